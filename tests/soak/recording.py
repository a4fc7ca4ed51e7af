"""What was seen of every process of the cluster over a run: its memory over time, and all that must be gone at the end.

Does not know requests or what is too much.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.soak.cluster import Cluster
from tests.soak.judging import Life
from tests.soak.watching import Footprint, Seen, footprint_of


class Recorder:
    """Looks at one cluster's processes when told to."""

    def __init__(self, cluster: Cluster, others: Callable[[], dict[str, int]]) -> None:
        """`others` are processes beside the cluster by name, as of now."""
        self._cluster = cluster
        self._others = others
        self._samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
        self._rss: dict[str, float] = {}
        self.seen = Seen()

    @property
    def rss(self) -> str:
        """The newest resident MiB of each process, in words."""
        return " ".join(f"{name} {mib:.0f}" for name, mib in self._rss.items())

    def sample(self, at_s: float) -> None:
        """Note every process as it is at `at_s`."""
        for name, (pid, footprint) in self._footprints().items():
            self.seen.note(pid, footprint)
            self._rss[name] = footprint.rss_mib
            self._samples.setdefault((name, pid), []).append((at_s, footprint.private_mib))

    def footprints(self) -> dict[str, Footprint]:
        """Of every process now, by name."""
        return {name: footprint for name, (_, footprint) in self._footprints().items()}

    def lives(self) -> list[Life]:
        """Of every process so far, the longest first."""
        lives = [Life(name, pid, tuple(samples)) for (name, pid), samples in self._samples.items()]
        return sorted(lives, key=lambda life: -life.length_s)

    def write(self, path: Path) -> None:
        """All samples of memory as CSV."""
        rows = [f"{life.name},{life.pid},{at:.1f},{mib:.2f}\n" for life in self.lives() for at, mib in life.samples]
        path.write_text("process,pid,second,private_mib\n" + "".join(rows))

    def _footprints(self) -> dict[str, tuple[int, Footprint]]:
        pids = {"up": self._cluster.pid, **{p.name: p.pid for p in self._cluster.look().processes if p.pid is not None}}
        pids |= self._others()
        found = {name: (pid, footprint_of(pid)) for name, pid in pids.items()}
        return {name: (pid, footprint) for name, (pid, footprint) in found.items() if footprint is not None}
