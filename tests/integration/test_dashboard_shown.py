"""What the page shows is what the router's events say, to the last number, and `diptych top` shows the same; nothing of it is
hard to read. The events are written down here, so that every number has one place where it may come from.
"""

import asyncio
import io
import re
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from msgspec.structs import replace
from rich.console import Console

from cli.top.screen import STAGES as COLOURS
from cli.top.screen import Room, Screen
from dashboard.files import EVENTS_PATH, INDEX, PAGE, load_files
from dashboard.frames import (
    DecisionRow,
    Frame,
    HandoffRow,
    Limits,
    RequestRow,
    Snapshot,
    Spread,
    Window,
    WorkerRow,
    event,
)
from tests.browser import chromium, require_chromium

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERE = "http://router.test"
T = 1_800_000_000.0
STATES = ("ready", "starting", "draining", "silent", "suspect", "stalled", "gone")

OLD = Window(T - 1, tokens=90_000, finished=9_000, good=9_000)  # too old for what is said of the last two seconds
# Of two seconds; each number is there once. Of 602 requests 403 are judged, 401 of them within limits.
EARLIER = Window(
    T, Spread(1.11, 2.11, 3.11), Spread(0.11, 0.12, 0.13), tokens=1000, finished=300, good=201, excused=99, running=9
)
LAST = Window(
    t=T + 1,
    ttft=Spread(41.1, 42.2, 43.3),
    itl=Spread(11.1, 12.2, 13.3),
    handoff=Spread(5.1, 6.2, 7.3),
    unexplained=Spread(0.31, 0.42, 0.53),
    second_unexplained=Spread(0.64, 0.75, 0.86),
    tokens=3000,
    finished=302,
    failed=1,
    good=200,
    excused=100,
    running=7,
    waiting=5,
)
DECODE = WorkerRow(
    "d0",
    "decode",
    "suspect",
    int(T * 1000) - 3_599_000,
    "10.0.0.7:9001",
    running=3,
    waiting=2,
    queued_tokens=77,
    slots=16,
    kv=0.62,
    connectors=("shm", "tcp"),
    step_ms=8.5,
)
PREFILL = WorkerRow("p0", "prefill", "ready", int(T * 1000) - 60_000, kv=0.25, prefill_tokens_per_s=4321.0)
STAGES = {
    "receive": 1.0,
    "admission": 2.0,
    "tokenise": 3.0,
    "route": 4.0,
    "prefill_queue": 5.0,
    "prefill_compute": 20.0,
    "notify": 6.0,
    "emit": 1.5,
    "transfer": 7.0,
    "commit": 8.0,
    "decode_queue": 9.0,
    "first_step": 10.0,
}
ONE = RequestRow(
    1,
    "the-slow-one",
    T,
    "length",
    "disaggregated",
    342.0,
    ok=True,
    good=False,
    ttft=43.0,
    gap=12.5,
    prompt_tokens=120,
    cached_tokens=16,
    output_tokens=22,
    stages=STAGES,
    unexplained=0.5,
    second=36.0,
    second_unexplained=2.0,
    handoff=HandoffRow("shm", 2_097_152, 3, 1, 4.25, 2.75, 0.49),
    prefill="p0",
    decode="d0",
    decision=DecisionRow("cheaper", 51.0, 62.0, 53.0),
    failures=1,
    moves=2,
    failed_handoffs=4,
)
QUICK = RequestRow(2, "quick", T + 1, "stop", "colocated", 12.0, ok=True, good=True, ttft=5.0, decode="d0")
LOST = RequestRow(3, "lost", T + 1, "UNAVAILABLE", "none", 900.0)
SNAPSHOT = Snapshot("austen", "9.9", T - 60, 2, Limits(ttft=42.5, itl=80.0), (OLD, EARLIER), (), (ONE,), (ONE,), ())
FRAME = Frame(LAST, (PREFILL, DECODE), (LOST, QUICK), (ONE, QUICK), (LOST,), ("no KV from p0 to d0 (refused)",))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    require_chromium()
    async with chromium() as browser:
        yield browser


