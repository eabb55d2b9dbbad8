// The prefix cache as a tree: each box is a run of blocks without branches, as wide as it and all that continues it;
// the continuations are below. The stronger a box's colour, the more often it was found.

import { getJson } from "./api.js";
import { element, grouped, svgElement } from "./dom.js";
import { Pointing } from "./pointing.js";
import { refusesViews, viewPath } from "./steps.js";

const $ = (id) => document.getElementById(id);
const WIDTH = 1000;
const ROW = 10; // units of height
const LEVELS = 14; // deeper nodes are not drawn
const PAUSE = 5000; // milliseconds between two requests

export class PrefixesView {
  constructor() {
    this.boxes = [];
    this.drawing = svgElement("svg", { preserveAspectRatio: "none", "aria-hidden": "true" });
    this.chart = element("div", { class: "prefixes" }, this.drawing);
    this.note = $("prefixes-note");
    this.pointing = new Pointing(this.chart, "Cached prefixes", {
      at: (x, y) => this.boxes.findIndex((box) => box.inside(x * WIDTH, y * this.height)),
      describe: (index) => this.boxes[index].words,
      mark: (index) => this.boxes.forEach((box, at) => box.node.classList.toggle("is-pointed", at === index)),
    });
    this.pointing.note = this.note;
    $("prefixes-chart").replaceChildren(this.chart);
    $("prefixes-view").addEventListener("toggle", () => this.look());
    this.forget("");
  }

  /** Start again, for another engine. */
  forget(model) {
    this.model = model;
    this.steps = -1;
    this.last = -Infinity;
    this.off = false;
    this.draw({ block_size: 1, blocks: 0, left_out: 0, nodes: [] });
  }

  /** Take the counters of one event of the engine; while the tree is open, fetch it if it may have grown. */
  show(now) {
    this.now = now;
    if (now.steps !== this.steps && performance.now() - this.last > PAUSE) this.look();
  }

  async look() {
    if (this.asking || this.off || !$("prefixes-view").open || this.now?.alive === false) return;
    this.asking = true;
    const { model, now } = this;
    try {
      const tree = await getJson(viewPath("prefixes", model));
      if (model !== this.model) return;
      this.steps = now?.steps ?? -1;
      this.draw(tree);
    } catch (error) {
      this.note.textContent = error.message;
      this.off = refusesViews(error);
    } finally {
      this.last = performance.now();
      this.asking = false;
    }
  }

  draw(tree) {
    this.boxes = laidOut(tree).filter(({ level }) => level < LEVELS).map((place) => box(place, tree));
    const levels = Math.max(1, ...this.boxes.map(({ level }) => level + 1));
    this.height = levels * ROW;
    this.drawing.setAttribute("viewBox", `0 0 ${WIDTH} ${this.height}`);
    this.drawing.style.height = `${levels * 1.05}rem`;
    this.drawing.replaceChildren(...this.boxes.map(({ node }) => node));
    this.pointing.renew(this.boxes.length, summary(tree));
  }
}

/** Where each node is: its left end, width and depth. The widest children of a node come first. */
function laidOut({ nodes, blocks }) {
  const unit = WIDTH / Math.max(1, blocks);
  const free = new Map([[-1, 0]]); // the next free place below each node
  return nodes.map((node, index) => {
    const above = free.get(node.parent);
    const size = (node.blocks + node.below) * unit;
    free.set(node.parent, above + size);
    free.set(index, above);
    const level = node.parent < 0 ? 0 : nodes[node.parent].level + 1;
    node.level = level;
    return { node, left: above, size, level };
  });
}

function box({ node, left, size, level }, tree) {
  const most = Math.max(1, ...tree.nodes.map(({ hits }) => hits));
  const wide = Math.max(0.6, size - Math.min(2, size * 0.1));
  const place = { x: left.toFixed(2), y: (level * ROW + 0.6).toFixed(1), width: wide.toFixed(2) };
  const body = svgElement("rect", { ...place, height: ROW - 1.2, class: "prefix-body" });
  body.style.fillOpacity = node.hits ? (0.3 + 0.7 * (Math.log1p(node.hits) / Math.log1p(most))).toFixed(2) : "0";
  const ground = svgElement("rect", { ...place, height: ROW - 1.2, class: "prefix-ground" });
  const used = svgElement("rect", { ...place, y: (level * ROW + ROW - 2.2).toFixed(1), width: ((wide * node.held) / node.blocks).toFixed(2), height: 1.6, class: "prefix-held" });
  return {
    level,
    words: describe(node, tree.block_size),
    node: svgElement("g", { class: "prefix" }, ground, body, used),
    inside: (x, y) => x >= left && x < left + size && y >= level * ROW && y < (level + 1) * ROW,
  };
}

function describe(node, size) {
  const place = node.start ? `after ${grouped(node.start)} tokens` : "from the beginning";
  const found = node.hits ? `Found ${times(node.hits)}, which spared ${grouped(node.hit_tokens)} tokens` : "Never found yet";
  const held = node.held ? ` ${grouped(node.held)} of ${grouped(node.blocks)} blocks in use.` : "";
  const idle = node.idle ? `last of use ${grouped(node.idle)} ${node.idle === 1 ? "admission" : "admissions"} ago` : "of use just now";
  return `${grouped(node.blocks * size)} tokens ${place}. ${found}; ${idle}.${held}`;
}

function times(count) {
  return count === 1 ? "once" : `${grouped(count)} times`;
}

function summary({ blocks, block_size: size, nodes, left_out: left }) {
  if (!blocks) return "Nothing is cached.";
  const rest = left ? `; ${grouped(left * size)} tokens in smaller ones are not drawn` : "";
  return `${grouped(blocks * size)} tokens in ${grouped(nodes.length)} ${nodes.length === 1 ? "run" : "runs"}${rest}.`;
}
