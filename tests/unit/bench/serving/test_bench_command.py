"""`diptych bench serve` from its flags to its files, against a server in this process; what is wrong is one line and exit 2."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving.openai_target import OpenAIConfig, OpenAITarget, read_stream
from bench.serving.requests import AskFailed
from cli.commands.bench import serve_command
from cli.commands.benchnames import OURS
from cli.main import run

EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[{"delta":{"con',
    b'tent":"b"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":4}}\n\ndata: [DONE]\n\n',
)


def plain(body: bytes) -> tuple[bytes, bytes]:
    """What `transformers serve` says: it takes no field that it does not know, no token ids, and never says [DONE]."""
    if b'"ignore_eos"' in body:
        return b"422 Unprocessable", b'{"detail": "Unexpected fields in the request: {\'ignore_eos\'}"}'
    if b'"prompt":"' not in body:
        return b"400 Bad Request", b'{"detail": "prompt must be a string."}'
    return b"200 OK", b"".join(EVENTS[:2]) + b'tent":"b"},"finish_reason":"length"}]}\n\n'


@pytest.fixture
def base_url() -> Iterator[str]:
    """Answers each completion at once; a model "busy" with 429, "silent" never; of "interrupting" the fifth is Ctrl-C's moment."""
    loop = asyncio.new_event_loop()
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun = await reader.readexactly(1)
        if begun == b"\x16":  # TLS, which this door does not speak
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()
            return
        head = (begun + await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
        body = await reader.readexactly(length)
        status, content = b"200 OK", b"".join(EVENTS)
        if head.startswith(b"get"):
            content = b'{"data": [{"id": "small"}]}'
        elif b'"locked"' in body and b"authorization: bearer k3y\r\n" not in head:
            status, content = b"401 Unauthorized", b'{"error": {"message": "no API key"}}'
        elif b'"plain"' in body:
            status, content = plain(body)
        elif b'"hanging-up"' in body or head.startswith(b"pri"):  # as a door with TLS does with whoever brings none
            writer.close()
            return
        elif b'"busy"' in body:
            status, content = b"429 Too Many Requests", b'{"error": {"message": "come again"}}'
        elif b'"silent"' in body:
            await reader.read()  # until the client has left
        elif b'"interrupting"' in body:
            seen.append(body)
            if len(seen) == 5:
                os.kill(os.getpid(), signal.SIGINT)
                await reader.read()
        elif b'"endless"' in body:
            status, content = b"200 OK", b"x" * 2048
        writer.write(
            b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(content)) + content
        )
        await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.run_until_complete(server.wait_closed())
    loop.close()


def serve(base_url: str, *args: str) -> int:
    return run(["bench", "serve", "--backend", "openai", "--base-url", base_url, "--num-prompts", "4", *args])


