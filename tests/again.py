"""pytest, for machines that others use as well: a few tests that failed are run once more, alone, and are named. `.ci/run` uses it.

    python -m tests.again ARGUMENTS      as `python -m pytest ARGUMENTS`; exit code 0 also where what failed passes alone

    run ── passes ─────────────────────────────────────────────────────────▶ 0
     ├── at most MOST tests fail ──▶ those alone ── pass ──▶ (as if passed) ▶ 0, and their names
     │                                  └── fail ─────────────────────────▶ pytest's code
     ├── all pass, coverage is below the gate ──▶ all once more, added to what was covered ──▶ that run's code
     └── more fail, a process died, nothing could be collected ───────────▶ pytest's code

A test that fails when it is run alone, too, is broken; one that dies with its process is never excused. What made a test fail the
first time stays on the screen. Loaded by the run itself (`-p tests.again`) this file notes which tests failed. It knows no test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import xdist

MOST = 10  # of 13,000; more than this do not fail by chance
_DIED = "crashed while running"  # what xdist says of a test whose process is gone
_NOTE = "--note-failures"


@dataclass(frozen=True)
class Run:
    """How a run of pytest ended: its exit code, the ids of the tests that failed, and whether one took its process with it."""

    code: int
    failed: tuple[str, ...] = ()
    died: bool = False


def verdict(arguments: Sequence[str], run: Callable[[list[str]], Run], say: Callable[[str], None]) -> int:
    """The exit code of it all. `run` runs pytest with the arguments that it gets."""
    ended = run(list(arguments))
    named: tuple[str, ...] = ()
    coverage = [one for one in arguments if one.startswith("--cov")]
    if ended.code == pytest.ExitCode.TESTS_FAILED and 0 < len(ended.failed) <= MOST and not ended.died:
        named = ended.failed
        say(f"again: {len(named)} failed, and are run once more, alone: {', '.join(named)}")
        # Named by id they are wanted whatever their marks say.
        ended = run([*coverage, *(["--cov-append"] if coverage else []), "-m", "", *named])
    if ended.code == pytest.ExitCode.TESTS_FAILED and not ended.failed and coverage:
        say("again: all pass, but not all that must be covered was: once more, added to the first run")
        ended = run([*arguments, "--cov-append"])
    if named and ended.code == 0:
        say(f"again: NOT STEADY, passed alone only: {', '.join(named)}")
    return ended.code


def run_pytest(arguments: list[str]) -> Run:
    """One run in a process of its own, whose output is ours."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "failures.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.again", f"{_NOTE}={note}", *arguments]
        code = subprocess.run(command, check=False).returncode
        if not note.exists():
            return Run(code or 1, died=True)
        noted = json.loads(note.read_text())
    return Run(code, tuple(noted["failed"]), noted["died"])


class Notes:
    """Part of pytest while a run lasts: which tests failed, in the process that hears of all of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: dict[str, None] = {}
        self._died = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of a test's set-up, of itself and of its clean-up."""
        if report.failed:
            self._failed[report.nodeid] = None
            self._died = self._died or _DIED in str(report.longrepr)

    def pytest_sessionfinish(self) -> None:
        """Writes it down."""
        self._path.write_text(json.dumps({"failed": list(self._failed), "died": self._died}))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option by which a run is told where to note its failures."""
    parser.addoption(_NOTE, metavar="FILE", help="(tests.again) write the ids of failed tests there")


def pytest_sessionstart(session: pytest.Session) -> None:
    """xdist's processes hear of their own tests only: they note nothing."""
    note = session.config.getoption(_NOTE)
    if note and not xdist.is_xdist_worker(session):
        session.config.pluginmanager.register(Notes(Path(note)))


if __name__ == "__main__":
    sys.exit(verdict(sys.argv[1:], run_pytest, lambda words: print(words, flush=True)))
