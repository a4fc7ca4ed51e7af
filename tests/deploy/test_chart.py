"""The Helm chart: what Helm makes of it is what Kubernetes takes, and what must be true of it is, whichever way it is used."""

import copy
import json
import re
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.deploy.render import CHART, ROOT, package, render
from tests.deploy.schemas import VERSIONS, faults
from tests.deploy.values_sets import SETS, all_rendered

POOLS = ("prefill", "decode")
PARTS = ("router", *POOLS)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(scope="module")
def rendered():
    """What Helm made of each set of values, by its name."""
    return all_rendered()


@pytest.fixture(scope="module")
def defaults(rendered):
    return rendered["defaults"]


def pod(manifest):
    return manifest["spec"]["template"]["spec"]


def container(manifest):
    (only,) = pod(manifest)["containers"]
    return only


def args(manifest):
    return container(manifest)["args"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SETS)
def test_kubernetes_takes_what_helm_renders(rendered, name, version):
    assert rendered[name].refusal == ""
    wrong = {f"{m['kind']} {m['metadata']['name']}": faults(m, version) for m in rendered[name].manifests}
    assert {what: found for what, found in wrong.items() if found} == {}
    names = [(m["kind"], m["metadata"]["name"]) for m in rendered[name].manifests]
    assert len(names) == len(set(names)) >= 9
    assert all(m["metadata"]["namespace"] == "llm" for m in rendered[name].manifests)
    assert not [
        m["metadata"]["name"] for m in rendered[name].manifests if has_float(m)
    ]  # a large number as Go prints it


def has_float(value):
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, float) or any(map(has_float, inside))


def test_a_pod_is_another_only_for_another_image_or_flag(defaults):
    """Nothing in it tells the chart's version: an upgrade of the chart alone restarts nobody, Redis least of all."""
    texts = [json.dumps(m["spec"]["template"]) for m in defaults.of("Deployment")]
    assert [text.count("0.1.0") - text.count("diptych:0.1.0") for text in texts] == [0] * 4
    assert '"app.kubernetes.io/version": "0.1.0"' in json.dumps(defaults.one("Deployment", "redis")["metadata"])


def test_pools_may_have_images_of_their_own():
    """For upgrades one pool after the other."""
    (one,) = render({"decode": {"imageTag": "0.2.0"}, "image": {"tag": "0.1.1"}})
    images = {}
    for part in PARTS:
        spec = pod(one.one("Deployment", part))
        images[part] = {run["image"] for run in (*spec["containers"], *spec["initContainers"])}
    assert images == {"router": {"diptych:0.1.1"}, "prefill": {"diptych:0.1.1"}, "decode": {"diptych:0.2.0"}}


def test_all_workers_can_be_found_by_name(defaults):
    for part in POOLS:
        spec = defaults.one("Service", part)["spec"]
        assert spec["clusterIP"] == "None" and spec["publishNotReadyAddresses"] is True
        assert spec["ports"] == [{"name": "metrics", "port": 9100, "targetPort": "metrics"}]


