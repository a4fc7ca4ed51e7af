"""The router process: open the doors, wait for a signal, drain, close. Does not know how requests are served."""

from __future__ import annotations

from contracts.clock import MonotonicClock
from observability.log import get_logger
from registry.link import check_credentials
from router.config import RouterConfig, tokenize_in_own_threads
from router.server import RouterServer
from rpc.files import raise_file_limit
from rpc.process import StopSignals, settle_heap

log = get_logger(__name__)
_OTHER_FILES = 512  # workers, Redis, templates, logs


async def serve(config: RouterConfig) -> None:
    """Run a router until SIGTERM or SIGINT; running requests end within config.drain_timeout_s, or at a second signal.

    Raises ConfigError for a model directory that cannot be used, for a busy port and for a Redis that refuses our credentials.
    """
    clock = MonotonicClock()
    if config.redis is not None:
        await check_credentials(config.redis, clock)
    tokenize_in_own_threads()
    router = RouterServer(config, clock)
    _warn_of_files(config)
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


def _warn_of_files(config: RouterConfig) -> None:
    """Say so where fewer files may be open than connections are allowed: then the system refuses them, not we."""
    allowed, wanted = raise_file_limit(), config.http.max_connections + config.grpc.max_connections + _OTHER_FILES
    if allowed < wanted:
        log.warning("fewer open files are allowed than connections; raise `ulimit -n`", allowed=allowed, wanted=wanted)
