// The page: follows /debug/live and passes its events to the modules that draw them.

import { Charts } from "./charts.js";
import { $, ask, clockTime, count, el, events, learnNames, ms, nameOf, percent, Refused, setKey } from "./common.js";
import { drawPicture, fillTable } from "./picture.js";
import { follow } from "./request.js";
import { offerModels } from "./prompt.js";

const AGAIN_MS = 2000;
const SILENCE_MS = 15000; // a gateway sends something every second

const charts = new Charts($("charts"));
let roster = { models: [], workers: [] };
let state = null;

function say(text, isAway) {
  const link = $("link");
  if (link.textContent !== text) link.textContent = text; // a screen reader reads changes aloud
  document.body.classList.toggle("away", isAway);
}

function draw() {
  if (state === null || state.workers.length !== roster.workers.length) return;
  drawPicture($("picture"), roster, state);
  if ($("table").open) fillTable($("table").querySelector("tbody"), roster, state);
}

function show() {
  const { figures } = state;
  const sums = [
    ["requests running", count(state.num_running)], ["queued", count(state.num_queued)],
    ["prompt tokens/s", count(figures.prompt_tokens_per_s)], ["output tokens/s", count(figures.output_tokens_per_s)],
    ["of prompt tokens cached", percent(figures.cached)], ["to the first token, median", ms(figures.ttft_s[0])],
    ["between tokens, 99 of 100", ms(figures.itl_s[1])],
  ];
  $("sums").replaceChildren(...sums.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const name = (index) => nameOf(roster.workers[index]?.address);
  const shut = [
    ...state.workers.flatMap(([, breaker], index) => (breaker === "closed" ? [] : [`${name(index)}: breaker ${breaker}`])),
    ...state.pairs.map(([prefill, decode, breaker]) => `${name(prefill)} with ${name(decode)}: breaker ${breaker}`),
  ];
  $("breakers").replaceChildren(...(shut.length ? shut : ["All breakers are closed."]).map((text) => el("li", { class: shut.length ? "bad" : "dim" }, text)));
  const key = JSON.stringify(state.errors);
  if ($("errors").dataset.key !== key) { // redraw only changes, so that a focused button keeps the focus
    $("errors").dataset.key = key;
    $("errors").replaceChildren(...state.errors.map(([at, id, status, what]) => el("li", {},
      `${clockTime(at)} ${status || "no answer"} ${what} `, el("button", { class: "link", onclick: () => follow(id) }, id))));
  }
  const tokens = (isLocal) => count(state.flows.reduce((sum, [prefill, , speed]) => ((prefill < 0) === isLocal ? sum + speed : sum), 0));
  $("flows").textContent = `Handed over: KV of ${tokens(false)} tokens a second. Computed by decode workers themselves: ${tokens(true)}.`;
  draw();
}

async function watch() {
  const silence = new AbortController();
  let timer = 0;
  const heard = () => { clearTimeout(timer); timer = setTimeout(() => silence.abort(), SILENCE_MS); };
  heard();
  try {
    for await (const [name, text] of events(await ask("debug/live", { signal: silence.signal }))) {
      heard();
      if (name === "roster") {
        roster = JSON.parse(text);
        learnNames(roster.workers);
        $("models").textContent = `${roster.version} serves ${roster.models.join(", ")}`;
        offerModels(roster.models);
      } else if (name === "state") {
        const isFirst = state === null;
        state = JSON.parse(text);
        if (isFirst) $("table").open = roster.workers.length <= 8;
        $("key-form").hidden = true;
        say("live", false);
        charts.add(roster, state);
        show();
      }
    }
    say("the gateway ended the stream; asking again …", true);
  } catch (error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      $("key-form").hidden = false;
      $("key-reason").textContent = error.message;
      say("waiting for a key", true);
      $("key").focus();
      return;
    }
    say(error instanceof Refused ? `refused: ${error.message}; asking again …` : "the gateway does not answer; asking again …", true);
  } finally {
    clearTimeout(timer);
  }
  setTimeout(watch, AGAIN_MS);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  watch();
});
$("table").addEventListener("toggle", draw);
new ResizeObserver(draw).observe($("picture"));
watch();
