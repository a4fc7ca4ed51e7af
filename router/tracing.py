"""A router's traces, where somebody wants them and OpenTelemetry is installed; else nothing of it is imported."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from contracts.errors import ConfigError
from observability.tracing.config import TracingConfig

if TYPE_CHECKING:
    from observability.tracing.otel import Tracing


def open_tracing(config: TracingConfig | None, instance_id: str) -> Tracing | None:
    """None where no traces are wanted. Raises ConfigError where they are and the extra is missing."""
    if config is None:
        return None
    try:
        from observability.tracing.otel import Tracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint, OTEL_EXPORTER_OTLP_ENDPOINT: got {config.endpoint}, but traces need an extra that is not "
            "installed, `otel`: pip install -e '.[otel]' in a clone (OTEL_SDK_DISABLED=true does without)"
        ) from error
    who = {
        "service.name": "diptych-router",
        "service.version": importlib.metadata.version("diptych"),
        "service.instance.id": instance_id,
    }
    return Tracing(config, who)
