"""Values that make no sense, or contradict each other, are refused by name before anything reaches Kubernetes."""

from tests.deploy.render import render

REFUSED = {
    "a misspelt value": ({"prefil": {"replicas": 2}}, "prefil"),
    "a misspelt value deep down": ({"tls": {"certManager": {"issuer": "x"}}}, "issuer"),
    "no workers' number": ({"decode": {"replicas": "many"}}, "/decode/replicas"),
    "a size without a unit": ({"decode": {"kvMemory": "40"}}, "/decode/kvMemory"),
    "shared memory between pods": ({"connector": "shm"}, "/connector"),
    "a name that no flag can carry": ({"model": {"servedName": 'a"b'}}, "/model/servedName"),
    "no flag": ({"router": {"extraArgs": ["max-waiting=3"]}}, "/router/extraArgs/0"),
    "a password in values": (
        {"redis": {"enabled": False, "external": {"url": "redis://:secret@host/0"}}},
        "/redis/external/url",
    ),
    "two registries": ({"redis": {"external": {"url": "redis://host/0"}}}, "redis.enabled and redis.external.url"),
    "routers that share nothing": ({"redis": {"enabled": False}}, "router.replicas"),
    "TLS without a certificate": ({"tls": {"enabled": True}}, "tls.secretName"),
    "a certificate without TLS": ({"tls": {"certManager": {"enabled": True}}}, "needs tls.enabled"),
    "a certificate of nobody": ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "issuerRef.name"),
    "KEDA without Prometheus": ({"autoscaling": {"kind": "keda"}}, "prometheusAddress"),
    "least above most": ({"autoscaling": {"decode": {"minReplicas": 9}}}, "minReplicas 9 is more than maxReplicas 4"),
    "two claims": ({"model": {"volume": {"create": True, "existingClaim": "x"}}}, "model.volume.create"),
    "a user's certificate without TLS": ({"tls": {"userSecretName": "x"}}, "tls.userSecretName"),
    "a certificate that nobody shows": ({"tls": {"secretName": "x"}}, "tls.secretName: needs"),
    "a secret that nobody proves": (
        {"clusterSecret": {"enabled": False, "existingSecret": "x"}},
        "clusterSecret.enabled",
    ),
    "users where all may come": (
        {"networkPolicy": {"enabled": False, "users": [{"podSelector": {}}]}},
        "networkPolicy.enabled",
    ),
    "more KV than memory": ({"decode": {"kvMemory": "4GiB"}}, "decode.kvMemory: 4GiB does not fit"),
    "more KV than memory in other units": (
        {
            "prefill": {
                "kvMemory": "4000MB",
                "resources": {"requests": {"cpu": 1, "memory": "1G"}, "limits": {"memory": "3.9G"}},
            }
        },
        "prefill.kvMemory: 4000MB does not fit",
    ),
    "two of a worker at one port": ({"ports": {"kv": 50052}}, "ports.worker and ports.kv: both are 50052"),
    "two of a router at one port": ({"ports": {"registry": 8000}}, "ports.http and ports.registry: both are 8000"),
    "pods that nothing may replace": ({"decode": {"rollout": {"maxSurge": 0}}}, "say maxUnavailable: 1"),
    "pods that no per cent may replace": (
        {"prefill": {"rollout": {"maxSurge": "0%", "maxUnavailable": "0%"}}},
        "prefill.rollout",
    ),
    "fewer pods than none": ({"prefill": {"rollout": {"maxSurge": -1}}}, "/prefill/rollout/maxSurge"),
    "more wanted than allowed": (
        {
            "redis": {
                "resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}, "limits": {"cpu": 1, "memory": "1Gi"}}
            }
        },
        "redis.resources: requests.cpu 1500m is more than limits.cpu 1",
    ),
    "a way out where all are": (
        {"networkPolicy": {"enabled": False, "egress": {"enabled": True}}},
        "networkPolicy.enabled",
    ),
}


def test_values_that_make_no_sense_are_refused_by_name():
    said = dict(zip(REFUSED, render(*(values for values, _ in REFUSED.values())), strict=True))
    unnamed = {what: said[what].refusal for what, (_, name) in REFUSED.items() if name not in said[what].refusal}
    assert unnamed == {}


def test_values_that_only_look_as_if_they_contradicted_each_other_are_taken():
    taken = (
        {"ports": {"worker": 8000, "kv": 50051}},  # routers and workers are pods of their own
        {"decode": {"rollout": {"maxSurge": 0, "maxUnavailable": "25%"}}},
        {"decode": {"kvMemory": "40GiB", "gpu": {"count": 1}}},  # a device has memory of its own
        {"decode": {"kvMemory": "4000000KB"}},
    )
    assert [one.refusal for one in render(*taken)] == [""] * len(taken)
