"""How large everything is: a Llama of 8 billion parameters on a GPU, or so small that the interpreter has done it in a minute."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig
from engine.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's shape, and how much of it is measured."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    block_size: int
    context: int  # positions of each decode row
    batches: tuple[int, ...]  # rows of decode steps
    prompts: tuple[int, ...]  # tokens of prefills
    gemm: int  # rows and columns of the product that gives the peak
    copy_bytes: int  # of the copy that gives the bandwidth
    tries: int

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of one position's KV of one layer, in bfloat16."""
        return 2 * self.kv_heads * self.head_size * 2

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def step_parameters(self) -> int:
        """Weights that one decode step reads."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    def prefill_flop(self, num_tokens: int) -> float:
        """Of a causal prefill whose last token alone gets logits."""
        attention = 2.0 * self.layers * self.heads * self.head_size * num_tokens**2
        return 2.0 * self.layers * self.layer_parameters * num_tokens + attention

    def config(self) -> ModelConfig:
        """The model as the engine describes it."""
        return ModelConfig(
            family="llama",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            rms_norm_eps=1e-5,
            max_positions=8192,
            tie_embeddings=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            windows=(None,) * self.layers,
            rope=RopeConfig("default", 500_000.0, 8192),
            dtype="bfloat16",
            eos_token_ids=(),
        )


LLAMA_8B = Sizes(
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_size=128,
    vocab=128_256,
    block_size=16,
    context=2048,
    batches=(1, 8, 32, 64),
    prompts=(1024, 4096),
    gemm=8192,
    copy_bytes=4 << 30,
    tries=20,
)
DRY = Sizes(
    hidden=64,
    intermediate=96,
    layers=1,
    heads=4,
    kv_heads=2,
    head_size=16,
    vocab=300,
    block_size=4,
    context=40,
    batches=(1, 3),
    prompts=(20,),
    gemm=64,
    copy_bytes=1 << 16,
    tries=1,
)
