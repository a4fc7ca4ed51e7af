"""Tokens without an answer: POST /tokenize and /detokenize, in vLLM's forms.

A prompt or conversation becomes the tokens that an answer to it would be made from, template and special tokens included.
Does not know workers.
"""

from __future__ import annotations

from starlette.responses import Response

from router.http.body import FrontLimits, read_body
from router.http.incoming import Incoming
from router.openai.chat import ChatRules
from router.openai.json import Json, render
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
        token_ids = await self._service.prompter.token_ids(self._rules.prompt(body))
        tokenizer = self._service.card.tokenizer
        answer: dict[str, Json] = {
            "count": len(token_ids),
            "max_model_len": self._service.max_model_len(),
            "tokens": token_ids,
            "token_strs": list(map(spelled, await tokenizer.spell(token_ids))) if body.return_token_strs else None,
        }
        return Response(render(answer), media_type="application/json")

    async def detokenize(self, request: Incoming, request_id: str) -> Response:
        """prompt: the text of all tokens, special ones as they are written."""
        del request_id
        body = parse(DetokenizeBody, await read_body(request, self._limits))
        self._service.check_model(body.model or "")
        card = self._service.card
        card.check_ids(body.tokens, "tokens.{}")
        text = await card.tokenizer.decode_whole(body.tokens, skip_special_tokens=False)
        return Response(render({"prompt": text}), media_type="application/json")
