"""The router process: open the doors, wait for a signal, drain, close. Does not know how requests are served."""

from __future__ import annotations

from contracts.clock import MonotonicClock
from observability.log import get_logger
from router.config import RouterConfig, tokenize_in_own_threads
from router.server import RouterServer
from rpc.process import StopSignals, settle_heap

log = get_logger(__name__)


async def serve(config: RouterConfig) -> None:
    """Run a router until SIGTERM or SIGINT; running requests end within config.drain_timeout_s, or at a second signal.

    Raises ConfigError for a model directory that cannot be used and for a busy port.
    """
    tokenize_in_own_threads()
    router = RouterServer(config, MonotonicClock())
    async with StopSignals() as signals:
        try:
            await router.warm_up()
            await router.start()
            settle_heap()
            await signals.wait()
            log.info("draining")
            await signals.bounded(router.drain(), config.drain_timeout_s, "drain")
        finally:
            await router.stop()
            log.info("stopped")
