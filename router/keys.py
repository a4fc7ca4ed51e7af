"""API keys: who holds which, read from a file that may change while the router runs.

    key file ──KeyBook()──▶ known keys ──refresh(), file changed──▶ the new ones; a bad file: the old ones, said aloud
                                  └─ caller("Bearer sk-diptych-…") ──▶ Caller, or Unauthenticated

A key has 256 random bits and exists in clear once, when it is made; the file has its SHA-256. A slow hash guards what can be
guessed, which such a key cannot (docs/adr/0026-who-may-come-in.md). Nothing here puts a key, or a part of one, into an
error or a log. Does not know HTTP, gRPC or what limits mean.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from contracts.errors import ConfigError, Unauthenticated
from observability.log import get_logger
from router.caller import ANYBODY, Caller
from rpc.files import FileState, file_state

log = get_logger(__name__)
KEY_PREFIX = "sk-diptych-"
HASH_PREFIX = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@+-]{1,64}")
_IN_CLEAR = re.compile(KEY_PREFIX + r"[\w-]*")
_MAX_PRESENTED_CHARS = 256
_MAX_FILE_BYTES = 64 * 2**20  # some hundred thousand keys
_MOST = 2**31 - 1  # what a limit, and a priority on the wire, can be
_SHOWN_HASH_CHARS = 8


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key of a file. A key is good through the day `expires` (UTC). None in a limit is no limit.

    Only a key whose `best_priority` is below 0 may go before others.
    """

    name: str
    hash: str
    weight: float = 1.0
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    best_priority: int = 0
    dashboard: bool = True
    expires: datetime.date | None = None
    disabled: bool = False

    @property
    def key_id(self) -> str:
        """What tells the keys of one owner apart, for people; not secret."""
        return self.hash.removeprefix(HASH_PREFIX)[:_SHOWN_HASH_CHARS]

    @property
    def caller(self) -> Caller:
        """Its owner."""
        return Caller(
            name=self.name,
            weight=self.weight,
            tokens_per_minute=self.tokens_per_minute,
            requests_per_minute=self.requests_per_minute,
            best_priority=self.best_priority,
            dashboard=self.dashboard,
        )

    def __post_init__(self) -> None:
        """Raise ValueError, which msgspec gives the entry's place in the file."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: got {self.name!r}, must be 1 to 64 letters, digits or . _ @ + -")
        if _IN_CLEAR.search(self.name):  # names stand in logs
            raise ValueError("name: is a key; it must be its owner's name")
        if not _HASH.fullmatch(self.hash):  # what stands there may be a key in clear, so it is not shown
            raise ValueError(f"hash of {self.name}: must be {HASH_PREFIX} and 64 lower-case hexadecimal digits")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight of {self.name}: got {self.weight:g}, must be above 0")
        limits = {"tokens_per_minute": self.tokens_per_minute, "requests_per_minute": self.requests_per_minute}
        for field, limit in limits.items():
            if limit is not None and not 1 <= limit <= _MOST:
                raise ValueError(f"{field} of {self.name}: got {limit}, must be at least 1 and at most {_MOST}")
        if not -_MOST <= self.best_priority <= _MOST:
            raise ValueError(f"best_priority of {self.name}: got {self.best_priority}, must be within +-{_MOST}")


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands in a key file, which is JSON: {"keys": [{"name": …, "hash": …}, …]}."""

    keys: tuple[KeyEntry, ...] = ()


def new_key() -> str:
    """A key nobody has seen: 256 bits from the system's source of randomness."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """The form in which a key is kept."""
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def read_key_file(path: Path) -> KeyFile:
    """Raises ConfigError naming the file, the entry and what is wrong with it; never the content of a hash."""
    try:
        found = msgspec.json.decode(_content(path), type=KeyFile)
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:  # its message has types, places, unknown fields, and values of KeyEntry
        said = _IN_CLEAR.sub(KEY_PREFIX + "…", str(error))  # a key that stands in a wrong place
        raise ConfigError(f"key file {path}: {said}") from None
    check_keys(found, path)
    return found


def _content(path: Path) -> bytes:
    """All of a file; OSError for what has no end, or gives nothing until somebody writes: the router would wait for it."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("is no file" if not stat.S_ISDIR(found.st_mode) else "Is a directory")
        if found.st_size > _MAX_FILE_BYTES:
            raise OSError(f"has {found.st_size} bytes, at most {_MAX_FILE_BYTES} are read")
        return file.read(_MAX_FILE_BYTES)


