"""The flags that say how workers are chosen, alike in `router` and `up`. Does not know what policies do."""

from __future__ import annotations

from typing import TypedDict

import click

from cli.options import option
from router.config import PolicyConfig
from router.policies import POLICIES, policy_names


class PolicyName(click.ParamType[str]):
    """One of ours, or of an installed plug-in."""

    name = "policy"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Fails with all names there are."""
        if value not in POLICIES and value not in policy_names():
            self.fail(f"{value!r} is not one of {', '.join(policy_names())}", param, ctx)
        return value


class PolicyFlags(TypedDict):
    """What click hands over, checked by the options below."""

    policy: str | None
    prefill_policy: str | None
    decode_policy: str | None


_DEFAULTS = PolicyConfig()
_NAMES = ", ".join(POLICIES)

POLICY_OPTIONS = (
    option(
        "--policy",
        section="Choosing workers",
        type=PolicyName(),
        metavar="NAME",
        help=f"How workers of both pools are chosen: {_NAMES}, or a plug-in of the group diptych.policies.",
    ),
    option(
        "--prefill-policy",
        section="Choosing workers",
        type=PolicyName(),
        metavar="NAME",
        help=f"The same for prefill workers only. [default: {_DEFAULTS.prefill}]",
    ),
    option(
        "--decode-policy",
        section="Choosing workers",
        type=PolicyName(),
        metavar="NAME",
        help=f"The same for decode workers only. [default: {_DEFAULTS.decode}]",
    ),
)


def policy_config(given: PolicyFlags) -> PolicyConfig:
    """What these flags say: a pool's own flag comes before the one for both."""
    both = given["policy"]
    return PolicyConfig(
        prefill=given["prefill_policy"] or both or _DEFAULTS.prefill,
        decode=given["decode_policy"] or both or _DEFAULTS.decode,
    )
