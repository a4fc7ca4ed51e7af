"""Conversations with tools through the official client: what the template is given, and calls out of what the model says."""

import json
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer as HFTokenizer

from router.config import ChatConfig
from tests.chat_templates import template_of
from tests.integration.router_harness import MODEL, model_dir, router_config, running_router
from tests.integration.scripted_workers import says

# Written here after the models' documented formats; HERMES shows all that a template is given.
HERMES = (
    "{% if tools %}tools:{{ tools | tojson }} call with <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call {{ c.function.name }} {{ c.function.arguments.city }} {{ c.id }}>{% endfor %}"
    "{% if m.tool_call_id %}<for {{ m.tool_call_id }}>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}system: You are named SmolLM\n{% endif %}"
    "{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
)
TEMPLATES = {"hermes": template_of("qwen2_5"), "llama3_json": template_of("llama3_2"), "smollm2": SMOLLM2}
ARGUMENTS = '{"city": "Zürich 🙂", "days": [1, 2]}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
SAYS = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "llama3_json": f"{CALL}; {CALL}".replace('"arguments"', '"parameters"'),
    "smollm2": f"<tool_call>[{CALL}, {CALL}]</tool_call>",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 200, "seed": 1}


@pytest.fixture(params=sorted(TEMPLATES))
def dialect(request):
    return request.param


def config_with(tmp_path: Path, template: str, **chat):
    config = router_config(tmp_path, chat=ChatConfig(**chat))
    files = {"chat_template": template, "eos_token": "<|eos|>"}
    (model_dir(tmp_path) / "tokenizer_config.json").write_text(json.dumps(files))
    return config


@pytest.fixture
async def served(tmp_path, dialect):
    async with running_router(config_with(tmp_path, TEMPLATES[dialect])) as running:
        await running.cluster.pools(1, 1)
        yield running


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def streamed(client, **body):
    """Content, calls as {index: [name, arguments, ids]}, and how each answer ended."""
    content, calls, ends = {}, {}, {}
    async for chunk in await client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            content[choice.index] = content.get(choice.index, "") + (choice.delta.content or "")
            for call in choice.delta.tool_calls or []:
                made = calls.setdefault((choice.index, call.index), [None, "", None])
                if call.id is not None:
                    assert made == [None, "", None], "id and name come first, and once"
                    made[0], made[2] = call.function.name, call.id
                made[1] += call.function.arguments
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    return content, calls, ends


@pytest.mark.parametrize("choice", ["auto", None])
async def test_calls_whole_and_streamed(served, client, dialect, choice):
    served.cluster.script = says(served.ids(SAYS[dialect]))
    body = {**ASK, "tools": TOOLS, "n": 2} | ({"tool_choice": choice} if choice else {})
    whole = await client.chat.completions.create(**body)
    content, calls, ends = await streamed(client, **body)
    ids = {call[2] for call in calls.values()}
    for one in whole.choices:
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        assert [call.function.name for call in one.message.tool_calls] == ["get_weather"] * 2
        assert [json.loads(call.function.arguments) for call in one.message.tool_calls] == [json.loads(ARGUMENTS)] * 2
        ids |= {call.id for call in one.message.tool_calls}
        assert content[one.index] == ""
        assert ends[one.index] == "tool_calls"
        assert [(name, arguments) for (answer, _), (name, arguments, _) in calls.items() if answer == one.index] == [
            (call.function.name, call.function.arguments) for call in one.message.tool_calls
        ]
    assert len(ids) == 8, "each call has an id of its own"
    assert all(i.startswith("call_") for i in ids)


