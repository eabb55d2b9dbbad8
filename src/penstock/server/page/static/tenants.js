// Each caller's share of the engine, if the server has API keys. All other callers are one line, except for an admin.

import { getJson } from "./api.js";
import { element, grouped } from "./dom.js";
import { refusesViews, viewPath } from "./steps.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 8;
const PAUSE = 2000; // milliseconds between two requests
const MEASURES = { running: "Slots", waiting: "Queue", tokens: "Tokens" };

export class TenantsView {
  constructor() {
    this.forget("");
  }

  /** Start again, for another engine or another key. */
  forget(model) {
    this.model = model;
    this.last = -Infinity;
    this.none = false;
    $("tenants-card").hidden = true;
  }

  /** Take the counters of one event of the engine. If the server has no keys, shares are requested once. */
  async show(now) {
    if (this.asking || this.none || !now.alive || performance.now() - this.last < PAUSE) return;
    this.asking = true;
    const { model } = this;
    try {
      const { data } = await getJson(viewPath("tenants", model));
      if (model !== this.model) return;
      this.draw(data);
      this.none = !data.length && now.steps > 0;
    } catch (error) {
      this.none = refusesViews(error); // then there is no card
    } finally {
      this.last = performance.now();
      this.asking = false;
    }
  }

  draw(tenants) {
    $("tenants-card").hidden = !tenants.length;
    const shown = firsts(tenants);
    const sums = Object.fromEntries(Object.keys(MEASURES).map((name) => [name, tenants.reduce((sum, each) => sum + each[name], 0)]));
    const head = element("tr", {}, element("th", { scope: "col" }, "Key"), ...Object.values(MEASURES).map((name) => element("th", { scope: "col" }, name)));
    $("tenants").replaceChildren(element("thead", {}, head), element("tbody", {}, ...shown.map((each) => row(each, sums))));
  }
}

/** The caller, then the tenants with most tokens; the rest as one. */
function firsts(tenants) {
  const sorted = [...tenants].sort((one, other) => other.own - one.own || other.tokens - one.tokens);
  if (sorted.length <= SHOWN) return sorted;
  const rest = sorted.slice(SHOWN - 1);
  const sum = (name) => rest.reduce((total, each) => total + each[name], 0);
  return [...sorted.slice(0, SHOWN - 1), { tenant: "", own: false, share: sum("share"), running: sum("running"), waiting: sum("waiting"), tokens: sum("tokens") }];
}

function row(tenant, sums) {
  const name = tenant.own ? "You" : tenant.tenant ? tenant.tenant.slice(0, 8) : "Others";
  const entitled = `Entitled to ${grouped(tenant.share)} ${tenant.share === 1 ? "share" : "shares"}`;
  const cells = Object.keys(MEASURES).map((measure) => cell(tenant[measure], sums[measure]));
  return element("tr", { class: tenant.own ? "is-own" : null, title: entitled }, element("th", { scope: "row" }, name), ...cells);
}

function cell(count, sum) {
  const bar = element("i", {});
  bar.style.width = `${sum ? ((100 * count) / sum).toFixed(1) : 0}%`;
  return element("td", { title: `${grouped(count)} of ${grouped(sum)}` }, element("span", { class: "share-bar", "aria-hidden": "true" }, bar), element("span", {}, grouped(count)));
}
