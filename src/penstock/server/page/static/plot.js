// A small plot of the last minute: an area under a line, scaled to its own maximum. SVG, so that it takes its colours
// from the style sheet and stays sharp on every screen.

import { svgElement } from "./dom.js";

const POINTS = 60;
const WIDTH = 240;
const HEIGHT = 44;

export class Plot {
  /** `floor` is the least height of the scale: without it, noise around zero would fill the plot. */
  constructor(host, floor) {
    this.values = [];
    this.floor = floor;
    this.area = svgElement("path", { class: "plot-area" });
    this.line = svgElement("path", { class: "plot-line", "vector-effect": "non-scaling-stroke" });
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    host.replaceChildren(svgElement("svg", box, this.area, this.line));
  }

  /** Add a value; the oldest one leaves. */
  push(value) {
    this.values.push(value);
    if (this.values.length > POINTS) this.values.shift();
    this.draw();
  }

  /** Forget everything: the next values do not continue the earlier ones. */
  clear() {
    this.values = [];
    this.draw();
  }

  draw() {
    const top = Math.max(this.floor, ...this.values);
    const left = POINTS - this.values.length;
    const x = (index) => (((left + index) / (POINTS - 1)) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 1.5 - (value / top) * (HEIGHT - 5)).toFixed(1);
    const points = this.values.map((value, index) => `${x(index)} ${y(value)}`);
    this.line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
    this.area.setAttribute("d", points.length > 1 ? `M${x(0)} ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z` : "");
  }
}
