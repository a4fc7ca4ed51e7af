"""The dashboard in a browser: it loads clean, moves under load, sees a worker killed, and serves keys, keyboards and phones."""

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from dashboard.files import EVENTS_PATH, PAGE
from dashboard.slo import SloConfig
from router.config import AccessConfig
from router.keys import hash_of, new_key
from rpc.server import ServerConfig
from tests.browser import chromium, require_chromium
from tests.integration.router_harness import MODEL, router_config, running_router

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = new_key()
PIXELS = "() => [...document.querySelectorAll('canvas')].map((c) => c.toDataURL())"
SHOWN = "#board:not([hidden])"
LOST = "[data-id=d1]:not([data-state=ready])"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    """One for all: each test has a context of its own."""
    require_chromium()
    async with chromium() as browser:
        yield browser


@asynccontextmanager
async def opened(browser, running, **options):
    """The page, and all that the browser complains of, which must be nothing."""
    context = await browser.new_context(**options)
    page = await context.new_page()
    complaints = []
    page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    elsewhere = []
    page.on("request", lambda request: None if request.url.startswith(running.url) else elsewhere.append(request.url))
    await page.goto(running.url + PAGE)
    try:
        yield page
        assert complaints == []
        assert elsewhere == []
    finally:
        await context.close()


async def ask(running, number: int, **more) -> None:
    bodies = [{"model": MODEL, "prompt": [5, 6, 7 + i], "max_tokens": 6, **more} for i in range(number)]
    await asyncio.gather(*(running.http.post("/v1/completions", json=body) for body in bodies))


async def test_it_loads_moves_under_load_and_sees_a_killed_worker(browser, tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        _, decode = await running.cluster.pools(1, 2)
        async with opened(browser, running) as page:
            await page.wait_for_selector(SHOWN)
            await page.wait_for_selector("canvas >> nth=3")
            before = await page.evaluate(PIXELS)
            await ask(running, 5)
            await page.wait_for_selector("button.request >> nth=4", timeout=5000)
            after = await page.evaluate(PIXELS)
            assert [a != b for a, b in zip(before, after, strict=True)] == [True] * 4
            assert "ms" in await page.inner_text("#tile-ttft b")
            assert await page.inner_text("#decode-sum") == "2 of 2 ready"
            killed_at = time.monotonic()
            await decode[1].stop()
            await page.wait_for_selector(LOST, timeout=5000)
            assert time.monotonic() - killed_at < 3
            assert "d1" in await page.inner_text("#trouble")


async def test_hands_on_the_keyboard_alone(browser, tmp_path):
    async with running_router(router_config(tmp_path, slo=SloConfig(ttft_s=1e-5))) as running:
        await running.cluster.pools(1, 1)
        await ask(running, 3)
        await ask(running, 1, max_tokens=100_000)  # refused
        async with opened(browser, running) as page:
            await page.wait_for_selector("button.request >> nth=3", timeout=5000)
            await page.keyboard.press("3")
            assert await page.locator("#tab-failed").get_attribute("aria-selected") == "true"
            assert await page.locator("button.request").count() == 1
            await page.keyboard.press("ArrowRight")  # around
            assert await page.evaluate("document.activeElement.id") == "tab-recent"
            await page.keyboard.press("ArrowDown")  # from its tab into the list
            assert await page.evaluate("document.activeElement === document.querySelector('button.request')")
            await page.keyboard.press("ArrowDown")
            number = await page.evaluate("document.activeElement.dataset.n")
            await ask(running, 2)  # the list does not move away from under the keyboard
            await page.wait_for_selector("#held:not([hidden])", timeout=5000)
            assert "2 newer" in await page.inner_text("#held")
            assert await page.locator("button.request").count() == 4
            assert await page.evaluate("document.activeElement.dataset.n") == number
            await page.keyboard.press("Enter")
            story = await page.inner_text("#story")
            assert "prefill queue" in story
            assert "Read by p0, written by d0" in story
            assert re.search(r"over a limit: first token [\d.]+ m?s of 0.01 ms$", story, re.M)
            await page.keyboard.press("Escape")
            assert await page.locator("#story").is_hidden()
            assert await page.evaluate("document.activeElement.dataset.n") == number
            assert await page.locator("button.request").count() == 6  # its closing drew what was newer
            await page.keyboard.press("p")
            assert await page.inner_text("#pause") == "Go on"


async def test_a_phone_in_either_light(browser, tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        await ask(running, 2)
        async with opened(browser, running, viewport={"width": 360, "height": 740}) as page:
            await page.wait_for_selector("button.request", timeout=5000)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360
            await page.locator("button.request").first.click()
            box = await page.locator("#story").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                assert (await page.evaluate(BRIGHTNESS) > 200) == (scheme == "light")
            await page.emulate_media(color_scheme="light")
            await page.keyboard.press("Escape")
            await page.click("#theme")  # light
            await page.click("#theme")  # dark, whatever the system says
            assert await page.evaluate(BRIGHTNESS) < 60


BRIGHTNESS = "() => Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"


async def test_a_key_is_asked_for_and_goes_into_no_address(browser, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "alice", "hash": hash_of(KEY)}]}))
    access = AccessConfig(api_keys=keys, workers=ServerConfig(port=0))
    async with running_router(router_config(tmp_path, access=access)) as running:
        context = await browser.new_context()
        page = await context.new_page()
        addresses = []
        page.on("request", lambda request: addresses.append(request.url))
        await page.goto(running.url + PAGE)
        await page.wait_for_selector("#gate:not([hidden])")
        assert await page.locator("#board").is_hidden()
        await page.keyboard.type("sk-diptych-wrong")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#refusal:not(:empty)")
        begun, over = [], []
        page.on("request", lambda request: begun.append(request) if request.url.endswith(EVENTS_PATH) else None)
        page.on("requestfailed", lambda request: over.append(request))
        await page.keyboard.type(KEY)
        await page.evaluate("for (let i = 0; i < 5; i++) document.getElementById('gate').requestSubmit()")
        await page.wait_for_selector(SHOWN)
        assert len(begun) - len(over) == 1, "impatience opens one stream"
        await page.reload()
        await page.wait_for_selector(SHOWN)  # this tab remembers
        assert not [address for address in addresses if KEY in address]
        assert await page.evaluate("Object.values(localStorage).length") == 0
        other = await context.new_page()
        await other.goto(running.url + PAGE)
        await other.wait_for_selector("#gate:not([hidden])")  # another does not


async def test_it_comes_again_when_the_router_does(browser, tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        port = running.ports.http
        context = await browser.new_context()
        page = await context.new_page()
        await page.clock.install()
        await page.goto(running.url + PAGE)
        await page.wait_for_selector("#link[data-state=live]")
        await page.clock.fast_forward(6000)  # without a word
        await page.wait_for_selector("#link[data-state=away]")
        await page.wait_for_selector("#link[data-state=live]")
    await page.wait_for_selector("#link[data-state=away]")
    assert await page.evaluate("document.getElementById('board').classList.contains('stale')")
    config = router_config(tmp_path)
    async with running_router(replace(config, http=replace(config.http, port=port))):
        await page.wait_for_selector("#link[data-state=live]", timeout=8000)
