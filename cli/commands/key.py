"""`diptych key`: API keys. `new` prints a key once and keeps its hash; `list` and `revoke` look after the file.

A router that was started with `--api-keys FILE` follows the file by itself. Does not know how keys are checked.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TypedDict, Unpack

import click
import msgspec

from cli.keyfile import change, read
from cli.options import SectionedCommand, apply, option
from contracts.errors import ConfigError
from router.caller import Caller
from router.keys import KeyEntry, hash_of, new_key

_LIMIT = click.IntRange(min=1)
_DATE = click.DateTime(["%Y-%m-%d"])
file_option = option(
    "--file",
    section="File",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("keys.json"),
    metavar="FILE.json",
    help="The key file, as a router's --api-keys names it.",
)


@click.group("key")
def key() -> None:
    """Make, list and revoke API keys."""


class NewFlags(TypedDict):
    """What click hands over."""

    file: Path
    name: str
    weight: float
    tokens_per_minute: int | None
    requests_per_minute: int | None
    best_priority: int
    no_dashboard: bool
    expires: datetime.datetime | None


NEW_OPTIONS = (
    option(
        "--name", section="Owner", required=True, metavar="NAME", help="Whose key it is; one owner may have several."
    ),
    option("--weight", section="Owner", type=float, default=1.0, help="Share of the router beside others that wait."),
    option(
        "--tokens-per-minute",
        section="Owner",
        type=_LIMIT,
        metavar="N",
        help="Tokens that its owner may use, prompts and answers together. [default: no limit]",
    ),
    option(
        "--requests-per-minute",
        section="Owner",
        type=_LIMIT,
        metavar="N",
        help="Requests that its owner may make. [default: no limit]",
    ),
    option(
        "--best-priority",
        section="Owner",
        type=int,
        default=0,
        metavar="N",
        help="Best priority that its requests may have; lower is better, and a request that names none has 0. "
        "Below 0 it may go before other owners' requests.",
    ),
    option(
        "--no-dashboard",
        section="Owner",
        is_flag=True,
        help="It does not open the dashboard, which shows ids, sizes and times of everybody's requests.",
    ),
    option("--expires", section="Owner", type=_DATE, metavar="YYYY-MM-DD", help="Last day, UTC. [default: never]"),
    file_option,
)


@key.command("new", cls=SectionedCommand)
def new(**given: Unpack[NewFlags]) -> None:
    """Make a key: it is printed once, and only its hash is kept.

    An owner's second key has the limits of the first unless they are given, and then they must be the same.
    """
    secret = new_key()
    expires, today = given["expires"], datetime.datetime.now(datetime.UTC).date()
    if expires is not None and expires.date() < today:
        raise ConfigError(f"--expires {expires.date()}: the key would be dead from the start; today is {today} (UTC)")
    try:
        entry = KeyEntry(
            name=given["name"],
            hash=hash_of(secret),
            weight=given["weight"],
            tokens_per_minute=given["tokens_per_minute"],
            requests_per_minute=given["requests_per_minute"],
            best_priority=given["best_priority"],
            dashboard=not given["no_dashboard"],
            expires=None if expires is None else expires.date(),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    change(given["file"], lambda keys: (*keys, _like_the_first(entry, keys)))
    click.echo(secret)
    click.echo(f"key {entry.key_id} of {entry.name}; it is shown once. {given['file']} has its hash.", err=True)


def _like_the_first(entry: KeyEntry, keys: tuple[KeyEntry, ...]) -> KeyEntry:
    """With the limits of the owner's first key where none are given."""
    first = next((key for key in keys if key.name == entry.name), None)
    if first is None or entry.caller != Caller(name=entry.name):
        return entry
    return msgspec.structs.replace(first, hash=entry.hash, expires=entry.expires, disabled=False)


apply(NEW_OPTIONS, new)


@key.command("list", cls=SectionedCommand)
@file_option
def list_keys(file: Path) -> None:
    """List the keys: id, owner, limits. There is nothing secret in it."""
    for entry in read(file).keys:
        facts = msgspec.to_builtins(entry)
        said = [f"{name}={value}" for name, value in facts.items() if name not in ("name", "hash")]
        click.echo("  ".join([entry.key_id, entry.name, *said]))


@key.command("revoke", cls=SectionedCommand, short_help="Revoke a key, by its id or its owner.")
@click.argument("key_id", metavar="ID|NAME")
@file_option
def revoke(key_id: str, file: Path) -> None:
    """Revoke a key by its id, or an owner's only key by the owner's name.

    It stays in the file, disabled, so that whoever uses it hears that it was revoked. Answers under way go on to their end.
    """

    def without(keys: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
        found = [entry for entry in keys if key_id in (entry.key_id, entry.name) and not entry.disabled]
        if len(found) > 1:
            ids = ", ".join(entry.key_id for entry in found)
            raise ConfigError(f"{key_id} has several keys, {ids}: name the one to revoke by its id")
        if not found:
            raise ConfigError(f"{file} has no key {key_id!r} that is not revoked")
        return tuple(msgspec.structs.replace(entry, disabled=True) if entry is found[0] else entry for entry in keys)

    change(file, without)
    click.echo(f"revoked {key_id}", err=True)
