"""Two pools or one, for one request: a pure choice over numbers, with its reason.

    asked for by the request ─▶ REQUEST
    no pair of workers, or its hand-offs failed ─▶ NO_PAIR, HANDOFFS_FAILED: colocated
    --disaggregate always, never ─▶ ALWAYS, NEVER
    --disaggregate-above N ─▶ ABOVE when more than N prompt tokens are not cached at decode, else BELOW
    auto ─▶ CHEAPER, or EXPLORE: the dearer way because nobody has gone it for long, if the budget pays for it

What is compared is the delay that the request causes, in seconds, up to where its second token would be computed:

    remote = max(queue_P + overhead_P + prefill_P(S − c_P) + exposed transfer(S − c_D), busy_D) + settle  +  w · B · drag
    local  = queue_D + overhead_D + prefill_D(S − c_D)  +  w · B · stall

with S prompt tokens, of which c_P and c_D are cached, and B streams at the decode worker, each of which waits `stall` longer
for a token, or `drag` where prefill slows it from outside (docs/adr/0022; TaiChi and Dynamo's conditional
disaggregation weigh the same things).
More load on the prefill worker never moves a request there; nor do more tokens cached at decode, because remote is credited
for those with at most what local is. Does not know workers, clocks or how costs are learnt.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.choosing.route import Decision, Reason, Route
from router.config import DisaggregationConfig, DisaggregationMode

MOST = 0.3  # by which share exploring may delay one request
PATIENCE_S = 30.0  # after which it may be more


@dataclass(frozen=True, slots=True)
class RemoteCost:
    """Seconds over both pools. `busy_s` is for how long decode does not take the continuation in, whatever prefill does;
    `drag_s` is what decode's streams lose together, weighted, where the workers share a machine;
    `saved_s` is how much less the transfer is because of what decode has cached.
    """

    queue_s: float
    prefill_s: float
    transfer_s: float
    settle_s: float
    busy_s: float = 0.0
    drag_s: float = 0.0
    saved_s: float = 0.0

    @property
    def total_s(self) -> float:
        """What the request would wait, and make others wait."""
        arrives_s = max(self.queue_s + self.prefill_s + self.transfer_s, self.busy_s)
        return arrives_s + self.settle_s + self.drag_s


@dataclass(frozen=True, slots=True)
class LocalCost:
    """Seconds on the decode worker alone. `stall_s` is what its streams lose together, weighted; `saved_s` is how much less
    prefill and stall are because of what is cached there.
    """

    queue_s: float
    prefill_s: float
    stall_s: float
    saved_s: float = 0.0

    @property
    def total_s(self) -> float:
        """What the request would wait, and make others wait."""
        return self.queue_s + self.prefill_s + self.stall_s


@dataclass(frozen=True, slots=True)
class Options:
    """Both ways of one request; `num_uncached` prompt tokens are not cached at decode."""

    remote: RemoteCost
    local: LocalCost
    num_uncached: int

    @property
    def cheaper(self) -> Route:
        """The way with the smaller cost; equal ones stay on one worker."""
        uncredited_s = max(0.0, self.remote.saved_s - self.local.saved_s)
        remote = self.remote.total_s + uncredited_s < self.local.total_s
        return Route.DISAGGREGATED if remote else Route.COLOCATED

    def cost_s(self, path: Route) -> float:
        """The cost of going that way."""
        return self.remote.total_s if path is Route.DISAGGREGATED else self.local.total_s


def decide(config: DisaggregationConfig, options: Options, *, explore: bool = False) -> Decision:
    """The way of a request that may go both. `explore` asks for the dearer way if it is the model's choice at all."""
    if config.mode is DisaggregationMode.ALWAYS:
        path, reason = Route.DISAGGREGATED, Reason.ALWAYS
    elif config.mode is DisaggregationMode.NEVER:
        path, reason = Route.COLOCATED, Reason.NEVER
    elif config.above_tokens is not None:
        above = options.num_uncached > config.above_tokens
        path = Route.DISAGGREGATED if above else Route.COLOCATED
        reason = Reason.ABOVE if above else Reason.BELOW
    else:
        path = other(options.cheaper) if explore else options.cheaper
        reason = Reason.EXPLORE if explore else Reason.CHEAPER
    return Decision(path, reason, options.remote.total_s, options.local.total_s)


def other(path: Route) -> Route:
    """The way not taken."""
    return Route.COLOCATED if path is Route.DISAGGREGATED else Route.DISAGGREGATED


class Exploration:
    """Lets the dearer way be gone now and then, so that both stay known, at a bounded price.

    Every request of the model's choice earns the share `budget` of its predicted cost; going the dearer way spends the
    predicted difference. So exploring adds at most that share to the delay that is predicted of all requests together. A way
    is due when nobody went it for `every_s`, and then for a request to which it is dearer by at most the share MOST; by more
    the longer nobody went it, so that no belief lasts for ever. What turned out cheaper than the other way was predicted to be
    is gone again at once. A budget of 0 explores nothing.
    """

    def __init__(self, budget: float, every_s: float, now: float) -> None:
        self._budget = budget
        self._every_s = every_s
        self._saved_s = 0.0
        self._gone_at = dict.fromkeys(Route, now)
        self._promising: Route | None = None

    def wants(self, options: Options, now: float) -> bool:
        """Whether this request shall go the dearer way; then it is paid for."""
        cheaper = options.cheaper
        cost_s = options.cost_s(cheaper)
        self._saved_s += self._budget * cost_s
        price_s = max(0.0, options.cost_s(other(cheaper)) - cost_s)
        if self._promising is other(cheaper):
            return True
        since_s = now - self._gone_at[other(cheaper)]
        most_s = MOST * cost_s * max(1.0, since_s / PATIENCE_S)
        if self._budget == 0 or since_s < self._every_s or price_s > min(self._saved_s, most_s):
            return False
        self._saved_s -= price_s
        return True

    def went(self, path: Route, now: float) -> None:
        """A request went this way, for whatever reason."""
        self._gone_at[path] = now
        self._promising = None

    def learnt(self, decision: Decision) -> None:
        """An attempt was measured. Exploring that paid off, against what was predicted, goes on with the next request."""
        measured_s, cheaper_s = decision.measured_s, decision.other_s
        if decision.reason is Reason.EXPLORE and measured_s is not None and cheaper_s is not None:
            self._promising = decision.path if measured_s < cheaper_s else None
