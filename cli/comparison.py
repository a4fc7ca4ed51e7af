"""Starts what `diptych bench compare` compares: clusters as `diptych up` starts them, with each worker on its own cores.

Does not know loads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from bench.compare.run import Start
from bench.compare.systems import System
from bench.progress import Say
from cli.cluster import ClusterFailed, LocalCluster
from cli.clustersecurity import cluster_security
from cli.config import ClusterConfig, RestartPolicy, WorkerOptions
from cli.process import ProcessState, ProcessStatus
from engine.models.store import model_name
from router.config import DisaggregationConfig, DisaggregationMode
from rpc.announce import UNHEARD


class _Listener:
    """Says what the cluster's processes complain of."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def changed(self, status: ProcessStatus) -> None:
        """See ProcessListener; what matters is found out by who waits."""

    def line(self, name: str, text: str) -> None:
        """See ProcessListener. Workers outlive the router, which is no news."""
        if UNHEARD not in text:
            self._say(f"{name} | {text}")


def starter(model_dir: Path, workers: WorkerOptions, mode: DisaggregationMode, say: Say) -> Start:
    """How a system is started on the model in `model_dir`; a worker has as many threads as cores."""

    def start(system: System) -> AbstractAsyncContextManager[str]:
        return _running(cluster_of(system, model_dir, workers, mode), say)

    return start


def cluster_of(system: System, model_dir: Path, workers: WorkerOptions, mode: DisaggregationMode) -> ClusterConfig:
    """The cluster that a system is: each worker on its own cores, with a thread for each."""
    options = replace(
        workers, threads=None, max_num_batched_tokens=system.step_tokens or workers.max_num_batched_tokens
    )
    return ClusterConfig(
        model_dir=model_dir,
        model_name=model_name(model_dir),
        num_prefill=len(system.prefill),
        num_decode=len(system.decode),
        http_port=0,
        grpc_port=0,
        disaggregation=DisaggregationConfig(mode=mode),
        workers=options,
        worker_cores=system.worker_cores,
        drain_timeout_s=2.0,
        restart=RestartPolicy(max_deaths=1),
    )


@asynccontextmanager
async def _running(config: ClusterConfig, say: Say) -> AsyncIterator[str]:
    with cluster_security(config.host, None, protect_metrics=False, tls=False, tls_dir=None) as security:
        async with LocalCluster(replace(config, security=security), _Listener(say)) as cluster:
            await cluster.wait_ready()
            yield cluster.grpc_address
            check_all_lived(cluster.statuses)


def check_all_lived(statuses: Sequence[ProcessStatus]) -> None:
    """Raises ClusterFailed naming what died: the router goes on without it, and other workers do its work unseen."""
    lost = [status.name for status in statuses if status.state is not ProcessState.READY or status.num_restarts]
    if lost:
        raise ClusterFailed(f"{', '.join(lost)} died under the load: what was measured says nothing")
