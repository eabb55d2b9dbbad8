// Where the time of one answer went: its parts as a bar that stands for the whole, and the steps that it lived through.

import { getJson } from "./api.js";
import { element, grouped } from "./dom.js";
import { Lanes, milliseconds } from "./lanes.js";

/** Each part, with what the time was spent on. */
const PARTS = {
  intake: "read, rendered and tokenised",
  queue: "waited in the queue",
  prompt: "its own prompt",
  other_prompts: "others' prompts in its steps",
  decode: "got its tokens",
  other_decodes: "others' tokens while its prompt was computed",
  drafting: "the draft model",
  grammar: "waited for its grammar",
  left_out: "left out of steps",
  preempted: "had lost its blocks",
  recovery: "a step had failed",
  restored: "read blocks from the store",
  engine: "the engine between steps",
  text: "its last text was made",
  transport: "between server and replica",
  reader: "until its last byte was taken",
};

const WAITS = {
  no_slot: "for a slot",
  no_blocks: "for KV blocks",
  no_budget: "for room in a step",
  shared_prefix: "for a beginning that another computes",
  newcomer: "for a newcomer of another tenant",
  suspects: "for a step that failed",
  next_step: "for the next step",
  turn: "for other prompts of its body",
};

const LEAST = 0.005; // share of the whole; smaller parts are shown as one

/** The view of an answer's time, by the answer's id; it fetches its own data. */
export function lifeOf(answer) {
  const bar = element("div", { class: "life-bar" });
  const list = element("ul", { class: "life-parts" });
  const steps = element("div", { class: "life-steps" });
  const view = element("section", { class: "life", "aria-label": "Where the time went" }, bar, list, steps);
  const path = `v1/requests/${encodeURIComponent(answer)}`;
  getJson(`${path}/latency`).then((told) => showParts(bar, list, told), (error) => bar.replaceWith(refused(error)));
  getJson(`${path}/steps`).then((told) => showSteps(steps, told), (error) => steps.replaceChildren(refused(error)));
  return view;
}

function refused(error) {
  return element("p", { class: "note" }, error.message);
}

function showParts(bar, list, { parts_ms: parts }) {
  const wall = parts.total;
  const spent = Object.entries(PARTS)
    .map(([name, words]) => ({ name, words, ms: Math.max(0, parts[name] ?? 0) }))
    .filter(({ ms }) => ms > 0);
  const large = spent.filter(({ ms }) => ms >= wall * LEAST);
  const rest = spent.filter(({ ms }) => ms < wall * LEAST).reduce((sum, { ms }) => sum + ms, 0);
  if (rest > 0) large.push({ name: "rest", words: "the rest", ms: rest });
  bar.append(element("p", { class: "life-head" }, element("b", {}, milliseconds(wall)), " from the first byte of the request to the last of the answer"));
  bar.append(element("div", { class: "meter", "aria-hidden": "true" }, ...large.map((part) => piece(part, wall))));
  list.append(...large.map((part) => line(part, wall, parts.queue_for)));
}

function piece({ name, words, ms }, wall) {
  const node = element("i", { class: `fixed part-${name}`, title: `${words}: ${milliseconds(ms)}` });
  node.style.width = `${((100 * ms) / wall).toFixed(3)}%`;
  return node;
}

function line({ name, words, ms }, wall, reasons) {
  const waits = name === "queue" ? Object.entries(reasons).filter(([, each]) => each >= wall * LEAST) : [];
  const why = waits.map(([reason, each]) => `${WAITS[reason] ?? reason} ${milliseconds(each)}`).join(", ");
  return element(
    "li",
    {},
    element("i", { class: `key part-${name}` }),
    element("span", { class: "life-words" }, words, why ? element("small", {}, why) : null),
    element("b", {}, milliseconds(ms)),
    element("span", { class: "life-share" }, `${((100 * ms) / wall).toFixed(1)} %`),
  );
}

function showSteps(host, { steps, cut }) {
  const chart = element("div", {});
  const head = element("h3", {}, `The ${steps.length === 1 ? "step" : `${grouped(steps.length)} steps`} it lived through${cut ? "; earlier ones are forgotten" : ""}`);
  host.replaceChildren(head, chart);
  new Lanes(chart, "Steps of this answer").show(steps, { own: true });
}
