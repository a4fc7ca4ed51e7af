"""The table by which files are dealt out names files that are there: one that was moved would come last, unseen."""

from pathlib import Path

from tests.dear_files import SECONDS

ROOT = Path(__file__).parents[2]


def test_every_dear_file_is_there():
    assert not [path for path in SECONDS if not (ROOT / path).is_file()]
