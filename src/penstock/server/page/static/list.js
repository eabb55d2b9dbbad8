// The list of conversations: opens them, finds them by title and by text, renames them.

import { element, iconButton } from "./dom.js";
import { openMenu } from "./menu.js";
import * as store from "./store.js";

const AROUND = 36; // characters shown before and after what was found

export class ConversationList {
  /** `actions` are called with an id: `open`, `exportOne`, `discard`, and `rename`, also with the new name. */
  constructor(host, field, status, actions) {
    Object.assign(this, { host, field, status, actions, current: "" });
    field.addEventListener("input", () => this.show());
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !field.value) return;
      event.stopPropagation();
      field.value = "";
      this.show();
    });
  }

  /** Show the stored conversations that match the search; `current` is the id of the one on the page. */
  show(current = this.current) {
    this.current = current;
    const sought = this.field.value.trim().toLowerCase();
    const all = store.list();
    const found = sought ? all.flatMap((entry) => matching(entry, sought)) : all;
    this.field.parentElement.hidden = !all.length;
    this.host.replaceChildren(...found.map((entry) => this.item(entry)));
    this.status.textContent = sought ? `${found.length || "No"} ${found.length === 1 ? "conversation" : "conversations"} found` : "";
  }

  item({ id, title, excerpt }) {
    const open = element(
      "button",
      { type: "button", class: "conversation", "aria-current": id === this.current ? "true" : null, click: () => this.actions.open(id) },
      element("span", { class: "conversation-title" }, title),
      excerpt ? element("span", { class: "excerpt" }, excerpt.before, element("mark", {}, excerpt.found), excerpt.after) : null,
    );
    const more = iconButton("more", `More about ${title}`, () => this.openMenu(more, id), { "aria-haspopup": "menu", "aria-expanded": "false" });
    open.addEventListener("dblclick", () => this.rename(id));
    open.addEventListener("keydown", (event) => {
      if (event.key === "F2") this.rename(id);
    });
    return element("li", { "data-id": id }, open, more);
  }

  openMenu(anchor, id) {
    openMenu(anchor, [
      ["edit", "Rename", () => this.rename(id)],
      ["export", "Export", () => this.actions.exportOne(id)],
      ["bin", "Delete", () => this.actions.discard(id)],
    ]);
  }

  /** Put an input field in place of the title. */
  rename(id) {
    const item = [...this.host.children].find((each) => each.dataset.id === id);
    const title = item.querySelector(".conversation-title").textContent;
    const field = element("input", { type: "text", class: "rename", "aria-label": "Name of the conversation", maxlength: "200" });
    field.value = title;
    let done = false;
    const end = (name) => {
      if (done) return;
      done = true;
      if (name !== null && name !== title) this.actions.rename(id, name);
      this.show();
      [...this.host.children].find((each) => each.dataset.id === id)?.querySelector(".conversation").focus();
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.preventDefault(); // so that the same key does not press the button that gets the focus
      end(event.key === "Enter" ? field.value.trim() : null);
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    item.replaceChildren(field);
    field.focus();
    field.select();
  }
}

/** The entry in a list, with an excerpt if its text matches; an empty list if neither text nor title does. */
function matching(entry, sought) {
  const said = store.load(entry.id)?.messages ?? [];
  for (const { content } of said) {
    const at = content.toLowerCase().indexOf(sought);
    if (at >= 0) return [{ ...entry, excerpt: excerptOf(content, at, sought.length) }];
  }
  return entry.title.toLowerCase().includes(sought) ? [entry] : [];
}

function excerptOf(text, at, length) {
  const start = Math.max(0, at - AROUND);
  return {
    before: (start ? "…" : "") + text.slice(start, at),
    found: text.slice(at, at + length),
    after: text.slice(at + length, at + length + AROUND) + (at + length + AROUND < text.length ? "…" : ""),
  };
}
