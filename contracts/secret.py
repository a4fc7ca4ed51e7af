"""What all processes of one cluster know and nobody else: the root of every proof that they give each other.

    secret ──HMAC(purpose)──▶ a key per purpose ──HMAC(parts, each with its length)──▶ proof

HMAC-SHA256 (RFC 2104, 6234), one key per purpose, so that what proves something in one place proves nothing in another. The
secret and its keys are in no message to another worker, and in no repr or log line. Does not know where it is kept, nor what
is proven.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

MIN_BYTES: Final = 16
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
_ROOT: Final = b"diptych cluster secret v1\0"


class ProofKey:
    """Makes and checks proofs for one purpose."""

    __slots__ = ("_hmac",)

    def __init__(self, key: bytes) -> None:
        self._hmac = hmac.new(key, digestmod=hashlib.sha256)

    def proof(self, *parts: bytes) -> bytes:
        """32 bytes that only who knows the secret can make of these parts, in this order and with these borders."""
        made = self._hmac.copy()
        for part in parts:
            made.update(len(part).to_bytes(8, "little"))
            made.update(part)
        return made.digest()

    def proves(self, proof: bytes, *parts: bytes) -> bool:
        """Whether `proof` was made of these parts. Takes as long for a wrong one as for a right one."""
        return hmac.compare_digest(self.proof(*parts), proof)

    def __repr__(self) -> str:
        """Without the key."""
        return "ProofKey(***)"


class ClusterSecret:
    """The secret of one cluster."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError for fewer than MIN_BYTES bytes."""
        if len(secret) < MIN_BYTES:
            raise ValueError(f"got {len(secret)} bytes, must have at least {MIN_BYTES}")
        self._secret = secret

    def key(self, purpose: str) -> ProofKey:
        """The key for one purpose."""
        return ProofKey(self.key_bytes(purpose))

    def key_bytes(self, purpose: str) -> bytes:
        """What that ProofKey is made of: for a process of this one's own that must prove the same."""
        return hmac.digest(self._secret, _ROOT + purpose.encode(), "sha256")

    def __repr__(self) -> str:
        """Without the secret."""
        return "ClusterSecret(***)"


def new_nonce() -> bytes:
    """Unlike any other, and not to be guessed."""
    return secrets.token_bytes(NONCE_BYTES)
