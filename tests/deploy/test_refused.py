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
    "a Redis's password without it": (
        {"redis": {"enabled": False, "passwordSecret": "x"}, "router": {"replicas": 1}},
        "redis.passwordSecret: is of redis.enabled",
    ),
    "a password of no Redis": ({"redis": {"external": {"passwordSecret": "x"}}}, "need redis.external.url"),
    "an authority where nothing is signed": (
        {"redis": {"enabled": False, "external": {"url": "redis://host/0", "caSecret": "x"}}},
        "redis.external.caSecret",
    ),
    "a flag that probes and policies do not know of": (
        {"decode": {"extraArgs": ["--port=9000"]}},
        "decode.extraArgs: --port follows from a value",
    ),
    "a flag beside its value": ({"workers": {"extraArgs": ["--threads=3"]}}, "workers.extraArgs: --threads"),
    "a router's flag beside its value": ({"router": {"extraArgs": ["--log-level=debug"]}}, "router.extraArgs"),
    "a variable of the chart's": ({"decode": {"env": [{"name": "POD_IP", "value": "1"}]}}, "decode.env: POD_IP"),
    "a variable twice": (
        {
            "prefill": {"env": [{"name": "DIPTYCH_KERNELS", "value": "avx2"}]},
            "workers": {"env": [{"name": "DIPTYCH_KERNELS", "value": "torch"}]},
        },
        "DIPTYCH_KERNELS is already said by prefill.env",
    ),
    "a token twice": (
        {"model": {"tokenSecret": {"name": "hub"}, "env": [{"name": "HF_TOKEN", "value": "x"}]}},
        "model.env: HF_TOKEN",
    ),
    "a secret's value without a name": ({"model": {"tokenSecret": {"name": "hub", "key": ""}}}, "tokenSecret/key"),
    "more devices than a worker uses": ({"decode": {"gpu": {"count": 2}}}, "/decode/gpu/count"),
    "a claim that one pod has": (
        {"model": {"volume": {"create": True, "accessModes": ["ReadWriteOncePod"]}}},
        "/model/volume/accessModes",
    ),
    "more KV than memory that is a number": (
        {
            "decode": {
                "kvMemory": "40GiB",
                "resources": {"requests": {"cpu": 0.5, "memory": 30000000000}, "limits": {"memory": 30000000000}},
            }
        },
        "decode.kvMemory: 40GiB does not fit",
    ),
    "a default of KV that does not fit": (
        {"decode": {"resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "1Gi"}}}},
        "decode.kvMemory: 1GiB does not fit",
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
        {"decode": {"resources": {"requests": {"cpu": 0.5, "memory": 3e10}, "limits": {"cpu": 2, "memory": "0.1P"}}}},
        {"router": {"env": [{"name": "POD_IP", "value": "1"}]}},  # no worker
    )
    assert [one.refusal for one in render(*taken)] == [""] * len(taken)
