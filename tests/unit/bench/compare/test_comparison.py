"""A comparison's numbers, winners and table, from runs that are known; and what is refused before anything is started."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.compare.load import Cell, CellRun, LoadConfig, StreamAnswer, prompts_of
from bench.compare.numbers import QUANTITIES, Comparison, Differences, best, differences, numbers, stream_gaps_s
from bench.compare.page import page
from bench.compare.report import page_text, report, table, wins_at, write
from bench.compare.run import CompareConfig, OnRound, compare, summed_up, turns
from bench.compare.systems import System, apart, together
from bench.machine import MachineFacts
from bench.report import Record
from bench.serving.measures import Limits
from bench.serving.requests import Form, Outcome, Reply
from bench.serving.writer import Writer
from cli.cluster import ClusterFailed, cores_argv
from cli.comparison import check_all_lived, cluster_of
from cli.config import WorkerOptions
from cli.main import run
from cli.process import ProcessState, ProcessStatus
from router.config import DisaggregationMode

BY_KEY = {quantity.key: quantity for quantity in QUANTITIES}
LIMITS = Limits((("ttft", 500.0), ("tpot", 60.0)))
TWO_POOLS, BOTH = apart(((0,),), ((1,),)), together(((0,), (1,)))
SHORT, LONG = Cell(64, 4.0), Cell(2048, 0.5)


def answered(due_s: float, first_s: float, gap_s: float, tokens: tuple[int, ...] = (7, 8, 9)) -> Outcome:
    times = tuple(first_s + gap_s * index for index in range(len(tokens)))
    return Outcome(due_s, 100, Reply(due_s, times, len(tokens), 100, "", tokens))


def cell_run(gap_s: float, stall_s: float, prompts: tuple[Outcome, ...], tokens: int = 40) -> CellRun:
    """A window from 10 s to 12 s, one stream from before it to after, that stands still once for `stall_s`."""
    times = [9.9]
    while len(times) < tokens:
        times.append(times[-1] + (stall_s if times[-1] < 11 <= times[-1] + gap_s else gap_s))
    ids = tuple(range(tokens))
    return CellRun(10.0, 12.0, (StreamAnswer((0, 0), tuple(times), (1,) * tokens, ids),), prompts)


def test_what_a_stream_waited_counts_when_it_began_in_the_window_however_late_it_ended() -> None:
    answer = StreamAnswer((0, 0), (9.0, 9.9, 10.1, 11.9, 14.9, 15.0), (1,) * 6, (1,) * 6)
    assert stream_gaps_s(CellRun(10.0, 12.0, (answer,), ())) == pytest.approx([1.8, 3.0])


def test_the_numbers_of_a_known_run() -> None:
    prompts = (answered(10.0, 10.2, 0.05), answered(10.5, 11.5, 0.05), Outcome(11.0, 100, error="refused"))
    found = numbers(cell_run(0.1, 0.5, prompts), LIMITS)
    assert found["stream_itl_p50"] == pytest.approx(100)
    assert 400 < found["stream_itl_p99"] < 500 == pytest.approx(found["stream_itl_max"])
    assert found["ttft_p50"] == pytest.approx(600) and found["tpot_p50"] == pytest.approx(50)
    assert found["goodput"] == pytest.approx(0.5)  # one of them in two seconds, the other one's first token was late
    assert found["input_throughput"] == pytest.approx(100)
    assert found["stream_goodput"] == 0  # no gap of 100 ms keeps 60
    stream_tokens = sum(10.0 <= at_s < 12.0 for at_s in cell_run(0.1, 0.5, ()).streams[0].arrivals_s)
    assert found["output_throughput"] == pytest.approx((stream_tokens + 6) / 2)


def test_nothing_measured_is_no_number_and_nobody_wins() -> None:
    found = numbers(cell_run(0.1, 0.1, ()), LIMITS)
    assert math.isnan(found["ttft_p50"])
    assert best({"a": math.nan, "b": 5.0}, BY_KEY["ttft_p50"]) is None


@pytest.mark.parametrize(
    ("key", "values", "winner"),
    [
        ("stream_itl_p99", {"a": 50.0, "b": 400.0}, "a"),
        ("stream_itl_p99", {"a": 105.0, "b": 100.0}, None),  # within ten per cent is even
        ("stream_itl_p99", {"a": 100.0, "b": 111.0, "c": 300.0}, "a"),
        ("output_throughput", {"a": 100.0, "b": 120.0}, "b"),
        ("output_throughput", {"a": 120.0, "b": 119.0, "c": 10.0}, None),
        ("goodput", {"a": 0.0, "b": 0.0}, None),
        ("goodput", {"a": 0.0, "b": 0.1}, "b"),
    ],
)
def test_the_best_is_best_by_more_than_ten_per_cent(key: str, values: dict[str, float], winner: str | None) -> None:
    assert best(values, BY_KEY[key]) == winner


def test_tokens_are_compared_as_far_as_both_streams_go_and_prompts_to_their_ends() -> None:
    ours = cell_run(0.1, 0.1, (answered(10, 10.1, 0.1), answered(10, 10.1, 0.1)), tokens=40)
    theirs = cell_run(0.1, 0.1, (answered(10, 10.1, 0.1), answered(10, 10.1, 0.1, (7, 8))), tokens=30)
    found = differences(ours, theirs)
    assert (found.compared, found.differing, found.answers) == (30 + 3 + 3, 1, 1)
    other = StreamAnswer((0, 0), theirs.streams[0].arrivals_s, (1,) * 30, (99, *range(1, 30)))
    assert differences(ours, CellRun(10, 12, (other,), ours.prompts)).differing == 1


def comparison(*, wrong: bool = False):
    """Two pools are steadier beside long prompts; workers that do both answer short ones sooner."""
    config = CompareConfig((TWO_POOLS, BOTH), (SHORT, LONG), LoadConfig(), rounds=3, limits=LIMITS)
    runs = {}
    for number in range(3):
        for cell, system, stall_s, ttft_s in (
            (SHORT, TWO_POOLS, 0.05, 0.375),
            (SHORT, BOTH, 0.05, 0.125),
            (LONG, TWO_POOLS, 0.06, 0.45),
            (LONG, BOTH, 1.5, 0.44),
        ):
            tokens = (7, 8, 1) if wrong and system is BOTH and number == 1 else (7, 8, 9)
            prompt = answered(10, 10 + ttft_s, 0.05, tokens)
            runs[number, cell, system.name] = cell_run(0.05, stall_s * (1 + 0.01 * number), (prompt,))
    return summed_up(config, runs), config


def test_the_table_says_where_each_wins() -> None:
    found, config = comparison()
    rows = {row[0]: row for row in table(found).rows}
    columns = table(found).columns
    itl, ttft = columns.index("ITL of streams p99, ms"), columns.index("TTFT p50, ms")
    assert rows[LONG.label][itl].startswith("**5") and "**" not in rows[SHORT.label][itl]
    assert rows[SHORT.label][ttft] == "375 · **125**" and "**" not in rows[LONG.label][ttft]
    assert found.winner(LONG, BY_KEY["stream_itl_p99"]) == "1P1D"
    assert wins_at(found, "2 colocated", BY_KEY["ttft_p50"]) == "TTFT p50 (64 at 256)"
    assert wins_at(found, "2 colocated", BY_KEY["stream_itl_p99"]) == ""
    said = report(found, config, "model", "diptych bench compare", ("the client is here",))
    by_name = {verdict.name: verdict for verdict in said.verdicts}
    assert by_name["token ids that differ between systems"].met
    claims = [
        verdict for name, verdict in by_name.items() if "beside 2048-token prompts, 1P1D over 2 colocated" in name
    ]
    assert len(claims) == 2 and all(claim.met and claim.value < 0.1 for claim in claims)
    assert any("1P1D is best at: ITL of streams p99 (2048 at 1024)" in note for note in said.notes)


def test_the_claim_is_held_to_the_worst_of_its_cells() -> None:
    often, seldom = Cell(2048, 0.5), Cell(2048, 0.1)
    of_each = {
        (often, "1P1D"): 60.0,
        (often, "2 colocated"): 90.0,
        (seldom, "1P1D"): 60.0,
        (seldom, "2 colocated"): 40.0,
    }
    rounds = {key: (dict.fromkeys(BY_KEY, value),) for key, value in of_each.items()}
    found = Comparison(("1P1D", "2 colocated"), (often, seldom), rounds, Differences(), {}, {})
    config = CompareConfig((TWO_POOLS, BOTH), (often, seldom), LoadConfig(), rounds=1, limits=LIMITS)
    claims = [verdict for verdict in report(found, config, "model", "", ()).verdicts if "worst cell" in verdict.name]
    assert [(claim.value, claim.met) for claim in claims] == [(1.5, False), (1.5, False)]


def test_token_ids_that_differ_miss_the_bar() -> None:
    found, config = comparison(wrong=True)
    assert found.tokens.differing == 2 and found.tokens.answers == 2
    assert not report(found, config, "model", "", ()).verdicts[0].met


def test_what_is_written_has_the_table_and_every_run(tmp_path: Path) -> None:
    found, config = comparison()
    facts = MachineFacts("now", "<cpu>", (), 2, 8.0, "Linux", "3", {"torch": "2"})
    record = Record(facts, report(found, config, "a <model>", "diptych bench compare", ()), 1.0)
    write(record, page(found, record, ()), tmp_path)
    html = (tmp_path / "compare.html").read_text()
    assert "<model>" not in html and "&lt;model&gt;" in html and 'class="best">125<' in html
    text = (tmp_path / "compare.md").read_text()
    assert (
        text == page_text(record)
        and "| ≤ 1.00 x | met |" in text
        and "prefill 0, decode 1; 2 colocated: workers 0/1" in text
    )
    names = {measure.name: measure.runs for measure in record.report.measures}
    assert len(names[f"{LONG.label}: 1P1D: ITL of streams p99"]) == 3


def test_systems_take_turns_and_the_second_round_goes_backwards() -> None:
    third = together(((0,), (1,)), 128)
    order = [(number, system.name) for number, system in turns((TWO_POOLS, BOTH, third), 2)]
    assert [name for _, name in order] == [TWO_POOLS.name, BOTH.name, third.name, third.name, BOTH.name, TWO_POOLS.name]
    assert [number for number, _ in order] == [0, 0, 0, 1, 1, 1]


def test_each_worker_has_a_thread_for_each_of_its_own_cores() -> None:
    """Unequal groups too: two pools of three cores and one against two workers of two."""
    threads = []
    for system in (apart(((0, 1, 2),), ((3,),)), together(((0, 1), (2, 3)), 128)):
        config = cluster_of(system, TINY, WorkerOptions(), DisaggregationMode.ALWAYS)
        assert config.workers.max_num_batched_tokens == system.step_tokens
        threads += [cores_argv(config, number) for number in range(2)]
    assert threads == [
        ("--cores", "0,1,2", "--threads", "3"),
        ("--cores", "3", "--threads", "1"),
        ("--cores", "0,1", "--threads", "2"),
        ("--cores", "2,3", "--threads", "2"),
    ]
    given = replace(config, workers=WorkerOptions(threads=1))
    assert cores_argv(given, 0) == ("--cores", "0,1") and cores_argv(replace(given, worker_cores=()), 0) == ()


@pytest.mark.parametrize(
    ("state", "restarts"), [(ProcessState.DEAD, 0), (ProcessState.RESTARTING, 0), (ProcessState.READY, 1)]
)
def test_a_worker_that_died_under_the_load_makes_the_numbers_void(state: ProcessState, restarts: int) -> None:
    """One death is the last, as a comparison starts them: nothing is started again that one could count."""
    well = ProcessStatus("decode-0", "decode", "", ProcessState.READY, 1, 0, "", "")
    check_all_lived((well,))
    with pytest.raises(ClusterFailed, match="prefill-0 died under the load"):
        check_all_lived((well, replace(well, name="prefill-0", state=state, num_restarts=restarts)))


def test_every_system_is_sent_the_same_prompts_at_the_same_times() -> None:
    config = LoadConfig(window_s=8.0)
    one, when = prompts_of(LONG, config, Writer(Form.IDS, 5, 1000))
    again, _ = prompts_of(LONG, config, Writer(Form.IDS, 5, 1000))
    other, _ = prompts_of(LONG, config, Writer(Form.IDS, 6, 1000))
    assert one == again and one[0].prompt != other[0].prompt and when == (1.0, 3.0, 5.0, 7.0)
    rare, at = prompts_of(Cell(2048, 0.01), config, Writer(Form.IDS, 5, 1000))
    assert len(rare) == 1 and at == (2.0,)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prefill-cores", "0", "--decode-cores", "1", "--colocated-cores", "0"], ["--colocated-cores", "1 (", "2 ("]),
        (["--prefill-cores", "0", "--decode-cores", "1", "--colocated-cores", "0/2"], ["--colocated-cores", "0/2", "1P1D"]),
        (["--prefill-cores", "0", "--decode-cores", "0"], ["--decode-cores", "prefill"]),
        (["--prefill-cores", "0"], ["--decode-cores", "given"]),
        (["--prefill-cores", "0/0", "--decode-cores", "1"], ["--prefill-cores", "'0/0'", "two workers"]),
        (["--prefill-cores", "4000", "--decode-cores", "0"], ["--prefill-cores", "4000"]),
        (["--prefill-cores", "x", "--decode-cores", "0"], ["--prefill-cores", "'x'", "number"]),
        (["--prefill-cores", "0", "--decode-cores", "1", "--colocated-cores", "0/1", "--colocated-cores", "1/0"], ["twice"]),
        (["--input-len", "0"], ["--input-len", "'0'", "1"]),
        (["--input-rate", "1", "--request-rate", "1"], ["--request-rate", "--input-rate"]),
        (["--request-rate", "0"], ["--request-rate", "'0'", "0.001"]),
        (["--burstiness", "0"], ["--burstiness", "'0'"]),
        (["--goodput", "speed:1"], ["--goodput", "'speed:1'"]),
        (["stray"], ["'stray'"]),
        (["--burstiness", "1,2"], ["--burstiness", "'1,2'", "one number"]),
        (["--rounds", "99999999999"], ["--rounds", "1000"]),
        (["--streams", "99999999999"], ["--streams", "1000"]),
        (["--stream-output-len", "99999999999"], ["--stream-output-len", "16777216"]),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line_and_exit_2(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "compare", "--model", str(TINY), *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert [word for word in words if word not in said] == [], said


TINY = Path(__file__).parents[3] / "fixtures" / "tiny-austen"


def test_what_whole_rounds_came_to_is_kept_when_the_rest_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(config: CompareConfig, start: object, say: object, on_round: OnRound) -> None:
        whole = replace(config, rounds=1)
        runs = {(0, cell, system.name): cell_run(0.05, 0.1, ()) for cell in config.cells for system in config.systems}
        on_round(whole, summed_up(whole, runs))
        raise KeyboardInterrupt

    monkeypatch.setattr("cli.commands.compare.compare", interrupted)
    given = ("--prefill-cores", "0", "--decode-cores", "1", "--no-plots", "--rounds", "3", "--input-len", "64")
    asked = ["bench", "compare", "--model", "tests/fixtures/tiny-austen", *given]
    assert run([*asked, "--result-dir", str(tmp_path / "out")]) == 130
    assert "1 of 3 rounds" in capsys.readouterr().err
    assert (tmp_path / "out" / "compare.json").exists()
    assert run([*asked, "--result-dir", "/proc/out"]) == 2  # before anything is started
    assert "ended early" not in capsys.readouterr().err
    monkeypatch.setattr(
        "cli.commands.compare.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    assert run([*asked, "--result-dir", str(tmp_path / "full")]) == 2
    said = capsys.readouterr()
    assert "No space left" in said.err and said.out.startswith("{")


async def test_systems_warm_up_and_have_the_same_cells_with_the_same_seeds_and_each_whole_round_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm: list[tuple[object, ...]] = []
    seeds: dict[str, list[tuple[object, object]]] = {}
    running: list[str] = []

    async def warmed(_target: object, lengths: object, _load: object, workers: object) -> None:
        warm.append((running[-1], lengths, workers))

    async def measured(_target: object, cell: object, _load: object, seed: object) -> CellRun:
        seeds.setdefault(running[-1], []).append((cell, seed))
        return cell_run(0.05, 0.1, ())

    @asynccontextmanager
    async def start(system: System) -> AsyncIterator[str]:
        running.append(system.name)
        yield "127.0.0.1:1"

    monkeypatch.setattr("bench.compare.run.warm_up", warmed)
    monkeypatch.setattr("bench.compare.run.run_cell", measured)
    told: list[int] = []
    three = apart(((0,), (1,), (2,)), ((3,),))
    config = CompareConfig((three, BOTH), (SHORT, LONG), rounds=3)
    await compare(config, start, lambda _: None, lambda whole, _: told.append(whole.rounds))
    assert running == ["3P1D", "2 colocated", "2 colocated", "3P1D", "3P1D", "2 colocated"]
    workers = {"3P1D": 3, "2 colocated": 2}
    assert warm == [(name, (64, 2048), workers[name]) for name in running]
    assert seeds["3P1D"] == seeds["2 colocated"] and len({seed for _, seed in seeds["3P1D"]}) == 6
    assert told == [1, 2, 3]
