// The live view of the engine. The server sends counters once a second; rates are differences, computed here. While the
// tab is hidden, nothing is requested.

import { announce, grouped } from "./dom.js";
import { events } from "./api.js";
import { Plot } from "./plot.js";

const LONGEST_PAUSE = 15_000;
// What one of several models is doing while it cannot answer.
const STATES = { unloaded: "Not loaded", loading: "Loading", unloading: "Unloading" };
const $ = (id) => document.getElementById(id);

export class EngineView {
  /** `views` are told of every event (`show`) and of every change of model (`forget`); `onRefused` is called when the server wants a key. */
  constructor(views, onRefused) {
    this.views = views;
    this.onRefused = onRefused;
    this.before = null;
    this.state = "";
    this.model = "";
    this.controller = null;
    this.plots = {
      decode: new Plot($("plot-decode"), 10),
      prompt: new Plot($("plot-prompt"), 50),
      running: new Plot($("plot-running"), 4),
      waiting: new Plot($("plot-waiting"), 4),
    };
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Begin again, with the present key; does nothing while the page is hidden. */
  restart() {
    this.controller?.abort();
    this.controller = null;
    if (document.hidden) return;
    this.controller = new AbortController();
    this.watch(this.controller.signal);
  }

  /** Show the engine of `model`, if the server has several; "" for its first. */
  choose(model) {
    if (model === this.model) return;
    this.model = model;
    this.before = null;
    for (const view of this.views) view.forget(model);
    for (const plot of Object.values(this.plots)) plot.clear();
    this.restart();
  }

  async watch(signal) {
    let pause = 1000;
    const path = this.model ? `engine/events?model=${encodeURIComponent(this.model)}` : "engine/events";
    while (!signal.aborted) {
      try {
        for await (const data of events(path, { signal })) {
          this.show(JSON.parse(data));
          pause = 1000;
        }
        await sleep(pause); // the server ended the stream: it stops, or this one was open for long enough
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401 || error.status === 403) {
          this.say("off", "A key is needed");
          this.onRefused();
          return;
        }
        this.say("off", "Not connected");
        this.before = null;
        await sleep(pause);
        pause = Math.min(LONGEST_PAUSE, pause * 2);
      }
    }
  }

  show(now) {
    if (now.state && now.state !== "loaded") this.say("idle", STATES[now.state] ?? now.state);
    else if (now.alive) this.say("on", now.running ? "Working" : "Ready");
    else this.say("dead", `The engine is dead: ${now.reason}`);
    this.showCounts(now);
    for (const view of this.views) view.show(now);
    this.showRates(now);
    this.before = now;
  }

  say(state, text) {
    $("engine-state").dataset.state = state;
    $("engine-state").textContent = text;
    $("live-dot").dataset.state = state;
    if (state === "off") $("live-rate").textContent = "offline";
    if (state !== this.state && (state !== "on" || this.state === "off" || this.state === "dead")) announce(`Engine: ${text}`);
    this.state = state;
  }

  showCounts(now) {
    $("value-running").textContent = grouped(now.running);
    $("unit-running").textContent = `of ${grouped(now.slots)}`;
    $("value-waiting").textContent = grouped(now.waiting);
    $("value-steps").textContent = grouped(now.steps);
    $("value-preemptions").textContent = grouped(now.preemptions);
    this.plots.running.push(now.running);
    this.plots.waiting.push(now.waiting);
  }

  showRates(now) {
    const { before } = this;
    // Counters that went back belong to another server: there is no rate between the two.
    if (!before || now.at <= before.at || now.generated_tokens < before.generated_tokens) return;
    const seconds = now.at - before.at;
    const generated = now.generated_tokens - before.generated_tokens;
    const decode = generated / seconds;
    const prompt = Math.max(0, now.computed_tokens - before.computed_tokens - generated) / seconds;
    $("value-decode").textContent = rate(decode);
    $("value-prompt").textContent = rate(prompt);
    $("live-rate").textContent = `${rate(decode)} tok/s`;
    this.plots.decode.push(decode);
    this.plots.prompt.push(prompt);
  }
}

function sleep(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

function rate(value) {
  return grouped(value > 0 && value < 10 ? Number(value.toFixed(1)) : Math.round(value));
}
