"""Our own server over gRPC, through `diptych_client`. Does not know loads."""

from __future__ import annotations

import time

from bench.serving.requests import AskFailed, Prompt, Reply, Turn
from contracts.pb.diptych.v1 import inference_pb2 as pb
from diptych_client import AsyncClient, RpcFailed, Tls, Unauthenticated
from diptych_client.options import Options

Heard = tuple[float, pb.GenerateResponse]
"""When a piece of an answer was read, by the monotonic clock, and the piece."""

_ROUTES = {pb.ROUTE_DISAGGREGATED: "disaggregated", pb.ROUTE_COLOCATED: "colocated"}


class GrpcTarget:
    """A router at `address` (host:port). Answers are greedy and have exactly the tokens that are asked for."""

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        api_key: str | None = None,
        tls: Tls | None = None,
        route: pb.Route.ValueType = pb.ROUTE_UNSPECIFIED,
    ) -> None:
        """Made in a running event loop."""
        self._client = AsyncClient(address, api_key=api_key, tls=tls)
        self._model = model
        self._route = route

    async def ask(self, prompt: Prompt, output_len: int) -> Reply:
        """See Target."""
        heard: list[Heard] = []
        sent_s = time.monotonic()
        await self.hear(prompt, output_len, heard)
        tokens = tuple(token for _, piece in heard for token in piece.token_ids)
        times = tuple(at_s for at_s, piece in heard if piece.token_ids)
        text = "".join(piece.text for _, piece in heard)
        prompt_tokens = next((piece.usage.prompt_tokens for _, piece in heard if piece.HasField("usage")), 0)
        route = _ROUTES.get(heard[-1][1].route, "") if heard else ""
        return Reply(sent_s, times, len(tokens), prompt_tokens, text, tokens, route)

    async def hear(self, prompt: Prompt, output_len: int, heard: list[Heard]) -> None:
        """The same into a list that the caller has while it grows, and keeps when it cancels this. Raises AskFailed."""
        if isinstance(prompt, str):
            wire: str | list[pb.ChatMessage] | list[int] = prompt
        elif prompt and isinstance(prompt[0], Turn):
            turns = [turn for turn in prompt if isinstance(turn, Turn)]
            wire = [pb.ChatMessage(role=turn.role, content=turn.content) for turn in turns]
        else:
            wire = [token for token in prompt if isinstance(token, int)]
        options = Options(model=self._model, max_tokens=output_len, ignore_eos=True, temperature=0.0, route=self._route)
        try:
            async for piece in self._client.generate(wire, **options):
                heard.append((time.monotonic(), piece))
        except RpcFailed as error:
            raise AskFailed(_said(error)) from error

    async def models(self) -> list[str]:
        """The names of what is served. Raises AskFailed."""
        try:
            return [model.name for model in await self._client.models()]
        except RpcFailed as error:
            raise AskFailed(_said(error)) from error

    async def close(self) -> None:
        """See Target."""
        await self._client.close()


def _said(error: RpcFailed) -> str:
    if isinstance(error, Unauthenticated):
        return f"{error} (--api-key-file FILE)"
    return f"{error} (--tls-ca FILE.pem)" if "`tls=" in str(error) else str(error)  # the client's advice, as a flag
