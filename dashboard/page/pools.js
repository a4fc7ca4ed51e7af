// Both pools: a card for each worker, changed in place.

import { count, duration, make, span } from "./words.js";

const SAID = { ready: "ready", starting: "starting", stalled: "stalled", draining: "draining", suspect: "lost?", silent: "silent", gone: "gone" };
const MEANS = {
  suspect: "Its connection broke; it gets nothing until it is heard again.",
  silent: "It has not said a word for a while; it gets nothing new.",
  gone: "It is no longer there.",
  stalled: "It has work and makes no progress.",
  draining: "It is about to stop and takes nothing new.",
};

export class Pools {
  constructor(roots, sums) {
    this.roots = roots;
    this.sums = sums;
    this.cards = new Map();
  }

  show(workers, now) {
    const there = new Set(workers.map((worker) => worker.id));
    for (const [id, card] of this.cards) {
      if (!there.has(id)) {
        card.root.remove();
        this.cards.delete(id);
      }
    }
    for (const worker of workers) {
      if (!this.cards.has(worker.id)) this.cards.set(worker.id, this.build(worker));
      this.fill(this.cards.get(worker.id), worker, now);
    }
    for (const pool of Object.keys(this.roots)) this.sum(pool, workers.filter((worker) => worker.pool === pool));
  }

  sum(pool, workers) {
    const ready = workers.filter((worker) => worker.state === "ready").length;
    this.sums[pool].textContent = workers.length ? `${ready} of ${workers.length} ready` : "";
    const root = this.roots[pool];
    if (!workers.length && !root.querySelector(".none")) root.append(make("p", { class: "none" }, "No worker."));
    if (workers.length) root.querySelector(".none")?.remove();
  }

  build(worker) {
    const parts = { state: make("span", { class: "pill" }), kv: make("i"), kvText: make("span"), load: make("i"), loadText: make("span"), facts: make("dl", { class: "facts" }) };
    parts.root = make("article", { class: "worker card", "data-id": worker.id, "aria-label": worker.id },
      make("header", {}, make("b", {}, worker.id), parts.state),
      make("div", { class: "meter" }, make("span", {}, "KV"), make("span", { class: "track" }, parts.kv), parts.kvText),
      make("div", { class: "meter" }, make("span", {}, "batch"), make("span", { class: "track" }, parts.load), parts.loadText),
      parts.facts);
    this.roots[worker.pool]?.append(parts.root);
    return parts;
  }

  fill(card, worker, now) {
    const running = worker.running ?? 0, waiting = worker.waiting ?? 0, slots = worker.slots ?? 0, kv = worker.kv ?? 0;
    card.root.dataset.state = worker.state;
    card.state.textContent = SAID[worker.state] ?? worker.state;
    card.state.title = MEANS[worker.state] ?? "";
    card.kv.style.width = `${(kv * 100).toFixed(1)}%`;
    card.kv.classList.toggle("full", kv > 0.9);
    card.kvText.textContent = `${(kv * 100).toFixed(0)} %`;
    card.load.style.width = `${Math.min(100, (running / (slots || Math.max(8, running))) * 100).toFixed(1)}%`;
    card.loadText.textContent = slots ? `${running} / ${slots}` : `${running}`;
    const facts = [
      ["queue", `${count(waiting)} waiting, ${count(worker.queued_tokens ?? 0)} tokens`],
      ["speed", [worker.step_ms && `step ${duration(worker.step_ms)}`, worker.prefill_tokens_per_s && `reads ${count(Math.round(worker.prefill_tokens_per_s))} tokens/s`].filter(Boolean).join(", ") || "–"],
      ["connectors", worker.connectors?.join(", ") || "–"],
      ["epoch", `${worker.epoch}, up ${span(now - worker.epoch / 1000)}`],
      ["address", worker.address || "–"],
    ];
    card.said ??= facts.map(([name]) => {
      const value = make("dd");
      card.facts.append(make("div", {}, make("dt", {}, name), value));
      return value;
    });
    facts.forEach(([, value], index) => { if (card.said[index].textContent !== value) card.said[index].textContent = value; });
  }
}
