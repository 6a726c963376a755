// Sends a prompt, and shows when each part of the answer came.

import { $, ask, count, el, events, ms } from "./common.js";
import { follow } from "./request.js";

const SLOW = 2; // a slow gap is this many times the median, a stall five times
const STALL = 5;
let sent = null; // the request that "stop" aborts

export function offerModels(models) {
  const select = $("model");
  if ([...select.options].map((option) => option.value).join() !== models.join())
    select.replaceChildren(...models.map((name) => el("option", { value: name }, name)));
}

// The first gap is the wait for the first token, so the median leaves it out.
function mark(gaps, spans) {
  const sorted = gaps.slice(1).sort((a, b) => a - b);
  const median = sorted[Math.floor(sorted.length / 2)] ?? 0;
  const longest = Math.max(0.001, ...gaps);
  const bars = gaps.map((gap, index) => {
    const kind = index === 0 || !median || gap < SLOW * median ? "" : gap < STALL * median ? "slow" : "stall";
    if (kind) spans[index].className = kind;
    const bar = el("i", { title: ms(gap) });
    bar.style.height = `${Math.max(2, (100 * gap) / longest)}%`;
    return bar;
  });
  $("gaps").replaceChildren(...bars);
  $("gaps").setAttribute("aria-label", `First part after ${ms(gaps[0])}; then one in ${ms(median)}, the slowest in ${ms(sorted.at(-1) ?? 0)}`);
  return median;
}

async function run(body) {
  const [spans, gaps] = [[], []];
  let [last, tokens, id] = [performance.now(), 0, null];
  const answer = await ask("v1/chat/completions", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: sent.signal });
  id = answer.headers.get("x-request-id");
  for await (const [, text] of events(answer)) {
    if (text === "[DONE]") break;
    const told = JSON.parse(text);
    if (told.error) throw new Error(told.error.message);
    tokens = told.usage?.completion_tokens ?? tokens;
    const delta = told.choices[0]?.delta ?? {};
    const piece = delta.reasoning_content ?? delta.content;
    if (!piece) continue;
    const now = performance.now();
    gaps.push((now - last) / 1000);
    last = now;
    spans.push(el("span", { title: `after ${ms(gaps.at(-1))}` }, piece));
    $("said").append(spans.at(-1));
  }
  const median = mark(gaps, spans);
  const link = id === null ? "" : el("button", { class: "link", type: "button", onclick: () => follow(id) }, "the request's waterfall");
  $("said-status").replaceChildren(`${count(tokens)} tokens; the first after ${ms(gaps[0])}, then one in ${ms(median)}; `, link);
}

$("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  sent = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("said").replaceChildren();
  $("gaps").replaceChildren();
  $("said-status").textContent = "asked …";
  const body = { model: $("model").value || undefined, messages: [{ role: "user", content: $("prompt").value }], max_tokens: Number($("max-tokens").value) || undefined, stream: true, stream_options: { include_usage: true } };
  try {
    await run(body);
  } catch (error) {
    $("said-status").textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    $("send").disabled = false;
    $("stop").disabled = true;
  }
});
$("stop").addEventListener("click", () => sent?.abort());
