"""Several faults at once, at places that nobody chose: what a client gets is right, and nothing is left behind."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.errors import ErrorCode
from router.config import CanaryConfig
from tests.faults.load import clients
from tests.faults.test_fault_matrix import check, lived
from tests.faults.wire import Edge, Fault, Kind
from tests.faults.world import CANARIES, NO_CANARIES, Setup

CANARY = (NO_CANARIES, CANARIES)
HARMLESS = [kind for kind in Kind if kind not in (Kind.LEAVE, Kind.DEADLINE)]
NUM_CROSSINGS = 20  # later occurrences of an edge than this are rare


def faults(kinds: list[Kind]) -> st.SearchStrategy[Fault]:
    return st.builds(
        Fault, st.sampled_from(Edge), st.sampled_from(kinds), st.integers(0, NUM_CROSSINGS), st.integers(0, 2)
    )


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(faults(HARMLESS), min_size=2, max_size=3), st.integers(0, 2), st.sampled_from(CANARY))
def test_a_few_faults_cost_nobody_a_token(plan: list[Fault], seed: int, canaries: CanaryConfig) -> None:
    history = lived(Setup(seed, plan, canaries=canaries), clients(seed))
    for client in history.clients:
        check(client, {"tokens"})


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(faults(list(Kind)), min_size=4, max_size=30), st.integers(0, 4), st.sampled_from(CANARY))
def test_whatever_happens_nothing_is_wrong_or_left(
    plan: list[Fault], failing_writes: int, canaries: CanaryConfig
) -> None:
    """So many that a retry budget may be spent; then the error says that it can be tried again."""
    seed = len(plan)
    history = lived(Setup(seed, plan, failing_writes=failing_writes, canaries=canaries), clients(seed))
    may = {"tokens", "left", ErrorCode.UNAVAILABLE.value, ErrorCode.RESOURCE_EXHAUSTED.value}
    for client in history.clients:
        check(client, may)
