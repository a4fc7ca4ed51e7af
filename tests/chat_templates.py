"""The chat templates that models really have: files in the wheel of trl, a development dependency that is never imported."""

import importlib.metadata
from pathlib import Path

FOLDER = Path(str(importlib.metadata.distribution("trl").locate_file("trl/chat_templates")))


def template_of(model: str) -> str:
    """As the model's authors wrote it; `model` is trl's name for it."""
    return (FOLDER / f"{model}.jinja").read_text()
