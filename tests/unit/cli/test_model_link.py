"""`diptych model fetch --link`: one path for whatever is served, which several containers share."""

import os
from pathlib import Path

import pytest

from cli.main import run
from engine.models.store import model_name

TINY = str(Path("tests/fixtures/tiny-austen").resolve())


def test_the_link_leads_to_the_model_and_its_name_stays(tmp_path, capfd):
    link = tmp_path / "models" / "served"
    assert run(["model", "fetch", TINY, "--link", str(link)]) == 0
    assert capfd.readouterr().out == TINY + "\n"
    assert link.is_symlink()
    assert link.resolve() == Path(TINY)
    assert model_name(link) == "tiny-austen"


def test_another_model_takes_its_place_and_both_may_be_moved(tmp_path):
    models = tmp_path / "models"
    for name in ("one", "two"):
        (models / name).mkdir(parents=True)
        for file in Path(TINY).iterdir():
            os.link(file, models / name / file.name)
        assert run(["model", "fetch", str(models / name), "--link", str(models / "served")]) == 0
    moved = models.rename(tmp_path / "elsewhere")
    assert (moved / "served").resolve() == moved / "two"
    assert sorted(path.name for path in moved.iterdir()) == ["one", "served", "two"]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_is_no_link_is_left_alone(tmp_path, make, capfd):
    there = tmp_path / "served"
    make(there)
    assert run(["model", "fetch", TINY, "--link", str(there)]) == 2
    assert str(there) in capfd.readouterr().err
    assert not there.is_symlink()


def test_what_a_killed_one_left_is_in_nobodys_way(tmp_path):
    """In a container the next one has the same process id."""
    (tmp_path / f".served.{os.getpid()}").symlink_to("nowhere")
    assert run(["model", "fetch", TINY, "--link", str(tmp_path / "served")]) == 0
    assert (tmp_path / "served").resolve() == Path(TINY)


def test_a_link_that_cannot_be_made_leaves_nothing(tmp_path):
    (tmp_path / "new").mkdir()
    assert run(["model", "fetch", TINY, "--link", str(tmp_path / "new" / "x" / "..")]) == 2
    assert list(tmp_path.rglob(".*")) == []
