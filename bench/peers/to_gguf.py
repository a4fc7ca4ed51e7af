"""Makes llama.cpp's form of a Llama checkpoint: a GGUF file in bf16 without a vocabulary, which llama.cpp itself then quantises.

`python -m bench.peers.to_gguf FILE.gguf int8|int4 OUT.gguf` is the second half, in the environment that has llama.cpp.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of a Llama checkpoint with tied embeddings."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{NAMES[inner.removesuffix('.weight')]}.weight"


def rotary_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a head in llama.cpp's order: rotated pairs are neighbours there, and half a head apart in the checkpoint."""
    out, inner = weight.shape
    return weight.view(num_heads, 2, out // num_heads // 2, inner).transpose(1, 2).reshape(out, inner)


def write_bf16(folder: Path, target: Path) -> None:
    """The checkpoint in `folder` as one file. Norms are float32, as llama.cpp wants them."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight":
            continue
        if ".q_proj." in name or ".k_proj." in name:
            tensor = rotary_pairs(tensor, heads if ".q_proj." in name else kv_heads)
        if tensor.dim() == 1:
            writer.add_tensor(gguf_name(name), tensor.float().numpy())
        else:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, precision: str, target: Path) -> None:
    """By llama.cpp's own function, as its tool does: Q8_0 or Q4_0."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[precision]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise RuntimeError(f"llama.cpp does not quantise {source.name}")


if __name__ == "__main__":
    quantise(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
