"""The sets of values that the chart is tested with: each is one way in which somebody runs it."""

from tests.deploy.render import Rendered, render

USERS = [{"podSelector": {"matchLabels": {"app": "chat"}}}]

SETS: dict[str, dict] = {
    "defaults": {},
    "one router, no Redis": {"redis": {"enabled": False}, "router": {"replicas": 1}},
    "external Redis": {
        "redis": {
            "enabled": False,
            "external": {
                "url": "rediss://redis.data:6380/3",
                "passwordSecret": "redis-password",
                "caSecret": "redis-ca",
            },
        },
        "clusterSecret": {"existingSecret": "our-secret"},
    },
    "TLS": {
        "tls": {
            "enabled": True,
            "certManager": {
                "enabled": True,
                "issuerRef": {"name": "ca", "kind": "ClusterIssuer"},
                "dnsNames": ["*.example.com"],
            },
            "userSecretName": "public-certificate",
        },
        "apiKeys": {"existingSecret": "keys"},
        "router": {"extraArgs": ["--protect-metrics"]},
        "monitoring": {"monitors": True, "keySecret": {"name": "metrics-key", "key": "key"}},
    },
    "TLS by a secret": {
        "tls": {"enabled": True, "secretName": "cluster-tls"},
        "monitoring": {"monitors": True},
        "redis": {"enabled": False},
        "router": {"replicas": 1},
    },
    "KEDA and everything watched": {
        "autoscaling": {"kind": "keda", "prometheusAddress": "http://prometheus.monitoring:9090"},
        "monitoring": {"monitors": True, "rules": True, "dashboards": True, "labels": {"team": "serving"}},
        "networkPolicy": {"users": USERS, "egress": {"enabled": True, "extra": [{"ports": [{"port": 4317}]}]}},
    },
    "unlike nodes, a quantised model and a GPU that is filled": {
        "workers": {
            "extraArgs": ["--quantization=int8", "--max-model-len=512"],
            "env": [{"name": "DIPTYCH_KERNELS", "value": "avx2"}],
        },
        "prefill": {"env": [{"name": "OMP_PROC_BIND", "value": "true"}], "extraArgs": ["--cores=auto"]},
        "decode": {
            "gpu": {"count": 1},
            "extraArgs": ["--max-model-len=256", "--gpu-memory-utilization=0.8", "--kv-staging=2GiB"],
            "resources": {"requests": {"cpu": 0.5, "memory": 3e9}, "limits": {"memory": 4000000000}},
        },
    },
    "HPA": {"autoscaling": {"kind": "hpa"}, "networkPolicy": {"monitoring": []}},
    "GPU, a shared volume and a hub's model": {
        "image": {"repository": "llm/diptych", "tag": "0.1.0-cuda", "pullSecrets": ["pull"]},
        "model": {
            "name": "meta-llama/Llama-3.1-8B-Instruct",
            "tokenSecret": {"name": "hub"},
            "servedName": "llama",
            "env": [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}],
            "volume": {"create": True, "storageClass": "shared"},
        },
        **{
            pool: {
                "gpu": {"count": 1, "runtimeClassName": "nvidia"},
                "kvMemory": "40GiB",
                "rollout": {"maxSurge": 0, "maxUnavailable": 1},
                "nodeSelector": {"gpu": "h200"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "priorityClassName": "serving",
                "extraArgs": ["--max-model-len=8192"],
                "preStopSeconds": 3,
            }
            for pool in ("prefill", "decode")
        },
    },
    "a model that is there": {
        "model": {"path": "/models/llama", "volume": {"existingClaim": "models"}},
        "clusterSecret": {"enabled": False},
        "serviceAccount": {"name": "ours"},
        "router": {"service": {"type": "LoadBalancer", "annotations": {"lb": "internal"}}, "preStopSeconds": 0},
        "podDisruptionBudgets": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
    "a model of the image, on OpenShift": {
        "model": {"path": "/opt/llama", "servedName": "Llama: ours #1"},
        "runAs": {"user": 1000650000, "group": 1000650000},
        "listen": "::",
    },
    "TLS, and names that YAML takes for something else": {
        "image": {"repository": "123", "tag": "45", "pullSecrets": ["1e3"]},
        "model": {
            "path": "",
            "name": "true",
            "servedName": "null",
            "tokenSecret": {"name": "123", "key": "456"},
            "volume": {"create": True, "storageClass": "0123", "size": 1000000000},
        },
        "router": {"priorityClassName": "123", "imageTag": "60", "nodeSelector": {"zone": "1"}},
        "decode": {"gpu": {"count": 1, "runtimeClassName": "1e3"}, "priorityClassName": "no", "imageTag": "1e3"},
        "redis": {"image": "12:30", "passwordSecret": "123"},
        "clusterSecret": {"existingSecret": "0x1f"},
        "apiKeys": {"existingSecret": "true"},
        "tls": {"enabled": True, "secretName": "123", "userSecretName": "off"},
        "monitoring": {
            "monitors": True,
            "rules": True,
            "labels": {"team": "1"},
            "keySecret": {"name": "123", "key": "on"},
        },
        "serviceAccount": {"name": "123"},
    },
}


def all_rendered() -> dict[str, Rendered]:
    """What Helm makes of each set, by its name; Helm is asked once for each process of tests."""
    return dict(zip(SETS, render(*SETS.values()), strict=True))