def test_a_sweep_writes_a_file_a_load_and_one_page_with_the_plots_inside(
    base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    code = serve(
        base_url, "--max-concurrency", "1,2", "--result-dir", str(folder), "--label", "<a>", "--save-detailed",
        "--goodput", "ttft:60000", "e2el:60000", "--metric-percentiles", "50,99.9",
    )  # fmt: skip
    said = capsys.readouterr().err
    assert code == 0, said
    found = json.loads((folder / "-a--concurrency-2.json").read_text())
    assert (found["model_id"], found["backend"], found["completed"], found["max_concurrency"]) == (
        "small",
        "openai",
        4,
        2,
    )
    assert found["request_rate"] == "inf" and found["request_goodput"] == found["request_throughput"]
    assert found["total_output_tokens"] == 16 and found["total_input_tokens"] == 28 and len(found["ttfts"]) == 4
    assert {"p50_ttft_ms", "p99.9_itl_ms", "median_tpot_ms", "std_e2el_ms"} <= found.keys()
    page = (folder / "report.html").read_text()
    assert "&lt;a&gt; under load" in page and "<a>" not in page and page.count("data:image/png;base64,") == 2
    assert "src=" not in page.replace('src="data:', "") and "http" not in page.replace("https://", "")
    assert (folder / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert "concurrency-1: [####" in said and "goodput" in said


def test_without_a_folder_the_results_are_json_on_stdout(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(base_url, "--request-rate", "200,inf", "--burstiness", "inf") == 0
    rates = [json.loads(line)["request_rate"] for line in capsys.readouterr().out.splitlines()]
    assert rates == [200.0, "inf"]


def test_a_server_that_refuses_is_quoted_in_one_line(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for warmups in ("0", "1"):
        assert serve(base_url, "--model", "busy", "--num-warmups", warmups) == 1
        said = capsys.readouterr().err
        assert ("4 failed, one of them: HTTP 429" in said) == (warmups == "0")
        last = said.splitlines()[-1]
        assert last.startswith("error: ") and "HTTP 429" in last and "come again" in last


def test_a_server_that_does_not_answer_ends_the_warm_up_in_time(
    base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(base_url, "--model", "silent", "--num-warmups", "1", "--request-timeout", "0.1") == 1
    assert "error: no end of a request to warm up within 0.1 s" in capsys.readouterr().err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell lets what it starts in the background ignore Ctrl-C; tests may be started so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_keeps_the_loads_that_came_to_their_end(
    base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], interruptible: None
) -> None:
    args = ("--model", "interrupting", "--num-warmups", "0", "--max-concurrency", "1,2", "--no-plots")
    assert serve(base_url, *args, "--result-dir", str(tmp_path)) == 130
    assert "interrupted; loads that were measured to their end: 1" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["openai-concurrency-1.json", "report.html"]
    assert json.loads((tmp_path / "openai-concurrency-1.json").read_text())["completed"] == 4


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert serve("http://127.0.0.1:9", "--model", "x", "--result-dir", str(tmp_path / "file" / "out")) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --result-dir: {tmp_path}/file/out: ") and said.count("\n") == 1


def test_results_that_cannot_be_written_are_not_lost(
    base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "openai-rate-inf.json").mkdir()
    assert serve(base_url, "--result-dir", str(tmp_path), "--no-plots") == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["completed"] == 4 and "error: --result-dir" in said.err
    assert not [*tmp_path.glob("*.part")]


def test_an_answer_without_an_end_is_cut_off(
    base_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.serving.openai_target._MOST_BYTES", 1024)
    assert serve(base_url, "--model", "endless", "--num-warmups", "0") == 1
    assert "the answer is longer than" in capsys.readouterr().err


def test_a_missing_key_or_authority_is_said_by_its_flag(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (base_url, "locked", "no API key"),
        (base_url, "hanging-up", "the address begins with https://"),
        (base_url.replace("http:", "https:"), "x", "the address begins with http://"),
    ]
    for url, model, words in cases:
        assert serve(url, "--model", model) == 1
        said = capsys.readouterr().err
        assert words in said and ("--api-key-file" in said) == (model == "locked")
    assert run(["bench", "serve", "--address", base_url.removeprefix("http://"), "--model", "x"]) == 1
    assert "speak TLS" in (said := capsys.readouterr().err) and "(--tls-ca FILE.pem)" in said


def test_the_key_of_a_file_is_sent_and_shown_nowhere(
    base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("k3y\nand a second line\n")
    assert serve(base_url, "--model", "locked", "--api-key-file", str(tmp_path / "key")) == 0
    said = capsys.readouterr()
    assert "k3y" not in said.err + said.out


def test_more_fields_go_into_each_body(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The server goes by any word of the body."""
    assert serve(base_url, "--model", "x", "--num-warmups", "0", "--extra-body", '{"user": "busy", "top_k": 1}') == 1
    assert "come again" in capsys.readouterr().err


def test_a_server_that_takes_less_and_never_says_done_is_measured_with_the_flags_that_are_named(
    base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: list[str] = []
    for wanted in (["--no-ignore-eos"], ["--form", "text"]):
        assert serve(base_url, "--model", "plain", *flags) == 1
        assert " ".join(wanted) in capsys.readouterr().err
        flags += wanted
    assert serve(base_url, "--model", "plain", *flags) == 0
    assert json.loads(capsys.readouterr().out)["total_output_tokens"] == 8


def test_on_a_terminal_the_table_is_the_result(
    base_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert serve(base_url) == 0
    said = capsys.readouterr()
    assert said.out == "" and "--result-dir DIR" in said.err and "p99" in said.err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("http://127.0.0.1:9", "--model", "x") == 1
    assert "error: http://127.0.0.1:9: ConnectError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--request-rate", "0"], ["--request-rate", "'0'", "1e-06"]),
        (["--request-rate", "1,fast"], ["--request-rate", "'fast'", "number"]),
        (["--request-rate", "1,2,1.0"], ["--request-rate", "'1.0'", "twice"]),
        (["--request-rate", "nan"], ["--request-rate", "'nan'"]),
        (["--burstiness", "-1"], ["--burstiness", "'-1'"]),
        (["--max-concurrency", "1.5"], ["--max-concurrency", "'1.5'", "whole"]),
        (["--goodput", "itl:5"], ["--goodput", "'itl:5'", "ttft:MS"]),
        (["stray"], ["unexpected", "'stray'"]),
        (["--random-input-len", "5"], ["--random-input-len", "here it is --input-len"]),
        (["--host", "x", "--port", "1"], ["--host", "--base-url http://HOST:PORT"]),
        (["--nothing-such"], ["No such option", "--nothing-such"]),
        (["--burstiness", "1,2"], ["--burstiness", "'1,2'", "one number"]),
        (["--label", "\udcff"], ["--label", "UTF-8"]),
        (["--model", "\udcff"], ["--model", "UTF-8"]),
        (["--vocab-size", "1" * 30], ["--vocab-size", "at most"]),
        (["--model", "x", "--tls-ca", "README.md"], ["--tls-ca", "README.md", "certificate"]),
        (["--model", "x", "--backend", "openai", "--base-url", "http://[::"], ["--base-url", "'http://[::'"]),
        (["--metric-percentiles", "101"], ["--metric-percentiles", "'101'", "100"]),
        (["--dataset-name", "mooncake"], ["--dataset-name", "mooncake", "--dataset-path"]),
        (["--dataset-path", "README.md"], ["random", "--dataset-path"]),
        (["--dataset-name", "shared-prefix"], ["--prefix-len", "0"]),
        (["--backend", "openai-chat", "--form", "ids"], ["--form", "ids", "openai-chat"]),
        (["--vocab-size", "10"], ["--vocab-size", "10", "256"]),
        (["--backend", "openai", "--base-url", "nowhere"], ["--base-url", "'nowhere'", "http://"]),
        (["--backend", "openai", "--route", "colocated"], ["--route", "colocated", "diptych"]),
        (["--backend", "openai", "--model", "x", "--extra-body", "[1]"], ["--extra-body", "'[1]'", "object"]),
        (["--extra-body", "{}"], ["--extra-body", "openai"]),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert [word for word in words if word not in said] == []


def test_what_stands_for_vllms_flags_are_flags_of_ours() -> None:
    known = {name for param in serve_command.params for name in (*param.opts, *param.secondary_opts)}
    assert not known & OURS.keys()
    assert {flag for words in OURS.values() for flag in re.findall(r"--[a-z-]+", words)} <= known


def test_a_key_that_no_header_holds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (b"sk-\xc3\xa9\n", b"a\x01b", b"\n", b"\xff"):
        (tmp_path / "key").write_bytes(content)
        assert run(["bench", "serve", "--model", "x", "--api-key-file", str(tmp_path / "key")]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: --api-key-file: ") and "key" in said and "sk-" not in said


def test_an_event_came_when_its_last_byte_did_and_tokens_are_as_the_server_counts() -> None:
    reply = read_stream(1.0, list(zip((2.0, 3.0, 4.0, 5.0), EVENTS, strict=True)))
    assert reply.arrivals_s == (3.0, 4.0) and (reply.text, reply.output_tokens, reply.prompt_tokens) == ("ab", 4, 7)


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[{"text":"a"}]}',
        b'{"choices":[{"delta":{"reasoning_content":"a"}}]}',
        b'{"choices":[{"delta":{"reasoning":"a","content":null}}]}',
    ],
)
def test_what_a_server_thinks_counts_as_its_answer(event: bytes) -> None:
    start, end = b'data: {"choices":[{"delta":{"content":""}}]}\n\n', b"data: [DONE]\n\n"
    reply = read_stream(1.0, [(2.0, start), (3.0, b"data: " + event + b"\n\n"), (4.0, end)])
    assert (reply.arrivals_s, reply.text, reply.output_tokens) == ((3.0,), "a", 1)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (EVENTS[:2], "broke off"),
        ((b'data: {"error": {"message": "worker lost"}}\n\n',), "worker lost"),
        ((b"data: [1]\n\n",), "not an event"),
        ((b"data: " + b'{"a":' * 10_000 + b"\n\n",), "not an event"),
        ((b"\x1b[2J",), "not a stream of events: \N{REPLACEMENT CHARACTER}.2J"),
        ((b"<html>", b"wait</html>"), "not a stream of events: <html>wait</html>"),
        ((EVENTS[1], EVENTS[2], b'data: {"usage":{"completion_tokens":-7}}\n\ndata: [DONE]\n\n'), "-7 of answer"),
        ((EVENTS[1], EVENTS[2], b'data: {"usage":{"prompt_tokens":900000000000}}\n\ndata: [DONE]\n\n'), "900000000000"),
        ((b"data: [DONE]\n\n",), "no token"),
    ],
)
def test_an_answer_that_broke_off_is_a_failure(events: tuple[bytes, ...], said: str) -> None:
    with pytest.raises(AskFailed, match=said):
        read_stream(1.0, [(2.0, event) for event in events])


def test_an_answer_is_the_same_wherever_the_network_cuts_it() -> None:
    whole = (
        'data: {"choices":[{"text":"é"}]}\r\n\r\n: ping\n\ndata: {"choices":[{"text":"😀"}]}\n\ndata: [DONE]\n'.encode()
    )
    reply = read_stream(0.0, [(float(at), whole[at : at + 1]) for at in range(len(whole))])
    assert reply.text == "é😀"
    assert reply.arrivals_s == tuple(
        float(whole.index(b"\n", whole.index(word))) for word in ("é".encode(), "😀".encode())
    )
    assert read_stream(0.0, [(1.0, whole)]).text == "é😀"


async def test_ids_are_not_for_a_chat() -> None:
    target = OpenAITarget(OpenAIConfig("http://127.0.0.1:9", "x", chat=True))
    with pytest.raises(AskFailed, match="token ids"):
        await target.ask((1, 2), 1)
    await target.close()
