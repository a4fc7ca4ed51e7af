// Requests, each as a waterfall of its stages; the story of the one that is chosen.

import { bytes, clock, count, duration, make } from "./words.js";

// In the order of time. What comes after the first token is behind the line.
const STAGES = [
  ["receive", "receive"], ["admission", "admission"], ["tokenise", "tokenise"], ["route", "route"], ["retry", "retry"], ["prefill_queue", "prefill queue"],
  ["prefill_compute", "prefill"], ["notify", "notify"], ["emit", "emit"], ["unexplained", "unexplained"],
  ["transfer", "transfer"], ["commit", "commit"], ["decode_queue", "decode queue"], ["first_step", "first step"], ["relay", "relay"], ["recover", "recover"],
  ["second_unexplained", "unexplained"], ["decode", "decode"],
];
const OUTCOMES = { CANCELLED: "left", RESOURCE_EXHAUSTED: "sent away", DEADLINE_EXCEEDED: "out of time", UNAVAILABLE: "unavailable", INVALID_ARGUMENT: "refused" };
const REASONS = {
  request: "the request asked for it", no_pair: "no pair of workers was there", handoffs_failed: "hand-offs failed before", always: "always, by configuration",
  never: "never two pools, by configuration", above: "the prompt is above the threshold", below: "the prompt is below the threshold", cheaper: "predicted to delay users least", explore: "to learn what it costs",
};

export function parts(request) {
  const stages = request.stages ?? {};
  const decode = request.ttft === undefined ? 0 : Math.max(0, request.e2e - request.ttft - (request.second ?? 0));
  const times = { ...stages, unexplained: request.unexplained ?? 0, second_unexplained: request.second_unexplained ?? 0, decode };
  return STAGES.map(([id, name]) => ({ id, name, ms: times[id] ?? 0 }));
}

// What is drawn on a line of the list: until the second token. What decoding takes after that is as long as the answer.
const shares = (request) => parts(request).filter((part) => part.ms > 0 && part.id !== "decode");

