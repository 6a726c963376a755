// Shared by all modules: elements, numbers as text, and requests to the gateway with the operator's key.

const SVG = "http://www.w3.org/2000/svg";
const KEY = "kvrelay-operators-key"; // kept only in this tab

export const $ = (id) => document.getElementById(id);

// An element. Text is always set as text, never as HTML, because names and problems come from outside.
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const ms = (s) => (s === null || s === undefined ? "-" : s < 1 ? `${short(s * 1000)} ms` : `${short(s)} s`);
const short = (number) => (number < 1 ? +number.toFixed(2) : +number.toPrecision(3));
export const count = (n) => (n < 10 ? +n.toFixed(1) : Math.round(n)).toLocaleString("en");
export const percent = (part) => (part === null ? "-" : `${Math.round(part * 100)} %`);
export const clockTime = (at) => new Date(at * 1000).toLocaleTimeString();

// The names that workers gave themselves, by address.
const names = new Map();
export const learnNames = (workers) => workers.forEach((worker) => worker.name && names.set(worker.address, worker.name));
export const nameOf = (address) => names.get(address) ?? address;

export const setKey = (key) => sessionStorage.setItem(KEY, key);

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The answer if its status is ok. Throws Refused with the gateway's message, or TypeError if there is no gateway.
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, body.error?.message ?? body.error ?? `status ${answer.status}`);
}

// The server-sent events of an answer as they arrive, each as [name, text].
export async function* events(answer) {
  let rest = "";
  // Not "for await": not every browser can iterate over a stream.
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const blocks = (rest + part.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
        yield [fields.event ?? "message", fields.data ?? ""];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever reads no further needs no connection; one that broke has been reported
  }
}
