"""A SentencePiece BPE vocabulary (Llama 2, Mistral) as a `tokenizers` BPE with byte fallback.

SentencePiece merges, among all neighbours that join to a token, the pair whose token has the best score, leftmost first.
`tokenizers` wants that as a ranked list of merges: every split of every token into two tokens, best score first.
Does not know GGUF.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

SPACE = "\u2581"


def spm_tokenizer(
    tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool], unk: str | None, space_prefix: bool
) -> Tokenizer:
    """`mergeable` says which tokens text may be made of; `space_prefix` whether a text begins as if after a space."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = ranked_merges(vocab, scores, mergeable)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", SPACE)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def ranked_merges(vocab: dict[str, int], scores: Sequence[float], mergeable: Sequence[bool]) -> list[tuple[str, str]]:
    """All (left, right) that join to a mergeable token of `vocab`, best score of the joined token first."""
    parts = {token for token, index in vocab.items() if mergeable[index]}
    found: list[tuple[float, int, str, str]] = []
    for token in parts:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in parts and right in parts:
                found.append((-scores[vocab[token]], vocab[token], left, right))
    found.sort()
    return [(left, right) for _, _, left, right in found]
