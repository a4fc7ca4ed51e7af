"""What operators read names only what there is: flags, metrics, ports, alerts, pages; docs/flags.md is what commands say."""

import re
import runpy
import sys

import pytest
from tree import ROOT

from observability.names import ALL

OPERATIONS = ROOT / "docs" / "operations.md"
FLAGS = ROOT / "docs" / "flags.md"
PAGES = (OPERATIONS, FLAGS, ROOT / "deploy" / "README.md")
RULES = ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml"
OTHERS_FLAGS = {"--scale"}  # docker compose's


@pytest.fixture(scope="module")
def generator():
    """tools/gen_flags.py, which puts the repository on sys.path."""
    path = list(sys.path)
    yield runpy.run_path(str(ROOT / "tools" / "gen_flags.py"))
    sys.path[:] = path


@pytest.fixture(scope="module")
def rows(generator):
    """Flags by command, as the page has them."""
    return {words: generator["rows_of"](command) for words, command in generator["commands"]()}


def test_the_page_of_flags_is_what_commands_say(generator):
    assert FLAGS.read_text(encoding="utf-8") == generator["render"](), "run make docs"


def test_every_flag_of_every_command_is_on_it(rows):
    text = FLAGS.read_text(encoding="utf-8")
    chapters = {part.split("\n", 1)[0]: part for part in text.split("\n## diptych ")[1:]}
    assert {"router", "prefill", "decode", "up", "model fetch", "key new", "generate", "bench serve"} <= set(rows)
    for words, options in rows.items():
        chapter = next(text for title, text in chapters.items() if words in title.split(" and "))
        assert options or words.startswith("bench"), words
        missing = [row.flag for row in options if f"`{row.flag}" not in chapter]
        assert not missing, f"{words}: {missing}"


def test_every_flag_says_what_it_does(rows):
    assert not [f"{words} {row.flag}" for words, options in rows.items() for row in options if len(row.what) < 5]


def test_numbers_that_a_flag_sets_are_not_among_those_that_none_sets(generator):
    given, text = generator["given_by_flags"](), generator["fixed"]()
    assert "drain_limit_s" in given["LifecycleConfig"] and "finish_share" not in given["LifecycleConfig"]
    assert "| `finish_share` |" in text and "| `lease_s` |" in text
    assert "| `drain_limit_s` |" not in text and "| `stall_weight` |" not in text


@pytest.mark.parametrize("page", [page for page in PAGES if page != FLAGS], ids=lambda page: page.parent.name)
def test_flags_that_are_named_are_flags(page, rows):
    known = {row.flag for options in rows.values() for row in options} | OTHERS_FLAGS
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")))
    assert sorted(named - known) == []


def test_metrics_that_are_named_are_metrics():
    named = set(re.findall(r"\bdiptych_(?!client\b)\w+", OPERATIONS.read_text(encoding="utf-8")))
    assert len(named) >= 5
    assert sorted(named - {metric.name for metric in ALL}) == []


def test_each_alert_has_its_line_and_its_severity():
    rules = re.findall(r"- alert: (\w+)\n(?:.*\n)*?        labels: \{severity: (\w+)\}", RULES.read_text())
    lines = re.findall(
        r"^\| \[(\w+)\]\(monitoring\.md#(\w+)\) \| (\w+) \| (.+) \|$", OPERATIONS.read_text(encoding="utf-8"), re.M
    )
    assert len(rules) >= 20
    assert [(name, severity) for name, _, severity, _ in lines] == rules
    for name, anchor, _, first in lines:
        assert anchor == name.lower()
        assert len(first.split()) >= 5, f"{name}: what to do first"


def anchors(text):
    """Of a page's headings, as renderers make them."""
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    assert len(links) >= 3
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {path}#{anchor}"


def test_compose_and_the_chart_have_the_ports_that_the_table_gives():
    table = OPERATIONS.read_text(encoding="utf-8").split("## Ports and firewalls")[1].split("\n## ")[0]
    said = {row.split("|")[3].strip() for row in table.splitlines() if row.startswith("| ")}
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    given = set(re.findall(r"--(?:http-|grpc-|kv-|metrics-)?port (\d+)", compose))
    assert len(given) >= 5
    assert given <= said
    values = (ROOT / "deploy" / "helm" / "diptych" / "values.yaml").read_text(encoding="utf-8")
    ports = set(re.findall(r"\w: (\d+)", re.findall(r"^ports: \{(.+)\}$", values, re.M)[0]))
    assert len(ports) >= 6
    assert ports <= said


