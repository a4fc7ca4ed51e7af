"""A process that cannot start is told of at once, with its reason: nobody waits a minute for what will not come."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.integration.processes.children import Nursery


async def test_a_nursery_that_cannot_import_what_it_needs_says_so_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "nursery.py"
    script.write_text("import no_such_thing")
    async with asyncio.timeout(10), AsyncExitStack() as stack:
        with pytest.raises(RuntimeError, match="the nursery ended with 1; why is in its stderr"):
            await stack.enter_async_context(Nursery(tmp_path, script))
    assert "No module named 'no_such_thing'" in capfd.readouterr().err
