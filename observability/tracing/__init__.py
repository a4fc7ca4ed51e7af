"""Traces by OpenTelemetry, an optional extra: `config` says whether, `otel` is the only module that imports it."""
