"""`diptych model`: gets models. `fetch` prints the directory on stdout, so that scripts can use it."""

from __future__ import annotations

from pathlib import Path

import click

from cli.commands import flags
from cli.modelsource import fetch as fetch_model
from cli.modelsource import point
from cli.options import NAME, SectionedCommand, option


@click.group("model")
def model() -> None:
    """Get models."""


@model.command("fetch", cls=SectionedCommand)
@click.argument("name", type=NAME, metavar="NAME")
@flags.cache_dir_option
@option(
    "--link",
    section="Model",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Make PATH a symbolic link to the directory, in place of one that is there: services are started with PATH as their "
    "--model, whatever the model is.",
)
def fetch(name: str, cache_dir: Path | None, link: Path | None) -> None:
    """Fetch a model, convert it if need be, and print its directory.

    NAME is the built-in name smollm2-135m-instruct, a Hugging Face hub id such as org/name, a .gguf file, or a model
    directory, which is only checked. What was fetched before is not fetched again.
    """
    directory = fetch_model(name, cache_dir)
    if link is not None:
        point(link, directory)
    click.echo(directory)
