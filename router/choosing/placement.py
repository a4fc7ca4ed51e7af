"""What a router chooses its workers with, put together: policies, index, the ear on the workers' block events.

    Placement.chooser ◀── policies ◀── index ◀── watch ◀── block events of every worker

Does not know flags or requests.
"""

from __future__ import annotations

from functools import partial

from contracts.clock import Clock
from contracts.worker import WorkerKind
from observability.policy_metrics import PolicyMetrics
from router.choosing.block_watch import BlockWatch
from router.choosing.choice import Chooser
from router.choosing.prefix_index import PrefixIndex
from router.choosing.prompts import Prompts
from router.config import PolicyConfig
from router.policies import GuardedPolicy, PolicyContext, make_policy
from router.workers.pairs import PairBook
from router.workers.pools import Pools
from router.workers.registry import Registry
from rpc.channel import ChannelConfig, ChannelOpener


class Placement:
    """Owns the index and what fills it; `close` gives the latter back. Made before any worker joins the registry."""

    def __init__(
        self, config: PolicyConfig, metrics: PolicyMetrics, clock: Clock, channels: tuple[ChannelConfig, ChannelOpener]
    ) -> None:
        """Raises ConfigError for a policy that is not known or cannot be made."""
        self.index = PrefixIndex(clock, config.expect_s)
        self.prompts = Prompts(self.index, metrics)
        self.watch = BlockWatch(self.index, clock, *channels)
        names = {WorkerKind.PREFILL: config.prefill, WorkerKind.DECODE: config.decode}
        self._policies = {
            kind: GuardedPolicy(
                name, make_policy(name, PolicyContext(kind, self.index)), partial(metrics.fault, kind.value, name)
            )
            for kind, name in names.items()
        }
        for kind, name in names.items():
            metrics.chosen_by(kind.value, name)
        metrics.watch(self._num_blocks, self._num_followed)

    def chooser(self, pools: Pools, book: PairBook, registry: Registry) -> Chooser:
        """Chooses among these pools' workers, and follows the registry's from now on."""
        registry.subscribe(self.watch.on_change)
        return Chooser(pools, self._policies, book, self.prompts)

    async def close(self) -> None:
        """Follow nobody any more. Idempotent."""
        await self.watch.close()

    def _num_blocks(self, pool: str) -> int:
        return sum(self.index.size(info.ref) for info in self.watch.followed if info.kind.value == pool)

    def _num_followed(self, pool: str) -> int:
        return sum(info.kind.value == pool for info in self.watch.followed)
