"""What every command's options share: help in titled sections, and value types that say what is allowed.

    @click.command("up", cls=SectionedCommand)
    @option("--kv-memory", section="Memory", type=SIZE, default="512MiB", help="…")

A bad value is a click.BadParameter whose message has the value and the limit; `cli.main` makes one line of it.
Does not know any command.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from rpc.cores import CoreChoice, parse_cores

Decorated = TypeVar("Decorated", bound="Callable[..., object] | click.Command")

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_HOST = re.compile(r"[\w.-]+", re.ASCII)
MAX_PORT = 65535
MAX_LABEL_CHARS = 256


class SectionedOption(click.Option):
    """An option that knows under which title of the help it stands."""

    def __init__(self, param_decls: Sequence[str], section: str = "Options", **attrs: object) -> None:
        attrs.setdefault("show_default", True)
        super().__init__(param_decls, **attrs)  # type: ignore[arg-type]  # click's own keyword arguments
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help lists its options by section, in the order in which the sections first appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one definition list a section; options without one, such as --help, come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and record[1]:  # an argument is explained by the command's own text
                section = param.section if isinstance(param, SectionedOption) else "Other"
                sections.setdefault(section, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def option(*param_decls: str, section: str, **attrs: object) -> Callable[[Decorated], Decorated]:
    """`click.option` with a section; defaults are shown."""
    return click.option(*param_decls, cls=SectionedOption, section=section, **attrs)


def apply(options: Sequence[Callable[[click.Command], click.Command]], command: click.Command) -> None:
    """Put a list of options on a command that is already made; its help has them in the order of the list."""
    for decorate in options:
        decorate(command)


class SizeType(click.ParamType[int]):
    """Bytes with a unit: 512MiB, 2GiB, 1.5GB; a bare number is bytes. At least one byte."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        factor = _UNITS.get(match.group(2).upper()) if match else None
        if match is None or factor is None:
            self.fail(f"{value!r} is not a size; give a number and a unit, such as 512MiB or 2GiB", param, ctx)
        num_bytes = int(float(match.group(1)) * factor)
        if num_bytes < 1:
            self.fail(f"{value!r} must be at least 1 byte", param, ctx)
        return num_bytes


class FloatType(click.ParamType[float]):
    """A finite number in a range; NaN and infinity are refused, which click's own float takes."""

    name = "number"

    def __init__(self, low: float, high: float, *, open_low: bool = False) -> None:
        self.low, self.high, self.open_low = low, high, open_low

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        bound = f"must be a number {'above' if self.open_low else 'from'} {self.low:g} to {self.high:g}"
        try:
            number = float(str(value))
        except ValueError:
            self.fail(f"{value!r} {bound}", param, ctx)
        too_low = number <= self.low if self.open_low else number < self.low
        if math.isnan(number) or too_low or number > self.high:
            self.fail(f"{value!r} {bound}", param, ctx)
        return number


class AddressType(click.ParamType[str]):
    """HOST:PORT of something to reach, the host of an IPv6 address in brackets."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address as it was given."""
        text = str(value).strip()
        host, _, port = text.rpartition(":")
        bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
        is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and 0 < int(port) <= MAX_PORT
        if not host or bare_ipv6 or not is_port:
            self.fail(f"{value!r} is not HOST:PORT with a port from 1 to {MAX_PORT}", param, ctx)
        return text


class ModelDirType(click.ParamType[Path]):
    """A directory that is there; whoever gives a model's name instead is told how to get one."""

    name = "dir"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The directory as it was given."""
        path = Path(str(value))
        if not path.is_dir():
            self.fail(
                f"directory {str(value)!r} does not exist; `diptych model fetch NAME` gets a model and prints its directory",
                param,
                ctx,
            )
        return path


class NameType(click.ParamType[str]):
    """Text that must not be empty. A shell passes any bytes; those that are not UTF-8 are refused."""

    name = "name"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text without white space around it."""
        text = str(value).strip()
        if not text:
            self.fail(f"{value!r} must not be empty", param, ctx)
        if not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
            self.fail(f"{value!r} is not UTF-8", param, ctx)
        return text


class LabelType(NameType):
    """A name that others are shown: printable, of a sensible length."""

    name = "label"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text without white space around it."""
        text = super().convert(value, param, ctx)
        if len(text) > MAX_LABEL_CHARS or not text.isprintable():
            self.fail(f"{text!r} must be printable and have at most {MAX_LABEL_CHARS} characters", param, ctx)
        return text


class TextType(click.ParamType[str]):
    """Any text of at least `least_chars` characters. A shell passes any bytes; those that are not UTF-8 are refused."""

    name = "text"

    def __init__(self, least_chars: int = 0) -> None:
        self._least_chars = least_chars

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it was given."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not UTF-8", param, ctx)
        if len(text) < self._least_chars:
            self.fail(f"{text!r} must have at least {self._least_chars} character", param, ctx)
        return text


class AdvertiseType(click.ParamType[str]):
    """HOST or HOST:PORT under which others reach us; an IPv6 address in brackets when a port follows."""

    name = "host[:port]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address as it was given."""
        text = str(value)
        host, colon, port = text.rpartition(":")
        if not colon or _is_ipv6(text):
            host, port = text, "1"
        bare_ipv6 = colon and host != text and not host.startswith("[") and ":" in host
        known = _HOST.fullmatch(host) or (_is_ipv6(host) and not bare_ipv6)
        if text and not (known and port.isdecimal() and 0 < int(port) <= MAX_PORT):
            self.fail(f"{value!r} is not HOST or HOST:PORT with a port from 1 to {MAX_PORT}", param, ctx)
        return text


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    except ValueError:
        return False
    return True


class CoresType(click.ParamType[CoreChoice]):
    """CPU cores by number, 0,2-3, or "auto": any that are free."""

    name = "cores"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> CoreChoice:  # noqa: ARG002
        """The numbers, in order. Whether they may be used is found out where they are."""
        if isinstance(value, tuple):
            return value
        if value == "auto":
            return "auto"
        flag = "--cores" if param is None else param.opts[0]
        return parse_cores(flag, str(value))


NAME = NameType()
LABEL = LabelType()
TEXT = TextType()
SOME_TEXT = TextType(least_chars=1)
ADVERTISE = AdvertiseType()
MODEL_DIR = ModelDirType()
SIZE = SizeType()
ADDRESS = AddressType()
PORT = click.IntRange(0, MAX_PORT)
SECONDS = FloatType(0.0, 86_400.0)
POSITIVE_SECONDS = FloatType(0.0, 86_400.0, open_low=True)
LOG_LEVEL = click.Choice(["debug", "info", "warning", "error"], case_sensitive=False)
CORES = CoresType()
DTYPE = click.Choice(["auto", "float32", "bfloat16"])
QUANTIZATION = click.Choice(["auto", "none", "int8", "int4"])
