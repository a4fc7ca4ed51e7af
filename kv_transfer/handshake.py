"""How the two ends of a connector's session prove to each other that both know the cluster's secret, before any byte moves.

    target ── nonce ──▶ source        source ── nonce, proof ──▶ target        target ── proof ──▶ source

A proof is over both nonces and the side that gives it, so it is good for one session, in one direction. Said once per
connection: windows keep their own keys, per grant, and writes cost nothing more. Does not know sockets.
"""

from __future__ import annotations

from typing import Final

from contracts.secret import NONCE_BYTES, PROOF_BYTES, ClusterSecret, ProofKey, new_nonce

ANSWER_BYTES: Final = NONCE_BYTES + PROOF_BYTES  # of the source
_SOURCE, _TARGET = b"source", b"target"


class TargetHandshake:
    """The target's half of one session."""

    def __init__(self, key: ProofKey) -> None:
        self._key = key
        self.nonce = new_nonce()

    def welcome(self, answer: bytes) -> bytes | None:
        """What proves this side to the source, if its answer proves the source; else None."""
        nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not self._key.proves(proof, _SOURCE, self.nonce, nonce):
            return None
        return self._key.proof(_TARGET, self.nonce, nonce)


class SourceHandshake:
    """The source's half of one session with the target that sent `nonce`."""

    def __init__(self, key: ProofKey, nonce: bytes) -> None:
        self._key = key
        self._nonces = nonce, new_nonce()

    @property
    def answer(self) -> bytes:
        """What to send."""
        return self._nonces[1] + self._key.proof(_SOURCE, *self._nonces)

    def accepts(self, welcome: bytes) -> bool:
        """Whether the target has proven itself."""
        return self._key.proves(welcome, _TARGET, *self._nonces)


def session_key(secret: ClusterSecret | None, kind: str) -> ProofKey | None:
    """For the sessions of connectors of this kind; None where nothing is proven."""
    return None if secret is None else secret.key(_purpose(kind))


def session_key_bytes(secret: ClusterSecret | None, kind: str) -> bytes | None:
    """The same as bytes: for a process of this one's own, in which the sessions are."""
    return None if secret is None else secret.key_bytes(_purpose(kind))


def _purpose(kind: str) -> str:
    return f"kv session {kind}"
