"""What tests of every kind share."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import xdist
from hypothesis import settings

from engine.models.store import resolve_model
from tests.dear_files import SECONDS
from tests.redis_process import RedisProcess, require_redis_server

# How long one example takes says how crowded the machine is, and nothing of the code.
settings.register_profile("crowded", parent=settings(), deadline=None)
settings.load_profile("crowded")


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Where files are dealt out to processes, dear ones come first; the tests of one file stay together, in their order.

    It takes `--no-loadscope-reorder`: without it xdist puts the files with the most tests first, which says little.
    """
    if xdist.is_xdist_worker(session):
        items.sort(key=lambda item: -SECONDS.get(item.nodeid.partition("::")[0], 0))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real model, fetched and converted once per machine into the usual cache."""
    return resolve_model("smollm2-135m-instruct", None, print)


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    """A real Redis of this test's own, started and empty."""
    require_redis_server()
    process = RedisProcess(tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test that runs a process's set-up in this process must not leave its log handlers to the next."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
