// Draws workers as tiles, prefill on the left and decode on the right, and the KV flows between them.

import { count, el, nameOf, percent, svg } from "./common.js";

const ROW = 54;
const SMALL = 26;  // tile size if there are many
const MAX_LARGE = 12; // more tiles of one role are drawn small, without names

export function drawPicture(place, roster, state) {
  const width = Math.max(280, place.clientWidth);
  const side = width * 0.36;
  const boxes = new Map();
  let height = 0;
  for (const [role, left] of [["prefill", 0], ["decode", width - side]]) {
    const members = roster.workers.flatMap((worker, index) => (worker.role === role ? [index] : []));
    const isSmall = members.length > MAX_LARGE;
    const columns = isSmall ? Math.max(1, Math.floor(side / SMALL)) : 1;
    const [w, h] = isSmall ? [side / columns, SMALL] : [side, ROW];
    members.forEach((index, at) => boxes.set(index, { x: left + (at % columns) * w, y: 22 + Math.floor(at / columns) * h, w: w - 4, h: h - 6, isSmall, role }));
    height = Math.max(height, 22 + Math.ceil(members.length / columns) * h);
  }
  const flows = state.flows.filter(([prefill, decode]) => boxes.has(prefill) && boxes.has(decode));
  const most = Math.max(1, ...flows.map(([, , tokens]) => tokens));
  const lines = flows.map(([prefill, decode, tokens]) => {
    const [from, to] = [boxes.get(prefill), boxes.get(decode)];
    const [x1, y1, x2, y2] = [side - 4, from.y + from.h / 2, width - side, to.y + to.h / 2];
    const bend = (x2 - x1) / 2;
    return svg("path", { class: "flow", d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`, "stroke-width": 1 + (5 * tokens) / most },
      svg("title", {}, `${count(tokens)} tokens/s`));
  });
  const roles = [["prefill", 0], ["decode", width - side]].map(([role, x]) => svg("text", { x, y: 13, class: "dim" }, `${role} (${[...boxes.values()].filter((box) => box.role === role).length})`));
  const numUp = state.workers.filter(([name]) => name === "up").length;
  place.replaceChildren(svg("svg", {
    viewBox: `0 0 ${width} ${height + 8}`, height: height + 8, role: "img",
    "aria-label": `${numUp} of ${roster.workers.length} workers are up. The table below has each of them.`,
  }, ...roles, ...lines, ...[...boxes].map(([index, box]) => tile(roster.workers[index], state.workers[index], box))));
}

function tile(worker, [name, breaker, running, waiting, , used], { x, y, w, h, isSmall, role }) {
  const kv = worker.num_blocks ? used / worker.num_blocks : 0;
  const busy = worker.max_running ? Math.min(1, running / worker.max_running) : running ? 1 : 0;
  const label = nameOf(worker.address);
  const classes = `tile ${role} is-${name} ${breaker === "closed" ? "" : "is-shut"}`;
  const bar = (part, kind, top, size) => [
    svg("rect", { class: "track", x: x + 5, y: top, width: w - 10, height: size }),
    svg("rect", { class: kind, x: x + 5, y: top, width: (w - 10) * part, height: size }),
  ];
  const parts = [svg("rect", { class: classes, x, y, width: w, height: h, rx: 4 }), svg("title", {}, `${label} of ${worker.model}: ${name}, ${running} running, KV ${percent(kv)}`)];
  if (isSmall) return svg("g", {}, ...parts, ...bar(busy, "running", y + 4, 5), ...bar(kv, "kv", y + h - 9, 5));
  const fit = Math.max(4, Math.floor((w - 12) / 7));
  const told = name !== "up" ? [name] : [`${running} run, ${waiting} wait, KV ${percent(kv)}`, `${running} run, KV ${percent(kv)}`, `KV ${percent(kv)}`];
  return svg("g", {}, ...parts,
    svg("text", { x: x + 6, y: y + 14 }, label.length > fit ? `…${label.slice(1 - fit)}` : label),
    svg("text", { x: x + 6, y: y + 28, class: "dim" }, told.find((text) => text.length <= fit) ?? ""),
    ...bar(busy, "running", y + h - 14, 4), ...bar(kv, "kv", y + h - 8, 4));
}

export function fillTable(body, roster, state) {
  body.replaceChildren(...roster.workers.map((worker, index) => {
    const [name, breaker, running, waiting, tokens, used, speed] = state.workers[index];
    const said = [name, breaker === "closed" ? "" : `breaker ${breaker}`, worker.problem ?? ""].filter(Boolean).join("; ");
    return el("tr", {},
      el("th", { scope: "row" }, nameOf(worker.address)), el("td", {}, roster.models.length > 1 ? `${worker.role} of ${worker.model}` : worker.role), el("td", { class: `text ${name}` }, said),
      ...[worker.max_running ? `${running} of ${worker.max_running}` : running, waiting, count(tokens), percent(worker.num_blocks ? used / worker.num_blocks : null), speed === null ? "-" : count(speed)]
        .map((value) => el("td", {}, `${value}`)));
  }));
}
