"""`diptych top`: what it draws, what it says of what is wrong, and the flag that it is measured by."""

import io
import os
import re
import signal
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli.cluster import router_argv
from cli.commands.router import router as router_command
from cli.config import ClusterConfig, DoorOptions
from cli.main import one_line, run
from cli.ports import keep_port
from cli.top.screen import Room, Screen, shown_ms, sparkline
from cli.top.watch import Source, events
from contracts.errors import ConfigError
from dashboard.frames import WorkerRow, event
from dashboard.history import History, Instant, Title
from dashboard.slo import SloConfig
from tests.unit.dashboard.finished import finished


def drawn(screen: Screen, link: str = "live", width: int = 120, height: int = 50) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen.draw(link, Room(width, height)))
    return console.export_text()


def test_it_draws_what_came():
    history, screen = History(Title("austen", "9.9", 0.0), SloConfig(ttft_s=0.06)), Screen()
    screen.take(history.snapshot())
    history.ended(finished("a", prefill="p0", decode="d0"))
    history.ended(finished("b", outcome="UNAVAILABLE", ttft_s=None))
    workers = (
        WorkerRow("p0", "prefill", "ready", 1764493841123, kv=0.25),
        WorkerRow("[red]d0", "decode", "suspect", 1),
    )
    screen.take(history.tick(Instant(1.0, 1.0), workers, 3, 7))
    text = drawn(screen)
    for said in (
        "austen",
        "9.9",
        "50.0 ms",
        "60.0 ms",
        "p0 → d0",
        "unavailable",
        "25%",
        "suspect",
        "[red]d0",
        "3 running",
        "7 waiting",
        "goodput/s",
        "50% within limits",
        "slowest",
        "failed",
        "1764493841123",
    ):
        assert said in text
    assert "away for now" in drawn(screen, "away for now")


def test_the_last_requests_get_the_lines_that_are_left():
    history, screen = History(Title("austen", "9.9", 0.0), SloConfig()), Screen()
    for second in range(20):
        history.ended(finished(ttft_s=0.05 + second))
        history.tick(Instant(second, second), (), 0, 0)
    screen.take(history.snapshot())
    lines = [drawn(screen, height=height).rstrip().count("\n") + 1 for height in (24, 30, 60)]
    assert lines[0] <= 24 < lines[1] <= 30 < lines[2] <= 60


def test_on_eighty_columns_nothing_is_cut_off():
    history, screen = History(Title("austen", "9.9", 0.0), SloConfig()), Screen()
    workers = (
        WorkerRow("prefill-0", "prefill", "ready", 1764493841123, kv=1.0, slots=64, connectors=("shm", "tcp")),
        WorkerRow("decode-10", "decode", "draining", 1764493841123, queued_tokens=99_999, connectors=("shm", "tcp")),
    )
    for second in range(70):
        for outcome in ("stop", "INVALID_ARGUMENT"):
            history.ended(finished(outcome=outcome, ttft_s=0.3, prefill="prefill-0", decode="decode-10", at_s=second))
        history.tick(Instant(second, second), workers, 1, 1)
    screen.take(history.snapshot())
    for width in (80, 100, 140):
        text = drawn(screen, width=width)
        assert "…" not in text, text
        assert ("1764493841123" in text) == (width >= 100)


def test_no_word_of_a_router_is_obeyed_by_a_terminal():
    history, screen = History(Title("a\x1b[31mb\u202e", "9.9", 0.0), SloConfig()), Screen()
    history.ended(finished(prefill="\x1b[2Jx[/b]"))
    worker = WorkerRow("[/red]\x1b]0;w\x07", "decode", "ready", 1, connectors=("\x1b[5m",))
    screen.take(history.snapshot())
    screen.take(history.tick(Instant(1.0, 1.0), (worker,), 1, 1))
    console = Console(width=200, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen.draw("\x1b[7maway"))
    said = console.file.getvalue()
    assert "\x07" not in said and "\u202e" not in said and "[/red]" in said and "x[/b]" in said
    assert set(re.findall("\x1b.[0-9]*.?", said)) <= {"\x1b[0m", "\x1b[1m", "\x1b[2m"}, "only rich's own: bold and dim"


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (10, 5), (20, 3), (500, 500)])
def test_it_can_be_drawn_on_any_terminal(size):
    history, screen = History(Title("austen", "9.9", 0.0), SloConfig()), Screen()
    history.ended(finished(prefill="p0", decode="d0"))
    history.tick(Instant(1.0, 1.0), (WorkerRow("p0", "prefill", "ready", 1),), 1, 1)
    screen.take(history.snapshot())
    assert drawn(screen, width=size[0], height=size[1])


