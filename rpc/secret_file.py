"""The cluster's secret as a file: the bytes in it, without the line ends around them. Does not know what it is for."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from contracts.errors import ConfigError
from contracts.secret import ClusterSecret
from observability.log import get_logger

log = get_logger(__name__)
_MAX_BYTES = 4096
_NEW_BYTES = 32


def read_secret(path: Path, flag: str) -> ClusterSecret:
    """Raises ConfigError, naming flag and file, for one that cannot be read or is too short to be a secret."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror or error}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{flag}: {path}: more than {_MAX_BYTES} bytes: this is no secret")
    others = [may for bits, may in ((0o004, "read"), (0o022, "write")) if mode & bits]
    if others:  # said whole: flags are read before the log is set up, and then fields are not written
        log.warning(f"{flag}: {path}: others than its owner can {' and '.join(others)} the cluster's secret")
    try:
        return ClusterSecret(data.strip(b"\r\n"))
    except ValueError as error:
        raise ConfigError(f"{flag}: {path}: {error}; `openssl rand -hex 32` makes a good one") from error


def write_new_secret(path: Path) -> None:
    """A new random secret, for this user's eyes only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_NEW_BYTES) + "\n")
