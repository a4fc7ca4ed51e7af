"""Any server that speaks OpenAI's API: streamed completions and chat completions, over HTTP.

While an answer streams only bytes and arrival times are kept; they are understood when it has ended, so that measuring costs
little. An event counts when it brings text; how many tokens there were is what the server says in `usage`, or the number of
events where it does not. Does not know loads.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from bench.serving.requests import MOST_TOKENS, AskFailed, Prompt, Reply, Turn
from contracts.errors import ConfigError
from rpc.tls_context import what_is_amiss

_ERROR_CHARS = 300
_CONNECT_S = 30.0
_LIST_S = 30.0  # for a list of models
_MOST_BYTES = 128 * 2**20  # of one answer


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        """What this event adds to the answer."""
        delta = self.delta or _Delta()
        return self.text or delta.content or delta.reasoning_content or delta.reasoning or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class OpenAIConfig:
    """Where and what. `base_url` is the server's, without /v1; `extra_json` are more fields of the body, a JSON object."""

    base_url: str
    model: str
    chat: bool = False
    api_key: str = field(default="", repr=False)
    ca_file: str = ""
    ignore_eos: bool = True
    extra_json: bytes = b"{}"

    def __post_init__(self) -> None:
        try:
            msgspec.json.decode(self.extra_json, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"--extra-body: {_shown(self.extra_json)!r} must be a JSON object: {error}") from error


