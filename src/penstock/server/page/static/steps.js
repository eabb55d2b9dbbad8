// The engine's latest steps. They are requested only when the engine has computed more, and only while the page is visible.

import { getJson } from "./api.js";
import { Lanes } from "./lanes.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 72;

/** Whether an engine has no such view at all: the replicas of a fleet have none. */
export const refusesViews = (error) => error.code === "views_off";

/** A path of the engine's views, for the model that is shown; "" is the server's only one. */
export function viewPath(name, model, query = {}) {
  const given = new URLSearchParams(model ? { model, ...query } : query).toString();
  return given ? `engine/${name}?${given}` : `engine/${name}`;
}

export class StepsView {
  constructor() {
    this.lanes = new Lanes($("steps-chart"), "Latest steps", SHOWN);
    this.forget("");
  }

  /** Start again, for another engine. */
  forget(model) {
    this.model = model;
    this.steps = [];
    this.seen = 0;
    this.off = false;
    this.lanes.show([]);
  }

  /** Take the counters of one event of the engine; fetch the new steps. */
  async show(now) {
    if (now.steps < this.seen) this.forget(this.model); // another server
    if (this.asking || this.off || !now.alive || !now.steps || now.steps === this.seen) return;
    this.asking = true;
    const { model } = this;
    try {
      const last = this.steps.at(-1);
      const { data } = await getJson(viewPath("steps", model, last ? { after: last.step } : {}));
      if (model !== this.model) return;
      this.seen = now.steps;
      this.steps = [...this.steps, ...data].slice(-SHOWN);
      if (this.lanes.pointing.index < 0) this.lanes.show(this.steps); // the step that is pointed at must not move
    } catch (error) {
      this.lanes.note.textContent = error.message;
      this.off = refusesViews(error);
      this.seen = now.steps; // not again until there is more to see
    } finally {
      this.asking = false;
    }
  }
}
