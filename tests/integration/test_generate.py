"""`diptych generate` on the tiny model: the engine alone, as a user runs it."""

import json
import shutil
import subprocess
import sys

import pytest

TINY = "tests/fixtures/tiny-austen"
PROMPTS = ["It is a truth", "She walked to the window and", "Mr. Darcy"]


def generate(*args, expect=0):
    line = [sys.executable, "-m", "cli", "generate", "--model", TINY, "--threads", "1", "--kv-memory", "16MiB", *args]
    run = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert run.returncode == expect, run.stderr
    return run


def test_one_prompt_is_text_on_stdout_and_speed_on_stderr():
    run = generate("--prompt", PROMPTS[0], "--temperature", "0", "--max-tokens", "12")
    assert run.stdout.strip()
    assert "12 new tokens" in run.stderr
    assert "tokens/s" in run.stderr


def test_alone_in_a_batch_and_in_chunks_the_tokens_are_the_same(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    flags = ["--json", "--seed", "5", "--temperature", "0.9", "--max-tokens", "16"]
    together = [json.loads(line) for line in generate("--file", str(path), *flags).stdout.splitlines()]
    assert [answer["index"] for answer in together] == [0, 1, 2]
    alone = json.loads(generate("--prompt", PROMPTS[1], *flags).stdout)
    assert alone["token_ids"] == together[1]["token_ids"]
    chunked = generate("--file", str(path), *flags, "--max-num-batched-tokens", "4", "--max-num-seqs", "2").stdout
    assert [json.loads(line)["token_ids"] for line in chunked.splitlines()] == [a["token_ids"] for a in together]


def test_a_stop_string_ends_the_text_before_it():
    whole = json.loads(generate("--prompt", PROMPTS[0], "--temperature", "0", "--json").stdout)["text"]
    stop = whole[10:14]
    cut = json.loads(generate("--prompt", PROMPTS[0], "--temperature", "0", "--stop", stop, "--json").stdout)
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_one_bad_prompt_of_a_file_is_named_and_nothing_runs(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("good\n" + "word " * 3000 + "\n")
    run = generate("--file", str(path), expect=2)
    assert run.stdout == ""
    assert run.stderr.startswith("error: prompt 2: ")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_model_directory_with_a_part_missing_is_one_line(tmp_path, missing):
    broken = tmp_path / "broken"
    shutil.copytree(TINY, broken)
    (broken / missing).unlink()
    line = [sys.executable, "-m", "cli", "generate", "--model", str(broken), "--prompt", "x"]
    run = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert run.returncode == 2
    assert missing in run.stderr
    assert run.stderr.count("\n") == 1
