// The engine's steps as a chart: a bar for each, as high as the time it took, divided by what took the time; a line where
// it was expected to end; below, a lane that marks stalls of the queue. For one request, its part of each step is lit.

import { element, grouped, svgElement } from "./dom.js";
import { Pointing } from "./pointing.js";

const WIDTH = 1000; // units of the drawing, whatever its width on the page
const HEIGHT = 100;
const GAP = 0.16; // between two bars, in bars
const WIDEST = 84; // units a step, so that bars of a few steps are not too wide
const TALL = 1.3; // times what 95 % of steps took at most: longer bars are cut off, so that the others can be seen

/** The kinds of time in a step, from the bottom of its bar to the top, each with its name. */
export const KINDS = { decode: "decode", guesses: "guesses", prompts: "prompts", stored: "read from the store", engine: "between steps" };

const STALLS = {
  no_blocks: "no KV blocks are free",
  no_slot: "no slot is free",
  no_budget: "the step has no room for it",
  shared_prefix: "another is just computing its beginning",
  suspects: "a step failed, and its requests are tried one by one",
  newcomer: "another tenant's newcomer goes alone",
};

/** Milliseconds of a step by kind. A row's guesses are computed with it: they get the share of time of their positions. */
export function times(step) {
  const guessed = step.drafted / Math.max(1, step.decoding + step.drafted);
  return {
    decode: step.decode_ms * (1 - guessed),
    guesses: step.decode_ms * guessed + step.drafting_ms,
    prompts: step.prompts_ms,
    stored: step.restored_ms,
    engine: step.engine_ms,
  };
}

export function took(step) {
  return step.decode_ms + step.prompts_ms + step.drafting_ms + step.restored_ms + step.engine_ms;
}

/** When the step was expected to end; 0 while nothing was known. The times of draft model and store are not foreseen. */
function expected(step) {
  return step.foreseen_ms ? step.foreseen_ms + step.drafting_ms + step.restored_ms : 0;
}

export class Lanes {
  /** Fills `host`; `name` is the chart's name for screen readers; `slots` is how many steps have room. */
  constructor(host, name, slots = 0) {
    this.slots = slots;
    this.steps = [];
    this.parts = Object.fromEntries([...Object.keys(KINDS), "own"].map((kind) => [kind, svgElement("path", { class: `lane-${kind}` })]));
    this.forecast = svgElement("path", { class: "lane-forecast", "vector-effect": "non-scaling-stroke" });
    this.stalls = svgElement("path", { class: "lane-stalls" });
    this.cuts = svgElement("path", { class: "lane-cuts" });
    this.cursor = svgElement("rect", { class: "lane-cursor", y: 0, height: HEIGHT, width: 0 });
    const box = { preserveAspectRatio: "none", "aria-hidden": "true" };
    this.top = element("span", { class: "lane-top", "aria-hidden": "true" });
    this.chart = element(
      "div",
      { class: "lanes" },
      this.top,
      svgElement("svg", { ...box, class: "lane-times", viewBox: `0 0 ${WIDTH} ${HEIGHT}` }, this.cursor, ...Object.values(this.parts), this.cuts, this.forecast),
      svgElement("svg", { ...box, class: "lane-queue", viewBox: `0 0 ${WIDTH} 10` }, this.stalls),
    );
    this.legend = element("p", { class: "legend legend-plain lane-legend", "aria-hidden": "true" });
    this.note = element("p", { class: "note lane-note" });
    this.pointing = new Pointing(this.chart, name, {
      at: (x) => this.at(x),
      describe: (index) => describe(this.steps[index]),
      mark: (index) => this.mark(index),
    });
    this.pointing.note = this.note;
    this.host = host;
    host.replaceChildren(this.chart, this.legend, this.note);
  }

  /** Draw these steps; if they are a request's (`own`), dim what was not its own part. */
  show(steps, { own = false } = {}) {
    this.steps = steps;
    this.pitch = Math.min(WIDEST, WIDTH / Math.max(1, this.slots, steps.length));
    this.left = this.slots ? WIDTH - steps.length * this.pitch : 0;
    const heights = steps.map((step) => Math.max(took(step), expected(step))).sort((one, other) => one - other);
    this.highest = Math.max(0.001, Math.min(heights.at(-1) ?? 0, TALL * (heights[Math.floor(heights.length * 0.95)] ?? 0)));
    this.host.classList.toggle("is-own", own);
    this.draw(own);
    this.explain(own);
    this.top.textContent = steps.length ? milliseconds(this.highest) : "";
    this.pointing.renew(steps.length, summary(steps));
  }

