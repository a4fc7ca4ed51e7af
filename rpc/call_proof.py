"""What a call between two processes of one cluster carries to prove that its caller knows the cluster's secret.

    caller ── Challenge(nonce) ──▶ server        ◀── session, challenge, proof of the server ──
    caller ── any call, metadata: session, number, proof(challenge, session, number, method, body) ──▶ server

The body is the request's bytes as they cross the wire; a call that streams its requests proves its method only, and its
stream is as safe as its connection (TLS). A challenge belongs to one session and one life of the server, and each number of a
session counts once: what was heard on the wire is worth nothing a second time, here, at another life, or at another method.
No clock is read. Does not know gRPC's channels or servers, nor which calls need a proof.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from contracts.errors import NotOfThisCluster
from contracts.secret import NONCE_BYTES, PROOF_BYTES, ClusterSecret, ProofKey, new_nonce
from rpc.replay import Replays

METADATA_KEY: Final = "diptych-call-bin"
_TOKEN: Final = struct.Struct(f"<QQ{PROOF_BYTES}s")  # session, number, proof
_NUMBERS: Final = struct.Struct("<QQ")
_SESSION: Final = struct.Struct("<Q")
Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Challenge:
    """What the proofs of one session are bound to, and the server's own proof that it knows the secret."""

    session: int
    challenge: bytes
    proof: bytes


class CallProver:
    """The server's half, for one life of one process."""

    def __init__(self, secret: ClusterSecret, replays: Replays | None = None) -> None:
        self._answers, self._calls = secret.key("challenge"), secret.key("call")
        self._life = ProofKey(new_nonce() + new_nonce())
        self._replays = replays if replays is not None else Replays()
        self._num_sessions = 0

    def begin(self, nonce: bytes) -> Challenge:
        """A new session for whoever asks: it costs nothing until a call proves itself. NotOfThisCluster without a nonce."""
        if len(nonce) != NONCE_BYTES:
            raise NotOfThisCluster(f"a nonce has {NONCE_BYTES} bytes, this one {len(nonce)}")
        self._num_sessions += 1
        number = _SESSION.pack(self._num_sessions)
        challenge = self._challenge(number)
        return Challenge(self._num_sessions, challenge, self._answers.proof(nonce, number, challenge))

    def check(self, metadata: Metadata | None, method: str, body: bytes) -> None:
        """Count this call, once. Raises NotOfThisCluster; an honest caller then tries once more, with another challenge."""
        token = next((value for key, value in metadata or () if key == METADATA_KEY), None)
        if token is None:
            raise NotOfThisCluster(
                f"{method}: the caller proves nothing, and this process has a cluster secret: both must be started with the "
                "same --cluster-secret-file"
            )
        if not isinstance(token, bytes) or len(token) != _TOKEN.size:
            raise NotOfThisCluster(f"{method}: what the caller proves itself with cannot be read")
        session, number, proof = _TOKEN.unpack(token)
        parts = _parts(self._challenge(_SESSION.pack(session)), (session, number), method, body)
        if not self._calls.proves(proof, *parts):
            said = "made for something else, for an earlier life of this process, or by a stranger"
            raise NotOfThisCluster(f"{method}: the caller's proof is wrong: {said}")
        if not self._replays.knows(session):
            raise NotOfThisCluster(f"{method}: the caller's session is over")
        if not self._replays.take(session, number):
            raise NotOfThisCluster(f"{method}: this call was heard before")

    def _challenge(self, session: bytes) -> bytes:
        """Of this session in this life; nothing is kept for one that is not used."""
        return self._life.proof(session)[:NONCE_BYTES]


class CallSession:
    """The caller's half of one session."""

    def __init__(self, secret: ClusterSecret, nonce: bytes, challenge: Challenge) -> None:
        """Raises NotOfThisCluster when the server's proof is wrong."""
        number = _SESSION.pack(challenge.session)
        if not secret.key("challenge").proves(challenge.proof, nonce, number, challenge.challenge):
            raise NotOfThisCluster(
                "it has another cluster secret: both must be started with the same --cluster-secret-file"
            )
        self._calls = secret.key("call")
        self._challenge = challenge
        self._number = 0

    def token(self, method: str, body: bytes) -> tuple[str, bytes]:
        """Metadata for the next call; each is good for one."""
        self._number += 1
        numbers = self._challenge.session, self._number
        proof = self._calls.proof(*_parts(self._challenge.challenge, numbers, method, body))
        return METADATA_KEY, _TOKEN.pack(*numbers, proof)


def _parts(challenge: bytes, numbers: tuple[int, int], method: str, body: bytes) -> tuple[bytes, ...]:
    return challenge, _NUMBERS.pack(*numbers), method.encode(), body
