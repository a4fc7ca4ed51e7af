"""Data sets become the requests that they describe; what is wrong with a file is said with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serving.requests import Form, Turn
from bench.serving.serve import DataConfig, ServeConfig, points_of, requests_maker
from bench.serving.synthetic import Shape
from contracts.errors import ConfigError

MOONCAKE = (
    {"timestamp": 1000, "input_length": 10, "output_length": 3, "hash_ids": [7, 8, 9]},
    {"timestamp": 1500, "input_length": 12, "output_length": 4, "hash_ids": [7, 8, 20]},
    {"timestamp": 3000, "input_length": 6, "output_length": 5, "hash_ids": [7, 21]},
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,20,3\n2023-11-16 18:17:05.4799600,9,4\n"
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "a b c"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "no question"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "d"}]},
]


def lines(path: Path, entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def data(name: str, path: Path | None, form: Form, count: int = 10, **more: object) -> DataConfig:
    return DataConfig(name, Shape(count), form, path, **more)


@pytest.mark.parametrize("form", [Form.IDS, Form.TEXT])
def test_equal_hash_ids_are_equal_prompt_blocks(tmp_path: Path, form: Form) -> None:
    config = data("mooncake", lines(tmp_path / "t.jsonl", MOONCAKE), form, block_tokens=4)
    make = requests_maker(config)
    first, second, third = make(0)
    assert [request.at_s for request in (first, second, third)] == [0.0, 0.5, 2.0]
    assert [request.prompt_len for request in (first, second, third)] == [10, 12, 6]
    assert [request.output_len for request in (first, second, third)] == [3, 4, 5]
    cut = (lambda prompt, n: prompt[:n]) if form is Form.IDS else (lambda prompt, n: prompt.split()[:n])
    assert cut(first.prompt, 8) == cut(second.prompt, 8) and cut(third.prompt, 4) == cut(first.prompt, 4)
    assert cut(first.prompt, 9) != cut(second.prompt, 9) and cut(third.prompt, 5) != cut(first.prompt, 5)
    assert len(cut(first.prompt, 99)) == 10
    assert make(0)[0] == first and make(1)[0].prompt != first.prompt, "another point finds nothing in a cache"


def test_azure_rows_keep_times_and_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(AZURE)
    first, second = requests_maker(data("azure", tmp_path / "a.csv", Form.IDS))(0)
    assert (first.at_s, second.at_s) == (0.0, pytest.approx(1.5))
    assert (len(first.prompt), first.output_len, len(second.prompt), second.output_len) == (20, 3, 9, 4)


def test_sharegpt_gives_first_questions_and_their_answers_lengths(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SHAREGPT))
    requests = requests_maker(data("sharegpt", tmp_path / "s.json", Form.TEXT, count=3))(0)
    assert [(request.prompt, request.prompt_len, request.output_len) for request in requests] == [
        ("one two", 2, 3),
        ("three", 1, 1),
        ("one two", 2, 3),
    ]
    tokenizer = Path("tests/fixtures/tiny-austen")
    counted = requests_maker(data("sharegpt", tmp_path / "s.json", Form.CHAT, count=1, tokenizer=tokenizer))(0)[0]
    assert counted.prompt == (Turn("user", "one two"),) and counted.prompt_len >= 2


def test_chat_logs_are_sent_without_their_last_answer(tmp_path: Path) -> None:
    said = [
        ("system", "be brief"),
        ("user", "hello you"),
        ("assistant", "hi"),
        ("user", "more"),
        ("assistant", "x y z"),
    ]
    log = [{"messages": [{"role": role, "content": content} for role, content in said]}, {"prompt": "plain words"}]
    log.append({"prompt": "q", "output_tokens": 9})
    chat, plain, told = requests_maker(data("file", lines(tmp_path / "log.jsonl", log), Form.CHAT, count=3))(0)
    assert chat.prompt == tuple(Turn(role, content) for role, content in said[:-1]) and chat.output_len == 3
    assert plain.prompt == (Turn("user", "plain words"),) and (plain.output_len, told.output_len) == (64, 9)


BAD = [
    ("mooncake", "t.jsonl", '{"timestamp": 1}', "t.jsonl:1: .*input_length"),
    ("mooncake", "t.jsonl", json.dumps({**MOONCAKE[0], "hash_ids": [1]}), "t.jsonl:1: 1 hash_ids .* must be 3"),
    ("mooncake", "t.jsonl", "\n".join(json.dumps(MOONCAKE[n]) for n in (1, 0)), "order of time"),
    ("mooncake", "t.jsonl", "", "has no requests"),
    ("azure", "a.csv", "a,b\n1,2\n", "a.csv:1: 'a,b' must be TIMESTAMP"),
    ("azure", "a.csv", AZURE + "soon,1,2\n", "a.csv:4: "),
    ("azure", "a.csv", AZURE.splitlines()[0], "has no requests"),
    ("sharegpt", "s.json", "{", "must be ShareGPT's JSON"),
    ("sharegpt", "s.json", json.dumps(SHAREGPT[1:2]), "no conversation"),
    ("file", "p.jsonl", '{"text": "x"}', 'p.jsonl:1: must have either "prompt" or "messages"'),
    ("file", "p.jsonl", '{"messages": []}', "p.jsonl:1: messages must have a turn"),
    ("file", "p.txt", "\n \n", "has no requests"),
    (
        "file",
        "p.jsonl",
        '{"prompt": "a", "output_tokens": 1000000000000}',
        "p.jsonl:1: output_tokens 1000000000000 must be",
    ),
    ("file", "p.jsonl", '{"x":' * 10_000, "p.jsonl:1: "),
    ("sharegpt", "s.json", '[{"conversations":' + "[" * 100_000, "must be ShareGPT's JSON"),
    (
        "mooncake",
        "t.jsonl",
        json.dumps({**MOONCAKE[0], "output_length": -1}),
        "t.jsonl:1: output_length -1 must be from 0",
    ),
    ("mooncake", "t.jsonl", json.dumps({**MOONCAKE[0], "output_length": 10**18}), "t.jsonl:1: output_length 1000"),
    (
        "mooncake",
        "t.jsonl",
        json.dumps({**MOONCAKE[0], "input_length": 0, "hash_ids": []}),
        "1: input_length 0 must be from 1",
    ),
    ("mooncake", "t.jsonl", json.dumps({**MOONCAKE[0], "hash_ids": [1, -2, 3]}), "1: hash_ids -2 must be at least 0"),
    (
        "mooncake",
        "t.jsonl",
        "\n".join(json.dumps({**MOONCAKE[0], "timestamp": t}) for t in (0, 1e300)),
        "1e.297 s after",
    ),
    ("azure", "a.csv", AZURE + "2024-01-01,-5,1\n", "a.csv:4: ContextTokens -5 must be from 1"),
    ("azure", "a.csv", AZURE + f"2024-01-01,{10**14},1\n", "a.csv:4: ContextTokens 1000"),
    ("azure", "a.csv", AZURE + f"2024-01-01,1,{10**14}\n", "a.csv:4: GeneratedTokens 1000"),
    ("azure", "a.csv", AZURE + '"' + "a" * 200_000 + '",1,2\n', "a.csv:4: .*field larger"),
    ("azure", "a.csv", AZURE + "2024-01-01T00:00:00Z,1,2\n", "a.csv:4: "),
]


@pytest.mark.parametrize(("name", "file", "text", "said"), BAD)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, name: str, file: str, text: str, said: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=said):
        requests_maker(data(name, tmp_path / file, Form.CHAT, block_tokens=4))(0)


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("file", "p.txt", "one\n"),
        ("file", "p.jsonl", '{"prompt": "one"}\n'),
        (
            "sharegpt",
            "s.json",
            json.dumps([{"conversations": [{"from": "user", "value": "one"}, {"from": "gpt", "value": "x"}]}]),
        ),
    ],
)
def test_a_mark_of_utf8_at_the_beginning_is_no_part_of_a_prompt(
    tmp_path: Path, name: str, file: str, text: str
) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8-sig")
    assert requests_maker(data(name, tmp_path / file, Form.TEXT, count=1))(0)[0].prompt == "one"


@pytest.mark.parametrize("field", ["input_len", "output_len", "prefix_len", "num_prompts"])
def test_lengths_that_no_memory_holds_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: 10000000000000 must be from"):
        Shape(**{"num_prompts": 1, field: 10**13})


def test_a_sweep_is_every_rate_with_every_limit_and_a_trace_has_its_own_times() -> None:
    config = ServeConfig(rates=(1.0, float("inf")), concurrencies=(2, 4))
    assert [point.label for point in points_of(config, timed=True)] == [
        "rate-1-concurrency-2",
        "rate-1-concurrency-4",
        "concurrency-2",
        "concurrency-4",
    ]
    assert [point.label for point in points_of(ServeConfig(), timed=True)] == ["rate-trace"]
    assert [point.label for point in points_of(ServeConfig(), timed=False)] == ["rate-inf"]
