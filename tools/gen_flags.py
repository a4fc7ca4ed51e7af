"""docs/flags.md from the commands themselves and from configurations: what each flag does, its default and its limits, what
has no flag, and the environment. `--check` only says whether the page is up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flags.md"
sys.path.insert(0, str(ROOT))

from cli.config import ENVIRONMENT, RestartPolicy  # noqa: E402 - found by the line before
from cli.main import ROOT as DIPTYCH  # noqa: E402
from cli.options import MAX_LABEL_CHARS, FloatType, LabelType, SectionedOption, SizeType  # noqa: E402
from engine.build import ModelRuntimeConfig  # noqa: E402
from engine.config import SchedulerConfig  # noqa: E402
from kv_transfer.config import ReceiverConfig, SenderConfig  # noqa: E402
from registry.config import LeaseConfig, RedisConfig  # noqa: E402
from router import config as router  # noqa: E402
from rpc.announce import AnnounceConfig  # noqa: E402
from rpc.channel import ChannelConfig  # noqa: E402
from rpc.lifecycle import LifecycleConfig  # noqa: E402
from rpc.server import ServerConfig  # noqa: E402

HEAD = """# Flags

<!-- Written by tools/gen_flags.py from the commands and configurations: change those, then `make docs`. -->

What each flag of each command does, its default and its limits; `diptych COMMAND --help` says the same. A value out of its
limits is one line that names flag, value and limit, and exit code 2. `SIZE` is bytes with a unit (`512MiB`, `2GiB`, `1.5GB`),
`SECONDS` may have a fraction. A flag marked * must be given, one marked + may be given several times. There is no
configuration file; of the environment only what [stands below](#environment) is looked at. Which flags a deployment
wants: [Operations](operations.md).

"""
# Those that an operator starts come first; what runs once or for a while, after them.
ORDER = ("router", "prefill", "decode", "up", "health", "model", "key", "top", "doctor", "generate", "demo", "bench")
PLAIN = re.compile(r"^(?:INTEGER|FLOAT|NUMBER)(?: RANGE)?$")  # what click says of a number without a word of its own
DEFAULT = re.compile(r"\s*\[default: ([^\]]+)\]\.?$")

# Configurations of which some numbers have no flag. What `cli` passes to them when it builds them has one.
CONFIGS: tuple[tuple[str, type], ...] = (
    ("Engine", SchedulerConfig),
    ("A model in memory", ModelRuntimeConfig),
    ("A prefill worker's patience with a hand-off", SenderConfig),
    ("A decode worker's patience with a hand-off", ReceiverConfig),
    ("A worker's end and its progress", LifecycleConfig),
    ("What workers announce", AnnounceConfig),
    ("How long a router believes it", router.RegistryConfig),
    ("How long Redis keeps it", LeaseConfig),
    ("A connection to Redis", RedisConfig),
    ("What one request may fail", router.RetryConfig),
    ("What all requests may retry", router.RetryBudgetConfig),
    ("Breakers", router.BreakerConfig),
    ("Canaries and bad pairs", router.CanaryConfig),
    ("Admission", router.AdmissionConfig),
    ("Limits of a key", router.LimitsConfig),
    ("One pool or two", router.DisaggregationConfig),
    ("Where prompts are taken to be cached", router.PolicyConfig),
    ("A router's HTTP", router.HttpConfig),
    ("gRPC servers, of all processes", ServerConfig),
    ("gRPC connections to other processes", ChannelConfig),
    ("Processes of `diptych up`", RestartPolicy),
)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its words."""
    for first in ORDER:
        command = DIPTYCH.get_command(click.Context(DIPTYCH), first)
        if command is None:
            raise KeyError(first)
        yield from _leaves(first, command)


def _leaves(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield words, command
        return
    ctx = click.Context(command)
    for name in command.list_commands(ctx):
        below = command.get_command(ctx, name)
        if below is not None:
            yield from _leaves(f"{words} {name}", below)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One flag, as the page shows it."""

    flag: str  # the first of its names, for references
    shown: str
    default: str
    limits: str
    what: str
    section: str

    @classmethod
    def of(cls, option: click.Option, ctx: click.Context) -> Row:
        """From the option and its help."""
        extra = option.get_help_extra(ctx)
        text = " ".join((option.help or "").split())
        said = DEFAULT.search(text)
        default = said[1] if said else extra.get("default", "")
        names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        shown_as_limits = isinstance(option.type, click.Choice) and option.metavar is None
        value = "" if option.is_flag or shown_as_limits else f" {PLAIN.sub('N', option.make_metavar(ctx))}"
        marks = (" *" if option.required else "") + (" +" if option.multiple else "")
        return cls(
            flag=max(option.opts, key=len),
            shown=names.removesuffix("`") + (f"{value}`{marks}" if value else f"`{marks}"),
            default=default if said or not default else f"`{default}`",
            limits=_limits(option, extra.get("range", "")),
            what=DEFAULT.sub("", text),
            section=option.section if isinstance(option, SectionedOption) else "Other",
        )

    def line(self) -> str:
        """A row of a table."""
        cells = (self.shown, self.default, self.limits, self.what)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _limits(option: click.Option, span: str) -> str:
    kind = option.type
    if isinstance(kind, FloatType):
        return f"{'above' if kind.open_low else 'from'} {kind.low:g} to {kind.high:g}"
    if isinstance(kind, SizeType):
        return "at least 1 byte"
    if isinstance(kind, LabelType):
        return f"at most {MAX_LABEL_CHARS} characters"
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    if low := re.fullmatch(r"x>=(\d+)", span):
        return f"at least {low[1]}"
    if both := re.fullmatch(r"(\d+)<=x<=(\d+)", span):
        return f"from {both[1]} to {both[2]}"
    return span


def rows_of(command: click.Command) -> list[Row]:
    """All flags but --help."""
    ctx = click.Context(command)
    options = [p for p in command.get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
    return [Row.of(option, ctx) for option in options if "--help" not in option.opts]


def chapters() -> Iterator[tuple[dict[str, click.Command], list[Row]]]:
    """Commands with the same flags are one chapter, where one follows the other."""
    begun: tuple[dict[str, click.Command], list[Row]] = {}, []
    for words, command in commands():
        rows = rows_of(command)
        if rows and rows == begun[1]:
            begun[0][words] = command
            continue
        if begun[0]:
            yield begun
        begun = {words: command}, rows
    yield begun


def title(words: Iterable[str]) -> str:
    """A chapter's heading."""
    return "diptych " + " and ".join(words)


def anchor(heading: str) -> str:
    """Where a heading is linked to."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def flags() -> str:
    """A chapter for each command; what reads the same as in a chapter before it is only referred to."""
    seen: dict[Row, str] = {}
    text = ""
    for group, rows in chapters():
        heading = title(group)
        text += f"## {heading}\n\n" + "".join(_about(words, command) for words, command in group.items())
        before: dict[str, list[str]] = {}
        for section in dict.fromkeys(row.section for row in rows):
            new = [row for row in rows if row.section == section and row not in seen]
            if new:
                text += f"**{section}**\n\n| flag | default | limits | what it does |\n|---|---|---|---|\n"
                text += "\n".join(row.line() for row in new) + "\n\n"
        for row in rows:
            if row in seen:
                before.setdefault(seen[row], []).append(f"`{row.flag}`")
        for other, same in before.items():
            text += f"As of [{other}](#{anchor(other)}): {', '.join(same)}.\n\n"
        seen |= {row: heading for row in rows if row not in seen}
    return text


def _about(words: str, command: click.Command) -> str:
    """How it is called, and what it says of itself but for its examples."""
    usage = " ".join(piece for piece in command.collect_usage_pieces(click.Context(command)) if piece)
    paragraphs = [part for part in inspect.cleandoc(command.help or "").split("\n\n") if not part.startswith("\b")]
    return f"`diptych {words} {usage}`\n\n" + "".join(" ".join(part.split()) + "\n\n" for part in paragraphs)


def given_by_flags() -> dict[str, set[str]]:
    """Fields that commands give where they make a configuration, by the class's name: a flag sets them."""
    given: dict[str, set[str]] = {}
    for path in (ROOT / "cli" / "commands").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                given.setdefault(node.func.id, set()).update(names)
    return given


# A field of a configuration, on a line of its own, with what is written behind it.
FIELD = re.compile(r"^    (\w+): [^=\n]+ = .*?  # (.+)$", re.M)


def fixed() -> str:
    """Numbers that no flag sets: what they are, and what they mean."""
    text = (
        "## What no flag sets\n\nNumbers that the processes go by, as their configurations have them: alerts, logs and other pages "
        "speak of these. Each is what it is until somebody shows that a deployment needs another.\n"
    )
    given = given_by_flags()
    for heading, config in CONFIGS:
        notes = dict(FIELD.findall(inspect.getsource(config)))
        without = [f for f in dataclasses.fields(config) if f.name not in given.get(config.__name__, set())]
        rows = {field.name: value for field in without if (value := _default(field)) is not None}
        if rows:
            noted = bool(notes.keys() & rows)
            text += f"\n### {heading}\n\n{_meaning(config)}\n\n"
            text += "| value | is | |\n|---|---|---|\n" if noted else "| value | is |\n|---|---|\n"
            for name, value in rows.items():
                text += f"| `{name}` | {value} |" + (f" {notes.get(name, '')} |\n" if noted else "\n")
    return text + "\n"


def _meaning(config: type) -> str:
    """What its docstring says to an operator."""
    words = " ".join((inspect.getdoc(config) or "").split())
    return re.sub(r"\s*Raises ConfigError[^.]*\.", "", words)


def _default(field: dataclasses.Field[object]) -> str | None:
    """None for what is no number, word or switch that works by itself."""
    value = field.default
    if isinstance(value, int) and field.name.endswith("_bytes") and value % 2**20 == 0:
        return f"{value >> 20} MiB"
    return f"`{value}`" if isinstance(value, (int, float, str)) and value != "" else None


def environment() -> str:
    """What is looked at, by us or by libraries."""
    rows = "\n".join(f"| `{name}` | {what} |" for name, what in ENVIRONMENT.items())
    return (
        "## Environment\n\nWhat changes how Diptych or a library of it behaves; `diptych doctor` lists those that are set.\n\n"
        f"| variable | what it does |\n|---|---|\n{rows}\n"
    )


def render() -> str:
    """The page."""
    return HEAD + flags() + fixed() + environment()


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == render() else "docs/flags.md: run python tools/gen_flags.py")
    PAGE.write_text(render(), encoding="utf-8")
