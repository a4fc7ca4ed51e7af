"""The machine-readable word that a cluster is ready: a JSON file that appears whole and goes away with the cluster.

    {"http": "http://127.0.0.1:8000", "grpc": "127.0.0.1:50051", "model": "…",
     "processes": [{"name": "router", "kind": "router", "address": "…", "state": "ready", "pid": 1}, …]}

Does not know who waits for it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from cli.cluster import LocalCluster
from contracts.errors import ConfigError


class ReadyFile:
    """Owns the file at `path`; writes it anew on each call of `write`, removes it on `remove`."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the folder cannot be written to, before anything is started."""
        self._path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._part.touch()  # to ask for permissions is not to know: there are read-only and special file systems
            self._part.unlink()
        except OSError as error:
            said = f"must be in an existing folder that can be written to ({error.strerror})"
            raise ConfigError(f"--ready-file: {str(path)!r} {said}") from error

    def write(self, cluster: LocalCluster) -> None:
        """Replace the file in one go, so that a reader never sees half of it."""
        content = {
            "http": cluster.http_url,
            "grpc": cluster.grpc_address,
            "model": cluster.config.model_name,
            "processes": [asdict(status) for status in cluster.statuses],
        }
        self._part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        self._part.replace(self._path)

    def remove(self) -> None:
        """Idempotent."""
        self._path.unlink(missing_ok=True)
