"""The soak's own judgement: a good run is silent, and each thing that must not be is said."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from tests.soak.asking import Heard, Outcome, Part
from tests.soak.cluster import MODEL
from tests.soak.firm import firm_questions
from tests.soak.judging import SHOWN_LINES, Bounds, Findings, Life, Pause, Tally, violations
from tests.soak.plan import Door, Kind, disturbances, questions, requests, shared_disturbances
from tests.soak.report import report, table
from tests.soak.run import SoakConfig
from tests.soak.truth import TrueAnswer, differences
from tests.soak.watching import Footprint

TRUTH = (TrueAnswer("one two", (5, 6, 7), "stop"), TrueAnswer("three", (8,), "length"))
OF_WORKERS = (Kind.KILL, Kind.TERM, Kind.STOP)
VICTIMS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def heard(outcome=Outcome.DONE, error="", usage=4, **parts):
    found = {int(name[1:]): part for name, part in parts.items()}
    return Heard(parts=found, outcome=outcome, error=error, usage=usage, num_pieces=len(found))


def whole():
    return heard(p0=Part("one two", (5, 6, 7), "stop"), p1=Part("three", (8,), "length"))


def tally(*others):
    made = Tally()
    for each in (whole(), *others):
        made.add("load", each, [])
    return made


def footprint(**what):
    return Footprint(rss_mib=300, private_mib=200, **{"fds": Counter(socket=4), **what})


def stalled(name, seconds):
    said = "rpc.lifecycle no progress although there is work; health says NOT_SERVING stalled_s=4"
    return f"{name}   | 1970-01-01T00:16:{40 + seconds:02}.123Z ERROR decode {said}"


def good(**changes):
    before = {
        "router": footprint(),
        "decode-0": footprint(),
        "prefill-0": footprint(memfds=frozenset({1, 2}), named=frozenset({"@diptych-a"})),
    }
    whole_run = Findings(
        tally=tally(),
        all_ready=True,
        running=0,
        kv_usage=dict.fromkeys(VICTIMS, 0.0),
        workers=VICTIMS,
        ended_by_us={"decode-0": [Kind.KILL, Kind.TERM]},
        endings=[("decode-0", "killed by SIGKILL"), ("decode-0", "exited with code 0")],
        pauses=[Pause("decode-0", 1000.0, 1004.0)],
        complaints=[stalled("decode-0", 9)],
        before=before,
        after=dict(before),
        lives=[Life("router", 1, tuple((float(t), 90 + 0.001 * t) for t in range(200)))],
        left_over=[],
        exit_code=0,
    )
    return replace(whole_run, **changes)


def test_a_good_run_has_no_violations_and_can_be_told():
    found = good()
    assert violations(found, Bounds()) == []
    assert "wrong answers" in table(found, Counter(kill=1), Bounds())
    assert all(verdict.met for verdict in report(SoakConfig(), found, Counter(kill=1), Bounds()).verdicts)


def with_after(**what):
    return {"after": {**good().before, "prefill-0": footprint(**what)}}


def growing(name, length_s, begin_mib, mib_per_s):
    return Life(name, 9, tuple((float(t), begin_mib + mib_per_s * t) for t in range(length_s)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tally": Tally()}, "no request was answered"),
        ({"tally": tally(heard(Outcome.HUNG))}, "hung: load"),
        ({"tally": tally(heard(Outcome.FAILED, "500: a fault of this server"))}, "failed: load"),
        ({"tally": tally(heard(Outcome.FAILED, "503: no worker", p0=Part("one", (5,), None)))}, "failed: load"),
        ({"tally": tally(heard(Outcome.FAILED, "UNAVAILABLE: no worker"))}, "1 of 2 requests failed in an allowed way"),
        ({"all_ready": False}, "not every process was ready"),
        ({"running": 1}, "1 requests at the router"),
        ({"kv_usage": {**good().kv_usage, "decode-1": 0.01}}, "decode-1: 1.00% of its KV blocks"),
        ({"kv_usage": {"decode-1": 0.0}}, "prefill-0: not heard of"),
        ({"endings": [*good().endings, ("decode-0", "killed by SIGKILL")]}, "decode-0 killed by SIGKILL, which nobody"),
        ({"endings": [*good().endings, ("router", "exited with code 1")]}, "router exited with code 1, which nobody"),
        ({"endings": good().endings[:1]}, "decode-0: asked for its end, but it did not come so: exited with code 0"),
        ({"complaints": [stalled("decode-0", 15)]}, "log: decode-0"),
        ({"complaints": [stalled("decode-1", 9)]}, "log: decode-1"),
        ({"complaints": ["an ERROR"]}, "log: an ERROR"),
        ({"complaints": ["an ERROR"] * (SHOWN_LINES + 2)}, "log: 2 more lines"),
        (with_after(fds=Counter(socket=13)), "prefill-0: 13 descriptors, before 4"),
        (with_after(memfds=frozenset({1, 2, 3})), "prefill-0: maps 3 shared segments"),
        (with_after(named=frozenset({"@diptych-a", "@diptych-b"})), "prefill-0: 2 abstract sockets"),
        (with_after(shm_files=frozenset({"/dev/shm/x"})), "prefill-0: has /dev/shm/x open"),
        ({"lives": [growing("router", 100, 50, 0.2)]}, "router (pid 9): gained"),
        ({"lives": [growing("decode-1", 90, 100, 2.2)]}, "decode-1 (pid 9): gained"),
        ({"lives": [growing("decode-1", 700, 190, 0.03)]}, "decode-1 (pid 9): gained"),
        ({"left_over": ["process 7"]}, "left over: process 7"),
        ({"exit_code": 1}, "the cluster ended with 1"),
        ({"exit_code": None}, "the cluster ended with None"),
    ],
)
def test_each_thing_that_must_not_be_is_said(changes, said):
    found = violations(good(**changes), Bounds())
    assert any(sentence.startswith(said) for sentence in found), found


def test_a_short_life_and_a_slow_gain_are_no_leak():
    short = growing("router", 60, 50, 0.2)
    meets_sizes = growing("decode-1", 700, 170, 0.04)
    young = growing("decode-1", 200, 190, 0.3)
    slow = growing("router", 3600, 90, 0.005)
    assert violations(good(lives=[short, meets_sizes, young, slow]), Bounds()) == []


def test_a_rare_allowed_failure_is_counted_and_no_violation():
    many = tally(*[whole()] * 200, heard(Outcome.FAILED, "UNAVAILABLE: no worker"), heard(Outcome.LEFT, usage=None))
    assert violations(good(tally=many), Bounds()) == []
    assert len(many.allowed) == 1
    assert many.outcomes[Outcome.LEFT] == 1


def test_who_fails_with_his_router_is_excused_and_who_hears_wrong_of_it_is_not():
    made = tally()
    made.add("load", heard(Outcome.FAILED, "ReadError"), [], excused=True)
    assert violations(good(tally=made), Bounds()) == []
    made.add("load", heard(Outcome.FAILED, "ReadError"), ["tokens"], excused=True)
    assert violations(good(tally=made), Bounds()) == ["wrong: load: tokens"]
    assert len(made.excused) == 2


def test_all_that_can_befall_a_redis_and_a_router_is_in_a_plan_one_after_the_other():
    plan = shared_disturbances(1, "redis", "router-2", 600.0, 7.0)
    befell = {(d.victims[0], d.kind) for d in plan}
    assert befell == {("redis", k) for k in Kind if k is not Kind.TERM} | {("router-2", k) for k in OF_WORKERS}
    ends = [d.at_s + d.length_s for d in plan]
    assert all(end <= after.at_s for end, after in zip(ends, plan[1:], strict=False))


def test_the_truth_and_its_beginning_are_right():
    assert differences(whole(), TRUTH) == []
    assert differences(heard(Outcome.LEFT, usage=None, p0=Part("one", (5, 6), None)), TRUTH) == []
    assert differences(heard(Outcome.LEFT, usage=None), TRUTH) == []


@pytest.mark.parametrize(
    "untrue",
    [
        heard(p0=Part("one two", (5, 6, 7), "stop")),
        heard(usage=3, p0=Part("one two", (5, 6, 7), "stop"), p1=Part("three", (8,), "length")),
        heard(p0=Part("one two", (5, 6, 6), "stop"), p1=Part("three", (8,), "length")),
        heard(p0=Part("one  two", (5, 6, 7), "stop"), p1=Part("three", (8,), "length")),
        heard(p0=Part("one two", (5, 6, 7), "length"), p1=Part("three", (8,), "length")),
        heard(p0=Part("one two", (5, 6, 7), "stop"), p1=Part("three", (8,), None)),
        heard(p0=Part("one two", (5, 6, 7), "stop"), p1=Part("three", (8,), "length"), p2=Part("", (), None)),
        heard(Outcome.LEFT, p0=Part("two", (5, 6), None)),
        heard(Outcome.LEFT, p0=Part("one", (6,), None)),
        heard(Outcome.LEFT, p0=Part("one two", (5, 6, 7, 8), None)),
        heard(Outcome.FAILED, "503", p0=Part("one", (5, 5), None)),
    ],
)
def test_what_is_not_the_truth_is_told(untrue):
    assert differences(untrue, TRUTH)


def test_a_question_is_cut_before_a_choice_that_hangs_on_a_rounding():
    thin = questions(1, 96, 1024, 600)[59]  # two tokens arrive together in the race for its 43rd
    (cut,) = firm_questions([thin], MODEL)
    assert cut == replace(thin, max_tokens=42)
    firm = replace(thin, max_tokens=30)
    assert firm_questions([firm], MODEL) == (firm,)


def test_a_seed_gives_one_plan_and_all_kinds_are_in_it():
    def drawn(seed):
        return (
            questions(seed, 96, 1024, 600),
            tuple(islice(requests(seed, 96, 5.0), 500)),
            disturbances(seed, VICTIMS, 1200.0, 7.0),
        )

    asked, sent, disturbed = drawn(1)
    assert (asked, sent, disturbed) == drawn(1)
    assert (asked, sent, disturbed) != drawn(2)
    assert {q.n for q in asked} == {1, 2}
    assert any(q.stop for q in asked)
    assert any(q.seed is None for q in asked)
    assert max(len(q.prompt) for q in asked) > 400
    assert {r.door for r in sent} == set(Door)
    assert any(r.leave_s is not None for r in sent)
    assert any(r.leave_pieces is not None for r in sent)
    assert {(d.kind, d.victims[0]) for d in disturbed if d.at_s < 600} == {(k, v) for k in OF_WORKERS for v in VICTIMS}
    spared = {d.kind for d in disturbed if d.at_s > 600 and {"prefill-0", "decode-0"} & {*d.victims}}
    assert spared == {Kind.STOP}
