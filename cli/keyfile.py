"""A key file that is changed while others read it: in one move, by one process at a time, readable by its owner only.

Does not know what keys mean.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
from filelock import FileLock

from contracts.errors import ConfigError
from router.keys import KeyEntry, KeyFile, check_keys, read_key_file

_PRIVATE = 0o600


def read(path: Path) -> KeyFile:
    """Raises ConfigError for a file that is not there or cannot be used."""
    return read_key_file(path)


def change(path: Path, edit: Callable[[tuple[KeyEntry, ...]], tuple[KeyEntry, ...]]) -> None:
    """Replace the keys by what `edit` makes of them; a file that is not there has none. Raises ConfigError, and then the
    file is what it was.
    """
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), mode=_PRIVATE):
            known = read_key_file(path).keys if path.exists() else ()
            changed = KeyFile(edit(known))
            check_keys(changed, path)
            mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else _PRIVATE
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(changed), indent=2) + b"\n")
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