@asynccontextmanager
async def shown(browser, *said, later=None, **options):
    """The page, which has heard all of this, and hears no more but what is `later`'s result, if somebody sets that."""
    files, answered = load_files(), []

    async def answer(route):
        path = urlsplit(route.request.url).path
        if path != EVENTS_PATH:
            file = files[INDEX if path == PAGE else path.removeprefix(f"{PAGE}/")]
            await route.fulfill(content_type=file.media_type, body=file.content)
        elif len(answered) == (1 if later is None else 2):
            await route.abort()
        else:
            answered.append(path)
            heard = said if len(answered) == 1 else await later
            await route.fulfill(content_type="text/event-stream", body=b"".join(map(event, heard)))

    context = await browser.new_context(timezone_id="UTC", **options)
    page = await context.new_page()
    await page.route("**/*", answer)
    await page.goto(HERE + PAGE)
    await page.wait_for_selector("#link[data-state=away]")
    yield page
    await page.unroute_all(behavior="wait")
    await context.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(browser):
    """That has heard SNAPSHOT and FRAME."""
    async with shown(browser, SNAPSHOT, FRAME) as page:
        yield page


async def words(page, selector: str) -> str:
    return re.sub(r"\s+", " ", await page.inner_text(selector))


def on_terminal(*said, width=140, height=60) -> list[str]:
    screen, console = Screen(), Console(width=width, record=True, file=io.StringIO())
    for each in said:
        screen.take(each)
    console.print(screen.draw("live", Room(width, height)))
    return [re.sub(r"\s+", " ", line).strip() for line in console.export_text().splitlines()]


def line(lines: list[str], begins: str) -> str:
    (found,) = [text for text in lines if text.startswith(begins)]
    return found


async def test_tiles_and_terminal_say_the_same_numbers(page):
    lines = on_terminal(SNAPSHOT, FRAME)
    tiles = {name: await words(page, f"#tile-{name}") for name in ("ttft", "itl", "handoff", "unexplained")}
    assert "41.1 ms 43.3 ms" in tiles["ttft"]
    assert "11.1 ms 13.3 ms" in tiles["itl"]
    assert "5.1 ms 7.3 ms" in tiles["handoff"]
    assert "0.31 ms 0.53 ms" in tiles["unexplained"]
    assert "token 2: 0.64 ms · 0.86 ms" in tiles["unexplained"]
    over = await page.evaluate("[...document.querySelectorAll('.tile.over')].map((tile) => tile.id)")
    assert over == ["tile-ttft"]
    assert await words(page, "#tile-tokens") == "Tokens a second 2,000 301 requests/s"
    assert await words(page, "#tile-good") == "Within limits 99 % goodput 201/s"  # 99.5: it is not all
    assert await words(page, "#tile-load") == "Running 7 5 waiting"
    assert line(lines, "first token").startswith("first token 41.1 ms 42.2 ms 43.3 ms 42.5 ms")
    assert line(lines, "between tokens").startswith("between tokens 11.1 ms 12.2 ms 13.3 ms 80.0 ms")
    assert line(lines, "hand-off").startswith("hand-off 5.1 ms 6.2 ms 7.3 ms 80.0 ms")
    assert line(lines, "unexplained").startswith("unexplained 0.31 ms 0.42 ms 0.53 ms")
    assert line(lines, "before token 2").startswith("before token 2 0.64 ms 0.75 ms 0.86 ms")
    assert line(lines, "tokens/s").startswith("tokens/s 2000")
    assert line(lines, "requests/s") == "requests/s 301.0 7 running, 5 waiting"
    assert line(lines, "goodput/s") == "goodput/s 200.5 99% within limits"


