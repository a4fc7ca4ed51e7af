"""`diptych model`: gets models. `fetch` prints the directory on stdout, so that scripts can use it."""

from __future__ import annotations

from pathlib import Path

import click

from cli.commands import flags
from cli.modelsource import fetch as fetch_model
from cli.options import NAME, SectionedCommand


@click.group("model")
def model() -> None:
    """Get models."""


@model.command("fetch", cls=SectionedCommand)
@click.argument("name", type=NAME, metavar="NAME")
@flags.cache_dir_option
def fetch(name: str, cache_dir: Path | None) -> None:
    """Fetch a model, convert it if need be, and print its directory.

    NAME is the built-in name smollm2-135m-instruct, a Hugging Face hub id such as org/name, a .gguf file, or a model
    directory, which is only checked. What was fetched before is not fetched again.
    """
    click.echo(fetch_model(name, cache_dir))
