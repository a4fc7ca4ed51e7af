"""What a conversation costs the router: rendering it beside the router, and parting calls from content in a stream.

    one small chat ──▶ rendered in the router's process | in the process that may be killed       wall and CPU, in turns
    an answer of N tokens, one at a time ──▶ ChatFormat | ToolChatFormat (content; a call)        time a token

Does not know workers or sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.progress import Say
from bench.report import Measure, Report, Verdict
from bench.stats import Spread
from contracts.request import FinishReason
from observability.stages import Spent, StageTimes
from router.choosing.route import Route
from router.exchange import Ending, Piece
from router.openai.chat import ToolUse
from router.openai.format import ChatFormat, Format, Frame
from router.openai.toolformat import ToolChatFormat
from router.text.chat_template import ChatTemplate, Conversation, Message
from router.text.model_card import ModelCard, load_model_card
from router.text.template_processes import TemplateProcesses
from router.toolcalls.dialects import DIALECTS

_TURNS = tuple(
    Message(role, "Tell me about the weather in the mountains, please. " * 4)
    for role in ("system", "user", "assistant", "user")
)
_TOOLS = ("get_weather",)
_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"text": "'


@dataclass(frozen=True, slots=True)
class ConversationBenchConfig:
    """How often: renderings and tokens of one round."""

    rounds: int = 5
    renderings: int = 1000
    tokens: int = 20_000


def run_conversation(model_dir: Path, config: ConversationBenchConfig, say: Say) -> Report:
    """Half a minute."""
    card = load_model_card(model_dir, "bench")
    assert card.chat_template is not None, "the model that is measured has a chat template"
    say("conversation: rendering")
    renders = uvloop.run(_render(card.chat_template, config))
    say("conversation: parting calls from content")
    formats = _formats(card, config)
    median = {name: Spread(tuple(runs)).median for name, runs in {**renders, **formats}.items()}
    added = median["beside, wall"] - median["within, wall"]
    parting = median["tools, content"] - median["no tools"]
    return Report(
        name="conversation",
        title="A conversation's cost in the router",
        command="python -m bench conversation",
        method=f"{config.rounds} rounds, in turns: {config.renderings} renderings of four turns of 200 characters one after "
        f"another; answers of {config.tokens} tokens, a piece each, to server-sent events.",
        measures=(
            *(Measure(f"render {name}", "us", tuple(s * 1e6 for s in runs)) for name, runs in renders.items()),
            *(Measure(f"token, {name}", "us", tuple(s * 1e6 for s in runs)) for name, runs in formats.items()),
        ),
        verdicts=(
            Verdict("rendering in a process of its own adds", added * 1e3, "ms", 1.0, at_least=False),
            Verdict("parting content from calls adds to a token", parting * 1e6, "us", 10.0, at_least=False),
        ),
    )


async def _render(template: ChatTemplate, config: ConversationBenchConfig) -> dict[str, list[float]]:
    conversation = Conversation(_TURNS)
    processes = TemplateProcesses()
    runs: dict[str, list[float]] = {name: [] for name in ("within, wall", "beside, wall", "beside, CPU of the router")}
    try:
        await processes.warm_up(template)
        for _ in range(config.rounds):
            begin = time.perf_counter()
            for _ in range(config.renderings):
                template.render(conversation)
            runs["within, wall"].append((time.perf_counter() - begin) / config.renderings)
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(config.renderings):
                await processes.render(template, conversation)
            runs["beside, wall"].append((time.perf_counter() - begin) / config.renderings)
            runs["beside, CPU of the router"].append((time.process_time() - cpu) / config.renderings)
            await asyncio.sleep(0)
    finally:
        await processes.close()
    return runs


def _formats(card: ModelCard, config: ConversationBenchConfig) -> dict[str, list[float]]:
    frame = Frame(response_id="x", created=0, model="bench", fingerprint="fp", tokenizer=card.tokenizer)
    use = ToolUse(lambda: DIALECTS["hermes"].new_parser(_TOOLS), parallel=True)
    words = [" word"] * config.tokens
    kinds: dict[str, tuple[Callable[[], Format], Sequence[str]]] = {
        "no tools": (lambda: ChatFormat(frame), words),
        "tools, content": (lambda: ToolChatFormat(frame, use), words),
        "tools, a call": (lambda: ToolChatFormat(frame, use), [_CALL, *words]),
    }
    runs: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(config.rounds):
        for name, (new_format, texts) in kinds.items():
            runs[name].append(_spoken(new_format(), texts) / config.tokens)
    return runs


def _spoken(form: Format, texts: Sequence[str]) -> float:
    """Seconds that it takes to say all this."""
    pieces = [Piece(text, (7,)) for text in texts]
    end = Piece("", (), ending=Ending(FinishReason.STOP, None, Spent(StageTimes()), None, Route.COLOCATED))
    begin = time.perf_counter()
    for piece in pieces:
        form.chunk(piece)
    form.chunk(end)
    return time.perf_counter() - begin
