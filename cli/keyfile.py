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
    file is what it was. Its owner and mode stay, also when somebody else changes it: else the router could not read it.
    """
    path = path.resolve()  # what a link leads to is changed, and not the link
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), mode=_PRIVATE):
            known = read_key_file(path).keys if path.exists() else ()
            changed = KeyFile(edit(known))
            check_keys(changed, path)
            _replace(path, msgspec.json.format(msgspec.json.encode(changed), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _replace(path: Path, content: bytes) -> None:
    """Raises OSError, and then nothing is left of it."""
    before = path.stat() if path.exists() else None
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "wb") as file:
            file.write(content)
            if before is not None:
                ours = os.fstat(file.fileno())
                if (ours.st_uid, ours.st_gid) != (before.st_uid, before.st_gid):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
