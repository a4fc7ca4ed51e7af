"""Engines beside each other: who is asked, when nobody else runs; what comes of one that fails; what the report makes of it."""

import sys
from pathlib import Path

import pytest

from bench.checkpoint import HALF_B, Shape, half_b_checkpoint
from bench.limits import Limits
from bench.peers.measure import shape_of
from bench.peers.plain import plain_checkpoint
from bench.peers.report import Part, ahead, over_limit, peers_report, prefill_s, read_limit_s, step_s
from bench.peers.run import BATCHES, Outcome, PeersConfig, Turn, last_words, run_rounds
from bench.peers.subjects import Subject
from bench.peers.to_gguf import gguf_name, rotary_pairs, write_bf16
from bench.stats import Spread

SMALL = PeersConfig(threads=1, rounds=2, prefill_tokens=8, decode_prompt_tokens=4, decode_tokens=5, warm_tokens=2)
ROOT = Path(__file__).resolve().parents[3]
ENGINE = """
import sys, pathlib
sys.path.insert(0, {root!r})
from bench.peers.child import Generated, serve
class Fake:
    def generate(self, prompts, num_tokens):
        print("words of a library")
        with open({log!r}, "a") as log:
            log.write(f"{name} {{len(prompts)}} {{len(prompts[0])}} {{num_tokens}}\\n")
        if {name!r} == "bad" and num_tokens == 5: sys.exit("error: out of memory")
        return Generated(tuple(float(i + 1) for i in range(num_tokens)), tuple(range(num_tokens)))
if {name!r} == "absent": sys.exit("error: no such file")
serve("{name} 1.0", Fake)
"""


def subject(folder: Path, name: str) -> Subject:
    (folder / f"{name}.py").write_text(ENGINE.format(root=str(ROOT), log=str(folder / "log"), name=name))
    return Subject(name, "bf16", (sys.executable, str(folder / f"{name}.py")))


def test_all_take_their_turns_and_who_fails_is_named(tmp_path, monkeypatch):
    few = Limits(1, *[Spread((1.0,))] * 3)
    monkeypatch.setattr("bench.peers.run.measure_limits", lambda threads, tries: few)
    subjects = [subject(tmp_path, name) for name in ("one", "absent", "bad", "two")]
    out = run_rounds(subjects, 100, SMALL, lambda words: None)
    assert out.failed == {"absent bf16": "error: no such file", "bad bf16": "error: out of memory"}
    assert out.versions == {"one": "one 1.0", "bad": "bad 1.0", "two": "two 1.0"}
    assert {label: len(turns) for label, turns in out.turns.items()} == {"one bf16": 2, "two bf16": 2}
    assert out.limits == (few, few)
    turn = out.turns["one bf16"][0]
    assert (turn.prefill_tokens_per_s, turn.step_s, turn.tokens) == (8.0, {1: 1.0, 8: 1.0, 16: 1.0}, (0, 1, 2, 3, 4))
    lines = (tmp_path / "log").read_text().split("\n")
    turns = [line.split()[0] for line in lines if line.endswith(" 1 8 1")]
    assert turns == ["one", "bad", "two", "one", "bad", "two", "two", "one"]  # each first once; the bad one never again
    assert [line for line in lines if line.startswith("one")][4:8] == [
        "one 1 8 1",
        "one 1 4 5",
        "one 8 4 5",
        "one 16 4 5",
    ]


def limits(read: float) -> Limits:
    return Limits(2, Spread((read / 2, read)), Spread((1.0,)), Spread((100.0,)))


def part(*ours: float, peer: tuple[float, ...], shape: Shape = HALF_B) -> Part:
    def turns(times: tuple[float, ...]) -> list[Turn]:
        return [Turn(1 / t, dict.fromkeys(BATCHES, t), (1, 2)) for t in times]

    found = {"diptych bf16": turns(ours), "llama.cpp bf16": turns(peer)}
    return Part("m", shape, Outcome(tuple(limits(10.0 * (i + 1)) for i in range(len(ours))), found, {}, {"x y": "z"}))


