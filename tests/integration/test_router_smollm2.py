"""The real model's prompts, as transformers makes them."""

import json
from pathlib import Path

import pytest

from router.text.chat_template import Conversation, Message
from router.text.model_card import load_model_card

pytestmark = pytest.mark.model
GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures/smollm2_golden.json").read_text())
TURNS = [
    [("user", "What is the capital of France?")],
    [("system", "Be brief."), ("user", "日本 🙂?"), ("assistant", "Japan."), ("user", "<b>Why</b>?\n\n")],
]


@pytest.fixture(scope="module")
def card(smollm2_dir):
    return load_model_card(smollm2_dir, "smollm2")


@pytest.mark.parametrize("turns", TURNS, ids=lambda t: t[-1][1][:10])
async def test_conversations(card, smollm2_dir, turns):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_dir)
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    got = await card.encode_chat(Conversation(tuple(Message(*turn) for turn in turns)))
    assert list(got) == list(expected)


async def test_golden_prompts(card):
    for prompt, facts in GOLDEN.items():
        if isinstance(facts, dict) and "prompt_ids" in facts:
            assert list(await card.tokenizer.encode_text(prompt)) == facts["prompt_ids"]
            stream = card.tokenizer.text_stream(skip_special_tokens=False)
            text = "".join(stream.push([i]) for i in facts["prompt_ids"]) + stream.flush()
            assert text == prompt
