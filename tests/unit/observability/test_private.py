"""What an error may say in a log: what is ours or the system's, never what may repeat a user."""

import io
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from contracts.errors import InvalidRequest, ModelNotFound, WorkerLost
from observability.log import LineFormatter, configure_logging, get_logger
from observability.private import private_traceback, reason

MARKER = "ZAUNKOENIG4711"
ROOT = Path(__file__).resolve().parents[3]


def caught(make) -> BaseException:
    try:
        make()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def chained():
    try:
        int(MARKER)
    except ValueError as error:
        raise InvalidRequest("prompt", MARKER, "must be a number") from error


def during():
    try:
        {}[MARKER]
    except KeyError:
        raise WorkerLost("10.0.0.1:5: gone")  # noqa: B904


def grouped():
    raise ExceptionGroup(MARKER, [ValueError(MARKER), ExceptionGroup("x", [KeyError(MARKER), OSError(2, "no file")])])


REPEATING = [
    ValueError(MARKER),
    KeyError(MARKER),
    UnicodeEncodeError("ascii", MARKER, 0, 1, MARKER),
    type("TemplateError", (Exception,), {})(MARKER),
    InvalidRequest("prompt", MARKER, "must be short"),
    InvalidRequest(MARKER, 1, "is not a field"),
    ModelNotFound(MARKER, ("tiny",)),
]


@pytest.mark.parametrize("error", REPEATING, ids=lambda error: type(error).__name__)
def test_what_may_repeat_a_user_says_its_class_alone(error):
    assert reason(error) == type(error).__name__
    assert MARKER not in private_traceback(error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorkerLost("10.0.0.1:5: gone"), "10.0.0.1:5: gone"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (
            RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        ),
        (MemoryError(), "MemoryError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_ours_or_the_systems_is_said(error, said):
    assert reason(error) == said


@pytest.mark.parametrize("make", [chained, during, grouped])
def test_a_traceback_has_every_place_and_class_and_no_words_of_a_user(make):
    error = caught(make)
    text = private_traceback(error)
    assert MARKER not in text
    assert f"in {make.__name__}" in text and type(error).__name__ in text
    if make is chained:
        assert "ValueError\n" in text and "direct cause" in text
    if make is during:
        assert "KeyError\n" in text and "During handling" in text and "WorkerLost: 10.0.0.1:5: gone" in text
    if make is grouped:
        assert all(name in text for name in ("ValueError", "KeyError", "no file"))


def written(log_it, *, private: bool) -> str:
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure_logging("test", "debug", stream, private=private)
        log_it()
    finally:
        for handler in list(root.handlers):
            root.removeHandler(handler)
        for handler in before:
            root.addHandler(handler)
        root.setLevel(level)
    return stream.getvalue()


def everything():
    error = caught(chained)
    get_logger("a").warning("refused", reason=error)
    get_logger("a").error("failed", error, reason=error)
    logging.getLogger("b").warning("%s failed: %s", "it", error)
    logging.getLogger("b").error("failed", exc_info=error)
    logging.getLogger("b").warning("%(x)s", {"x": 1})
    logging.getLogger("b").warning("100 %")


def test_every_way_to_log_an_error_is_private_unless_told_otherwise():
    quiet, loud = written(everything, private=True), written(everything, private=False)
    assert MARKER not in quiet
    assert quiet.count("InvalidRequest") >= 4
    assert loud.count(MARKER) >= 4
    assert quiet.count("\n") == loud.count("\n") == 6


def test_what_a_peer_sent_is_not_repeated_by_a_library_that_cannot_read_it():
    """gRPC does so with metadata, where API keys are."""

    def raw():
        for given in (MARKER.encode(), bytearray(MARKER, "ascii")):
            logging.getLogger("grpc._cython.cygrpc").error("Invalid encoding on %s", given)
            logging.getLogger("other").error("Invalid encoding on %(it)s", {"it": given})

    assert written(raw, private=True).count(f"Invalid encoding on {len(MARKER)} bytes") == 4
    assert MARKER in written(raw, private=False)


def test_a_line_is_one_line_whatever_an_error_says():
    record = logging.LogRecord("n", logging.ERROR, __file__, 1, "%s", (OSError(5, "two\nlines"),), None)
    assert "\n" not in LineFormatter("test").format(record)


CRASHES = {
    "main": "raise ValueError(MARKER)",
    "thread": "threading.Thread(target=wrong, args=(MARKER,)).start()",
    "task": """
        async def wrong():
            int(MARKER)
        task = asyncio.ensure_future(wrong())
        await asyncio.sleep(0)
        del task
    """,
    "callback": "asyncio.get_running_loop().call_soon(wrong, MARKER); await asyncio.sleep(0.01)",
    "callback with its arguments": (
        "asyncio.get_running_loop().call_soon(functools.partial(wrong, MARKER)); await asyncio.sleep(0.01)"
    ),
    "finaliser": """
        class Wrong:
            def __del__(self):
                int(MARKER)
        Wrong()
    """,
}


@pytest.mark.parametrize("where", CRASHES)
def test_a_process_that_crashes_says_where_and_not_what(tmp_path, where):
    script = tmp_path / "crash.py"
    body = textwrap.indent(textwrap.dedent(CRASHES[where]), "    ")
    script.write_text(
        "import asyncio, functools, gc, sys, threading\n"
        "from observability import lastwords\n"
        "from observability.log import configure_logging\n"
        "from rpc.process import run_process\n"
        "MARKER = 'ZAUNKOENIG' + '4711'\n"
        "def wrong(text):\n    int(text)\n"
        "configure_logging('crash', 'debug')\n"
        "lastwords.install()\n"
        f"async def main():\n{body}\n    gc.collect()\n"
        "sys.exit(run_process(main))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == (1 if where == "main" else 0)
    assert "ValueError" in done.stderr and "crash.py" in done.stderr
    assert MARKER not in done.stderr + done.stdout
    assert all(" ERROR crash " in line or " DEBUG crash " in line for line in done.stderr.splitlines()), done.stderr
