"""CPUs that are held are seen by others by the holder's name, until he lets go or dies; nobody holds what another does."""

import subprocess
import sys

import pytest

from engine.placement.claims import CpuClaims


def test_what_one_holds_the_other_sees_and_does_not_get(tmp_path):
    ours, theirs = CpuClaims(tmp_path / "claims"), CpuClaims(tmp_path / "claims")
    with ours.turn():
        assert ours.take((0, 2), "prefill-0") == {}
        assert ours.held() == {}
    with theirs.turn():
        assert theirs.held() == {0: "prefill-0", 2: "prefill-0"}
        assert theirs.take((1, 2), "decode-0") == {2: "prefill-0"}
    assert ours.held() == {1: "decode-0"}
    ours.close()
    ours.close()
    assert theirs.held() == {} and theirs.take((2,), "decode-0") == {}
    theirs.close()


def test_a_shorter_name_leaves_nothing_of_a_longer_one(tmp_path):
    first = CpuClaims(tmp_path / "claims")
    first.take((3,), "a-very-long-name")
    first.close()
    second, looking = CpuClaims(tmp_path / "claims"), CpuClaims(tmp_path / "claims")
    second.take((3,), "b")
    assert looking.held() == {3: "b"}
    second.close()


def test_who_is_killed_holds_nothing(tmp_path):
    code = (
        "import os, pathlib, signal, sys; from engine.placement.claims import CpuClaims; "
        "claims = CpuClaims(pathlib.Path(sys.argv[1])); claims.take((1,), 'victim'); print(claims.held(), flush=True); "
        "sys.stdin.read()"
    )
    folder = tmp_path / "claims"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == "{}\n"
    ours = CpuClaims(folder)
    assert ours.held() == {1: "victim"}
    child.kill()
    child.communicate()
    assert ours.held() == {}


def test_strange_files_are_left_alone(tmp_path):
    folder = tmp_path / "claims"
    folder.mkdir(mode=0o700)
    (folder / "cpu-x").write_text("?")
    assert CpuClaims(folder).held() == {}


def test_a_folder_behind_a_link_is_not_used(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "claims").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        CpuClaims(tmp_path / "claims")
