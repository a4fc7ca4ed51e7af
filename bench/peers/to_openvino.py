"""Makes OpenVINO's form of a checkpoint: `python -m bench.peers.to_openvino FOLDER bf16|int8|int4 TOKENIZER_FOLDER OUT`.

Runs in the peers' environment, with optimum-intel. The pipeline wants a tokenizer though it is asked in token ids: any will do.
"""

from __future__ import annotations

import sys
from pathlib import Path

GROUP = 64  # divides the widths of all that is measured


def convert(folder: Path, precision: str, tokenizer_folder: Path, out: Path) -> None:
    """Some seconds for a small model."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    quantised = {
        "bf16": None,
        "int8": OVWeightQuantizationConfig(bits=8, sym=False),
        "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=GROUP, ratio=1.0),
    }[precision]
    # Without a precision of its own optimum makes int8 of a large model; False keeps what the checkpoint has.
    more = {"quantization_config": quantised} if quantised else {"load_in_8bit": False}
    model = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, torch_dtype="bfloat16", **more)
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    for part, name in zip(
        convert_tokenizer(tokenizer, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
    ):
        openvino.save_model(part, out / f"openvino_{name}.xml")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
