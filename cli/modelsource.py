"""From what a user calls a model to the directory it is served from, with its progress on the screen.

Does not know formats or downloads; `engine.models.store` does.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cli.progress import working
from contracts.errors import ConfigError
from engine.models.store import resolve_model


def fetch(model: str, cache_dir: Path | None) -> Path:
    """The directory of `model` (a directory, a .gguf file, a built-in name or a hub id), fetched and converted if need be.

    Progress is shown on stderr. Raises ConfigError or its ModelLoadError.
    """
    if os.path.isdir(os.path.expanduser(model)):  # Path raises for what cannot be looked up
        return resolve_model(model, cache_dir)  # only looked at, which takes no time
    with working(f"Looking for the model {model}") as say:
        return resolve_model(model, cache_dir, say)


def point(link: Path, directory: Path) -> None:
    """Make `link` a symbolic link to `directory`, relative, so that both may be moved together; whoever opens it meanwhile has
    the old directory or the new one. Raises ConfigError where something else than a link is in its place.
    """
    try:
        if link.exists() and not link.is_symlink():
            raise ConfigError(f"--link: {link} is there and is no symbolic link; nothing was changed")
        link.parent.mkdir(parents=True, exist_ok=True)
        # Not the process id: in a container who comes after one that was killed here has the same.
        new = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
        try:
            new.symlink_to(os.path.relpath(directory.resolve(), link.parent.resolve()), target_is_directory=True)
            new.replace(link)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--link: {link}: {error.strerror or error}") from error
