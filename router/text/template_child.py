"""The process that renders chat templates: one conversation at a time, within bounds that the kernel keeps.

    stdin: length, {source, variables, max_chars} ──▶ stdout: length, {text} | {refusal}        end of stdin ──▶ exit

A template that computes for longer than `cpu_s` ends the process (SIGPROF, whose default is death, also in the middle of C
code), one that takes more memory than the process may have is refused. It needs nobody to watch it: a router that was
killed leaves at most one such rendering behind. Lengths are 8 bytes, big-endian. Does not know sockets or requests.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import BinaryIO

import jinja2

from observability import lastwords
from observability.log import configure_logging
from router.text.chat_template import TemplateRefusal, compiled, rendered

LENGTH_BYTES = 8
_MAX_COMPILED = 16  # templates; a model has one or two, requests may bring their own


def serve(source: BinaryIO, sink: BinaryIO, cpu_s: float) -> None:
    """Answer requests until there are no more, each within `cpu_s`."""
    templates: dict[str, jinja2.Template] = {}
    while head := source.read(LENGTH_BYTES):
        body = source.read(int.from_bytes(head, "big"))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = json.dumps(_answer(body, templates)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sink.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        sink.flush()


def _answer(body: bytes, templates: dict[str, jinja2.Template]) -> dict[str, str]:
    try:
        request = json.loads(body)
        source, variables, max_chars = request["source"], request["variables"], request["max_chars"]
        if source not in templates:
            if len(templates) >= _MAX_COMPILED:
                templates.clear()
            templates[source] = compiled(source)
        return {"text": rendered(templates[source], variables, max_chars)}
    except TemplateRefusal as refusal:
        return {"refusal": str(refusal)}
    except (MemoryError, RecursionError) as error:
        return {"refusal": f"it needs too much: {type(error).__name__}"}


def main() -> None:
    """Take the bounds on memory and time from the command line, then serve stdin and stdout."""
    configure_logging("template", "warning")
    lastwords.install()
    max_memory_bytes, cpu_s = int(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the router's; we end when it does
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS does not keep it
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    serve(sys.stdin.buffer, sys.stdout.buffer, cpu_s)


if __name__ == "__main__":
    main()