async def test_the_stream_helper_of_the_client_puts_calls_together(served, client, dialect):
    served.cluster.script = says(served.ids(SAYS[dialect]))
    async with client.chat.completions.stream(**ASK, tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 4, "arguments come while they are written"
    assert [call.function.arguments for call in final.choices[0].message.tool_calls] == [ARGUMENTS] * 2
    assert final.choices[0].finish_reason == "tool_calls"


async def test_only_the_first_call_without_parallel_calls(served, client, dialect):
    served.cluster.script = says(served.ids(SAYS[dialect]))
    body = {**ASK, "tools": TOOLS, "parallel_tool_calls": False}
    whole = await client.chat.completions.create(**body)
    assert len(whole.choices[0].message.tool_calls) == 1
    assert len((await streamed(client, **body))[1]) == 1


async def test_what_is_no_call_is_content_and_without_tools_nothing_is(served, client, dialect):
    broken = SAYS[dialect].replace('"name"', '"nome"')
    for text, more in [
        (broken, {"tools": TOOLS}),
        (SAYS[dialect], {}),
        (SAYS[dialect], {"tools": TOOLS, "tool_choice": "none"}),
    ]:
        served.cluster.script = says(served.ids(text))
        whole = await client.chat.completions.create(**ASK, **more)
        assert (whole.choices[0].message.content, whole.choices[0].message.tool_calls) == (text, None)
        assert whole.choices[0].finish_reason == "stop"
        content, calls, ends = await streamed(client, **ASK, **more)
        assert (content, calls, ends) == ({0: text}, {}, {0: "stop"})


async def test_a_call_that_is_cut_off_says_so(served, client, dialect):
    ids = served.ids(SAYS[dialect])
    served.cluster.script = says(ids)
    body = {**ASK, "tools": TOOLS, "max_tokens": len(served.ids(SAYS[dialect][: SAYS[dialect].index("Z")])) + 1}
    whole = await client.chat.completions.create(**body)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.tool_calls[0].function.arguments.startswith('{"city": "')
    _, calls, ends = await streamed(client, **body)
    assert ends == {0: "length"}
    assert calls[0, 0][1] == whole.choices[0].message.tool_calls[0].function.arguments


async def test_stop_strings_and_log_probabilities_beside_calls(served, client, dialect):
    ids = served.ids(SAYS[dialect])
    served.cluster.script = says(ids)
    stopped = await client.chat.completions.create(**ASK, tools=TOOLS, stop=[', "days'])
    call = stopped.choices[0].message.tool_calls[0]
    assert (stopped.choices[0].finish_reason, call.function.arguments) == ("tool_calls", '{"city": "Zürich 🙂"')
    entries = []
    stream = await client.chat.completions.create(**ASK, tools=TOOLS, logprobs=True, stream=True)
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            entries += chunk.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries[: len(ids)]).decode() == SAYS[dialect]


async def rendered(served, **body):
    tokens = (await served.http.post("/tokenize", json={"model": MODEL, **body})).json()
    assert "tokens" in tokens, tokens
    assert tokens["count"] == len(tokens["tokens"])
    return (await served.http.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})).json()["prompt"]


CALLED = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "now?"}], "name": "Ann"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


async def test_a_conversation_with_calls_and_results(tmp_path):
    async with running_router(config_with(tmp_path, HERMES)) as served:
        text = await rendered(served, messages=CALLED, tools=TOOLS)
        assert text == (
            f"tools:{json.dumps(TOOLS)} call with <tool_call>{{...}}</tool_call>\nsystem: Be brief.\nuser: Weather\nnow?\n"
            "assistant: <call get_weather Bonn call_1>\ntool: sunny<for call_1>\nassistant:"
        )
        assert "tools:" not in await rendered(served, messages=CALLED)
    async with running_router(config_with(tmp_path, SMOLLM2)) as served:
        text = await rendered(served, messages=CALLED, tools=TOOLS)
        assert text.startswith("system: Be brief.\n\nYou can call functions")
        assert f"<tools>{json.dumps(TOOLS)}</tools>" in text
        assert 'assistant: <tool_call>[{"name": "get_weather", "arguments": {"city": "Bonn"}}]</tool_call>\n' in text
        assert "{{" not in text
    async with running_router(
        config_with(tmp_path, "{% for m in messages %}{{ m.role }}{% endfor %}{# developer #}")
    ) as served:
        assert await rendered(served, messages=CALLED[:1]) == "developer"


BAD_TOOLS = [
    ({"tools": TOOLS}, "tools"),
    ({"messages": CALLED}, "messages.2.tool_calls"),
    ({"documents": [{"title": "a"}]}, "documents"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.custom"),
    ({"tools": [{"type": "code"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools.0.function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "new": 3}}]}, "tools.0.function.new"),
    ({"tools": "f"}, "tools"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLED[2]["tool_calls"]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "assistant", "content": "x", "refusal": "y"}]}, "messages.0.refusal"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "y"}}]}, "messages.0.audio"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
]


async def test_what_the_template_has_no_place_for_is_refused_by_name(tmp_path):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with running_router(config_with(tmp_path, plain)) as served:
        for change, param in BAD_TOOLS:
            response = await served.http.post("/v1/chat/completions", json={**ASK, **change})
            assert response.status_code == 400, (change, response.text)
            assert response.json()["error"]["param"] == param, response.text
        none = {**ASK, "tools": [], "tool_choice": "auto", "documents": [], "parallel_tool_calls": True}
        assert (await served.http.post("/tokenize", json={"prompt": "x"})).status_code == 200
        response = await served.http.post("/v1/chat/completions", json=none)
        assert response.status_code == 503, "nothing is wrong with it, there is no worker"


