"""The real model's directory against facts that transformers made from the same file."""

import json
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig

from engine.models.store import check_model_dir, model_name

GOLDEN = json.loads((Path(__file__).parents[2] / "fixtures" / "smollm2_golden.json").read_text(encoding="utf-8"))
CHAT_PROMPT = next(prompt for prompt in GOLDEN if prompt.startswith("<|im_start|>user"))

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.mark.parametrize("prompt", GOLDEN, ids=lambda prompt: prompt[:20])
def test_prompts_have_the_ids_that_transformers_gave_them(tokenizer, prompt):
    assert tokenizer.encode(prompt).ids == GOLDEN[prompt]["prompt_ids"]
    assert tokenizer.decode(GOLDEN[prompt]["out_ids"], skip_special_tokens=False) == GOLDEN[prompt]["text"]


def test_a_special_token_is_skipped_when_decoding_and_found_in_text(tokenizer):
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([7042, 2], skip_special_tokens=True) == " Paris"
    assert tokenizer.get_vocab_size() == 49152


def test_the_chat_template_makes_the_prompt(smollm2_dir, tokenizer):
    config = json.loads((smollm2_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    text = template.render(
        messages=messages, add_generation_prompt=True, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    system = "<|im_start|>system\nBe short.<|im_end|>\n"
    assert text == system + CHAT_PROMPT
    assert tokenizer.encode(text).ids[-16:] == GOLDEN[CHAT_PROMPT]["prompt_ids"]


def test_the_directory_is_whole_and_says_what_it_is(smollm2_dir):
    check_model_dir(smollm2_dir)
    assert model_name(smollm2_dir) == "smollm2-135m-instruct"
    config = AutoConfig.from_pretrained(smollm2_dir)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings) == (30, 3, 8192)
    assert config.rms_norm_eps == 1e-5
    assert json.loads((smollm2_dir / "generation_config.json").read_text())["eos_token_id"] == [2]
