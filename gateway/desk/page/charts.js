// Charts of the last five minutes, drawn by uPlot (MIT; uplot-LICENSE.txt).

import { clockTime, count, el, ms, percent } from "./common.js";

const NUM_KEPT = 300;
const HEIGHT = 150;
const PARTS = ["accept", "queue", "prefill", "transfer", "first_step"];
const sum = (values) => values.reduce((total, value) => total + value, 0);

function kvInUse(roster, state, role) {
  const members = roster.workers.map((worker, index) => [worker, state.workers[index]]).filter(([worker]) => worker.role === role && worker.num_blocks);
  const blocks = sum(members.map(([worker]) => worker.num_blocks));
  return blocks ? sum(members.map(([, load]) => load[5])) / blocks : null;
}

// title, format of a value, names of lines, their values, whether they are stacked
const CHARTS = [
  ["Tokens a second", count, ["prompt", "output"], (_, { figures }) => [figures.prompt_tokens_per_s, figures.output_tokens_per_s]],
  ["Requests", count, ["running", "queued", "at decode workers", "waiting at prefill workers"], (roster, state) => [
    state.num_running, state.num_queued,
    sum(state.workers.map((load, index) => (roster.workers[index].role === "decode" ? load[2] : 0))),
    sum(state.workers.map((load, index) => (roster.workers[index].role === "prefill" ? load[3] : 0))),
  ]],
  ["From accept to the second token, by parts", ms, PARTS, (_, { figures }) => PARTS.map((name) => figures.parts_s[name] ?? null), true],
  ["Time between tokens", ms, ["median", "99 %"], (_, { figures }) => figures.itl_s],
  ["KV in use", percent, ["prefill", "decode"], (roster, state) => ["prefill", "decode"].map((role) => kvInUse(roster, state, role))],
  ["Prompt tokens from the cache", percent, ["cached"], (_, { figures }) => [figures.cached]],
];

export class Charts {
  constructor(place) {
    this.times = [];
    this.charts = CHARTS.map(([title, told, names, read, isStack]) => {
      const words = names.map(() => el("span"));
      const canvas = el("div", { role: "img" });
      const legend = words.map((word, index) => el("span", {}, el("i", { class: `c${index + 1}` }), word));
      place.append(el("figure", {}, el("figcaption", {}, title, el("br"), ...legend), canvas));
      return { title, told, names, read, isStack, words, canvas, rows: names.map(() => []), plot: null };
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#rebuild());
    new ResizeObserver(() => this.charts.forEach((chart) => chart.plot?.setSize({ width: chart.canvas.clientWidth, height: HEIGHT }))).observe(place);
  }

  add(roster, state) {
    if (roster.workers.length !== state.workers.length) return;
    this.times.push(state.at);
    if (this.times.length > NUM_KEPT) this.times.shift();
    for (const chart of this.charts) {
      const values = chart.read(roster, state);
      chart.rows.forEach((row, index) => { row.push(values[index]); if (row.length > NUM_KEPT) row.shift(); });
      if (chart.plot !== null) chart.plot.setData(this.#data(chart));
      else if (this.times.length > 1) this.#build(chart);
      this.#tell(chart);
    }
  }

  // Shows the values at the pointer, or else the newest.
  #tell(chart) {
    const at = chart.plot?.cursor.idx ?? this.times.length - 1;
    const texts = chart.names.map((name, index) => `${name.replace("_", " ")} ${chart.told(chart.rows[index][at] ?? null)}`);
    texts.forEach((text, index) => { chart.words[index].textContent = text; });
    chart.canvas.setAttribute("aria-label", `${chart.title}: ${texts.join(", ")}`);
  }

  #data({ rows, isStack }) {
    if (!isStack) return [this.times, ...rows];
    // The highest area is drawn first; each further one covers its lower part.
    const lying = rows.map((_, index) => this.times.map((_, at) => sum(rows.slice(0, index + 1).map((row) => row[at] ?? 0)) || null));
    return [this.times, ...lying.reverse()];
  }

  #build(chart) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const order = chart.names.map((_, index) => (chart.isStack ? chart.names.length - 1 - index : index));
    const series = order.map((index) => ({
      stroke: colour(`c${index + 1}`), width: chart.isStack ? 0 : 1.5, points: { show: false }, fill: chart.isStack ? colour(`c${index + 1}`) : undefined,
    }));
    chart.plot = new uPlot({
      width: chart.canvas.clientWidth, height: HEIGHT, padding: [8, 30, 0, 0], legend: { show: false }, cursor: { y: false }, series: [{}, ...series],
      hooks: { setCursor: [() => this.#tell(chart)] },
      // Shares are told in whole per cent, so a scale of less than a few has one label several times.
      scales: { y: { range: (_, _low, high) => [0, high > 0 ? Math.max(high * 1.1, chart.told === percent ? 0.05 : 0) : 1] } },
      axes: [{ ...axis, size: 28, space: 90, values: (_, ticks) => ticks.map(clockTime) }, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => chart.told(tick)) }],
    }, this.#data(chart), chart.canvas);
  }

  #rebuild() {
    for (const chart of this.charts) {
      chart.plot?.destroy();
      chart.plot = null;
      if (this.times.length > 1) this.#build(chart);
    }
  }
}
