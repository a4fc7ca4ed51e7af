"""Conversations over gRPC: tools, calls, turns to be continued, variables; and tokens without an answer."""

import json

import pytest

from diptych_client import AsyncClient, Chat, ChatMessage, InvalidArgument, NotFound, ToolCall, assistant, user
from tests.integration.router_harness import router_config, running_router

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>"
    ' call them as <tool_call>{"name": …}</tool_call>\n{% endif %}'
    "{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %};{% endfor %}"
    "{% if mood %}{{ mood }} {% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL = json.dumps({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})


@pytest.fixture
async def served(tmp_path):
    config = router_config(tmp_path)
    (config.model_dir / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|eos|>"})
    )
    async with running_router(config) as running:
        await running.cluster.pools(1, 1)
        yield running


@pytest.fixture
async def client(served):
    async with AsyncClient(served.target) as client:
        yield client


async def rendered(client: AsyncClient, chat: Chat) -> str:
    tokens = (await client.tokenize(chat)).token_ids
    return (await client.detokenize(tokens)).text


async def test_tools_and_their_calls_reach_the_template(served, client):
    chat = Chat(
        messages=[
            ChatMessage(role="user", content="Rain?", name="ann"),
            ChatMessage(
                role="assistant",
                tool_calls=[ToolCall(id="c1", name="weather", arguments_json='{"city": "Oslo"}')],
            ),
            ChatMessage(role="tool", content="wet", tool_call_id="c1"),
        ],
        tools_json=[TOOL],
        template_variables_json='{"mood": "gently"}',
    )
    said = await rendered(client, chat)
    assert "<tools>weather </tools>" in said
    assert "user ann: Rain?;assistant: [c1 weather Oslo];tool: wet (c1);gently assistant:" in said
    answer = await client.generate(chat, max_tokens=2).answer()
    assert answer.usage.prompt_tokens == len((await client.tokenize(chat)).token_ids)


async def test_the_last_turn_goes_on(client):
    chat = Chat(messages=[user("hi"), assistant("Dear")], continue_final_message=True)
    assert (await rendered(client, chat)).endswith("assistant: Dear")
    chat = Chat(messages=[user("hi")], add_generation_prompt=False)
    assert (await rendered(client, chat)).endswith("user: hi;")


async def test_text_is_tokenised_as_an_answer_would_have_it(served, client):
    answer = await client.tokenize("Emma was")
    assert list(answer.token_ids) == served.ids("Emma was")
    assert answer.max_model_len == 1024
    assert (await client.detokenize(answer.token_ids)).text == "Emma was"


BAD = {
    "chat.messages[1].role": Chat(messages=[user("x"), ChatMessage(role="king")]),
    "chat.messages": Chat(),
    "chat.tools_json[0]": Chat(messages=[user("x")], tools_json=["{"]),
    "chat.tools_json[0].type": Chat(messages=[user("x")], tools_json=["{}"]),
    "chat.tools_json[1]": Chat(messages=[user("x")], tools_json=[TOOL, '"\\ud800"']),
    "chat.tools_json[2]": Chat(messages=[user("x")], tools_json=[TOOL, TOOL, "[" * 400 + "]" * 400]),
    "chat.tools_json[3]": Chat(messages=[user("x")], tools_json=[TOOL, TOOL, TOOL, "1e999"]),
    "chat.template_variables_json.big": Chat(messages=[user("x")], template_variables_json='{"big": 1e999}'),
    "chat.template_variables_json": Chat(messages=[user("x")], template_variables_json="[1]"),
    "chat.template_variables_json.messages": Chat(messages=[user("x")], template_variables_json='{"messages": 1}'),
    "chat.messages[0].tool_calls[0].arguments_json": Chat(
        messages=[ChatMessage(role="assistant", tool_calls=[ToolCall(name="f", arguments_json="[]")])]
    ),
    "chat.messages[0].tool_call_id": Chat(messages=[ChatMessage(role="user", content="x", tool_call_id="c")]),
    "chat.continue_final_message": Chat(
        messages=[assistant("x")], continue_final_message=True, add_generation_prompt=True
    ),
}


@pytest.mark.parametrize("field", BAD)
async def test_what_is_wrong_is_named_by_its_path_in_the_message(client, field):
    for ask in (client.generate(BAD[field], max_tokens=1).answer(), client.tokenize(BAD[field])):
        with pytest.raises(InvalidArgument) as caught:
            await ask
        assert [violation.field for violation in caught.value.violations] == [field]


async def test_what_has_no_tokens_and_no_text(client):
    with pytest.raises(InvalidArgument) as caught:
        await client.detokenize([5, 10**6])
    assert [v.field for v in caught.value.violations] == ["token_ids[1]"]
    with pytest.raises(NotFound):
        await client.tokenize("x", model="other")
    with pytest.raises(NotFound):
        await client.detokenize([1], model="other")