async def test_a_parser_can_be_named_and_a_requests_own_template_trusted(tmp_path):
    template = "{{ tools | tojson }}"
    async with running_router(config_with(tmp_path, template, tool_call_parser="llama3_json")) as served:
        await served.cluster.pools(0, 1)
        served.cluster.script = says(served.ids(SAYS["llama3_json"]))
        got = (await served.http.post("/v1/chat/completions", json={**ASK, "tools": TOOLS})).json()
        assert len(got["choices"][0]["message"]["tool_calls"]) == 2
    for template, parser in [(HERMES, "none"), ("{{ messages }}", "hermes")]:
        async with running_router(config_with(tmp_path, template, tool_call_parser=parser)) as served:
            response = await served.http.post("/v1/chat/completions", json={**ASK, "tools": TOOLS})
            assert response.json()["error"]["param"] == "tools"
    async with running_router(config_with(tmp_path, HERMES, trust_request_chat_template=True)) as served:
        body = {"messages": ASK["messages"], "chat_template": "{{ messages[0].content }}{{ style }}"}
        assert await rendered(served, **body, chat_template_kwargs={"style": "!"}) == "Weather?!"
        bad = await served.http.post("/tokenize", json={**body, "chat_template": "{% if %}"})
        assert bad.json()["error"]["param"] == "chat_template"


async def test_the_final_message_is_continued(tmp_path):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The sky is "}]
    async with running_router(config_with(tmp_path, template)) as served:
        assert await rendered(served, messages=turns, continue_final_message=True) == "<user>x</><assistant>The sky is"
        whole = template.replace(" | trim", "")
    async with running_router(config_with(tmp_path, whole)) as served:
        assert await rendered(served, messages=turns, continue_final_message=True) == "<user>x</><assistant>The sky is "
        assert await rendered(served, messages=turns) == "<user>x</><assistant>The sky is </><a>"
    async with running_router(config_with(tmp_path, "{{ messages[0].content }}")) as served:
        refused = await served.http.post("/tokenize", json={"messages": turns, "continue_final_message": True})
        assert refused.json()["error"]["param"] == "messages"


async def test_tokens_without_an_answer(tmp_path):
    async with running_router(config_with(tmp_path, HERMES)) as served:
        ids = served.ids("Say 🙂")
        got = (await served.http.post("/tokenize", json={"prompt": "Say 🙂", "return_token_strs": True})).json()
        assert got["tokens"] == ids
        assert got["max_model_len"] == served.card.max_model_len
        assert len(got["token_strs"]) == got["count"] == len(ids)
        assert (await served.http.post("/tokenize", json={"prompt": "x"})).json()["token_strs"] is None
        for path, body, param in [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": ASK["messages"]}, "prompt"),
            ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
            ("/tokenize", {"prompt": "x", "tools": TOOLS}, "tools"),
            ("/tokenize", {"prompt": "x", "tools": 0}, "tools"),
            ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
            ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
            ("/tokenize", {"prompt": "x", "chat_template": "x"}, "chat_template"),
            ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            ("/detokenize", {"tokens": [5, 99999]}, "tokens.1"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ]:
            response = await served.http.post(path, json=body)
            assert response.json()["error"]["param"] == param, response.text


async def test_a_special_token_that_spells_a_tag_is_one_and_no_other_is_text(tmp_path):
    config = config_with(tmp_path, TEMPLATES["llama3_json"])
    tokenizer = HFTokenizer.from_file(str(config.model_dir / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|python_tag|>", "<|other|>"])
    tag, other = tokenizer.token_to_id("<|python_tag|>"), tokenizer.token_to_id("<|other|>")
    tokenizer.save(str(config.model_dir / "tokenizer.json"))
    with_room = json.loads((config.model_dir / "config.json").read_text()) | {"vocab_size": other + 1}
    (config.model_dir / "config.json").write_text(json.dumps(with_room))
    async with running_router(config) as served:
        await served.cluster.pools(1, 1)
        call = SAYS["llama3_json"].split(";")[0]
        served.cluster.script = says([*served.ids("Let me see."), other, tag, *served.ids(call)])
        for more, content, num_calls in [
            ({"tools": TOOLS}, "Let me see.", 1),
            ({}, f"Let me see.{call}", 0),
            ({"skip_special_tokens": False}, f"Let me see.<|other|><|python_tag|>{call}", 0),
        ]:
            got = (await served.http.post("/v1/chat/completions", json={**ASK, **more})).json()
            message = got["choices"][0]["message"]
            assert (message["content"], len(message.get("tool_calls", []))) == (content, num_calls)