def prefill_flop(parameters, layers, heads, head_size, tokens):
    """The page's formula, nothing cached."""
    return 2 * parameters * tokens + 2 * layers * heads * head_size * tokens**2


def queued(service_s, rate):
    """Mean TTFT of Poisson arrivals at one worker, as the page has it."""
    return service_s + rate * service_s**2 / (2 * (1 - rate * service_s))


def test_the_small_example_follows_from_the_formulas():
    text = OPERATIONS.read_text(encoding="utf-8").split("### SmolLM2-135M")[1].split("\n### ")[0]
    kv, weights, flop_s, bytes_s = 2 * 30 * 3 * 64 * 4, 134.5e6 * 4, 190e9, 24e9

    def step_ms(batch, context):
        return 1e3 * ((weights + batch * context * kv) / bytes_s + 2 * 134.5e6 * batch / flop_s)

    took_s = {tokens: prefill_flop(106.2e6, 30, 9, 64, tokens) / flop_s for tokens in (256, 512, 2048)}
    for said in (
        f"{kv // 1024} KiB",
        f"{256 * kv / 1e6:.1f} MB",
        f"| {took_s[256] * 1e3:.0f} ms |",
        f"| {took_s[512] * 1e3:.0f} ms |",
        f"| {took_s[2048]:.1f} s |",
        f"| {step_ms(1, 256):.0f} · {step_ms(4, 90):.0f} · {step_ms(32, 130):.0f} ms |",
        f"{queued(0.737, 1):.1f} s",
        f"three {queued(0.737, 2 / 3):.1f} s",
        f"four {queued(0.737, 1 / 2):.2f} s",
        f"{step_ms(0, 0):.0f} ms + {step_ms(1, 512) - step_ms(0, 0):.1f} ms",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    ("column", "bytes_s", "memory"), [(2, 0.8 * 3.35e12, 80e9), (3, 0.8 * 4.8e12, 141e9)], ids=["H100", "H200"]
)
def test_the_plan_follows_from_the_formulas(column, bytes_s, memory):
    text = OPERATIONS.read_text(encoding="utf-8").split("### Llama-3.1-8B")[1].split("\n### ")[0]
    cells = {row.split("|")[1].strip(): row.split("|")[column].strip() for row in text.splitlines() if "|" in row}
    kv, weights, context, flop_s = 2 * 32 * 8 * 128 * 2, 16.06e9, 4096 + 256 // 2, 989e12 / 2
    took_s = prefill_flop(6.98e9, 32, 32, 128, 4096) / flop_s
    rate = 0.7 / took_s

    def step_s(batch):
        return (weights + batch * context * kv) / bytes_s

    if column == 2:  # the other says "the same"
        wait_ms, network = queued(took_s, rate) * 1e3, kv * 4096 / took_s / 1e9
        assert cells["prefill: `T_p`, tokens/s, requests/s at `R·T_p` = 0.7, mean TTFT there"] == (
            f"{took_s * 1e3:.0f} ms, {round(4096 / took_s, -2):,.0f}, {rate:.1f}, {wait_ms:.0f} ms"
        )
        assert f"{4096 * kv / 1e6:.0f} MB; {network:.1f} GB/s = {8 * network:.0f} Gb/s" in text
    steps = " · ".join(f"{step_s(batch) * 1e3:.2g}" for batch in (16, 64, 128))
    assert cells["decode: step at batch 16 · 64 · 128"] == f"{steps} ms"
    assert cells["contexts of 4,224 tokens that fit"] == f"{(0.9 * memory - weights) / kv / context:.0f}"
    tokens_s = 64 / step_s(64)
    assert cells["at batch 64: tokens/s, requests/s"] == f"{round(tokens_s, -1):,.0f}, {tokens_s / 256:.3g}"
    assert cells["prefill : decode at that load"] == f"{tokens_s / 256 / rate:.1f} : 1"
