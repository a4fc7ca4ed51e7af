"""The flags that say how conversations are read and answered, alike in `router` and `up`. Does not know templates."""

from __future__ import annotations

from typing import TypedDict

import click

from cli.options import option
from router.config import ChatConfig
from router.toolcalls.dialects import DIALECTS


class ChatFlags(TypedDict):
    """What click hands over, checked by the options below."""

    tool_call_parser: str
    trust_request_chat_template: bool


_SECTION = "Conversations"

CHAT_OPTIONS = (
    option(
        "--tool-call-parser",
        section=_SECTION,
        type=click.Choice(["auto", *DIALECTS, "none"]),
        default=ChatConfig().tool_call_parser,
        help="How the model writes calls of tools; auto takes what its chat template tells, none refuses tools.",
    ),
    option(
        "--trust-request-chat-template",
        section=_SECTION,
        is_flag=True,
        help="Take chat_template from requests: any client may then give programs, which run sandboxed and in bounds.",
    ),
)


def chat_config(given: ChatFlags) -> ChatConfig:
    """What these flags say."""
    return ChatConfig(given["tool_call_parser"], given["trust_request_chat_template"])
