"""Policies by name: ours, and those that installed packages offer as entry points of the group `diptych.policies`.

A plug-in is imported only when its name is asked for. Ours cannot be replaced: a dashboard that says `least_loaded` means it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from contracts.errors import ConfigError
from router.policies.affinity import SessionAffinity
from router.policies.interface import Policy, PolicyContext
from router.policies.load import LeastLoaded, PowerOfTwo, RoundRobin
from router.policies.prefix import PrefixAware

GROUP = "diptych.policies"
PolicyFactory = Callable[[PolicyContext], Policy]
POLICIES: Mapping[str, PolicyFactory] = {
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
    "round_robin": RoundRobin,
    "session_affinity": SessionAffinity,
}


def policy_names(offered: Iterable[EntryPoint] | None = None) -> tuple[str, ...]:
    """All that `make_policy` takes, in order."""
    return tuple(sorted({*POLICIES, *_plugins(offered)}))


def make_policy(name: str, context: PolicyContext | None = None, offered: Iterable[EntryPoint] | None = None) -> Policy:
    """A new policy of this name; plug-ins are those `offered`, or installed.

    Raises ConfigError with the known names, or with why a plug-in cannot be made.
    """
    context = PolicyContext() if context is None else context
    if name in POLICIES:
        return POLICIES[name](context)
    plugin = _plugins(offered).get(name)
    if plugin is None:
        raise ConfigError(f"policy: got {name!r}, must be one of {', '.join(policy_names(offered))}")
    try:
        factory: PolicyFactory = plugin.load()
        return factory(context)
    except Exception as error:
        raise ConfigError(
            f"policy: {name!r} ({plugin.value}) cannot be made: {type(error).__name__}: {error}"
        ) from error


def _plugins(offered: Iterable[EntryPoint] | None) -> dict[str, EntryPoint]:
    return {plugin.name: plugin for plugin in (entry_points(group=GROUP) if offered is None else offered)}
