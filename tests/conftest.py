"""What tests of every kind share."""

from pathlib import Path

import pytest

from engine.models.store import resolve_model


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real model, fetched and converted once per machine into the usual cache."""
    return resolve_model("smollm2-135m-instruct", None, print)
