"""The choice of the way: its reasons, its invariants, and what exploring may cost."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError
from router.choosing.decision import Exploration, LocalCost, Options, RemoteCost, decide
from router.choosing.route import Decision, Reason, Route
from router.config import DisaggregationConfig, DisaggregationMode

AUTO = DisaggregationConfig()
REMOTE_CHEAPER = Options(RemoteCost(0.0, 1.0, 0.1, 0.0), LocalCost(0.0, 1.0, 0.5), 100)
LOCAL_CHEAPER = Options(RemoteCost(0.5, 1.0, 0.1, 0.0), LocalCost(0.0, 1.0, 0.5), 100)


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        (AUTO, REMOTE_CHEAPER, (Route.DISAGGREGATED, Reason.CHEAPER)),
        (AUTO, LOCAL_CHEAPER, (Route.COLOCATED, Reason.CHEAPER)),
        (DisaggregationConfig(DisaggregationMode.ALWAYS), LOCAL_CHEAPER, (Route.DISAGGREGATED, Reason.ALWAYS)),
        (DisaggregationConfig(DisaggregationMode.NEVER), REMOTE_CHEAPER, (Route.COLOCATED, Reason.NEVER)),
        (DisaggregationConfig(above_tokens=99), LOCAL_CHEAPER, (Route.DISAGGREGATED, Reason.ABOVE)),
        (DisaggregationConfig(above_tokens=100), REMOTE_CHEAPER, (Route.COLOCATED, Reason.BELOW)),
    ],
)
def test_reasons(config: DisaggregationConfig, options: Options, expected: tuple[Route, Reason]) -> None:
    decision = decide(config, options)
    assert (decision.path, decision.reason) == expected
    assert decision.predicted_remote_s == options.remote.total_s
    assert decision.predicted_local_s == options.local.total_s


def test_exploring_goes_the_dearer_way_and_says_so() -> None:
    assert decide(AUTO, REMOTE_CHEAPER, explore=True).path is Route.COLOCATED
    assert decide(AUTO, LOCAL_CHEAPER, explore=True).path is Route.DISAGGREGATED
    assert decide(AUTO, LOCAL_CHEAPER, explore=True).reason is Reason.EXPLORE
    assert decide(replace(AUTO, above_tokens=5), LOCAL_CHEAPER, explore=True).reason is Reason.ABOVE


def test_regret_is_what_the_other_way_was_predicted_to_save() -> None:
    decision = Decision(Route.DISAGGREGATED, Reason.CHEAPER, 1.0, 1.5)
    assert decision.regret_s is None
    assert replace(decision, measured_s=1.2).regret_s == 0.0
    assert replace(decision, measured_s=1.75).regret_s == 0.25
    assert replace(decision, path=Route.COLOCATED, measured_s=1.75).regret_s == 0.75
    assert replace(decision, predicted_local_s=None, measured_s=1.75).regret_s is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stall_weight": -1.0}, "disaggregation.stall_weight: got -1.0, must be at least 0 and finite"),
        ({"stall_weight": math.nan}, "disaggregation.stall_weight: got nan"),
        ({"explore_share": 1.5}, "disaggregation.explore_share: got 1.5, must be from 0 to 1"),
        ({"explore_every_s": math.inf}, "disaggregation.explore_every_s: got inf"),
        ({"above_tokens": -1}, "disaggregation.above_tokens: got -1, must be at least 0"),
        ({"above_tokens": 1, "mode": DisaggregationMode.NEVER}, "got 1 with mode never; only auto asks"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(change: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        DisaggregationConfig(**change)


SECONDS = st.floats(0, 1e4)


@given(st.builds(RemoteCost, *[SECONDS] * 6), st.builds(LocalCost, *[SECONDS] * 4), SECONDS)
def test_more_load_on_a_worker_never_moves_a_request_there(remote: RemoteCost, local: LocalCost, more_s: float) -> None:
    before = Options(remote, local, 1).cheaper
    fuller = Options(replace(remote, queue_s=remote.queue_s + more_s), local, 1)
    if before is Route.COLOCATED:
        assert fuller.cheaper is Route.COLOCATED
    busier = replace(remote, busy_s=remote.busy_s + more_s)  # decode's queue is in the way of both
    loaded = Options(busier, replace(local, queue_s=local.queue_s + more_s), 1)
    if before is Route.DISAGGREGATED and local.total_s - remote.total_s > 1e-6 * (local.total_s + more_s):
        assert loaded.cheaper is Route.DISAGGREGATED


@given(
    num_tokens=st.integers(1, 50_000),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    prices=st.tuples(*[st.floats(0, 1e-2)] * 4),
    fixed=st.tuples(*[SECONDS] * 4),
)
def test_more_cached_at_decode_never_moves_a_request_to_both_pools(num_tokens, shares, prices, fixed) -> None:
    """Also where moving a token costs more than computing it, so that what is cached saves the remote way more."""
    compute, attend, stall, move = prices

    def options(share: float) -> Options:
        cached = int(share * num_tokens)

        def local(had: int) -> tuple[float, float]:
            prefill_s = compute * (num_tokens - had) + attend * 1e-4 * (num_tokens**2 - had**2)
            return prefill_s, stall * 100 * prefill_s

        prefill_s, stall_s = local(cached)
        remote = RemoteCost(
            fixed[0], fixed[1], move * (num_tokens - cached), fixed[2], busy_s=0.0, saved_s=move * cached
        )
        return Options(remote, LocalCost(fixed[3], prefill_s, stall_s, sum(local(0)) - prefill_s - stall_s), 1)

    fewer, more = (options(share) for share in sorted(shares))
    close = abs(fewer.remote.total_s - fewer.local.total_s) < 1e-9 * (fewer.remote.total_s + fewer.local.total_s + 1)
    if fewer.cheaper is Route.COLOCATED and not close:
        assert more.cheaper is Route.COLOCATED


def test_exploring_costs_no_more_than_its_share_and_comes_when_a_way_is_unknown() -> None:
    rng, now = random.Random(4), 0.0
    exploration = Exploration(budget=0.02, every_s=10.0, now=now)
    total_s = paid_s = 0.0
    explored = []
    for _ in range(2000):
        now += 0.25
        options = Options(RemoteCost(0, rng.uniform(1, 3), 0, 0), LocalCost(0, rng.uniform(0.2, 0.9), 0), 1)
        if exploration.wants(options, now):
            explored.append(now)
            path = Route.DISAGGREGATED
            paid_s += options.remote.total_s - options.local.total_s
        else:
            path = Route.COLOCATED
        total_s += options.local.total_s
        exploration.went(path, now)
    assert 0 < paid_s <= 0.02 * total_s
    assert len(explored) > 5
    assert min(b - a for a, b in itertools.pairwise(explored)) >= 10.0


def test_a_budget_of_nothing_explores_nothing() -> None:
    exploration = Exploration(budget=0.0, every_s=0.0, now=0.0)
    equal = Options(RemoteCost(1, 0, 0, 0), LocalCost(1, 0, 0), 1)
    assert not any(exploration.wants(equal, float(now)) for now in range(100))
