"""The pieces of a stream joined into answers. Does not know where the pieces come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import types_pb2


@dataclass(slots=True)
class Answer:
    """One answer as far as its pieces came. `last` is the piece that ended it, with stages, route and hand-off; None: not yet.

    `usage` is that of all answers of the request, on the answer whose piece brought it.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    usage: pb.Usage | None = None
    last: pb.GenerateResponse | None = None
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far. Pieces are put together when somebody reads it, not each time that one comes."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def finish_reason(self) -> str:
        """ "stop", "length", …; "" while it has not ended."""
        if self.last is None:
            return ""
        return types_pb2.FinishReason.Name(self.last.finish_reason).removeprefix("FINISH_REASON_").lower()

    def add(self, piece: pb.GenerateResponse) -> None:
        """Take the next piece of this answer."""
        self._texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        if piece.HasField("usage"):
            self.usage = piece.usage
        if piece.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
            self.last = piece


def join(pieces: Iterable[pb.GenerateResponse]) -> list[Answer]:
    """The answers that these pieces make, in the order of their index."""
    answers: dict[int, Answer] = {}
    for piece in pieces:
        answers.setdefault(piece.index, Answer(piece.index)).add(piece)
    return [answers[index] for index in sorted(answers)]
