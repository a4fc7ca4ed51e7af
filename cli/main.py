"""The `diptych` command: finds the subcommand, runs it, and turns what goes wrong into one line and an exit code.

    what happened                                   stderr                       exit
    done                                            -                            0
    a bad argument, ConfigError, InvalidRequest     error: <one line>            2
    any other DiptychError                          error: <one line>            1
    Ctrl-C                                          -                            130
    a fault of ours                                 its traceback                1

Subcommands are imported when they are asked for, so that `diptych --help` is there at once and only the process that
computes imports torch. Does not know what the commands do.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from contracts.errors import ConfigError, DiptychError, InvalidRequest

EXIT_USER_ERROR = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a subcommand is defined, and its line in the list of commands."""

    module: str
    attribute: str
    summary: str


class LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def __init__(self, commands: dict[str, LazyCommand], **attrs: object) -> None:
        super().__init__(**attrs)  # type: ignore[arg-type]  # click's own keyword arguments, passed through
        self._lazy = commands

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order in which a newcomer needs them."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the command, or None when there is none of this name."""
        lazy = self._lazy.get(cmd_name)
        if lazy is None:
            return None
        command = vars(importlib.import_module(lazy.module))[lazy.attribute]
        if not isinstance(command, click.Command):
            raise TypeError(f"{lazy.module}:{lazy.attribute} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the known commands when the one asked for is not among them."""
        if args and args[0] not in self._lazy and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; one of: {', '.join(self._lazy)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """One line a command, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in self._lazy.items()])


ROOT = LazyGroup(
    name="diptych",
    help="Serve a language model from two pools: prefill workers read prompts, decode workers write answers.\n\n"
    "Start with `diptych up --model smollm2-135m-instruct`; see `diptych COMMAND --help` for the rest.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    commands={
        "up": LazyCommand("cli.commands.up", "up", "Run a whole cluster on this machine, in the foreground."),
        "demo": LazyCommand("cli.commands.demo", "demo", "See it work: questions, streamed answers, measurements."),
        "generate": LazyCommand("cli.commands.generate", "generate", "Answer prompts offline, with the engine alone."),
        "model": LazyCommand("cli.commands.model", "model", "Get models."),
        "top": LazyCommand("cli.commands.top", "top", "Watch a router and its workers in this terminal."),
        "key": LazyCommand("cli.commands.key", "key", "Make, list and revoke API keys."),
        "bench": LazyCommand(
            "cli.commands.bench", "bench", "Measure a server under load, two pools against one, or the engine."
        ),
        "health": LazyCommand("cli.commands.health", "health", "Ask a process whether it is well, by exit code."),
        "doctor": LazyCommand("cli.commands.doctor", "doctor", "Say what is wrong with this environment."),
        "router": LazyCommand("cli.commands.router", "router", "Run one router: the door for clients."),
        "prefill": LazyCommand("cli.commands.prefill", "prefill", "Run one prefill worker."),
        "decode": LazyCommand("cli.commands.decode", "decode", "Run one decode worker."),
    },
)

click.version_option(None, "--version", package_name="diptych", message="%(prog)s %(version)s")(ROOT)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; user errors are one line on stderr."""
    try:
        result = ROOT.main(args=list(args), prog_name="diptych", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message())
        return EXIT_USER_ERROR
    except click.ClickException as error:
        return _complain(error.format_message(), EXIT_USER_ERROR)
    except (ConfigError, InvalidRequest) as error:
        return _complain(error.message, EXIT_USER_ERROR)
    except DiptychError as error:
        return _complain(error.message, EXIT_FAILED)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left, as `| head` does; nothing more can be said to it, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def one_line(message: str) -> str:
    """The message with all white space made single spaces; what a terminal would obey, as a server may have said it, is shown."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(message.split()))


def _complain(message: str, code: int) -> int:
    click.echo(f"error: {one_line(message)}", err=True)
    return code


def main() -> None:
    """The entry point of the `diptych` script and of `python -m cli`."""
    sys.exit(run(sys.argv[1:]))
