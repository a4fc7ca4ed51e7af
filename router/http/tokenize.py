"""Tokens without an answer: POST /tokenize and /detokenize, in vLLM's forms.

A prompt or conversation becomes the tokens that an answer to it would be made from, template and special tokens included. Each is
a request under its caller's limits. Does not know workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response

from router.admission.deadlines import wanted_timeout_s
from router.admission.gate import Entry
from router.admission.rate_limits import length
from router.http.body import FrontLimits, read_body
from router.http.incoming import Incoming
from router.key_door import caller_of
from router.openai.chat import ChatRules
from router.openai.json import Json, joined, render
from router.openai.logprobs import spelled
from router.openai.schema import DetokenizeBody, TokenizeBody, parse
from router.service import Inference


class TokenizeFront:
    """Two endpoints of `router.http.front`."""

    def __init__(self, service: Inference, rules: ChatRules, limits: FrontLimits) -> None:
        self._service = service
        self._rules = rules
        self._limits = limits

    async def tokenize(self, request: Incoming, request_id: str) -> Response:
        """count, max_model_len, tokens, and token_strs when asked for."""
        del request_id
        body = parse(TokenizeBody, await read_body(request, self._limits))
        self._service.check_model(body.model or "")
        prompt, tokenizer = self._rules.prompt(body), self._service.card.tokenizer
        async with self._reading(request, length(prompt)) as entry:
            token_ids = await self._service.prompter.token_ids(prompt)
            entry.took(len(token_ids), 0)
            spelt = joined(await tokenizer.spell(token_ids, _strings)) if body.return_token_strs else None
        answer: dict[str, Json] = {
            "count": len(token_ids),
            "max_model_len": self._service.max_model_len(),
            "tokens": token_ids,
            "token_strs": spelt,
        }
        return _answer(answer, entry)

    async def detokenize(self, request: Incoming, request_id: str) -> Response:
        """prompt: the text of all tokens, special ones as they are written."""
        del request_id
        body = parse(DetokenizeBody, await read_body(request, self._limits))
        self._service.check_model(body.model or "")
        card = self._service.card
        card.check_ids(body.tokens, "tokens.{}")
        async with self._reading(request, len(body.tokens)) as entry:
            text = await card.tokenizer.decode_whole(body.tokens, skip_special_tokens=False)
            entry.took(len(body.tokens), 0)
        return _answer({"prompt": text}, entry)

    def _reading(self, request: Incoming, num_tokens: float) -> AbstractAsyncContextManager[Entry]:
        timeout_s = min(self._limits.request_timeout_s, wanted_timeout_s(request.headers) or math.inf)
        return self._service.reading(caller_of(request.scope), max(1.0, num_tokens), timeout_s)


def _strings(tokens: Sequence[bytes]) -> bytes:
    """A list of them in JSON."""
    return render([spelled(token) for token in tokens])


def _answer(said: dict[str, Json], entry: Entry) -> Response:
    headers = {} if entry.quota is None else dict(entry.quota.words())
    return Response(render(said), headers=headers, media_type="application/json")
