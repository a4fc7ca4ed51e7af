"""Templates see of a conversation what Hugging Face's own code shows them: tools, calls, results, documents, continuing."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from router.openai.messages import ChatMessage
from router.text.chat_template import ChatTemplate, Conversation, Message, says
from router.toolcalls.dialects import DIALECTS, dialect_of

# Everything that a template can see, and the shapes that templates of Qwen and Llama 3 take it apart with.
SEES_ALL = (
    "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}{{ add_generation_prompt }}"
    "{% for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}{% if call.function is defined %}"
    "{% set call = call.function %}{% endif %}{{ call.name }}{{ call.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ m.tool_call_id }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}|{% endif %}"
    "{% endif %}{% endfor %}{{ messages[-1].content }}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi", "name": "Ann"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"é": [1, {"a": null}]}'}}]},
    {"role": "tool", "content": "<b>1</b>", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is "},
]  # fmt: skip
AS_HUGGING_FACE_HAS_THEM = [
    *TURNS[:2],
    {
        **TURNS[2],
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"é": [1, {"a": None}]}}}
        ],
    },
    *TURNS[3:],
]


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("with_tools", [False, True])
def test_the_same_text(continued, with_tools):
    documents = [{"title": "a", "text": "b"}]
    expected, _ = render_jinja_template(
        conversations=[AS_HUGGING_FACE_HAS_THEM],
        chat_template=SEES_ALL,
        tools=TOOLS if with_tools else None,
        documents=documents,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        bos_token="<s>",
        enable_thinking=False,
    )
    messages = tuple(ChatMessage.model_validate(turn).as_message(f"messages.{i}") for i, turn in enumerate(TURNS))
    conversation = Conversation(
        messages,
        add_generation_prompt=not continued,
        tools=tuple(TOOLS) if with_tools else (),
        documents=tuple(documents),
        continue_final_message=continued,
        variables=(("enable_thinking", False),),
    )
    assert ChatTemplate(SEES_ALL, {"bos_token": "<s>"}).render(conversation) == expected[0]


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        (
            '…return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <name>}',
            "hermes",
        ),
        ("{%- if tools is not none %}{{- '<|start_header_id|>system<|end_header_id|>' }}\"parameters\"", "llama3_json"),
        ("{{ '<|start_header_id|>' + role + '<|end_header_id|>' }}", None),  # Llama 3.0 knows no tools
        ("{{ 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}", "smollm2"),
        ("{{ '<|im_start|>' + message['role'] }}", None),
    ],
)
def test_a_template_tells_how_its_model_calls(template, dialect):
    found = dialect_of(template)
    assert found is (None if dialect is None else DIALECTS[dialect])


@pytest.mark.parametrize(
    ("source", "word", "said"),
    [
        ("{% if tools %}", "tools", True),
        ("{{ message['tools'] }}", "tools", True),
        ("{% set toolset = 1 %}{{ my_tools }}", "tools", False),
        ("", "tools", False),
    ],
)
def test_whether_a_template_says_a_word(source, word, said):
    assert says(source, word) is said


def test_a_template_that_cuts_the_final_message_away_cannot_continue_it():
    template = ChatTemplate("{{ messages[-1].content[:3] }}", {})
    conversation = Conversation((Message("assistant", "abcdef"),), continue_final_message=True)
    with pytest.raises(Exception, match="cannot be continued"):
        template.render(conversation)