INK = """() => Object.fromEntries([...document.querySelectorAll('figure')].map((figure) => {
  const canvas = figure.querySelector('canvas'), shades = {};
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const of = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  for (const name of ['--line-a', '--line-b', '--line-c', '--slo']) {
    const [r, g, b] = of(name).match(/[0-9a-f]{2}/gi).map((v) => parseInt(v, 16));
    shades[name] = [];
    for (let at = 0; at < data.length; at += 4)
      if (data[at + 3] > 200 && Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) < 12)
        shades[name].push(at >> 2);
  }
  return [figure.id.slice(6), Object.fromEntries(Object.entries(shades).map(([name, at]) => [name, { count: at.length,
    top: at.length ? Math.min(...at.map((i) => Math.floor(i / canvas.width))) / canvas.height : null }]))];
}))"""


async def test_charts_draw_every_line_where_its_value_is(browser):
    """Three seconds each way, so that there is a line; of a limit that is near, and of one that would flatten the rest."""
    windows = tuple(
        Window(
            T + n,
            Spread(10.0, 30.0, 60.0),
            Spread(2.0, 4.0, 8.0),
            Spread(1.0, 3.0, 9.0),
            tokens=100,
            finished=40,
            failed=10,
            good=20,
        )
        for n in range(40)
    )
    newest = Frame(Window(T + 40, Spread(11.5, 31.5, 61.5), Spread(2.5, 4.5, 8.5), Spread(1.5, 3.5, 9.5), tokens=130))
    said = Snapshot("austen", "9.9", T, 10, Limits(ttft=50.0, itl=500.0), windows)
    async with shown(browser, said, newest) as page:
        await page.wait_for_selector("canvas >> nth=3")
        ink = await page.evaluate(INK)
        legends = {name: await page.locator(f"#chart-{name} .u-value").all_inner_texts() for name in ink}
        limits = {name: await words(page, f"#chart-{name} .slo") for name in ink}
        described = await page.locator("#chart-ttft .plot").get_attribute("aria-label")
    for name, chart in ink.items():
        assert all(chart[f"--line-{which}"]["count"] > 50 for which in "abc"), (name, chart)
    for name in ("ttft", "itl", "handoff"):  # the higher the value, the nearer to the top
        low, middle, high = (ink[name][f"--line-{which}"]["top"] for which in "abc")
        assert low > middle + 0.05 > high + 0.1, name
    ttft = ink["ttft"]
    assert ttft["--line-b"]["top"] > ttft["--slo"]["top"] > ttft["--line-c"]["top"]  # 50 is between 30 and 60
    assert ink["itl"]["--slo"]["count"] == ink["handoff"]["--slo"]["count"] == 0
    failed, good, every = (ink["flow"][color]["top"] for color in ("--slo", "--line-a", "--line-c"))
    assert failed > good + 0.1 > every + 0.3  # a quarter, a half, all
    assert limits == {
        "ttft": "limit 50.0 ms",
        "itl": "limit 500 ms, far above ↑",
        "handoff": "limit 500 ms, far above ↑",
        "flow": "",
    }
    assert legends["ttft"][1:] == ["11.5 ms", "31.5 ms", "61.5 ms", "50.0 ms"]  # behind the time
    assert legends["itl"][1:4] == ["2.5 ms", "4.5 ms", "8.5 ms"]
    assert legends["handoff"][1:4] == ["1.5 ms", "3.5 ms", "9.5 ms"]
    assert legends["flow"][1:] == ["130", "0", "0", "0"]
    assert (
        described
        == "Time to first token over the last five minutes; now p50 11.5 ms, p90 31.5 ms, p99 61.5 ms, limit 50.0 ms"
    )


