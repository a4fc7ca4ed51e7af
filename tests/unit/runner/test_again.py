"""Which failures a second, lonely run excuses, and which it does not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import again
from tests.again import MOST, Run, verdict

ALL_PASS = Run(0)
COVERAGE = ["--cov=thing", "--cov-fail-under=100"]


class Runs:
    """Runs that end as told, one after the other; keeps what each was asked."""

    def __init__(self, *ends: Run) -> None:
        self.ends = list(ends)
        self.asked: list[list[str]] = []
        self.said = ""

    def __call__(self, arguments: list[str]) -> Run:
        self.asked.append(arguments)
        return self.ends.pop(0)

    def of(self, *arguments: str) -> int:
        code = verdict(arguments, self, self.say)
        assert not self.ends, "a run that was expected was not made"
        return code

    def say(self, words: str) -> None:
        self.said += words + "\n"


def test_what_passes_is_run_once_and_nothing_is_said() -> None:
    runs = Runs(ALL_PASS)
    assert runs.of("-q", "tests") == 0
    assert (runs.asked, runs.said) == ([["-q", "tests"]], "")


@pytest.mark.parametrize("count", range(1, MOST + 1))
def test_few_that_fail_are_run_alone_and_named(count: int) -> None:
    names = tuple(f"test_a.py::test_{i}" for i in range(count))
    runs = Runs(Run(1, names), ALL_PASS)
    assert runs.of("-n", "3", "tests") == 0
    assert runs.asked[1] == ["-m", "", *names]
    assert all(runs.said.count(name) == 2 for name in names)


def test_who_fails_alone_too_fails() -> None:
    runs = Runs(Run(1, ("t::a",)), Run(1, ("t::a",)))
    assert runs.of("tests") == 1
    assert "NOT STEADY" not in runs.said


@pytest.mark.parametrize(
    "end",
    [
        Run(1, tuple(f"t::{i}" for i in range(MOST + 1))),
        Run(1, ("t::a",), died=True),
        Run(2),
        Run(3),
        Run(4),
        Run(5),
        Run(-11, died=True),
        Run(1),
    ],
    ids=[
        "many",
        "a process died",
        "interrupted",
        "pytest's own",
        "usage",
        "no tests",
        "a signal",
        "no test and no gate",
    ],
)
def test_nothing_else_is_excused(end: Run) -> None:
    assert Runs(end).of("tests") == end.code


def test_coverage_below_its_gate_gets_one_more_run_of_everything() -> None:
    runs = Runs(Run(1), ALL_PASS)
    assert runs.of(*COVERAGE, "tests") == 0
    assert runs.asked[1] == [*COVERAGE, "tests", "--cov-append"]
    assert Runs(Run(1), Run(1)).of(*COVERAGE, "tests") == 1


def test_a_failure_and_coverage_may_both_be_made_up_for() -> None:
    runs = Runs(Run(1, ("t::a",)), Run(1), ALL_PASS)
    assert runs.of(*COVERAGE, "tests") == 0
    assert runs.asked[1] == [*COVERAGE, "--cov-append", "-m", "", "t::a"]
    assert runs.asked[2] == [*COVERAGE, "tests", "--cov-append"]
    assert "NOT STEADY" in runs.said
    assert Runs(Run(1, ("t::a",)), Run(1), Run(1, ("t::a",))).of(*COVERAGE, "tests") == 1


def really(folder: Path, test: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """tests.again in a project of its own that has this one test file."""
    (folder / "tests").mkdir()
    shutil.copy(again.__file__, folder / "tests")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = long: x\naddopts = -m 'not long'\n")
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "tests.again", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


FAILS_ONCE = """
import pathlib, pytest
@pytest.mark.long
@pytest.mark.parametrize("x", ["a b", "c"])
def test_first(x):
    file = pathlib.Path(__file__).with_name("been-" + x)
    been = file.exists()
    file.write_text("")
    assert been
@pytest.mark.long
def test_well():
    with open(pathlib.Path(__file__).with_name("well"), "a") as file:
        file.write("x")
"""


def test_a_real_run_over_several_processes(tmp_path: Path) -> None:
    ended = really(tmp_path, FAILS_ONCE, "-n", "2", "-m", "long")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = ended.stdout.strip().split("\n")[-1]
    assert last.startswith("again: NOT STEADY") and "test_first[a b]" in last and "test_first[c]" in last
    assert (tmp_path / "well").read_text() == "x"  # what passed was not run again


def test_a_real_process_that_dies_is_a_failure(tmp_path: Path) -> None:
    dies = "import os\ndef test_it():\n    os._exit(0)\n"
    ended = really(tmp_path, dies, "-n", "1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "again:" not in ended.stdout