class OpenAITarget:
    """One server; owns its connections."""

    def __init__(self, config: OpenAIConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` None is the network. Raises ConfigError for an address that is none, and for a file without certificates."""
        self._config = config
        self._path = "/v1/chat/completions" if config.chat else "/v1/completions"
        self._extra = msgspec.json.decode(config.extra_json, type=dict[str, msgspec.Raw])
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if config.api_key:
            headers["authorization"] = f"Bearer {config.api_key}"
        try:
            self._client = httpx.AsyncClient(
                base_url=config.base_url,
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                transport=transport,
                verify=ssl.create_default_context(cafile=config.ca_file or None),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"--base-url: {config.base_url!r}: {error}") from error
        except ssl.SSLError as error:
            raise ConfigError(f"--tls-ca: {config.ca_file}: {error}") from error

    async def ask(self, prompt: Prompt, output_len: int) -> Reply:
        """See Target."""
        content = self._body(prompt, output_len)
        chunks: list[tuple[float, bytes]] = []
        num_bytes = 0
        sent_s = time.monotonic()
        try:
            async with self._client.stream("POST", self._path, content=content) as response:
                async for chunk in response.aiter_raw():
                    chunks.append((time.monotonic(), chunk))
                    num_bytes += len(chunk)
                    if num_bytes > _MOST_BYTES:
                        raise AskFailed(f"the answer is longer than {_MOST_BYTES // 2**20} MiB")
        except httpx.HTTPError as error:
            amiss = what_is_amiss(self._config.base_url, error)
            where = f"{self._config.base_url}: " if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else ""
            raise AskFailed(where + f"{type(error).__name__}: {error}".rstrip(": ") + amiss) from error
        if response.status_code != httpx.codes.OK:
            said = b"".join(chunk for _, chunk in chunks)
            advice = self._advice(response.status_code, said, prompt)
            raise AskFailed(f"HTTP {response.status_code}: {_shown(said)}{advice}")
        return read_stream(sent_s, chunks)

    async def models(self) -> list[str]:
        """The names of what is served. Raises AskFailed."""
        try:
            async with asyncio.timeout(_LIST_S):
                response = await self._client.get("/v1/models")
            if response.status_code != httpx.codes.OK:
                advice = self._advice(response.status_code, response.content, "")
                said = f"HTTP {response.status_code}: {_shown(response.content)}{advice}"
                raise AskFailed(f"{self._config.base_url}/v1/models: {said}")
            listed = msgspec.json.decode(response.content, type=_Models)
        except TimeoutError as error:
            raise AskFailed(f"{self._config.base_url}/v1/models: no answer within {_LIST_S:g} s") from error
        except (httpx.HTTPError, msgspec.DecodeError, RecursionError) as error:
            amiss = what_is_amiss(self._config.base_url, error)
            raise AskFailed(f"{self._config.base_url}/v1/models: {error}{amiss}") from error
        return [model.id for model in listed.data]

    def _advice(self, status: int, said: bytes, prompt: Prompt) -> str:
        """The flag that a refusal asks for, as words that follow it; "" where none would help."""
        if status == httpx.codes.UNAUTHORIZED:
            return " (--api-key-file FILE)"
        if self._config.ignore_eos and b"ignore_eos" in said:
            return " (--no-ignore-eos)"
        if prompt and isinstance(prompt[0], int) and b"prompt" in said:
            return " (token ids were sent; --form text sends words)"
        return ""

    async def close(self) -> None:
        """See Target."""
        await self._client.aclose()

    def _body(self, prompt: Prompt, output_len: int) -> bytes:
        body: dict[str, object] = {
            "model": self._config.model,
            "max_tokens": output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.ignore_eos:
            body["ignore_eos"] = True
        if self._config.chat:
            body["messages"] = _messages(prompt)
        elif not isinstance(prompt, str) and prompt and isinstance(prompt[0], Turn):
            raise AskFailed("this is a conversation: it needs the chat endpoint")
        else:
            body["prompt"] = prompt
        return msgspec.json.encode({**body, **self._extra})


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    turns = [turn for turn in prompt if isinstance(turn, Turn)]
    if len(turns) != len(prompt):
        raise AskFailed("token ids cannot be sent to a chat endpoint")
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def read_stream(sent_s: float, chunks: Sequence[tuple[float, bytes]]) -> Reply:
    """The reply that a stream of server-sent events is; an event came when its last byte did. Raises AskFailed."""
    worded: list[float] = []
    any_choice: list[float] = []
    texts: list[str] = []
    usage = _Usage()
    done = any_event = finished = False
    for at_s, line in _lines(chunks):
        if not line.startswith(b"data:"):
            continue
        any_event = True
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        event = _decode(data)
        usage = event.usage or usage
        if event.choices:
            any_choice.append(at_s)
            finished = finished or event.choices[0].finish_reason is not None
            if event.choices[0].words:
                worded.append(at_s)
                texts.append(event.choices[0].words)
    if not any_event:
        raise AskFailed(f"not a stream of events: {_shown(b''.join(chunk for _, chunk in chunks[:4]))}")
    if not (done or finished):  # some servers end with the reason, and never say [DONE]
        raise AskFailed("the stream broke off before [DONE]")
    counts = (usage.prompt_tokens, usage.completion_tokens)
    if not 0 <= min(counts) <= max(counts) <= MOST_TOKENS:
        raise AskFailed(
            f"the server counts {usage.prompt_tokens} tokens of prompt and {usage.completion_tokens} of answer"
        )
    arrivals = tuple(worded or any_choice)  # tokens without text, such as special ones, are tokens as well
    return Reply(sent_s, arrivals, usage.completion_tokens or len(arrivals), usage.prompt_tokens, "".join(texts))


def _lines(chunks: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    lines: list[tuple[float, bytes]] = []
    begun: list[bytes] = []  # pieces of a line whose end has not come
    for at_s, chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        for other in others:
            lines.append((at_s, b"".join(begun).rstrip(b"\r")))
            begun = [other]
    rest = b"".join(begun)
    return [*lines, (chunks[-1][0], rest)] if rest.strip() == b"data: [DONE]" else lines  # half a line is none


def _decode(data: bytes) -> _Event:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AskFailed(f"not an event of a completion: {error}: {_shown(data)}") from error
    if bytes(event.error) not in {b"", b"null"}:
        raise AskFailed(f"the stream ended in an error: {_shown(bytes(event.error))}")
    return event


def _shown(said: bytes) -> str:
    words = " ".join(said[:_ERROR_CHARS].decode("utf-8", "replace").split())
    return "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in words
    )  # a terminal may obey others
