// How sure the model was: an answer as its tokens, each coloured by its probability, and, beside the token that is pointed
// at, a card of the alternatives. Probabilities are the model's own, before temperature and filters.

import { element } from "./dom.js";
import { place } from "./menu.js";

export const ALTERNATIVES = 5;
const ROUND = 1e4;

/** A token as it is stored: its text, its log probability, and both for the most likely tokens in its place. */
export function tokenOf({ token, bytes, logprob, top_logprobs: top = [] }) {
  return [textOf(token, bytes), rounded(logprob), top.map((each) => [textOf(each.token, each.bytes), rounded(each.logprob)])];
}

/** A token's text, or its bytes if they are only part of a character. */
function textOf(token, bytes) {
  if (!bytes || !token.includes("\ufffd")) return token;
  return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
}

const rounded = (logprob) => Math.round(logprob * ROUND) / ROUND;

/** The text with its white space made visible. */
function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share < 0.01) return "< 0.01 %";
  if (share > 99.99 && share < 100) return "> 99.99 %";
  return `${share.toFixed(share < 1 || share > 99 ? 2 : 1)} %`;
}

export class TokensView {
  /** Shows tokens in `host`, and nothing else there. */
  constructor(host) {
    this.summary = element("span", {});
    this.line = element("div", { class: "tokens", role: "group", "aria-label": "Tokens of the answer, arrow keys move between them" });
    this.count = 0;
    this.surprise = 0;
    this.line.addEventListener("pointerover", (event) => event.pointerType === "mouse" && this.point(event.target));
    this.line.addEventListener("pointerleave", () => card.hide());
    this.line.addEventListener("focusin", (event) => this.point(event.target));
    this.line.addEventListener("focusout", () => card.hide());
    this.line.addEventListener("keydown", (event) => this.move(event));
    const scale = element("span", { class: "token-scale", "aria-hidden": "true" });
    const legend = element("p", { class: "token-legend" }, element("span", {}, "sure", scale, "unsure"), element("span", { class: "token other" }, "not the likeliest"), this.summary);
    host.replaceChildren(legend, this.line);
  }

  /** Show what has been added to `tokens`, a list that only grows. */
  show(tokens) {
    for (const token of tokens.slice(this.count)) this.line.append(this.node(token));
    this.count = tokens.length;
    this.summary.textContent = `perplexity ${Math.exp(this.surprise / (this.count || 1)).toFixed(2)}`;
    this.summary.title = "e to the mean of minus the log probabilities: 1 is certain";
  }

  node(token) {
    const [text, logprob, alternatives] = token;
    const likeliest = !alternatives.length || alternatives[0][0] === text || logprob >= alternatives[0][1];
    const blank = text.trim() === "";
    const node = element(
      "span",
      {
        class: `token${likeliest ? "" : " other"}${text.includes("\n") && blank ? " breaks" : ""}`,
        role: "button",
        tabindex: this.line.childElementCount ? "-1" : "0",
        "aria-label": blank ? visible(text) : null,
        "aria-describedby": "token-card",
      },
      text,
    );
    node.style.setProperty("--doubt", (1 - Math.exp(logprob)).toFixed(3));
    node.token = token;
    this.surprise -= logprob;
    return node;
  }

  point(node) {
    if (node.token) card.show(node);
    else card.hide();
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    const now = document.activeElement;
    if (event.key === "Escape" && card.isOpen()) {
      event.stopPropagation();
      card.hide();
    }
    if (!step || !now.token) return;
    event.preventDefault();
    const all = this.line.children;
    const next = all[Math.max(0, Math.min(all.length - 1, [...all].indexOf(now) + step))];
    now.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

/** The one card on the page. */
class Card {
  constructor() {
    this.node = element("div", { class: "token-card", id: "token-card", role: "tooltip", popover: "manual" });
    document.body.append(this.node);
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  isOpen() {
    return this.node.matches(":popover-open");
  }

  show(node) {
    const [text, logprob, alternatives] = node.token;
    const listed = alternatives.some(([other]) => other === text);
    const rows = alternatives.map(([other, its]) => row(other, its, other === text));
    if (!listed) rows.push(row(text, logprob, true));
    this.node.replaceChildren(
      element("p", { class: "token-head" }, element("code", {}, visible(text)), element("b", {}, percent(logprob))),
      element("table", {}, element("tbody", {}, rows)),
      element("p", { class: "note" }, listed ? `log probability ${logprob.toFixed(3)}` : `not among the ${alternatives.length} likeliest; log probability ${logprob.toFixed(3)}`),
    );
    if (!this.isOpen()) this.node.showPopover();
    place(this.node, node.getClientRects()[0] ?? node.getBoundingClientRect());
  }

  hide() {
    if (this.isOpen()) this.node.hidePopover();
  }
}

function row(text, logprob, chosen) {
  const bar = element("i", {});
  bar.style.width = `${(100 * Math.exp(logprob)).toFixed(1)}%`;
  return element("tr", { class: chosen ? "chosen" : null }, element("th", { scope: "row" }, visible(text)), element("td", { class: "bar-cell" }, bar), element("td", {}, percent(logprob)));
}

const card = new Card();