async def test_workers_are_told_in_full_and_trouble_is_called(page):
    lines = on_terminal(SNAPSHOT, FRAME)
    decode, prefill = await words(page, "[data-id=d0]"), await words(page, "[data-id=p0]")
    for said in (
        "lost?",
        "62 %",
        "3 / 16",
        "2 waiting, 77 tokens",
        "step 8.5 ms",
        "shm, tcp",
        f"{DECODE.epoch}, up 1 h 0 min",
        "10.0.0.7:9001",
    ):
        assert said in decode, (said, decode)
    assert "reads 4,321 tokens/s" in prefill
    assert await page.evaluate("document.querySelector('[data-id=d0] .meter i').style.width") == "62%"
    trouble = page.locator("#trouble[role=alert]")
    assert await trouble.is_visible()
    assert await trouble.inner_text() == "d0 is lost or restarting · no KV from p0 to d0 (refused)"
    assert "no KV from p0 to d0 (refused)" in "\n".join(lines)
    assert await page.get_by_role("article", name="d0").count() == 1
    sums = [await words(page, "#prefill-sum"), await words(page, "#decode-sum")]
    assert sums == ["1 of 1 ready", "0 of 1 ready"]
    row = line(lines, "d0 decode")
    assert row.startswith("d0 decode suspect 62% 3/16 2 77 tok")
    assert row.endswith(f"shm, tcp {DECODE.epoch}")


@pytest.mark.parametrize(
    ("width", "named"),
    [
        (80, "prefill compute/transfer/commit/decode queue/first step"),
        (
            140,
            "tokenise/route/prefill queue/prefill compute/notify/transfer/commit/decode queue/first step/unexplained",
        ),
    ],
)
async def test_the_terminal_names_the_stages_that_took_longest(width, named):
    assert line(on_terminal(SNAPSHOT, FRAME, width=width), "█") == " ".join(f"█ {name}" for name in named.split("/"))


async def test_the_terminal_draws_stages_to_scale_and_what_is_over_its_limit_red():
    screen, room = Screen(), Room(140)
    screen.take(replace(SNAPSHOT, windows=(EARLIER, LAST), slowest=()))
    said = Console(width=room.width).render(screen.draw(room=room))
    coloured = [(part.text, part.style.color.name) for part in said if part.style and part.style.color]
    assert [text.strip() for text, color in coloured if color == "red" and "ms" in text] == ["43.3 ms"]
    drawn = [(color, len(text)) for text, color in coloured if set(text) == {"█"}]
    assert [color for color, _ in drawn] == [
        color for color in (*map(COLOURS.get, STAGES), "red") if color in dict(drawn)
    ]
    times = {COLOURS[stage]: took for stage, took in STAGES.items()} | {"red": 2.5}
    scaled = {color: took / sum(times.values()) * room.bar for color, took in times.items()}
    assert {color: dict(drawn).get(color, 0) for color in scaled} == pytest.approx(scaled, abs=1)
    assert sum(dict(drawn).values()) == room.bar


