"""Every op on a GPU, as `kernels.dispatch` hands them out: Triton, and cuBLAS for the projections. Does not know models."""

from __future__ import annotations

from kernels.implementation import Kernels, labels
from kernels.triton import linear, small
from kernels.triton.cache import TritonKVCache
from kernels.triton.choosing import choose_tokens
from kernels.triton.forward import TritonForward
from kernels.triton.pack import TritonPacking


def triton_kernels(device: str) -> Kernels:
    """On `device`: "cuda", or "cpu" for Triton's interpreter."""
    return Kernels(
        name="triton",
        device=device,
        linear=linear.TorchLinear,
        embedding=linear.TorchEmbedding,
        tied=linear.tied,
        rms_norm=small.rms_norm,
        rotary=small.rotary,
        silu_mul=small.silu_mul,
        kv_cache=TritonKVCache,
        forward=TritonForward,
        sampling=lambda: choose_tokens,
        packing=TritonPacking,
        labels=labels(
            "Triton",
            linear="cuBLAS",
            embedding="torch, in a tied head's weight",
            forward="Triton, rotation with KV write",
            sampling="Triton, filters by torch's sort",
        ),
    )
