"""What counts as a call, in each dialect: texts as models write them, good and broken."""

import pytest

from tests.property.test_toolcalls import hear

F = '{"name": "f", "arguments": {"a": 1}}'
ONE = [("f", '{"a": 1}')]
CASES = {
    "hermes": [
        (f"<tool_call>{F}</tool_call>", "", ONE),
        (f"Sure.\n<tool_call>\n{F}\n</tool_call>\n", "Sure.", ONE),
        (f"Sure. <tool_call>{F}</tool_call> Done.", "Sure. Done.", ONE),
        (f"<tool_call>{F}\n{F}</tool_call>", "", ONE * 2),
        # A tag in a string is a string's; what the model forgot to close, the closing tag closes.
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("f", '{"a": "</tool_call>"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', "x", ONE),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', "x", [("f", '{"a": 1')]),
        # Known only at its end, and whole.
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", ONE),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ONE),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        # A name that was not given is a call all the same: the tag says so.
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', "", [("g", "{}")]),
        # Broken before it is a call: text, whole. Broken in its arguments: the call's, as OpenAI has it.
        *[
            (text, text, [])
            for text in (
                "<tool_call>",
                "<tool_call>\n",
                "<tool_call>f(1)</tool_call>",
                '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
                '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
                '<tool_call>{"nome": "f", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "f", "argu',
                "a <tool_cal",
                "</tool_call> alone",
            )
        ],
        ('<tool_call>{"name": "f", "arguments": {"a": 1,,}}</tool_call>', "", [("f", '{"a": 1,,}')]),
        (f"<tool_call>{F} and more</tool_call> x", "and more x", ONE),
        (f"<tool_call><tool_call>{F}</tool_call>", "<tool_call>", ONE),
    ],
    "smollm2": [
        (f"<tool_call>[{F}, {F}]</tool_call>", "", ONE * 2),
        ("<tool_call>[]</tool_call>", "", []),
        ("I need none. <tool_call>[]</tool_call>", "I need none.", []),
        (f"<tool_call>[{F}, {F}", "", ONE * 2),
        (f'<tool_call>[{F}, {{"nome": 1}}]</tool_call> x', '{"nome": 1}] x', ONE),
    ],
    "llama3_json": [
        (F, "", ONE),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", ONE),
        (f" <|python_tag|>{F}", "", ONE),
        (f"{F}; {F}\n", "", ONE * 2),
        (f"{F}; that is all", "; that is all", ONE),
        (f"Let me see. <|python_tag|>{F}", "Let me see.", ONE),
        # JSON that is an answer, not a call.
        *[
            (text, text, [])
            for text in (
                '{"name": "Ann", "parameters": {}}',
                '{"name": "f", "age": 3}',
                '{"name": "f"}',
                "[1, 2]",
                f"The call is {F}",
                '<|python_tag|>print("hi")',
                "{",
            )
        ],
    ],
}


@pytest.mark.parametrize(("dialect", "case"), [(d, case) for d, cases in CASES.items() for case in cases], ids=str)
def test_what_counts(dialect, case):
    text, content, calls = case
    assert hear(dialect, [text]) == (content, calls)
    assert hear(dialect, text) == (content, calls)
