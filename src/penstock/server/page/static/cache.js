// The prefix cache: what it holds and how much work it saved, for the engine and for each answer of this conversation. A
// cached block is kept for a prompt with the same prefix, and given up when another sequence needs room.

import { element, grouped } from "./dom.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 8; // answers, the latest
const LATELY = 30; // seconds

export class CacheView {
  constructor() {
    this.past = [];
  }

  /** Start again: the counters that follow belong to another engine. */
  forget() {
    this.past = [];
  }

  /** Show the counters of one event of the engine. */
  show(now) {
    this.showBlocks(now);
    this.showHits(now);
  }

  showBlocks(now) {
    const held = now.total_blocks - now.free_blocks;
    const shares = { held, cached: now.cached_blocks, empty: now.free_blocks - now.cached_blocks };
    for (const [name, blocks] of Object.entries(shares)) {
      $(`blocks-${name}`).textContent = grouped(blocks);
      $(`bar-${name}`).style.flexGrow = String(blocks);
    }
    $("blocks-total").textContent = `${grouped(now.total_blocks)} blocks`;
  }

  showHits(now) {
    $("value-hits").textContent = percent(now.hit_tokens, now.query_tokens);
    $("unit-hits").textContent = `${grouped(now.hit_tokens)} of ${grouped(now.query_tokens)} since the start`;
    $("bar-hits").style.width = `${now.query_tokens ? ((100 * now.hit_tokens) / now.query_tokens).toFixed(1) : 0}%`;
    const before = this.before(now);
    $("hits-lately").textContent = percent(now.hit_tokens - before.hit_tokens, now.query_tokens - before.query_tokens);
  }

  /** The counters of some time ago. Counters that went back belong to another server. */
  before(now) {
    if (this.past.length && now.query_tokens < this.past.at(-1).query_tokens) this.past = [];
    this.past.push(now);
    while (now.at - this.past[0].at > LATELY) this.past.shift();
    return this.past[0];
  }

  /** Show what each answer among `messages` took from the cache, had to compute, and wrote. */
  showAnswers(messages) {
    const known = messages.filter(({ stats }) => stats?.prompt).slice(-SHOWN);
    const most = Math.max(...known.map(({ stats }) => stats.prompt + stats.tokens));
    $("turns-view").hidden = !known.length;
    $("turns").replaceChildren(...known.map(({ stats }) => turn(stats, most)));
  }
}

function turn({ prompt, cached, tokens }, most) {
  const words = `${grouped(prompt)} prompt tokens, ${grouped(cached)} of them from the cache; ${grouped(tokens)} written`;
  const bar = element("span", { class: "meter", "aria-hidden": "true" });
  for (const [kind, count] of [["cached", cached], ["held", prompt - cached], ["written", tokens]]) {
    const part = element("i", { class: `fixed fill-${kind}` });
    part.style.width = `${((100 * count) / most).toFixed(2)}%`;
    bar.append(part);
  }
  return element("li", { title: words }, bar, element("span", { class: "unseen" }, words), element("span", { class: "turn-share", "aria-hidden": "true" }, percent(cached, prompt)));
}

function percent(part, whole) {
  const share = (100 * part) / whole;
  return whole > 0 ? `${share.toFixed(share < 10 && share > 0 ? 1 : 0)} %` : "–";
}
