"""From what a user calls a model to the directory it is served from, and the name it is served under.

Does not know formats or downloads; `engine.models.store` does.
"""

from __future__ import annotations

from pathlib import Path

from engine.models.store import resolve_model

from cli.progress import working


def fetch(model: str, cache_dir: Path | None) -> Path:
    """The directory of `model` (a directory, a .gguf file, a built-in name or a hub id), fetched and converted if need be.

    Progress is shown on stderr. Raises ConfigError or its ModelLoadError.
    """
    with working(f"Looking for the model {model}") as say:
        return resolve_model(model, cache_dir, say)


def served_name(model: str, given: str | None) -> str:
    """The name clients use: the one given, else a path's last part without .gguf, else the name as it is."""
    if given:
        return given
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model
