"""A chat template is a program of whoever made the model: whatever it does, the router goes on, and in bounds."""

import asyncio
import os
import signal

import pytest

from contracts.errors import InvalidRequest, Unavailable
from router.text.chat_template import ChatTemplate, Conversation, Message
from router.text.template_processes import TemplateLimits, TemplateProcesses
from tests.integration.router_harness import MODEL
from tests.integration.test_openai_tools import config_with, running_router

GOOD = ChatTemplate("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", {})
TALK = Conversation((Message("user", "hi 🙂"), Message("assistant", "<b>\u2028")))
LIMITS = TemplateLimits(cpu_s=0.2, memory_bytes=256 * 2**20, text_chars=100_000)
HOSTILE = {
    "loops for ever": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "computes for more than 0.2 s",
    ),
    "computes in C": ("{{ '%1000000000d' % 1 }}", "limit|needs too much"),
    "computes a constant": ("{{ 2 ** (2 ** 33) }}", "limit|needs too much"),
    "takes memory": ("{{ ('x' * 10 ** 9) | length }}", "needs too much: MemoryError"),
    "takes memory slowly": (
        "{% set n = namespace(x=['a']) %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "needs too much|limit",
    ),
    "says too much": (
        "{% for i in range(9999) %}{{ messages[0].content * 99 }}{% endfor %}",
        "characters, which is the limit",
    ),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "reaches out": ("{{ cycler.__init__.__globals__.os.popen('id') }}", "unsafe|undefined|has no attribute"),
    "says half a character": ("{{ '\\ud800' }}", "surrogates not allowed"),
    "is no Python": ("{% break %}", "outside loop"),
    "fails an assertion": ("{{ 'abc' | truncate(-1) }}", "expected length"),
    "refuses": ("{{ raise_exception('only users') }}", "only users"),
}


@pytest.fixture
async def processes():
    processes = TemplateProcesses(LIMITS)
    yield processes
    await processes.close()


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_template_costs_its_request_and_no_more(processes, kind):
    source, says = HOSTILE[kind]
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=says) as caught:
            await processes.render(ChatTemplate(source, {}), TALK)
        assert caught.value.field == "messages"
        assert await processes.render(GOOD, TALK) == GOOD.render(TALK)


async def test_others_go_on_while_a_template_computes(processes):
    loops = ChatTemplate(HOSTILE["loops for ever"][0], {})
    slow = asyncio.create_task(processes.render(loops, TALK))
    await asyncio.sleep(0)
    for _ in range(20):
        assert await processes.render(GOOD, TALK) == GOOD.render(TALK)
    assert not slow.done()
    with pytest.raises(InvalidRequest):
        await slow


async def test_processes_that_somebody_has_stopped_are_replaced(processes):
    """Not after the half minute that a crowded machine is given, and not by a refusal of what is good."""
    await asyncio.gather(*(processes.render(GOOD, TALK) for _ in range(LIMITS.max_processes)))
    stopped = [child._process for child in processes._idle]
    assert len(stopped) == LIMITS.max_processes
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    async with asyncio.timeout(LIMITS.wall_s / 3):
        texts = await asyncio.gather(*(processes.render(GOOD, TALK) for _ in range(4)))
    assert texts == [GOOD.render(TALK)] * 4
    assert [process.poll() for process in stopped] == [-signal.SIGKILL] * 2
    assert all(child._process not in stopped for child in processes._idle)


async def test_what_is_nested_too_deeply_is_refused(processes):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        await processes.render(GOOD, Conversation((Message("user", "x"),), variables=(("deep", deep),)))
    assert await processes.render(GOOD, TALK) == GOOD.render(TALK)


async def test_many_at_once_each_get_their_own(processes):
    talks = [Conversation((Message("user", f"{i} " * (i * 100)),)) for i in range(40)]
    texts = await asyncio.gather(*(processes.render(GOOD, talk) for talk in talks))
    assert texts == [GOOD.render(talk) for talk in talks]
    assert len(processes._idle) <= LIMITS.max_processes


async def test_a_client_that_leaves_gets_nobody_elses_text(processes):
    for _ in range(20):
        leaving = asyncio.create_task(processes.render(GOOD, TALK))
        await asyncio.sleep(0.0001)
        leaving.cancel()
        other = Conversation((Message("user", "other"),))
        assert await processes.render(GOOD, other) == "user=other;"


async def test_a_process_that_is_killed_is_replaced(processes):
    await processes.render(GOOD, TALK)
    await asyncio.gather(processes.render(GOOD, TALK), processes.render(GOOD, TALK))
    assert len(processes._idle) == 2
    for child in processes._idle:
        os.kill(child._process.pid, signal.SIGKILL)
    for _ in range(3):  # nobody's conversation is at fault
        assert await processes.render(GOOD, TALK) == GOOD.render(TALK)


async def test_a_process_that_is_killed_in_the_middle_is_replaced(processes):
    await processes.render(GOOD, TALK)
    (child,) = processes._idle
    os.kill(child._process.pid, signal.SIGSTOP)
    rendering = asyncio.create_task(processes.render(GOOD, TALK))
    while processes._idle:
        await asyncio.sleep(0)
    os.kill(child._process.pid, signal.SIGKILL)
    assert await rendering == GOOD.render(TALK)


async def test_nothing_stays_when_it_is_closed_in_the_middle():
    processes = TemplateProcesses(TemplateLimits(cpu_s=60.0))
    await processes.render(GOOD, TALK)
    (child,) = processes._idle
    rendering = asyncio.create_task(processes.render(ChatTemplate(HOSTILE["loops for ever"][0], {}), TALK))
    while processes._idle:
        await asyncio.sleep(0.001)
    await processes.close()
    with pytest.raises(asyncio.CancelledError):
        await rendering
    assert child._process.returncode is not None


async def test_a_machine_without_processes_says_so(processes, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="cannot start a process"):
        await processes.render(GOOD, TALK)


async def test_a_router_goes_on_with_a_model_whose_template_never_ends(tmp_path):
    source = HOSTILE["loops for ever"][0]
    async with running_router(config_with(tmp_path, source)) as served:
        await served.cluster.pools(0, 1)
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        asked = asyncio.create_task(served.http.post("/v1/chat/completions", json=chat))
        others = 0
        while not asked.done():
            plain = await served.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2})
            assert plain.status_code == 200
            others += 1
        response = await asked
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert others > 2, "nobody waits for the template"