SPOILT = {
    "a misspelt field": ("Deployment", "decode", lambda m: pod(m).update(terminationGracePeriod=3)),
    "a number as text": ("Deployment", "router", lambda m: m["spec"].update(replicas="two")),
    "a probe of no kind": ("Deployment", "prefill", lambda m: container(m)["livenessProbe"].update(tcp={"port": 1})),
    "a selector that is missing": ("Deployment", "redis", lambda m: m["spec"].pop("selector")),
    "a peer of no kind": ("NetworkPolicy", "decode", lambda m: m["spec"]["ingress"][0]["from"][0].update(pods={})),
    "a budget with a wrong word": ("PodDisruptionBudget", "decode", lambda m: m["spec"].update(maxUnavailables=1)),
    "a trigger without a query": (
        "ScaledObject",
        "decode",
        lambda m: m["spec"]["triggers"][0]["metadata"].pop("query"),
    ),
    "a threshold that is no text": (
        "ScaledObject",
        "prefill",
        lambda m: m["spec"]["triggers"][0]["metadata"].update(threshold=3),
    ),
    "a policy that KEDA hands on": (
        "ScaledObject",
        "prefill",
        lambda m: m["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"].update(pods=1),
    ),
    "a monitor without endpoints": ("ServiceMonitor", "router", lambda m: m["spec"].pop("endpoints")),
    "a rule without an expression": (
        "PrometheusRule",
        "rules",
        lambda m: m["spec"]["groups"][0]["rules"][0].pop("expr"),
    ),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_kubernetes_would_not_take_anything(rendered, spoilt):
    """The schemas can say no: else the test above says nothing."""
    kind, name, spoil = SPOILT[spoilt]
    manifest = copy.deepcopy(rendered["KEDA and everything watched"].one(kind, name))
    spoil(manifest)
    assert all(faults(manifest, version) for version in VERSIONS)


def test_each_value_has_its_place_in_the_schema_and_is_used():
    def leaves(values, schema, path):
        for key, value in values.items():
            there = schema["properties"][key]
            there = whole["definitions"][there["$ref"].rpartition("/")[2]] if "$ref" in there else there
            if isinstance(value, dict) and value and "properties" in there and there["properties"]:
                yield from leaves(value, there, (*path, key))
            else:
                yield (*path, key)

    whole = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    paths = list(leaves(values, whole, ()))
    assert len(paths) > 90
    used = {p: rf"\.{p[-1]}\b|toYaml \S*\.{p[-2] if len(p) > 1 else p[-1]}\b" for p in paths}
    assert [".".join(p) for p, use in used.items() if not re.search(use, templates)] == []


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert chart["appVersion"] == chart["version"] == version
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_no_pod_may_more_than_it_must(rendered):
    """The profile "restricted" of Kubernetes's pod security standards, and a root file system that nobody writes to."""
    pods = [(name, pod(m)) for name, one in rendered.items() for m in one.of("Deployment")]
    assert len(pods) > 30
    for name, spec in pods:
        assert spec["securityContext"]["runAsNonRoot"] is True
        user = SETS[name].get("runAs", {}).get("user", 10001)
        assert [spec["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [user] * 3
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for one in (*spec["containers"], *spec.get("initContainers", ())):
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert one["resources"]["limits"]["memory"] and one["resources"]["requests"]["cpu"]
        assert all({"secret", "emptyDir", "persistentVolumeClaim"} & volume.keys() for volume in spec["volumes"])
        assert all(v["secret"]["defaultMode"] == 0o440 for v in spec["volumes"] if "secret" in v)
        mounted = {m["name"] for one in spec["containers"] for m in one["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_a_pod_has_time_to_drain(rendered):
    """What kubelet waits covers the pause before SIGTERM, the drain that the process was told, and an end in good order."""
    for one in rendered.values():
        for part in PARTS:
            manifest = one.one("Deployment", part)
            (drain,) = [int(a.partition("=")[2]) for a in args(manifest) if a.startswith("--drain-timeout=")]
            pause = (
                container(manifest).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
            )
            assert pod(manifest)["terminationGracePeriodSeconds"] >= drain + int(pause[1]) + 10
    assert container(rendered["defaults"].one("Deployment", "router"))["lifecycle"]["preStop"]
    assert "lifecycle" not in container(rendered["a model that is there"].one("Deployment", "router"))
    assert container(rendered["GPU, a shared volume and a hub's model"].one("Deployment", "decode"))["lifecycle"]


def test_probes_ask_for_progress_and_never_only_for_a_port(rendered):

    for name, one in rendered.items():
        for part in POOLS:
            found = [container(one.one("Deployment", part))[probe] for probe in PROBES]
            if name.startswith("TLS"):  # kubelet's own gRPC probe knows no TLS
                words = [probe["exec"]["command"] for probe in found]
                assert all(w[:3] == ["diptych", "health", "127.0.0.1:50052"] for w in words)
                assert all("--tls-server-name=diptych.internal" in w for w in words)
            else:
                assert all(probe["grpc"] == {"port": 50052} for probe in found)
            startup, _, liveness = found
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
            assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
        router = [container(one.one("Deployment", "router"))[probe]["httpGet"] for probe in PROBES]
        assert [probe["path"] for probe in router] == ["/version", "/health", "/version"]
        assert {probe.get("scheme", "HTTP") for probe in router} == {"HTTPS" if name.startswith("TLS") else "HTTP"}


def test_secrets_are_in_secrets_and_nowhere_else(rendered):
    made = rendered["defaults"].of("Secret")
    assert {m["metadata"]["name"] for m in made} == {"demo-diptych-redis", "demo-diptych-cluster"}
    values = [value for m in made for value in m["data"].values()]
    assert all(len(value) > 50 for value in values)
    others = json.dumps([m for m in rendered["defaults"].manifests if m["kind"] != "Secret"])
    assert not [value for value in values if value in others]
    assert rendered["external Redis"].of("Secret") == []
    assert "our-secret" in json.dumps(rendered["external Redis"].one("Deployment", "decode"))


def test_workers_find_a_router_that_is_not_ready_yet(rendered):
    """A single router is ready once a decode worker has found it: a Service that hides it until then would wait for ever."""
    alone = rendered["one router, no Redis"]
    service = alone.one("Service", "registry")["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert service["ports"] == [{"name": "registry", "port": 50054, "targetPort": "registry"}]
    assert "--worker-port=50054" in args(alone.one("Deployment", "router"))
    for part in POOLS:
        assert "--router=demo-diptych-registry.llm.svc:50054" in args(alone.one("Deployment", part))
    assert alone.one("Deployment", "router")["spec"]["strategy"] == {"type": "Recreate"}
    assert [
        s["metadata"]["name"] for s in rendered["defaults"].of("Service") if "registry" in s["metadata"]["name"]
    ] == []
    assert rendered["defaults"].one("Deployment", "router")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_who_scales_says_how_many(rendered):
    for name, one in rendered.items():
        scaled = name in ("HPA", "KEDA and everything watched")
        assert [("replicas" in one.one("Deployment", part)["spec"]) for part in PARTS] == [True, not scaled, not scaled]


def test_gpus_are_limits_of_workers(rendered):
    one = rendered["GPU, a shared volume and a hub's model"]
    for part in POOLS:
        manifest = one.one("Deployment", part)
        assert container(manifest)["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert pod(manifest)["runtimeClassName"] == "nvidia"
        assert pod(manifest)["nodeSelector"] == {"gpu": "h200"}
        assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        assert args(manifest)[-1] == "--max-model-len=8192"
    assert "nvidia.com/gpu" not in container(one.one("Deployment", "router"))["resources"]["limits"]
    assert container(one.one("Deployment", "router"))["image"] == "llm/diptych:0.1.0-cuda"


def test_one_truth_for_rules_and_dashboards(rendered):
    """The chart has those of deploy/ by links, and no copies."""
    one = rendered["KEDA and everything watched"]
    (rules,) = one.of("PrometheusRule")
    sources = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))]
    assert rules["spec"]["groups"] == [group for source in sources for group in source["groups"]]
    boards = {name: text for m in one.of("ConfigMap") for name, text in m["data"].items()}
    files = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
    assert boards == {f"diptych-{path.name}": path.read_text() for path in files}
    assert all((CHART / "files" / name).is_symlink() for name in ("rules", "dashboards"))


def test_a_package_has_rules_and_dashboards_in_it(tmp_path):
    """Who installs the chart from an archive has no repository around it."""
    archive = package(tmp_path)
    with tarfile.open(archive) as tar:
        packed = {Path(one.name).name for one in tar.getmembers() if one.isfile() and "/files/" in one.name}
    assert packed >= {"alerts.yml", "recording.yml", "overview.json"}
    (here, there) = (render(SETS["KEDA and everything watched"], chart=chart)[0] for chart in (CHART, archive))
    assert there.of("PrometheusRule") == here.of("PrometheusRule") and there.of("ConfigMap") == here.of("ConfigMap")


def test_what_is_scraped_has_the_names_that_rules_rely_on(rendered):
    monitors = [*rendered["TLS"].of("ServiceMonitor"), *rendered["TLS"].of("PodMonitor")]
    jobs = set()
    for monitor in monitors:
        (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        keep, *named = endpoint["relabelings"]
        assert keep == {"sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Running", "action": "keep"}
        labels = {r["targetLabel"]: r["replacement"] for r in named}
        jobs.add(labels["job"])
        assert labels["release"] == "demo" and endpoint["interval"] == "5s"
        assert ("scheme" in endpoint) == ("authorization" in endpoint) == (labels["job"] == "diptych-router")
    assert jobs == {"diptych-router", "diptych-prefill", "diptych-decode"}
    (router,) = rendered["TLS by a secret"].of("ServiceMonitor")
    assert router["spec"]["endpoints"][0]["tlsConfig"]["ca"] == {"secret": {"name": "cluster-tls", "key": "ca.crt"}}


def test_files_that_flags_name_are_mounted(rendered):
    for one in rendered.values():
        for manifest in one.of("Deployment"):
            spec = pod(manifest)
            for run in (*spec["containers"], *spec.get("initContainers", ())):
                asked = [run[probe]["exec"]["command"] for probe in PROBES if "exec" in run.get(probe, {})]
                said = " ".join([*run["command"], *run.get("args", ()), *(word for words in asked for word in words)])
                named = set(re.findall(r"/(?:etc/diptych/|models?\b|tmp\b)[\w./-]*", said))
                mounts = [m["mountPath"] for m in run["volumeMounts"]]
                assert named and {n for n in named if not any(f"{n}/".startswith(f"{m}/") for m in mounts)} == set()


def test_what_objects_name_is_there(rendered):
    """Secrets, claims, accounts and targets are made by the chart or named by who uses it; selectors and ports find pods."""
    for name, one in rendered.items():
        given = json.dumps(SETS[name])
        made = {(m["kind"], m["metadata"]["name"]) for m in one.manifests}
        made |= {("Secret", m["spec"]["secretName"]) for m in one.of("Certificate")}
        pods = [m["spec"]["template"] for m in one.of("Deployment")]
        wanted = {("ServiceAccount", p["spec"]["serviceAccountName"]) for p in pods}
        for volume in (v for p in pods for v in p["spec"]["volumes"]):
            if "secret" in volume:
                wanted.add(("Secret", volume["secret"]["secretName"]))
            if "persistentVolumeClaim" in volume:
                wanted.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        scalers = [*one.of("ScaledObject"), *one.of("HorizontalPodAutoscaler")]
        wanted |= {("Deployment", m["spec"]["scaleTargetRef"]["name"]) for m in scalers}
        assert {want for want in wanted - made if f'"{want[1]}"' not in given} == set()
        for m in (*one.of("Service"), *one.of("PodDisruptionBudget"), *one.of("Deployment")):
            selector = m["spec"]["selector"]
            found = [
                p for p in pods if selector.get("matchLabels", selector).items() <= p["metadata"]["labels"].items()
            ]
            assert len(found) == 1, m["metadata"]["name"]
            ports = {port["name"] for port in found[0]["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in m["spec"].get("ports", ())} <= ports
        for m in (*one.of("ServiceMonitor"), *one.of("PodMonitor")):
            (endpoint,) = m["spec"].get("endpoints") or m["spec"]["podMetricsEndpoints"]
            of = one.of("Service") if m["kind"] == "ServiceMonitor" else pods
            matches = [o for o in of if m["spec"]["selector"]["matchLabels"].items() <= o["metadata"]["labels"].items()]
            spoken = [o["spec"].get("ports") or o["spec"]["containers"][0]["ports"] for o in matches]
            assert sum(endpoint["port"] in {port["name"] for port in ports} for ports in spoken) == 1
