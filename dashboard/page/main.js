// The page: what comes from the stream goes to the tiles, the charts, the pools and the requests.

import { Charts } from "./charts.js";
import { Pools } from "./pools.js";
import { Requests } from "./requests.js";
import { Stream } from "./stream.js";
import { clock, count, duration, make, span } from "./words.js";

const $ = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];
const FACES = [
  ["ttft", "First token", "p50 · p99"], ["itl", "Between tokens", "p50 · p99"], ["handoff", "Hand-off", "p50 · p99"], ["unexplained", "Unexplained, first token", "p50 · p99"],
  ["tokens", "Tokens a second", ""], ["good", "Within limits", ""], ["load", "Running", ""],
];
const tiles = Object.fromEntries(FACES.map(([id, title, hint]) => {
  const value = make("b", {}, "–"), note = make("small", {}, hint);
  $("tiles").append(make("div", { class: "tile card", id: `tile-${id}` }, make("span", {}, title), value, note));
  return [id, { value, note, root: value.parentElement }];
}));

let charts = null, title = null, paused = false, last = null;
const recent = []; // the last ten windows
const pools = new Pools({ prefill: $("prefill"), decode: $("decode") }, { prefill: $("prefill-sum"), decode: $("decode-sum") });
const requests = new Requests($("list"), $("legend"), $("story"), { recent: $("tab-recent"), slowest: $("tab-slowest"), failed: $("tab-failed") }, $("held"));

function pair(id, spread, limit) {
  const { value, root } = tiles[id];
  value.textContent = spread ? `${duration(spread[0])}` : "–";
  if (spread) value.append(make("i", {}, ` ${duration(spread[2])}`));
  root.classList.toggle("over", Boolean(spread && limit !== undefined && spread[2] > limit));
}

function now(window) {
  const limits = title.limits;
  pair("ttft", window.ttft, limits.ttft);
  pair("itl", window.itl, limits.itl);
  pair("handoff", window.handoff, limits.itl);
  pair("unexplained", window.unexplained);
  const second = window.second_unexplained;
  tiles.unexplained.note.textContent = second ? `token 2: ${duration(second[0])} · ${duration(second[2])}` : "p50 · p99";
  const sum = (name) => recent.reduce((total, w) => total + (w[name] ?? 0), 0);
  const finished = sum("finished"), good = sum("good"), judged = finished - sum("excused"), seconds = Math.max(1, recent.length);
  tiles.tokens.value.textContent = count(sum("tokens") / seconds);
  tiles.tokens.note.textContent = `${count(finished / seconds)} requests/s`;
  tiles.good.value.textContent = judged ? `${Math.floor((good / judged) * 100)} %` : "–";
  tiles.good.note.textContent = judged ? `goodput ${count(good / seconds)}/s` : "no request in 10 s";
  tiles.good.root.classList.toggle("over", judged > 0 && good / judged < 0.9);
  tiles.load.value.textContent = count(window.running ?? 0);
  tiles.load.note.textContent = `${count(window.waiting ?? 0)} waiting`;
}

function trouble(workers, troubles) {
  const bad = workers.filter((worker) => worker.state !== "ready" && worker.state !== "starting");
  const said = bad.map((worker) => `${worker.id} is ${{ suspect: "lost or restarting", gone: "gone", silent: "silent" }[worker.state] ?? worker.state}`).concat(troubles).join(" · ");
  if ($("trouble").textContent !== said) $("trouble").textContent = said;
  $("trouble").hidden = !said;
}

function draw() {
  if (paused || last === null) return;
  now(last.window);
  pools.show(last.workers ?? [], last.window.t);
  trouble(last.workers ?? [], last.troubles ?? []);
  $("num-failed").textContent = requests.lists.failed.length || "";
  if (!document.hidden) requests.refresh();
}

const stream = new Stream({
  snapshot(said) {
    title = said;
    $("gate").hidden = true;
    $("board").hidden = false;
    $("model").textContent = said.model;
    document.title = `${said.model} · Diptych`;
    $("about").textContent = `Diptych ${said.version} · this router is up since ${clock(said.since)} · percentiles are of ${said.look_s} s`;
    charts ??= new Charts($("charts"));
    charts.begin(said.windows ?? [], said.limits, !paused);
    recent.splice(0, recent.length, ...(said.windows ?? []).slice(-said.look_s));
    requests.begin(said);
    const window = recent.at(-1) ?? { t: Date.now() / 1000 };
    last = { window, workers: said.workers, troubles: said.troubles };
    draw();
  },
  frame(said) {
    recent.push(said.window);
    if (recent.length > title.look_s) recent.shift();
    requests.take(said);
    last = said;
    charts.push(said.window, !paused && !document.hidden);
    draw();
  },
  state(name) {
    $("link").textContent = name;
    $("link").dataset.state = name === "live" ? "live" : "away";
    $("board").classList.toggle("stale", name !== "live"); // what is shown is what was
  },
  locked(why) {
    $("gate").hidden = false;
    $("board").hidden = true;
    $("refusal").textContent = why || "";
    $("key").value = "";
    $("key").focus();
  },
});

$("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  stream.useKey($("key").value.trim());
});

function pause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused) {
    draw();
    charts?.draw();
  }
}

function dress(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  charts?.recolour();
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(localStorage.getItem("diptych.theme") ?? "auto") + 1) % THEMES.length];
  localStorage.setItem("diptych.theme", theme);
  dress(theme);
}

$("pause").addEventListener("click", pause);
$("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts?.recolour());
document.addEventListener("visibilitychange", () => {
  draw();
  if (!document.hidden && !paused) charts?.draw();
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const list = { 1: "recent", 2: "slowest", 3: "failed" }[event.key];
  if (list) {
    requests.select(list);
    requests.tabs[list].focus();
  } else if (event.key === "p" && !$("board").hidden) pause();
  else if (event.key === "t") nextTheme();
});

dress(THEMES.includes(localStorage.getItem("diptych.theme")) ? localStorage.getItem("diptych.theme") : "auto");
stream.run();
