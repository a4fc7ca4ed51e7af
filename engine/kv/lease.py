"""The only way to hold blocks: a lease gives them back exactly once, and says so loudly when asked again.

    held ──release──▶ released ──release, block_ids──▶ LeaseError

A lease does not know what it is for: a running request, KV that is to come from elsewhere, or KV that is to go there.
"""

from __future__ import annotations

from collections.abc import Callable


class LeaseError(RuntimeError):
    """A lease used after its release, or at a place that did not give it out: a programming error."""


class KVLease:
    """Blocks in order of positions. Made by KVCacheManager; whoever has it must release it or pass it on.

    `num_cached_tokens` is how many leading tokens were found in the prefix cache (whole blocks): their KV is there.
    `num_published_blocks` counts the leading blocks that the prefix cache has been told of. `cached_seals` are the seals that
    the cached blocks had when it was made.
    """

    def __init__(
        self, holder: str, block_ids: list[int], num_cached: tuple[int, int], on_release: Callable[[KVLease], None]
    ) -> None:
        self.holder = holder
        self.num_published_blocks, self.num_cached_tokens = num_cached
        self.cached_seals: tuple[bytes | None, ...] = ()
        self._block_ids: list[int] | None = block_ids
        self._on_release = on_release

    @property
    def block_ids(self) -> list[int]:
        """The live list of block ids; it grows while a request runs. Raises LeaseError after release."""
        if self._block_ids is None:
            raise LeaseError(f"the lease of {self.holder} is used after its release")
        return self._block_ids

    @property
    def released(self) -> bool:
        """Whether the blocks have gone back."""
        return self._block_ids is None

    def release(self) -> None:
        """Give the blocks back. Raises LeaseError the second time."""
        if self._block_ids is None:
            raise LeaseError(f"the lease of {self.holder} is released twice")
        self._on_release(self)
        self._block_ids = None
