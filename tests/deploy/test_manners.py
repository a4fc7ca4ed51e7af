"""What an API server refuses though the schemas take it: names, labels, ports, requests above their limits."""

import re

import pytest

from tests.deploy.render import render
from tests.deploy.values_sets import SETS, all_rendered

LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # of a Service, whose rules are the strictest
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
UNITS = {"": 1, "m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text):
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", str(text)).groups()
    return float(number) * UNITS[unit]


def labels(value):
    """All labels and selectors in a manifest."""
    for key, inside in value.items() if isinstance(value, dict) else ():
        if key in ("labels", "matchLabels") and inside:
            yield from inside.items()
        yield from labels(inside)
    for inside in value if isinstance(value, list) else ():
        yield from labels(inside)


def check(manifests):
    for m in manifests:
        assert NAME.fullmatch(m["metadata"]["name"]), m["metadata"]["name"]
        wrong = [(k, v) for k, v in labels(m) if not (LABEL.fullmatch(v) and LABEL.fullmatch(k.rpartition("/")[2]))]
        assert wrong == [], m["metadata"]["name"]
        if m["kind"] == "Service":
            ports = m["spec"]["ports"]
            assert len({p["name"] for p in ports}) == len({p["port"] for p in ports}) == len(ports)
    for spec in (m["spec"]["template"]["spec"] for m in manifests if m["kind"] == "Deployment"):
        for run in (*spec["containers"], *spec.get("initContainers", ())):
            ports = run.get("ports", ())
            assert all(PORT_NAME.fullmatch(p["name"]) for p in ports)
            assert len({p["name"] for p in ports}) == len({p["containerPort"] for p in ports}) == len(ports)
            names = [e["name"] for e in run.get("env", ())]
            assert len(names) == len(set(names))
            paths = [v["mountPath"] for v in run["volumeMounts"]]
            assert len(paths) == len(set(paths))
            wanted, limits = run["resources"]["requests"], run["resources"]["limits"]
            assert all(quantity(wanted[what]) <= quantity(limits[what]) for what in wanted.keys() & limits.keys())


@pytest.mark.parametrize("name", SETS)
def test_names_labels_ports_and_limits_are_allowed(name):
    check(all_rendered()[name].manifests)


@pytest.mark.parametrize("release", ["a" * 53, "diptych", "x-" + "y" * 37 + "-z", "123", "1e3", "true", "1.2"])
def test_names_fit_whatever_a_release_is_called(release):
    (one,) = render(SETS["KEDA and everything watched"], release=release)
    check(one.manifests)
    names = [(m["kind"], m["metadata"]["name"]) for m in one.manifests]
    assert len(names) == len(set(names))
    assert release != "diptych" or ("Service", "diptych-router") in names


def test_whatever_signs_are_in_text_it_arrives_as_it_is():
    (one,) = render({"model": {"path": "/models/it's #1: {x}", "servedName": "it's: *"}, "listen": "fe80::1%eth0"})
    for part in ("router", "decode"):
        said = one.one("Deployment", part)["spec"]["template"]["spec"]["containers"][0]["args"]
        assert {"--model=/models/it's #1: {x}", "--served-name=it's: *", "--host=fe80::1%eth0"} <= set(said)