def test_a_ratio_is_of_one_round():
    """The machine was twice as fast in the second round, and four times in the third: nobody was."""
    one = part(4.0, 2.0, 1.0, peer=(8.0, 4.0, 2.0))
    assert ahead(one, "diptych bf16", "llama.cpp bf16", prefill_s) == 2.0
    assert ahead(one, "diptych bf16", "llama.cpp bf16", step_s(8)) == 2.0
    weights = HALF_B.matmul_parameters * 2
    assert read_limit_s(HALF_B, "bf16", limits(10.0)) == weights / 10e9
    at_limit = [weights / 10e9, weights / 20e9, weights / 30e9]
    assert over_limit(part(*at_limit, peer=(1.0, 1.0, 1.0)), "diptych bf16", 1) == pytest.approx(1.0)


def test_the_report_holds_us_to_the_bars_of_each_precision():
    report = peers_report([part(1.0, 1.0, peer=(2.0, 3.0))], ["vLLM"], PeersConfig())
    said = {verdict.name: verdict for verdict in report.verdicts}
    assert said["m, bf16: prefill, llama.cpp bf16 over ours"].value == 2.5
    assert said["m, bf16: batch 16 over the memory's limit"].bar == 1.5
    assert len(said) == 7 and len(report.measures) == 2 * 4 + 2
    assert [row[0] for row in report.tables[0].rows] == [
        "limit, bf16",
        "diptych bf16",
        "llama.cpp bf16",
        "limit, int8",
        "limit, int4",
    ]
    assert "vLLM is not installed here." in report.notes and "m: x y is left out: z" in report.notes


def test_the_shape_of_a_checkpoint_is_read(tmp_path):
    small = Shape(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16, ffn_size=96, vocab_size=50)
    folder = half_b_checkpoint(tmp_path, small)
    assert shape_of(folder).matmul_parameters == small.matmul_parameters
    write_bf16(folder, tmp_path / "it.gguf")

    import gguf
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    read = {one.name: one for one in gguf.GGUFReader(tmp_path / "it.gguf").tensors}
    assert read.keys() == {gguf_name(name) for name in tensors}
    down = torch.from_numpy(read["blk.1.ffn_down.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(down, tensors["model.layers.1.mlp.down_proj.weight"])


def test_rows_of_a_head_are_put_in_pairs():
    import torch

    rows = torch.arange(8.0)[:, None]
    assert rotary_pairs(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_last_words_are_of_the_error_whatever_a_library_says_after_it():
    assert (
        last_words("loading\n[rank0]: ValueError: no such tensor\nloading: 0%\n\n")
        == "[rank0]: ValueError: no such tensor"
    )
    assert last_words("loading\n\nkilled\n\n") == "killed"
    assert last_words("\n") == "no word"


def test_peers_get_no_blocks_to_read(tmp_path):
    import gguf
    import torch
    from safetensors.torch import load_file, save_file

    weight, norm = torch.linspace(-1, 1, 4 * 64).view(4, 64), torch.ones(64, dtype=torch.bfloat16)
    blocks = torch.from_numpy(gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0))
    folder = tmp_path / "digest" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"w.weight.q8_0": blocks, "norm.weight": norm}, folder / "model.safetensors")
    plain = plain_checkpoint(folder, tmp_path / "cache", lambda words: None)
    assert plain.name == "model" and (plain / "config.json").read_text() == "{}"
    made = load_file(plain / "model.safetensors")
    assert set(made) == {"w.weight", "norm.weight"} and torch.equal(made["norm.weight"], norm)
    assert made["w.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(made["w.weight"].float(), weight, atol=0.01, rtol=0)
    assert plain_checkpoint(plain, tmp_path / "cache", lambda words: None) == plain