  draw(own) {
    const paths = Object.fromEntries(Object.keys(this.parts).map((kind) => [kind, []]));
    const y = (ms) => HEIGHT * (1 - Math.min(1, ms / this.highest));
    let forecast = "";
    let stalls = "";
    let cuts = "";
    this.steps.forEach((step, index) => {
      const x = this.left + index * this.pitch;
      const wide = this.pitch * (1 - GAP);
      const bar = (from, to) => `M${x.toFixed(2)} ${y(from).toFixed(2)}h${wide.toFixed(2)}V${y(to).toFixed(2)}h${(-wide).toFixed(2)}z`;
      let below = 0;
      const parts = { decode: step.own_decode_ms, prompts: step.own_prompts_ms };
      for (const [kind, ms] of Object.entries(times(step))) {
        if (ms > 0) paths[kind].push(bar(below, below + ms));
        if (own && parts[kind] > 0) paths.own.push(bar(below, below + parts[kind]));
        below += Math.max(0, ms);
      }
      const ends = expected(step);
      if (ends) forecast += `M${x.toFixed(2)} ${y(ends).toFixed(2)}h${this.pitch.toFixed(2)}`;
      if (below > this.highest) cuts += `M${x.toFixed(2)} 5h${wide.toFixed(2)}v2.5h${(-wide).toFixed(2)}z`;
      if (step.stall) stalls += `M${x.toFixed(2)} 0h${wide.toFixed(2)}v10h${(-wide).toFixed(2)}z`;
    });
    for (const [kind, node] of Object.entries(this.parts)) node.setAttribute("d", paths[kind].join(""));
    this.cuts.setAttribute("d", cuts);
    this.forecast.setAttribute("d", forecast);
    this.stalls.setAttribute("d", stalls);
  }

  /** Explain the colours that are in use. */
  explain(own) {
    const there = Object.entries(KINDS).filter(([kind]) => this.steps.some((step) => times(step)[kind] > 0));
    if (own) there.unshift(["own", "its own part"]);
    if (this.steps.some(expected)) there.push(["forecast", "forecast"]);
    if (this.steps.some(({ stall }) => stall)) there.push(["stalls", "queue stands still"]);
    this.legend.replaceChildren(...there.map(([kind, name]) => element("span", {}, element("i", { class: `key lane-key-${kind}` }), name)));
  }

  at(x) {
    const index = Math.floor((x * WIDTH - this.left) / this.pitch);
    return index >= 0 && index < this.steps.length ? index : -1;
  }

  mark(index) {
    this.cursor.setAttribute("x", String(this.left + Math.max(0, index) * this.pitch));
    this.cursor.setAttribute("width", String(index < 0 ? 0 : this.pitch));
  }
}

/** One step in words. */
export function describe(step) {
  const computed = [
    step.decoding && `${grouped(step.decoding)} decode`,
    step.drafted && `${grouped(step.drafted)} guessed`,
    step.chunk && `${grouped(step.chunk)} of prompts`,
    step.read && `${grouped(step.read)} from the store`,
  ].filter(Boolean);
  const foreseen = expected(step) ? `, expected ${milliseconds(expected(step))}` : "";
  const own = step.own_positions === undefined ? "" : ` Its own part: ${grouped(step.own_positions)} ${step.own_positions === 1 ? "position" : "positions"}, ${milliseconds(step.own_decode_ms + step.own_prompts_ms)}.`;
  const waits = step.stall ? ` ${grouped(step.waiting)} waiting: ${STALLS[step.stall.reason] ?? step.stall.reason}${lack(step.stall)}.` : "";
  return `Step ${grouped(step.step)}: ${milliseconds(took(step) - step.engine_ms)}${foreseen}. ${computed.join(", ") || "Nothing computed"}.${own}${waits}`;
}

function lack({ need, have }) {
  return need > have ? ` (${grouped(need)} needed, ${grouped(have)} there)` : "";
}

/** All steps in words. */
function summary(steps) {
  if (!steps.length) return "No step yet.";
  const typical = median(steps.map((step) => took(step) - step.engine_ms));
  const known = steps.filter((step) => expected(step) && took(step) > step.engine_ms);
  const off = median(known.map((step) => Math.abs(expected(step) / (took(step) - step.engine_ms) - 1)));
  const forecast = known.length ? `, forecast off by ${(100 * off).toFixed(0)} %` : "";
  return `${grouped(steps.length)} ${steps.length === 1 ? "step" : "steps"}: median ${milliseconds(typical)}${forecast}.`;
}

function median(values) {
  return [...values].sort((one, other) => one - other)[Math.floor(values.length / 2)] ?? 0;
}

export function milliseconds(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}
