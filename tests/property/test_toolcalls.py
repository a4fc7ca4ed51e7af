"""Calls in what a model says: any cut of the text gives the same, nothing is lost, and no part of a call is shown as text."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.toolcalls.dialects import DIALECTS

NAMES = {"get_weather", "f"}
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_call>\n",
    "\n</tool_call>",
    "<tool_",
    "</tool",
    "<",
    "<|python_tag|>",
    "<|pyth",
    "[",
    "]",
    "{",
    "}",
    ",",
    ";",
    ":",
    '"',
    "\\",
    " ",
    "\n\n",
    " " * 70,
    "Sure. ",
    "null",
    "12",
    '"name"',
    '"f"',
    '"arguments"',
    '{"name": "f", "arguments": {"a": [1, "}"]}}',
    '{"name": "get_weather", "parameters": {"city": "<tool_call>\\"x\\" 日本"}}',
    '{"arguments": {"a": 1}, "name": "f"}',
    '{"type": "function", "name": "f", "parameters": {}}',
    '{"name": "f"}',
    '{"name": "other", "arguments": {}}',
    '{"name": "f", "arguments": {"a": ',
    '{"name": "f", "arguments": "{\\"a\\": 1}"}',
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join)
dialects = st.sampled_from(sorted(DIALECTS))


def hear(dialect, pieces):
    """Content, and (name, arguments) of each call; the shape of what came is checked on the way."""
    parser = DIALECTS[dialect].new_parser(NAMES)
    content, calls = "", []
    for heard in [*(parser.feed(piece) for piece in pieces), parser.end()]:
        content += heard.content
        assert len({delta.index for delta in heard.calls}) == len(heard.calls)
        for delta in heard.calls:
            if delta.name is not None:
                assert delta.index == len(calls), "names come in order, once"
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1 or delta.name is None
            calls[delta.index][1] += delta.arguments
    return content, [tuple(call) for call in calls]


@settings(max_examples=500, deadline=None)
@given(dialect=dialects, text=texts, data=st.data())
@example(dialect="hermes", text='<tool_call>{"name": "f", "arguments": {"a": 1}</tool_ca</tool_call>x', data=None)
@example(dialect="hermes", text='<tool_call>[{"name": "f", "arguments": {}}, nonsense <x]</tool_call> y', data=None)
def test_any_cut_gives_the_same(dialect, text, data):
    whole = hear(dialect, [text])
    assert hear(dialect, text) == whole, "character by character"
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert hear(dialect, pieces) == whole


@settings(max_examples=400, deadline=None)
@given(dialect=dialects, text=texts)
def test_what_has_no_call_is_content_as_it_stands(dialect, text):
    content, calls = hear(dialect, [text])
    if not calls:
        empty = re.compile(r"\s{0,64}<tool_call>\s*\[\s*\]\s*(</tool_call>\s*|$)")
        assert content == text or empty.search(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=4)
words = st.text(st.characters(exclude_characters="<{[", exclude_categories=["Cs"]), max_size=20).map(str.strip)
spaces = st.text(" \n", max_size=3)


@settings(max_examples=120, deadline=None)
@given(before=words, after=words, given_calls=st.lists(arguments, min_size=1, max_size=3), space=spaces, data=st.data())
def test_calls_come_out_as_they_were_meant(before, after, given_calls, space, data):
    """In each dialect's own form, with words around where it has a place for them."""
    indent = data.draw(st.sampled_from([None, 1]))
    ascii_only = data.draw(st.booleans())
    key = data.draw(st.sampled_from(["arguments", "parameters"]))

    def spelled(wanted):
        return json.dumps({"name": "f", key: wanted}, indent=indent, ensure_ascii=ascii_only)

    calls = [spelled(wanted) for wanted in given_calls]
    tagged = space.join(f"<tool_call>{space}{call}{space}</tool_call>" for call in calls)
    listed = f"<tool_call>{space}[{(space + ',').join(calls)}{space}]</tool_call>"
    bare = f"<|python_tag|>{(';' + space).join(calls)}"
    for dialect, written in (("hermes", tagged), ("smollm2", listed), ("llama3_json", bare)):
        content, heard = hear(dialect, before + space + written + space + after)
        assert content == before + (space if before and after else "") + after
        assert [(name, json.loads(text)) for name, text in heard] == [("f", wanted) for wanted in given_calls]


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_arguments_are_streamed_and_the_name_comes_first(dialect):
    opening = "" if dialect == "llama3_json" else "<tool_call>"
    parser = DIALECTS[dialect].new_parser(NAMES)
    assert parser.feed(opening + '{"name": "f", "arguments": ').calls == ()
    first = parser.feed('{"city": "Par').calls[0]
    assert (first.index, first.name, first.arguments) == (0, "f", '{"city": "Par')
    assert parser.feed("is").calls[0].arguments == "is"
    assert parser.feed('"').calls[0].name is None


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_a_character_costs_the_same_whatever_came_before(dialect):
    """Counted in characters held back, not in time: nothing that is held grows with the answer."""
    for unit in ("a <tool", " ", "\n", "</tool_call>", "word "):
        parser = DIALECTS[dialect].new_parser(NAMES)
        total = 0
        for _ in range(500):
            total += len(parser.feed(unit).content)
        held = 500 * len(unit) - total
        assert held <= 200 or unit.isspace()
