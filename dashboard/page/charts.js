// Five minutes in four charts, drawn by uPlot. A limit is a series of its own, so that it is drawn as the others are.

import { count, duration, make } from "./words.js";

const SPAN = 300;
const LEAST = 60; // seconds that are shown when the router has just begun
const FAR = 4; // a limit so many times above all that is shown would flatten it: it is named, and not drawn

const CHARTS = [
  { id: "ttft", title: "Time to first token", unit: duration, limit: "ttft", lines: spread("ttft") },
  { id: "itl", title: "Between tokens", unit: duration, limit: "itl", lines: spread("itl") },
  { id: "handoff", title: "Hand-off, before token 2", unit: duration, limit: "itl", lines: spread("handoff") }, // a part of that gap
  {
    id: "flow", title: "Throughput and goodput", unit: count, lines: [
      { label: "tokens/s", color: "--line-b", value: (w) => w.tokens ?? 0 },
      { label: "goodput, requests/s", color: "--line-a", value: (w) => w.good ?? 0, scale: "r", fill: true },
      { label: "all requests/s", color: "--line-c", value: (w) => w.finished ?? 0, scale: "r", dash: [3, 3] },
      { label: "failed/s", color: "--slo", value: (w) => w.failed ?? 0, scale: "r" },
    ],
  },
];

function spread(name) {
  const at = (index) => (w) => (w[name] ? w[name][index] : null);
  return [
    { label: "p50", color: "--line-a", value: at(0), fill: true },
    { label: "p90", color: "--line-b", value: at(1) },
    { label: "p99", color: "--line-c", value: at(2) },
  ];
}

// A tick of an axis: a duration without the zeros that say nothing.
const tick = (ms) => duration(ms).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Charts {
  constructor(root) {
    this.windows = [];
    this.limits = {};
    this.parts = CHARTS.map((chart) => this.build(root, chart));
    new ResizeObserver(() => this.resize()).observe(root);
  }

  build(root, chart) {
    const limit = make("span", { class: "slo" });
    const empty = make("span", { class: "empty" }, "nothing in five minutes");
    const box = make("div", { class: "plot", role: "img" });
    root.append(make("figure", { class: "card", id: `chart-${chart.id}` }, make("figcaption", {}, make("b", {}, chart.title), empty, limit), box));
    return { chart, empty, limit, box, plot: null };
  }

  plotOf(part) {
    const { chart, box } = part;
    const width = Math.max(200, box.clientWidth);
    const axis = (extra) => ({ stroke: () => css("--dim"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui", ...extra });
    const series = chart.lines.map((line) => ({
      label: line.label, scale: line.scale ?? "y", stroke: () => css(line.color), width: line.fill ? 1.8 : 1.4,
      dash: line.dash, fill: line.fill ? () => css(`${line.color}-soft`) : undefined, points: { show: false }, spanGaps: false,
      value: (_, value) => (value === null || value === undefined ? "–" : chart.unit(value)),
    }));
    if (chart.limit) series.push({ label: "limit", stroke: () => css("--slo"), width: 1.2, dash: [5, 4], points: { show: false }, value: () => duration(this.limits[chart.limit]) });
    const two = chart.lines.some((line) => line.scale === "r");
    const room = (_, low, high) => [0, high > 0 ? high * 1.15 : 10];
    return new uPlot({
      width, height: 170, series: [{ label: "time", value: (_, t) => (t ? new Date(t * 1000).toLocaleTimeString("en-GB") : "–") }, ...series],
      legend: { live: true, markers: { width: 0, fill: (plot, index) => plot.series[index].stroke(plot, index) } }, cursor: { drag: { x: false, y: false }, sync: { key: "diptych" }, points: { size: 6 } },
      scales: { x: { range: (plot) => this.span(plot) }, y: { range: room }, r: { range: room } },
      axes: [axis({ size: 26, space: 70, values: (_, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB")) }),
        axis({ size: 58, values: (_, ticks) => ticks.map((v) => (chart.unit === duration ? tick(v) : count(v))) }),
        ...(two ? [axis({ scale: "r", side: 1, size: 40, grid: { show: false }, values: (_, ticks) => ticks.map((v) => count(v)) })] : [])],
    }, this.data(chart), box);
  }

  span() {
    const last = this.windows.length ? this.windows[this.windows.length - 1].t : Date.now() / 1000;
    const first = this.windows.length ? this.windows[0].t : last;
    return [last - Math.min(SPAN, Math.max(LEAST, last - first)), last];
  }

  data(chart) {
    const columns = chart.lines.map((line) => this.windows.map(line.value));
    const times = this.windows.map((w) => w.t);
    if (!chart.limit) return [times, ...columns];
    const limit = this.limits[chart.limit];
    return [times, ...columns, times.map(() => (limit !== undefined && !this.far(chart) ? limit : null))];
  }

  // Whether its limit would leave everything else at the bottom.
  far(chart) {
    const top = this.top(chart);
    return top > 0 && this.limits[chart.limit] > top * FAR;
  }

  top(chart) {
    return Math.max(0, ...chart.lines.flatMap((line) => this.windows.map(line.value)).filter((value) => value !== null));
  }

  begin(windows, limits, drawn) {
    this.windows = windows.slice(-SPAN);
    this.limits = limits;
    if (drawn) this.draw();
  }

  push(window, drawn) {
    this.windows.push(window);
    if (this.windows.length > SPAN) this.windows.shift();
    if (drawn) this.draw();
  }

  draw() {
    for (const part of this.parts) {
      if (part.plot === null) part.plot = this.plotOf(part);
      else part.plot.setData(this.data(part.chart));
      const limit = this.limits[part.chart.limit];
      part.limit.textContent = limit === undefined ? "" : `limit ${duration(limit)}${this.far(part.chart) ? ", far above ↑" : ""}`;
      part.empty.hidden = this.top(part.chart) > 0;
      part.box.setAttribute("aria-label", this.told(part.chart)); // a picture for who does not see it
      queueMicrotask(() => { // behind uPlot's own, which empties the legend of a chart that is new
        if (part.plot?.cursor.idx == null) part.plot?.setLegend({ idx: this.windows.length - 1 }); // nobody points: the newest
      });
    }
  }

  told(chart) {
    const last = this.windows[this.windows.length - 1], limit = this.limits[chart.limit];
    const values = last ? chart.lines.map((line) => [line.label, line.value(last)]).filter(([, value]) => value !== null) : [];
    const now = [...values.map(([label, value]) => `${label} ${chart.unit(value)}`), ...(limit === undefined ? [] : [`limit ${duration(limit)}`])];
    return `${chart.title} over the last five minutes${now.length ? `; now ${now.join(", ")}` : ""}`;
  }

  resize() {
    for (const part of this.parts) {
      if (part.plot !== null) part.plot.setSize({ width: Math.max(200, part.box.clientWidth), height: 170 });
    }
  }

  recolour() {
    for (const part of this.parts) {
      part.plot?.destroy(); // a legend keeps the colours that it was made with
      part.plot = null;
    }
    if (this.windows.length) this.draw();
  }
}