async def test_a_request_is_drawn_by_stage_and_tells_its_story(page):
    rows = page.locator("button.request")
    assert [await row.get_attribute("data-n") for row in await rows.all()] == ["3", "2", "1"]
    assert [await row.get_attribute("data-state") for row in await rows.all()] == ["bad", "good", "late"]
    drawn = await page.evaluate("""[...document.querySelectorAll('button.request[data-n="1"] .bar i')].map(
        (i) => [i.className, Math.round(parseFloat(i.style.width) * 10) / 10])""")
    times = {**STAGES, "unexplained": 0.5, "second_unexplained": 2.0}
    order = [*list(STAGES)[:8], "unexplained", *list(STAGES)[8:], "second_unexplained"]
    whole = sum(times.values())
    assert drawn == [[f"s-{stage}", pytest.approx(times[stage] / whole * 100, abs=0.06)] for stage in order]
    for tab, expected in (("slowest", ["1", "2"]), ("failed", ["3"])):
        await page.click(f"#tab-{tab}")
        assert [await row.get_attribute("data-n") for row in await rows.all()] == expected, tab
    assert await words(page, "#num-failed") == "1"
    await page.click("#tab-slowest")
    await rows.first.click()
    story = await words(page, "#story")
    for said in (
        "the-slow-one",
        "Read by p0, written by d0. First token after 43.0 ms, the last after 342 ms.",
        "prefill queue 5.0 ms prefill 20.0 ms notify 6.0 ms emit 1.5 ms unexplained 0.50 ms transfer 7.0 ms",
        "decode the other 20 tokens 263 ms",
        "length, over a limit: first token 43.0 ms of 42.5 ms",
        "120 tokens, 16 of them cached",
        "22 tokens, one each 12.5 ms",
        "Unexplained 0.50 ms of 43.0 ms; of the 36.0 ms to the second token, 2.0 ms",
        "2.0 MiB by shm at 0.49 GB/s; 3 blocks sent, 1 there already; 4.3 ms busy, 2.8 ms exposed",
        "predicted to delay users least (predicted delay: two pools 51.0 ms, one worker 62.0 ms, came out 53.0 ms)",
        "1 attempt failed, 2 moves off draining workers, 4 hand-offs failed",
    ):
        assert said in story, (said, story)


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1), canvas.fillStyle = color, canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3]));
  const linear = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const up = (element) => (element ? [element, ...up(element.parentElement)] : []);
  const found = {}, walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility()) continue;
    seen++;
    const layers = up(element).reverse().map((each) => rgba(getComputedStyle(each).backgroundColor));
    const behind = layers.reduce((under, top) => over(top, under), [255, 255, 255]);
    const ink = rgba(getComputedStyle(element).color);
    ink[3] *= up(element).reduce((share, each) => share * Number(getComputedStyle(each).opacity), 1);
    const [high, low] = [luminance(over(ink, behind)), luminance(behind)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found[`${element.tagName}.${element.className}: ${text.slice(0, 20)}`] = ratio.toFixed(2);
  }
  return [seen, found];
}"""


async def test_every_word_can_be_read(browser):
    """WCAG's 4.5 to 1, of whatever state workers and requests are in, with a story open, and after the router has gone."""
    workers = tuple(WorkerRow(f"w-{state}", "decode", state, 1, kv=0.95) for state in STATES)
    frame = Frame(LAST, workers, (LOST, QUICK), None, (LOST,))
    async with shown(browser, SNAPSHOT, frame, viewport={"width": 1300, "height": 900}) as page:
        await page.click('button.request[data-n="1"]')
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            seen, unreadable = await page.evaluate(CONTRAST)
            assert seen > 150
            assert unreadable == {}, scheme


async def test_a_picture_that_is_held_holds_still_and_a_theme_that_is_chosen_stays(browser):
    """Held, also when the router ends its stream, as it does every few minutes, and all comes anew."""
    after = Window(T + 2, Spread(71.0, 72.0, 73.0), tokens=9)
    again = Snapshot("austen", "9.9", T - 60, 10, Limits(), (EARLIER, LAST), (PREFILL,), (QUICK,), (QUICK,), (LOST,))
    drawn = "...[...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
    picture = f"() => [document.querySelector('main').innerText, {drawn}]"
    later = asyncio.get_running_loop().create_future()
    async with shown(browser, SNAPSHOT, FRAME, later=later) as page:
        await page.keyboard.press("p")
        assert await page.locator("#pause").get_attribute("aria-pressed") == "true"
        before = await page.evaluate(picture)
        begun = page.expect_request_finished(lambda request: request.url.endswith(EVENTS_PATH))
        async with begun:
            later.set_result((again, Frame(after, (PREFILL,))))
        await page.wait_for_function("document.getElementById('link').dataset.state === 'away'")
        assert await page.evaluate(picture) == before
        await page.keyboard.press("p")
        held, now = before, await page.evaluate(picture)
        assert "71.0 ms" in now[0]
        assert [a != b for a, b in zip(held, now, strict=True)][:2] == [True, True]
        for tab, expected in (("slowest", "2"), ("failed", "3")):
            await page.click(f"#tab-{tab}")
            assert await page.locator("button.request").get_attribute("data-n") == expected
        for expected in ("light", "dark"):
            await page.keyboard.press("t")
            assert await page.evaluate("document.documentElement.dataset.theme") == expected
        await page.reload()
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
