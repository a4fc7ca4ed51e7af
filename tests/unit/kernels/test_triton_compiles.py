"""Every Triton kernel becomes an sm_90 binary, without a GPU: what the interpreter lets through, the compiler may not.

Shapes are those of a Llama of 8 billion parameters (32 query and 8 KV heads of 128), and a small one whose sizes are odd.
"""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed (the extra gpu)")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.triton import decode, kv_write, pack, prefill, sampling, small  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
CACHE = {"LAYERS": 32, "BLOCK_SIZE": 16, "KV_HEADS": 8}
SHAPE = {**CACHE, "HEAD_SIZE": 128}
ODD = {"LAYERS": 3, "BLOCK_SIZE": 5, "KV_HEADS": 1, "HEAD_SIZE": 40}
DECODE = {"GROUP": 4, "WINDOW": 0, "PART_LEN": 128, "TILE": 32, "ROWS": 16, "PADDED": 128}
PREFILL = {"GROUP": 4, "WINDOW": 0, "TILE": 64, "ROWS": 128, "PADDED": 128}
CASES = {
    "rms_norm": (small.rms_norm_kernel, {"SIZE": 4096, "PADDED": 4096, "HAS_RESIDUAL": False}, "bf16", 8),
    "add_rms_norm": (small.rms_norm_kernel, {"SIZE": 4096, "PADDED": 4096, "HAS_RESIDUAL": True}, "bf16", 8),
    "rms_norm odd": (small.rms_norm_kernel, {"SIZE": 33, "PADDED": 64, "HAS_RESIDUAL": False}, "fp32", 4),
    "rotary": (small.rotary_kernel, {"HALF": 64, "PADDED": 64, "HEADS": 8}, "bf16", 4),
    "silu_mul": (small.silu_mul_kernel, {"SIZE": 14336, "AT_ONCE": 2048}, "bf16", 8),
    "kv_write": (kv_write.kv_write_kernel, {**SHAPE, "PADDED": 128}, "bf16", 1),
    "rotate_write": (
        kv_write.rotate_write_kernel,
        {"HEADS": 32, **CACHE, "HALF": 64, "PADDED": 64, "AT_ONCE": 8},
        "bf16",
        4,
    ),
    "decode_parts": (decode.decode_parts_kernel, {**SHAPE, **DECODE, "DOT": tl.bfloat16}, "bf16", 4),
    "decode_parts of a window": (
        decode.decode_parts_kernel,
        {**ODD, **DECODE, "GROUP": 3, "WINDOW": 100, "PADDED": 64, "DOT": tl.float32},
        "fp32",
        4,
    ),
    "decode_sum": (
        decode.decode_sum_kernel,
        {"HEADS": 32, "HEAD_SIZE": 128, "WINDOW": 0, "PART_LEN": 128, "PADDED": 128, "SOME": 16},
        "bf16",
        4,
    ),
    "prefill": (prefill.prefill_kernel, {**SHAPE, **PREFILL, "DOT": tl.bfloat16}, "bf16", 8),
    "prefill of a window": (
        prefill.prefill_kernel,
        {**ODD, **PREFILL, "GROUP": 3, "WINDOW": 100, "TILE": 32, "PADDED": 64, "DOT": tl.float32},
        "fp32",
        8,
    ),
    "pack fp8": (pack.pack_kernel, {**SHAPE, "PADDED": 2048, "FP8": True}, "bf16", 4),
    "pack int8": (pack.pack_kernel, {**ODD, "PADDED": 256, "FP8": False}, "fp32", 4),
    "unpack fp8": (pack.unpack_kernel, {**SHAPE, "PADDED": 2048, "FP8": True}, "bf16", 4),
    "unpack int8": (pack.unpack_kernel, {**ODD, "PADDED": 256, "FP8": False}, "fp32", 4),
    "tile_largest": (sampling.tile_largest_kernel, {"TILE": 4096}, "bf16", 8),
    "row_largest": (sampling.row_largest_kernel, {"PADDED": 64}, "bf16", 1),
    "run_race": (sampling.run_race_kernel, {"RUN": 128, "RUNS": 16}, "bf16", 4),
    "token_race": (sampling.token_race_kernel, {"RUN": 128, "PADDED": 32}, "bf16", 4),
}
# Parameters that are not tensors of the model's own type.
POINTERS = {
    **dict.fromkeys(("slots", "tables", "contexts", "rows", "tiles", "segments", "block_ids", "ids", "token"), "*i32"),
    **dict.fromkeys(("partial", "values", "best", "temperatures"), "*fp32"),
    "winners": "*i32",
    "keys": "*i64",
    "arrivals": "*fp64",
    "packed": "*u8",
}
NUMBERS = {"eps": "fp32", "scale": "fp32", "largest": "fp32"}
INTEGERS = {
    "inner", "heads", "layer", "max_parts", "workers", "vocab", "row_stride", "inner_stride", "residual_stride", "head_stride",
    "angle_stride", "value_row_stride", "value_head_stride", "query_stride", "table_stride",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_compiles_for_sm_90(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    kernel, constants, element, warps = CASES[case]
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS or (name == "tiles" and kernel.fn.__module__ == sampling.__name__):
            signature[name] = "i32"
        else:
            signature[name] = NUMBERS.get(name) or POINTERS.get(name) or f"*{element}"
    # Tensors begin at multiples of 16 bytes, as torch's do.
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=TARGET, options={"num_warps": warps})
    assert made.asm["cubin"]
    assert ".target sm_90" in made.asm["ptx"]


def test_no_kernel_is_forgotten() -> None:
    modules = (decode, kv_write, pack, prefill, sampling, small)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert kernels == {case[0].fn.__name__ for case in CASES.values()}
