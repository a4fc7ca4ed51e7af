"""What a command that is a client of a server is given for it: an API key's file, an authority's. Does not know the server."""

from __future__ import annotations

import ssl
from pathlib import Path

from contracts.errors import ConfigError


def read_api_key(path: Path | None) -> str:
    """The key in the first line of this file, "" for no file. Raises ConfigError for a file without one that a header can hold."""
    if path is None:
        return ""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {path}: {error}") from error
    key = lines[0].strip() if lines else ""
    if not key:
        raise ConfigError(f"--api-key-file: {path} is empty")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"--api-key-file: the first line of {path} must be printable ASCII")
    return key


def read_authority(path: Path | None) -> bytes | None:
    """This PEM file, None for none. Raises ConfigError for one that has no certificate."""
    if path is None:
        return None
    try:
        pem = path.read_bytes()
        ssl.create_default_context(cafile=str(path))
    except OSError as error:  # ssl.SSLError as well
        raise ConfigError(f"--tls-ca: {path} has no certificate that can be read: {error}") from error
    return pem
