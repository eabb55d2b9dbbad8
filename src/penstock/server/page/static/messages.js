// Messages as elements: one article for each message, with its actions and what it cost.

import { announce, element, grouped, icon, iconButton } from "./dom.js";
import { lifeOf } from "./life.js";
import { render } from "./markdown.js";
import { TokensView } from "./tokens.js";

const ENDINGS = {
  length: "The answer reached its length limit.",
  stopped: "Stopped.",
};

/**
 * One message on the page. `actions` are called with the message: `regenerate`, `edit` (with the new text), `turn` (with the
 * version to show); `versions` returns its versions, and `byTokens` whether answers are shown as tokens.
 */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const own = message.role === "user";
    this.body = element("div", { class: own ? "said" : "answer" });
    this.thinking = null;
    this.tokens = null; // the view of the tokens, while it is shown
    this.byTokens = null; // whether to show tokens; null: as the conversation says
    this.life = null; // the view of where its time went, while it is shown
    this.foot = element("div", { class: "message-foot" });
    this.node = element("article", { class: `message message-${message.role}`, "aria-label": own ? "You" : "Answer" }, this.body, this.foot);
    if (own) this.showOwn();
    else this.refresh();
  }

  showOwn() {
    this.body.replaceChildren(this.message.content);
    this.showOwnFoot();
  }

  showOwnFoot() {
    this.foot.replaceChildren(
      ...[
        this.branches(),
        iconButton("copy", "Copy message", () => copy(this.message.content)),
        iconButton("edit", "Edit message", () => this.edit()),
      ].filter(Boolean),
    );
  }

  /** Show which version this is, of how many; called when there may be another. */
  refreshVersions() {
    if (this.message.role === "assistant") this.refresh();
    else this.showOwnFoot();
  }

  /** The controls that lead to the other versions of this message, if there are any. */
  branches() {
    const all = this.actions.versions(this.message);
    if (all.length < 2) return null;
    const at = all.indexOf(this.message);
    const step = (name, label, to) => iconButton(name, label, () => this.actions.turn(this.message, all[to]), { disabled: !all[to] });
    return element(
      "span",
      { class: "branches", role: "group", "aria-label": `Version ${at + 1} of ${all.length}` },
      step("left", "Previous version", at - 1),
      element("span", { class: "branch-count" }, `${at + 1} / ${all.length}`),
      step("right", "Next version", at + 1),
    );
  }

  /** Show the answer as it is now. */
  refresh() {
    const { content, reasoning, running } = this.message;
    this.node.setAttribute("aria-busy", String(Boolean(running)));
    this.node.classList.toggle("is-running", Boolean(running) && !content);
    if (reasoning) this.showThinking(reasoning, Boolean(running) && !content);
    this.showText(content, Boolean(running));
    if (running) this.life = null;
    if (running) this.foot.replaceChildren();
    else this.showFoot();
  }

  showText(content, growing) {
    const byTokens = Boolean(this.message.tokens?.length) && (this.byTokens ?? this.actions.byTokens());
    if (byTokens !== Boolean(this.tokens)) {
      this.body.replaceChildren();
      this.body.markdownSources = [];
      this.tokens = byTokens ? new TokensView(this.body) : null;
    }
    if (this.tokens) this.tokens.show(this.message.tokens);
    else render(this.body, content, { growing });
  }

  /** The answer for screen readers. */
  spoken() {
    return this.tokens ? this.message.content : this.body.innerText;
  }

  /** Switch between showing the answer as text and as tokens. */
  turnTokens() {
    this.byTokens = !this.tokens;
    this.refresh();
    this.foot.querySelector("[aria-pressed]").focus();
  }

  showThinking(text, growing) {
    if (!this.thinking) {
      this.thinking = element("div", {});
      this.body.before(element("details", { class: "thinking" }, element("summary", {}, "Thinking"), this.thinking));
    }
    render(this.thinking, text, { growing });
  }

  showFoot() {
    const { content, error, ending, stats } = this.message;
    const parts = [];
    if (error) parts.push(element("p", { class: "failure", role: "alert" }, icon("alert"), element("span", {}, error)));
    if (ENDINGS[ending]) parts.push(element("p", { class: "ending" }, ENDINGS[ending]));
    const row = element("div", { class: "message-actions" }, this.branches());
    if (content) row.append(iconButton("copy", "Copy answer", () => copy(content)));
    row.append(iconButton("again", error ? "Try again" : "Regenerate answer", () => this.actions.regenerate(this.message)));
    if (this.message.tokens?.length) {
      row.append(iconButton("tokens", "Show how sure each token was", () => this.turnTokens(), { "aria-pressed": String(Boolean(this.tokens)) }));
    }
    if (this.message.answer && ending && ending !== "stopped" && !error) row.append(this.lifeButton());
    if (stats) row.append(statistics(stats));
    this.foot.replaceChildren(...parts, row, ...(this.life ? [this.life] : []));
  }

  lifeButton() {
    return iconButton("time", "Show where its time went", () => this.turnLife(), { "aria-pressed": String(Boolean(this.life)) });
  }

  /** Show where the answer's time went, or hide it again. */
  turnLife() {
    this.life = this.life ? null : lifeOf(this.message.answer);
    this.showFoot();
    this.foot.querySelector("[aria-label='Show where its time went']").focus();
    this.life?.scrollIntoView({ block: "nearest" });
  }

  edit() {
    const text = element("textarea", { class: "editor", "aria-label": "Edit message", rows: 3 });
    text.value = this.message.content;
    const done = () => {
      this.showOwn();
      this.foot.querySelector("[aria-label='Edit message']").focus();
    };
    const send = () => {
      if (text.value.trim()) this.actions.edit(this.message, text.value);
    };
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") done();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.body.replaceChildren(text);
    this.foot.replaceChildren(
      element("button", { type: "button", class: "button", click: done }, "Cancel"),
      element("button", { type: "button", class: "button button-main", click: send }, "Send again"),
    );
    text.focus();
  }
}

// `approximate` is set in answers that were stored before servers counted the tokens of stopped answers.
function statistics({ ttft, rate, tokens, cached, approximate }) {
  const about = approximate ? "≈ " : "";
  const parts = [
    rate ? [`${about}${rate.toFixed(1)} tok/s`, "Tokens per second, from the first token to the last"] : null,
    ttft === undefined ? null : [`${seconds(ttft)} to first token`, "Time to first token, as seen from this page"],
    tokens ? [`${about}${grouped(tokens)} ${tokens === 1 ? "token" : "tokens"}`, "Tokens of this answer"] : null,
    cached ? [`${grouped(cached)} cached`, "Prompt tokens that the prefix cache had"] : null,
  ];
  return element("span", { class: "stats" }, ...parts.filter(Boolean).map(([text, title]) => element("span", { title }, text)));
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

/** Put text on the clipboard; the older way serves plain http, where browsers offer no other. */
export async function copy(text) {
  let copied = false;
  if (navigator.clipboard) {
    copied = await navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  if (!copied) copied = copyBySelection(text);
  announce(copied ? "Copied." : "The browser did not allow copying.");
  document.dispatchEvent(new CustomEvent("notice", { detail: copied ? "Copied" : "The browser did not allow copying" }));
}

function copyBySelection(text) {
  const before = document.activeElement;
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  before?.focus();
  return copied;
}