def test_without_a_terminal_it_says_what_to_do(capsys):
    assert run(["top", "--url", "http://127.0.0.1:9"]) == 2
    assert "--once" in capsys.readouterr().err


def test_who_is_told_to_stop_gives_the_terminal_back(monkeypatch, capsys):
    def told_to_stop(source):
        yield History(Title("austen", "9.9", 0.0), SloConfig()).snapshot()
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("cli.commands.top.events", told_to_stop)
    try:
        with pytest.raises(SystemExit) as left:
            run(["top"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == 143
    said = capsys.readouterr().out
    assert said.index("\x1b[?1049h") < said.index("austen") < said.index("\x1b[?1049l")


@pytest.fixture
def saying():
    """Starts a server that says something, without a length and so with a proper end, and goes; gives its address."""
    with ExitStack() as stack:

        def start(content):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"

            def answer():
                connection, _ = listener.accept()
                with connection, suppress(ConnectionError):
                    connection.recv(4096)
                    connection.sendall(head + content)

            thread = threading.Thread(target=answer)
            thread.start()
            stack.callback(thread.join)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


def test_half_an_event_of_a_router_that_dies_is_none(saying):
    whole = event(History(Title("austen", "9.9", 0.0), SloConfig()).snapshot())
    url = saying(whole + whole + whole[:30])
    assert [said.model for said in events(Source(url))] == ["austen", "austen"]


@pytest.mark.parametrize(
    "content", [b"data: " + b"x" * 4096, b"data: {}\n\n", b'data: {"a":' + b'{"a":' * 4096 + b"\n\n"]
)
def test_who_is_no_router_is_named(saying, monkeypatch, content):
    monkeypatch.setattr("cli.top.watch._MOST_CHARS", 1024)
    url = saying(content)
    with pytest.raises(ConfigError, match=url):
        list(events(Source(url)))


def test_nothing_at_all_can_be_drawn():
    assert "no worker" in drawn(Screen())


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=80))
def test_a_sparkline_has_a_block_a_value(values):
    line = sparkline(values)
    assert len(line) == len(values)
    assert all((char == " ") == (value is None) for char, value in zip(line, values, strict=True))
    known = [v for v in values if v]
    if known:
        assert line[values.index(max(known))] == "█"


def test_times_are_written_short():
    assert [shown_ms(v) for v in (None, 0.0, 0.126, 99.94, 345.6, 1234.0)] == [
        "–",
        "0 ms",
        "0.13 ms",
        "99.9 ms",
        "346 ms",
        "1.23 s",
    ]


def test_an_error_obeys_no_terminal():
    assert one_line("a\x1b[2Jb\n\x07 c\u202e") == "a\ufffd[2Jb \ufffd c\ufffd"


def test_who_is_not_there_is_one_line(capsys):
    kept = keep_port("127.0.0.1", 0, "--port")
    port = kept.port
    kept.release()
    assert run(["top", "--url", f"http://127.0.0.1:{port}", "--once"]) == 1
    assert str(port) in capsys.readouterr().err
    assert run(["top", "--url", "nonsense", "--once"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["ttft", "ttft:", "ttft:fast", "speed:1", ":5", "ttft:1:2"])
def test_a_limit_that_is_none_is_refused_with_its_value(value, capsys):
    assert run(["router", "--model", "/tmp", "--slo", value]) == 2
    assert value in capsys.readouterr().err


@pytest.mark.parametrize("value", ["ttft:0", "ttft:-1", "itl:inf", "itl:nan"])
def test_a_limit_that_nothing_can_keep_is_refused_by_name(value, capsys):
    assert run(["router", "--model", "/tmp", "--slo", value]) == 2
    assert f"slo.{value.split(':')[0]}" in capsys.readouterr().err


def test_up_hands_its_limits_on(tmp_path):
    slo = SloConfig(ttft_s=0.25, itl_s=None, e2e_s=12.5)
    port = keep_port("127.0.0.1", 0, "--port")
    argv = list(router_argv(ClusterConfig(model_dir=tmp_path, model_name="m", door=DoorOptions(slo=slo)), port, port))
    port.release()
    flags = argv[argv.index("cli") + 2 :]
    given = router_command.make_context("router", flags).params["slo"]
    assert SloConfig(**{f"{name}_s": limit for name, limit in given}) == slo
