"""From what a user calls a model to the directory it is served from, with its progress on the screen.

Does not know formats or downloads; `engine.models.store` does.
"""

from __future__ import annotations

import os
from pathlib import Path

from cli.progress import working
from engine.models.store import resolve_model


def fetch(model: str, cache_dir: Path | None) -> Path:
    """The directory of `model` (a directory, a .gguf file, a built-in name or a hub id), fetched and converted if need be.

    Progress is shown on stderr. Raises ConfigError or its ModelLoadError.
    """
    if os.path.isdir(os.path.expanduser(model)):  # Path raises for what cannot be looked up
        return resolve_model(model, cache_dir)  # only looked at, which takes no time
    with working(f"Looking for the model {model}") as say:
        return resolve_model(model, cache_dir, say)