export class Requests {
  constructor(list, legend, story, tabs, held) {
    Object.assign(this, { list, legend, story, tabs, held });
    this.pointed = false;
    this.newest = 0;
    list.addEventListener("pointerenter", (event) => { this.pointed = event.pointerType === "mouse"; });
    list.addEventListener("pointerleave", () => { this.pointed = false; });
    held.addEventListener("click", () => this.draw());
    this.lists = { recent: [], slowest: [], failed: [] };
    this.limits = {}; // in ms
    this.shown = "recent";
    this.chosen = null;
    for (const [id, name] of STAGES) if (id !== "second_unexplained") legend.append(make("span", {}, make("i", { class: `s-${id}` }), name));
    for (const [name, tab] of Object.entries(tabs)) tab.addEventListener("click", () => this.select(name));
    list.addEventListener("keydown", (event) => this.walk(event));
    tabs.recent.parentElement.addEventListener("keydown", (event) => this.turn(event));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  begin(said) {
    this.limits = said.limits ?? {};
    this.lists = { recent: said.requests ?? [], slowest: said.slowest ?? [], failed: said.failed ?? [] };
  }

  take(frame) {
    this.lists.recent = [...(frame.requests ?? []), ...this.lists.recent].slice(0, 60);
    if (frame.slowest) this.lists.slowest = frame.slowest;
    if (frame.failed) this.lists.failed = frame.failed;
  }

  select(name) {
    this.shown = name;
    for (const [other, tab] of Object.entries(this.tabs)) {
      tab.setAttribute("aria-selected", String(other === name));
      tab.tabIndex = other === name ? 0 : -1;
    }
    this.list.setAttribute("aria-labelledby", `tab-${name}`);
    this.draw();
  }

  turn(event) {
    const first = event.key === "ArrowDown" && this.list.querySelector("button.request");
    if (first) {
      event.preventDefault();
      first.focus();
    }
    const names = Object.keys(this.tabs);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const name = names[(names.indexOf(this.shown) + step + names.length) % names.length];
    this.select(name);
    this.tabs[name].focus();
  }

  walk(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    const rows = [...this.list.querySelectorAll("button.request")];
    const at = rows.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    rows[Math.min(rows.length - 1, Math.max(0, at + step))].focus();
  }

  // A list that somebody points at, or walks through, does not move away from under them: it says how many are newer.
  refresh() {
    if (!this.pointed && !this.list.contains(document.activeElement)) return this.draw();
    const newer = this.shown === "recent" ? this.lists.recent.filter((request) => request.n > this.newest).length : 0;
    this.held.hidden = newer === 0;
    this.held.textContent = `held still · ${newer} newer`;
    return undefined;
  }

  draw() {
    this.newest = Math.max(0, ...this.lists.recent.map((request) => request.n));
    this.held.hidden = true;
    const requests = this.lists[this.shown].slice(0, this.shown === "recent" ? 25 : 20);
    const focused = document.activeElement?.dataset?.n; // the row that is being walked on stays under the keyboard
    // One that is far slower than the others fills its line, so that theirs can still be read.
    const lengths = requests.map((request) => shares(request).reduce((sum, part) => sum + part.ms, 0)).sort((a, b) => a - b);
    const most = Math.max(0.001, Math.min(lengths.at(-1) ?? 0, (lengths[lengths.length >> 1] ?? 0) * 4));
    this.list.replaceChildren(...requests.map((request) => this.row(request, most)));
    if (!requests.length) this.list.append(make("p", { class: "none" }, this.shown === "failed" ? "None has failed." : "No request yet."));
    if (focused) this.list.querySelector(`button[data-n="${Number(focused)}"]`)?.focus({ preventScroll: true });
  }

  row(request, most) {
    const shown = shares(request);
    const total = Math.max(most, shown.reduce((sum, part) => sum + part.ms, 0));
    const bar = make("span", { class: "bar" }, ...shown.map((part) =>
      make("i", { class: `s-${part.id}`, style: { width: `${(part.ms / total) * 100}%` }, title: `${part.name} ${duration(part.ms)}` })));
    const state = request.good ? "good" : request.ok ? "late" : "bad";
    const where = [request.prefill, request.decode].filter(Boolean).join(" → ") || "–";
    return make("button", { class: "request", type: "button", "data-n": request.n, "data-state": state, "aria-expanded": String(this.chosen?.n === request.n), "aria-controls": "story", onclick: () => this.open(request) },
      make("span", { class: "when" }, clock(request.t)),
      make("span", { class: "outcome" }, OUTCOMES[request.outcome] ?? request.outcome.toLowerCase().replaceAll("_", " ")),
      make("span", { class: "ttft" }, duration(request.ttft)), bar,
      make("span", { class: "where" }, where),
      make("span", { class: "size" }, `${count(request.prompt_tokens ?? 0)} → ${count(request.output_tokens ?? 0)}`));
  }

  open(request) {
    this.chosen = request;
    this.story.replaceChildren(...this.told(request));
    this.story.hidden = false;
    this.draw();
    this.story.querySelector("button").focus({ preventScroll: true });
  }

  close() {
    if (this.story.hidden) return;
    const row = this.list.querySelector(`button[data-n="${Number(this.chosen.n)}"]`);
    this.story.hidden = true;
    this.chosen = null;
    this.draw();
    (this.list.querySelector(`button[data-n="${Number(row?.dataset.n)}"]`) ?? this.tabs[this.shown]).focus({ preventScroll: true });
  }

  told(request) {
    const all = parts(request).filter((part) => part.ms !== 0); // below 0: the stages before it say too much by so much
    const total = shares(request).reduce((sum, part) => sum + part.ms, 0) || 1;
    const longest = Math.max(...all.map((part) => part.ms), 1);
    let at = 0;
    const lines = all.map((part) => {
      const line = make("div", { class: "stage" }, make("span", {}, part.name), part.id === "decode"
        ? make("span", { class: "rest" }, `the other ${count(Math.max(0, (request.output_tokens ?? 0) - (request.second === undefined ? 1 : 2)))} tokens`)
        : make("span", { class: "track" }, make("i", { class: `s-${part.id}`, style: { left: `${(at / total) * 100}%`, width: part.ms < 0 ? "0" : `${Math.max(0.4, (part.ms / total) * 100)}%` } })),
        make("span", { class: part.ms === longest ? "most" : "" }, duration(part.ms)));
      at += Math.max(0, part.ms);
      return line;
    });
    return [
      make("header", {}, make("h2", { id: "story-title" }, request.id), make("button", { type: "button", "aria-label": "Close (Esc)", onclick: () => this.close() }, "✕")),
      make("p", { class: "lead" }, sentence(request)),
      make("div", { class: "stages" }, ...lines),
      make("dl", {}, ...facts(request, this.limits).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    ];
  }
}

function sentence(request) {
  if (request.ttft === undefined) return `Ended after ${duration(request.e2e)} without a token: ${OUTCOMES[request.outcome] ?? request.outcome}.`;
  const way = request.handoff ? `read by ${request.prefill}, written by ${request.decode}` : `read and written by ${request.decode || "one worker"}`;
  return `${way[0].toUpperCase()}${way.slice(1)}. First token after ${duration(request.ttft)}, the last after ${duration(request.e2e)}.`;
}

// Which limits it was over, as the router judged it; nothing where it was not.
function missed(request, limits) {
  if (!request.ok || request.good) return "";
  const times = [["first token", request.ttft, limits.ttft], ["between tokens", request.gap, limits.itl], ["the whole", request.e2e, limits.e2e]];
  const over = times.filter(([, took, limit]) => took !== undefined && limit !== undefined && took > limit);
  return `, over a limit: ${over.map(([name, took, limit]) => `${name} ${duration(took)} of ${duration(limit)}`).join(", ")}`;
}

function facts(request, limits) {
  const { handoff, decision } = request;
  const found = [
    ["Ended", `${clock(request.t)}, ${request.outcome}${missed(request, limits)}`],
    ["Prompt", `${count(request.prompt_tokens ?? 0)} tokens, ${count(request.cached_tokens ?? 0)} of them cached`],
    ["Answer", `${count(request.output_tokens ?? 0)} tokens${request.gap === undefined ? "" : `, one each ${duration(request.gap)}`}`],
    ["Unexplained", `${duration(request.unexplained ?? 0)} of ${duration(request.ttft)}${request.second === undefined ? "" : `; of the ${duration(request.second)} to the second token, ${duration(request.second_unexplained ?? 0)}`}`],
  ];
  if (handoff) found.push(["Hand-off", `${bytes(handoff.kv_bytes)} by ${handoff.connector} at ${handoff.gb_per_s.toFixed(2)} GB/s; ${handoff.blocks} block${handoff.blocks === 1 ? "" : "s"} sent, ${handoff.cached_blocks} there already; ${duration(handoff.transfer)} busy, ${duration(handoff.exposed)} exposed`]);
  if (decision) {
    const costs = [decision.remote !== undefined && `two pools ${duration(decision.remote)}`, decision.local !== undefined && `one worker ${duration(decision.local)}`, decision.measured !== undefined && `came out ${duration(decision.measured)}`].filter(Boolean);
    found.push(["Its way", `${request.route}: ${REASONS[decision.reason] ?? decision.reason}${costs.length ? ` (predicted delay: ${costs.join(", ")})` : ""}`]);
  }
  const troubles = [[request.failures, "attempt", " failed"], [request.moves, "move", " off draining workers"], [request.failed_handoffs, "hand-off", " failed"]].filter(([number]) => number);
  if (troubles.length) found.push(["Trouble", troubles.map(([number, what, more]) => `${number} ${what}${number === 1 ? "" : "s"}${more}`).join(", ")]);
  return found;
}