def check_keys(found: KeyFile, path: Path) -> None:
    """Raises ConfigError for keys of `path` that contradict each other."""
    owners: dict[str, Caller] = {}
    hashes: set[str] = set()
    for entry in found.keys:
        if owners.setdefault(entry.name, entry.caller) != entry.caller:
            raise ConfigError(f"key file {path}: the keys of {entry.name} must have the same limits and weight")
        if entry.hash in hashes:
            raise ConfigError(f"key file {path}: the key {entry.key_id} of {entry.name} stands there twice")
        hashes.add(entry.hash)


class Doorkeeper(Protocol):
    """Tells callers apart."""

    def caller(self, authorization: str) -> Caller:
        """Whose request this is, by its Authorization header or metadata; "" is none. Raises Unauthenticated."""
        ...


class OpenDoor:
    """Where there are no keys everybody is welcome, whatever they present."""

    def caller(self, authorization: str) -> Caller:
        """See Doorkeeper."""
        del authorization
        return ANYBODY


class KeyBook:
    """The keys of one file. Owns nothing; `refresh` makes it follow the file."""

    def __init__(self, path: Path, today: Callable[[], datetime.date] | None = None) -> None:
        """Raises ConfigError for a file that cannot be used. `today` is the date in UTC."""
        self._path = path
        self._today = today if today is not None else _today
        self._seen: FileState = file_state(path)
        self._refused: tuple[FileState, str] | None = None  # the file as it is cannot be used, and why
        self._by_hash = _by_hash(read_key_file(path))
        log.info("api keys", file=str(path), keys=len(self._by_hash))
        if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            log.warning("others than its owner may write the key file, and so let themselves in", file=str(path))

    def caller(self, authorization: str) -> Caller:
        """See Doorkeeper.

        It is found by its hash: how long that takes says something about hashes, of which none leads back to a key.
        """
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("no API key: send it as `Authorization: Bearer KEY`")
        if len(key) > _MAX_PRESENTED_CHARS or not key.isascii():
            raise Unauthenticated("this API key is not known here")
        digest = hash_of(key)
        entry = self._by_hash.get(digest)
        if entry is None or not hmac.compare_digest(entry.hash, digest):
            raise Unauthenticated("this API key is not known here")
        if entry.disabled:
            raise Unauthenticated("this API key was revoked")
        if entry.expires is not None and self._today() > entry.expires:
            raise Unauthenticated(f"this API key expired on {entry.expires}")
        return entry.caller

    def refresh(self) -> None:
        """Read the file again if it changed. One that cannot be used changes nothing, is complained of once, and is read
        until it can: it may have been this process that could not, so that a key that was revoked would be good for ever.
        """
        signature = file_state(self._path)
        if signature == self._seen and self._refused is None:
            return
        self._seen = signature
        try:
            by_hash = _by_hash(read_key_file(self._path))
        except ConfigError as error:
            if self._refused != (signature, error.message):
                log.error("the key file cannot be used; the keys stay what they were", reason=error)
            self._refused = signature, error.message
            return
        self._refused = None
        added, gone = by_hash.keys() - self._by_hash.keys(), self._by_hash.keys() - by_hash.keys()
        self._by_hash = by_hash
        log.info("api keys read again", keys=len(by_hash), added=len(added), removed=len(gone))


def _by_hash(found: KeyFile) -> Mapping[str, KeyEntry]:
    return {entry.hash: entry for entry in found.keys}


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
