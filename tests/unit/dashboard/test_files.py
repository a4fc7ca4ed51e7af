"""The page is all there, and nothing of it comes from elsewhere."""

import re

from cli.top.screen import STAGES
from dashboard.files import INDEX, NAMES, load_files
from observability.stages import StageTimes

OURS = [name for name in NAMES if not name.startswith("uplot/")]


def test_every_file_that_is_named_is_one_of_ours():
    files = load_files()
    said = "".join(files[name].content.decode() for name in OURS)
    assert {f"/dashboard/{name}" for name in files} >= set(re.findall(r'(?:src|href)="(/[^"]+)"', said))
    assert {name for name in files if name.endswith(".js")} >= set(re.findall(r'from "\./([\w.]+)"', said))


def test_every_stage_has_a_name_and_a_colour_wherever_it_is_drawn():
    stages = {name for name, _ in StageTimes().by_name()} | {"unexplained", "second_unexplained"}
    files = load_files()
    drawn, style = files["requests.js"].content.decode(), files["style.css"].content.decode()
    assert stages | {"decode"} == set(re.findall(r'\["(\w+)", "[\w ]+"\]', drawn.partition("];")[0]))
    for stage in stages:
        assert re.search(rf"(^|}} |, )\.s-{stage}[ ,]", style, re.M), stage
        assert re.search(rf"\.stage (\.track i)?\.s-{stage}[ ,]", style), stage
    assert stages == set(STAGES)


def test_nothing_comes_from_elsewhere():
    for name in OURS:
        text = load_files()[name].content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|url\(|innerHTML|document\.write|eval\(", text), name


def test_the_page_has_nothing_that_its_policy_forbids():
    html = load_files()[INDEX].content.decode()
    assert "style=" not in html
    assert "<style" not in html
    assert not re.findall(r"<script(?![^>]*src=)", html)
    assert not re.findall(r"\son\w+=", html)


def test_the_library_has_its_licence_and_version_beside_it():
    from importlib import resources

    folder = resources.files("dashboard") / "page" / "uplot"
    assert "MIT License" in (folder / "LICENSE").read_text()
    assert "1.6.32" in (folder / "VERSION").read_text()
    assert b"1.6.32" in load_files()["uplot/uPlot.iife.min.js"].content
