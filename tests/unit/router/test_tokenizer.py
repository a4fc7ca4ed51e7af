"""Prompts become the tokens that the model was trained on: one BOS, its own template, its own defaults."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import processors

from contracts.errors import InvalidRequest, ModelLoadError
from contracts.families import ARCHITECTURES
from engine.models.config import read_model_config
from router.text.chat_template import ChatTemplate, Conversation, Message
from router.text.model_card import load_model_card
from router.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "fixtures/tiny-austen"
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny(adds_bos=False):
    hf = HFTokenizer.from_file(str(TINY / "tokenizer.json"))
    if adds_bos:
        hf.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return Tokenizer(hf, "<|bos|>")


@pytest.mark.parametrize(
    ("adds_bos", "text", "add", "num_bos"),
    [
        (False, "Emma", True, 0),
        (True, "Emma", True, 1),
        (True, "Emma", False, 0),
        (True, "<|bos|>Emma", True, 1),
        (True, "<|bos|><|bos|>Emma", True, 2),  # the user's own two, and none of ours
        (False, "<|bos|><|bos|>Emma", True, 2),
    ],
)
async def test_one_bos(adds_bos, text, add, num_bos):
    ids = await tiny(adds_bos).encode_text(text, add)
    assert ids[: num_bos + 1].count(0) == num_bos
    assert ids.count(0) == num_bos


async def test_a_template_brings_its_own_bos():
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<|bos|>"})
    card = replace(load_model_card(TINY, "tiny"), tokenizer=tiny(adds_bos=True), chat_template=template)
    assert (await card.encode_chat(Conversation((Message("user", "Emma"),)))).count(0) == 1


async def test_long_texts_do_not_stall_the_loop():
    tokenizer = tiny()
    text = "It is a truth universally acknowledged. " * 20_000
    turns = 0

    async def others():
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    task = asyncio.create_task(others())
    ids = await tokenizer.encode_text(text)
    task.cancel()
    assert len(ids) > 100_000
    assert turns > 20


def test_the_template_as_hugging_face_renders_it():
    conversation = Conversation((Message("user", "hi"), Message("assistant", "ho"), Message("user", "<b>&</b>")))
    expected = (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
        "<|im_start|>user\n<b>&</b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(CHATML, {}).render(conversation) == expected


def test_what_templates_may_use():
    source = (
        "{%- generation %}x{% endgeneration %}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ style }}"
    )
    conversation = Conversation((Message("user", "hi"),), variables=(("style", "terse"), ("messages", "mine")))
    assert ChatTemplate(source, {}).render(conversation) == 'x{"a": "<é>"}401terse'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[7].content.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_the_requests_error(source):
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(Conversation((Message("user", "hi"),)))
    assert caught.value.field == "messages"


async def test_a_model_without_a_template_says_so():
    with pytest.raises(InvalidRequest, match="no chat template"):
        await load_model_card(TINY, "tiny").encode_chat(Conversation((Message("user", "hi"),)))


def write_model(path, **files):
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((TINY / name).read_bytes())
    for name, content in files.items():
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (path / name.replace("__", ".")).write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_models_own_defaults(tmp_path):
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "max_new_tokens": 64}
    card = load_model_card(write_model(tmp_path, generation_config__json=generation), "m")
    got = card.sampling()
    assert (got.temperature, got.top_p, got.top_k, got.repetition_penalty) == (0.6, 0.9, 40, 1.1)
    assert card.max_new_tokens == 64
    assert card.sampling().seed != got.seed, "each request has a seed of its own"
    assert (card.vocab_size, card.max_model_len) == (1024, 1024)


@pytest.mark.parametrize("form", ["string", "named", "file"])
def test_where_templates_are_kept(tmp_path, form):
    files = {
        "string": {"tokenizer_config__json": {"chat_template": "{{ eos_token }}", "eos_token": "E"}},
        "named": {
            "tokenizer_config__json": {
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {"name": "default", "template": "{{ eos_token }}"},
                ],
                "eos_token": {"content": "E"},
            }
        },
        "file": {"chat_template__jinja": "{{ eos_token }}", "tokenizer_config__json": {"eos_token": "E"}},
    }
    directory = write_model(tmp_path, **files[form])
    if form == "file":
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates/tool_use.jinja").write_text("no")
    card = load_model_card(directory, "m")
    plain = Conversation((Message("user", "x"),))
    assert card.template_for(plain).render(plain) == "E"
    with_tools = replace(plain, tools=({"type": "function"},))
    assert card.template_for(with_tools).render(with_tools) == ("E" if form == "string" else "no")


@pytest.mark.parametrize("left_out", ["max_position_embeddings", "vocab_size"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "Unknown"])
def test_what_a_config_leaves_out_is_what_the_engine_takes(tmp_path, architecture, left_out):
    config = json.loads((TINY / "config.json").read_text()) | {"architectures": [architecture]}
    del config[left_out]
    directory = write_model(tmp_path, config__json=config)
    if architecture == "Unknown":
        with pytest.raises(ModelLoadError, match=left_out):
            load_model_card(directory, "m")
    else:
        engine, card = read_model_config(directory), load_model_card(directory, "m")
        assert (card.vocab_size, card.max_model_len) == (engine.vocab_size, engine.context_len)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config__json": "{"}, "config.json"),
        ({"config__json": "[]"}, "must be a JSON object"),
        ({"config__json": {"vocab_size": 10}}, "max_position_embeddings"),
        ({"tokenizer__json": "{}"}, "tokenizer.json"),
        ({"generation_config__json": {"temperature": "hot"}}, "temperature"),
        ({"tokenizer_config__json": {"chat_template": "{% if %}"}}, "chat template, line 1"),
        ({"config__json": "[" * 100_000}, "config.json"),
        ({"chat_template__jinja": b"\xff\xfe"}, "chat_template.jinja"),
        ({"generation_config__json": {"temperature": -1}}, r"generation_config\.json: temperature: got -1"),
        ({"generation_config__json": '{"top_p": NaN}'}, "top_p: got nan"),
        ({"generation_config__json": {"top_k": 1.5}}, "top_k is 1.5, must be an integer"),
        ({"generation_config__json": {"top_k": -2}}, "top_k: got -2"),
    ],
)
def test_a_directory_that_cannot_be_used_says_which_file_and_why(tmp_path, files, says):
    with pytest.raises(ModelLoadError, match=says):
        load_model_card(write_model(tmp_path, **files), "m")


@pytest.mark.parametrize("bos", [-1, 5000, 2**70, "x"])
def test_a_bos_that_the_tokenizer_does_not_know_is_none(tmp_path, bos):
    config = json.loads((TINY / "config.json").read_text()) | {"bos_token_id": bos}
    assert load_model_card(write_model(tmp_path, config__json=config), "m").tokenizer._bos_id is None


def test_the_context_is_the_workers_where_the_rope_stretches_it(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = json.loads((TINY / "config.json").read_text()) | {"rope_parameters": scaling}
    directory = write_model(tmp_path, config__json=config)
    assert load_model_card(directory, "m").max_model_len == 4096 == read_model_config(directory).context_len


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json: not there"):
        load_model_card(tmp_path, "m")
