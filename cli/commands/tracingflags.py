"""The flag that says where traces go, alike in `router` and `up`. Does not know what a trace is."""

from __future__ import annotations

from typing import TypedDict

from cli.options import option
from contracts.errors import ConfigError
from observability.tracing.config import TracingConfig, tracing_config


class TracingFlags(TypedDict):
    """What click hands over."""

    otlp_endpoint: str | None


otlp_option = option(
    "--otlp-endpoint",
    section="Running",
    metavar="URL",
    help="Send traces of requests to this collector, by OTLP over gRPC: http://HOST:4317, or https://. Needs the extra "
    "`otel`. [default: OTEL_EXPORTER_OTLP_ENDPOINT, else none]",
)


def traces(given: TracingFlags) -> TracingConfig | None:
    """None where none are wanted. Raises ConfigError for an address that cannot be used."""
    try:
        return tracing_config(given["otlp_endpoint"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
