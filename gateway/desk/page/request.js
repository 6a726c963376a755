// A request by its id, as bars on a time axis.

import { $, ask, clockTime, count, el, ms, nameOf } from "./common.js";

const GOOD = ["", "finished", "stopped", "moved", "taken_back", "given_up"];

function rows(request, one) {
  const end = request.ended_s ?? Math.max(one.last_token_s ?? 0, ...one.attempts.map((attempt) => attempt.ended_s ?? attempt.begun_s));
  const found = [["accept, template, tokens", 0, one.prepared_s, ""]];
  if (one.placed_s !== null) found.push(["waits for a place", one.prepared_s, one.placed_s, ""]);
  // Workers report the parts with the first token, so they belong to the attempt that sent it.
  const told = one.attempts.findIndex((attempt) => one.first_token_s !== null && (attempt.ended_s ?? end) >= one.first_token_s);
  one.attempts.forEach((attempt, index) => {
    const until = attempt.ended_s ?? end;
    const bad = GOOD.includes(attempt.outcome) ? "" : "bad";
    found.push([`attempt: ${attempt.workers.map(nameOf).join(" → ")} (${attempt.reason}) ${attempt.outcome}`, attempt.begun_s, until, `attempt ${bad}`]);
    if (index === told) {
      let at = attempt.begun_s;
      for (const [name, took] of Object.entries(one.parts_s)) found.push([name.replace("_", " "), at, (at += took), "part"]);
    }
  });
  if (one.first_token_s !== null) found.push([`output, ${count(one.num_output_tokens)} tokens`, one.first_token_s, one.last_token_s, "output"]);
  return [found, Math.max(end, 1e-6)];
}

function waterfall(request) {
  const what = [request.status || (request.ended_s === null ? "runs" : "no answer"), request.error, request.cut].filter(Boolean).join(", ");
  const shown = request.sequences.map((one, index) => {
    const [found, end] = rows(request, one);
    const cached = one.num_cached_tokens ? `, ${count(one.num_cached_tokens)} of them cached` : "";
    const items = found.map(([name, from, to, kind]) => {
      const bar = el("div", { class: "bar" });
      bar.style.left = `${(100 * from) / end}%`;
      bar.style.width = `${(100 * Math.max(0, to - from)) / end}%`;
      return el("li", { class: kind }, el("span", { class: "name" }, name), el("span", { class: "rail", "aria-hidden": "true" }, bar), el("span", { class: "num" }, ms(to - from)));
    });
    return el("div", {},
      el("p", { class: "dim" }, `${request.num_sequences > 1 ? `choice ${index + 1} of ${request.num_sequences}: ` : ""}${count(one.num_prompt_tokens)} prompt tokens${cached}; first token after ${ms(one.first_token_s)}, ${one.num_attempts} ${one.num_attempts === 1 ? "attempt" : "attempts"}`),
      el("ol", { class: "fall" }, ...items));
  });
  return el("article", {}, el("h3", {}, request.request_id),
    el("p", {}, `${clockTime(request.received_at)} ${request.route ?? ""}: ${what}, ${ms(request.ended_s)}`), ...shown);
}

function list(requests) {
  if (!requests.length) return el("p", {}, "No requests yet.");
  const titles = ["at", "request", "status", "prompt", "output", "first token", "took"];
  const lines = requests.map((request) => {
    const one = request.sequences[0];
    const cells = [request.status || "runs", one?.num_prompt_tokens ?? "-", one?.num_output_tokens ?? "-", ms(one?.first_token_s), ms(request.ended_s)];
    const id = el("button", { class: "link", onclick: () => follow(request.request_id) }, request.request_id);
    return el("tr", {}, el("td", {}, clockTime(request.received_at)), el("td", {}, id), ...cells.map((cell) => el("td", {}, `${cell}`)));
  });
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, ...lines)));
}

async function find(path, shown) {
  try {
    $("found").replaceChildren(...shown((await (await ask(path)).json()).requests));
  } catch (error) {
    $("found").replaceChildren(el("p", { class: "bad" }, error.message));
  }
}

export async function follow(id) {
  $("request-id").value = id;
  await find(`debug/requests/${encodeURIComponent(id)}`, (requests) => requests.map(waterfall));
  $("request-title").scrollIntoView();
}

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("request-id").value.trim()) follow($("request-id").value.trim());
});
$("newest").addEventListener("click", () => find("debug/requests?limit=20", (requests) => [list(requests)]));
