"""Whether traces are sent and where: a flag, or the variables that OpenTelemetry has for it; what else it can be told (headers,
certificates, sampler, queue, resource) its SDK reads by itself. The only module of traces that reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DISABLED, _EXPORTER = "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"
ENVIRONMENT = {
    ENDPOINT: "where the router sends traces, by OTLP over gRPC; --otlp-endpoint wins over it",
    TRACES_ENDPOINT: "the same, for traces only",
    _DISABLED: "true sends no traces, whatever else is set",
    _EXPORTER: "none sends no traces, unless --otlp-endpoint is given",
    "OTEL_TRACES_SAMPLER": "which requests are traced where their caller does not say it",
    "OTEL_SERVICE_NAME": "what the router is called in traces",
}


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """An OTLP collector that speaks gRPC: http://HOST:PORT or, over TLS, https://HOST:PORT."""

    endpoint: str

    @property
    def insecure(self) -> bool:
        """Whether it is reached without TLS."""
        return self.endpoint.startswith("http://")


def tracing_config(flag: str | None) -> TracingConfig | None:
    """None: no traces. Raises ValueError for an address or a protocol that cannot be used, naming who gave it."""
    env = os.environ  # noqa: TID251
    if env.get(_DISABLED, "").strip().lower() == "true":
        return None
    if flag is not None:
        return _checked("--otlp-endpoint", flag)
    name = next((name for name in (TRACES_ENDPOINT, ENDPOINT) if env.get(name)), None)
    if name is None or env.get(_EXPORTER, "").strip().lower() == "none":
        return None
    for protocol in _PROTOCOLS:
        if env.get(protocol):
            if env[protocol] != "grpc":
                raise ValueError(f"{protocol}: got {env[protocol]!r}, must be grpc for traces of a router")
            break
    return _checked(name, env[name])


def _checked(name: str, url: str) -> TracingConfig:
    said = f"{name}: got {url!r}, must be http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(said) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ValueError(said)
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(said)
    return TracingConfig(f"{parts.scheme}://{parts.netloc}")
