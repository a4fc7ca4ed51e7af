"""The dashboard in a browser, where all names are markup, and where there is no room to watch."""

from contextlib import AsyncExitStack

from contracts.worker import WorkerKind
from dashboard.feed import MOST_WATCHERS
from dashboard.files import EVENTS_PATH, PAGE
from tests.browser import chromium, require_chromium
from tests.integration.router_harness import router_config, running_router

MARKUP = "<img src=x onerror=\"document.title='run'\">${1}</b>"


async def test_names_are_words_and_who_finds_no_room_is_told_and_comes_again(tmp_path):
    require_chromium()
    async with (
        running_router(router_config(tmp_path, model_name=MARKUP)) as running,
        AsyncExitStack() as crowd,
        chromium() as browser,
    ):
        await running.cluster.add(WorkerKind.PREFILL, f"p{MARKUP}")
        await running.cluster.add(WorkerKind.DECODE, f"d{MARKUP}")
        answer = await running.http.post(
            "/v1/completions",
            json={"model": MARKUP, "prompt": [5, 6, 7], "max_tokens": 4},
            headers={"X-Request-Id": MARKUP},
        )
        assert answer.status_code == 200, answer.text
        for _ in range(MOST_WATCHERS):
            await crowd.enter_async_context(running.http.stream("GET", EVENTS_PATH))
        page = await browser.new_page()
        complaints = []
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(running.url + PAGE)
        await page.wait_for_function(
            "document.getElementById('link').textContent === 'too many watchers'", timeout=5000
        )
        await crowd.aclose()
        await page.wait_for_selector("button.request", timeout=8000)
        await page.locator("button.request").first.click()
        assert await page.inner_text("#story-title") == MARKUP
        assert f"Read by p{MARKUP}, written by d{MARKUP}" in await page.inner_text("#story")
        assert await page.inner_text("#model") == MARKUP
        assert MARKUP in await page.inner_text(".worker header")
        assert await page.evaluate("document.querySelectorAll('main img, aside img').length") == 0
        assert await page.title() == f"{MARKUP} · Diptych"
        assert [said for said in complaints if "429" not in said] == []
