"""Who reaches which port, by the chart's NetworkPolicies as Kubernetes reads them: the KV plane is our pods' own."""

import pytest

from tests.deploy.render import render
from tests.deploy.values_sets import USERS, all_rendered

OURS = {"app.kubernetes.io/name": "diptych", "app.kubernetes.io/instance": "demo"}
PODS = {part: {**OURS, "app.kubernetes.io/component": part} for part in ("router", "prefill", "decode", "redis")}
# Others: (labels of the pod, labels of its namespace).
NAMESPACE = {"kubernetes.io/metadata.name": "llm"}
STRANGERS = {
    "a neighbour": ({"app": "curious"}, NAMESPACE),
    "another release": ({**PODS["prefill"], "app.kubernetes.io/instance": "other"}, NAMESPACE),
    "our labels elsewhere": (PODS["prefill"], {"kubernetes.io/metadata.name": "elsewhere"}),
    "a chat": ({"app": "chat"}, NAMESPACE),
    "Prometheus": ({"app": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"}),
}
SOURCES = {**{part: (labels, NAMESPACE) for part, labels in PODS.items()}, **STRANGERS}
PORTS = {8000: "http", 50051: "grpc", 50052: "worker", 50053: "kv", 50054: "registry", 9100: "metrics", 6379: "redis"}
EVERYBODY = frozenset(SOURCES)


def chosen(selector, labels):
    assert not selector.keys() - {"matchLabels"}
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def let_in(peer, source):
    """Whether a peer of a policy in our namespace means this source."""
    labels, namespace = source
    if "namespaceSelector" in peer:
        return chosen(peer["namespaceSelector"], namespace) and chosen(peer.get("podSelector", {}), labels)
    return namespace == NAMESPACE and chosen(peer["podSelector"], labels)


def reaches(policies, source, part, port):
    applied = [
        p["spec"]
        for p in policies
        if chosen(p["spec"]["podSelector"], PODS[part]) and "Ingress" in p["spec"]["policyTypes"]
    ]
    rules = [rule for spec in applied for rule in spec.get("ingress", [])]
    open_ports = [r for r in rules if "ports" not in r or port in [p["port"] for p in r["ports"]]]
    # No peers at all means everybody, as an empty list does.
    return not applied or any(
        not rule.get("from") or any(let_in(peer, source) for peer in rule["from"]) for rule in open_ports
    )


def table(policies):
    """Who reaches what, without what nobody does."""
    return {
        (part, name): found
        for part in PODS
        for port, name in PORTS.items()
        if (found := {who for who, source in SOURCES.items() if reaches(policies, source, part, port)})
    }


KV_PLANE = {
    ("prefill", "worker"): {"router"},
    ("prefill", "metrics"): {"Prometheus"},
    ("decode", "worker"): {"router", "prefill"},
    ("decode", "kv"): {"prefill"},
    ("decode", "metrics"): {"Prometheus"},
}
REDIS = {("redis", "redis"): {"router", "prefill", "decode"}}
OPEN = {("router", "http"): EVERYBODY, ("router", "grpc"): EVERYBODY}
BARE = {("redis", name): EVERYBODY for name in PORTS.values()}  # there is none, so no policy either

EXPECTED = {
    "defaults": {**OPEN, **KV_PLANE, **REDIS},
    "one router, no Redis": {**OPEN, ("router", "registry"): {"prefill", "decode"}, **KV_PLANE, **BARE},
    "KEDA and everything watched": {
        ("router", "http"): {"a chat", "Prometheus"},
        ("router", "grpc"): {"a chat"},
        **KV_PLANE,
        **REDIS,
    },
    "HPA": {**OPEN, **{port: who for port, who in KV_PLANE.items() if port[1] != "metrics"}, **REDIS},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_only_who_must_reaches_a_port(name):
    assert table(all_rendered()[name].of("NetworkPolicy")) == EXPECTED[name]


def test_without_policies_everybody_would():
    assert set(map(frozenset, table([]).values())) == {EVERYBODY}


def test_pods_may_be_kept_from_reaching_others():
    one = all_rendered()["KEDA and everything watched"]
    (there,) = render({"model": {"path": "/m"}, "networkPolicy": {"egress": {"enabled": True}}})
    egress = one.one("NetworkPolicy", "egress")["spec"]
    assert egress["policyTypes"] == ["Egress"] and chosen(egress["podSelector"], PODS["decode"])
    assert egress["egress"][0] == {"to": [{"podSelector": {"matchLabels": OURS}}]}
    assert [[p["port"] for p in rule["ports"]] for rule in egress["egress"][1:]] == [[53, 53], [443], [4317]]
    inside = there.one("NetworkPolicy", "egress")["spec"]["egress"]
    assert [[p["port"] for p in rule["ports"]] for rule in inside[1:]] == [[53, 53]]
    assert USERS[0] in one.one("NetworkPolicy", "router")["spec"]["ingress"][0]["from"]
