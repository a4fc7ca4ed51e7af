"""Where fetched and converted models are kept; the only place of the model store that reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

# What each variable does, for `diptych doctor`. huggingface_hub reads its own (HF_HOME, HF_ENDPOINT, HF_TOKEN, …).
ENVIRONMENT = {
    "DIPTYCH_CACHE": "where fetched and converted models are kept",
    "XDG_CACHE_HOME": "parent of that folder when DIPTYCH_CACHE is not set; ~/.cache when neither is",
}


def default_cache_dir() -> Path:
    """$DIPTYCH_CACHE, else $XDG_CACHE_HOME/diptych, else ~/.cache/diptych. Not created here."""
    own = os.environ.get("DIPTYCH_CACHE")  # noqa: TID251
    if own:
        return Path(own).expanduser()
    parent = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251
    return (Path(parent).expanduser() if parent else Path.home() / ".cache") / "diptych"
