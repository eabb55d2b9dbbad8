// Presets: a system prompt and sampling values under a name, kept in this browser. A conversation holds values of its own
// and shows the preset that has the same values, so a conversation never changes a preset.

import { element } from "./dom.js";

const KEPT = "penstock.presets";
const CUSTOM = "";
const BUILT_IN = [
  { name: "Server's defaults", system: "", sampling: {} },
  { name: "Always the likeliest", system: "", sampling: { temperature: 0 } },
];

export class Presets {
  /** `current` returns the settings of the conversation, `onChoose` gets the preset that was chosen. */
  constructor({ select, form, name, add, remove }, current, onChoose) {
    Object.assign(this, { select, form, name, add, remove, current });
    this.own = kept();
    select.addEventListener("change", () => onChoose(this.all().find((each) => each.name === select.value)));
    add.addEventListener("click", () => this.ask(form.hidden));
    name.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.ask(false);
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (name.value.trim()) this.save(name.value.trim());
    });
    remove.addEventListener("click", () => this.discard(select.value));
  }

  all() {
    return [...BUILT_IN, ...this.own];
  }

  /** Show the name of the preset whose settings the conversation has. */
  show() {
    const now = fingerprint(this.current());
    const fitting = this.all().find((each) => fingerprint(each) === now)?.name ?? CUSTOM;
    const names = fitting === CUSTOM ? [CUSTOM, ...this.all().map((each) => each.name)] : this.all().map((each) => each.name);
    this.select.replaceChildren(...names.map((name) => element("option", { value: name }, name || "Custom")));
    this.select.value = fitting;
    this.remove.hidden = !this.own.some((each) => each.name === fitting);
    this.add.hidden = fitting !== CUSTOM;
    if (fitting !== CUSTOM) this.form.hidden = true;
  }

  /** Show or hide the form that asks for a name. */
  ask(wanted) {
    this.form.hidden = !wanted;
    this.name.value = "";
    (wanted ? this.name : this.add).focus();
  }

  save(name) {
    const { system, sampling } = this.current();
    const others = this.own.filter((each) => each.name !== name);
    this.keep([...others, { name: BUILT_IN.some((each) => each.name === name) ? `${name} (own)` : name, system, sampling: { ...sampling } }]);
  }

  discard(name) {
    this.keep(this.own.filter((each) => each.name !== name));
  }

  keep(own) {
    this.own = own;
    try {
      localStorage.setItem(KEPT, JSON.stringify(own));
    } catch {
      this.own = own; // the presets last as long as the page
    }
    this.show();
    this.select.focus();
  }
}

function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT)) ?? [];
    return found.filter(({ name, system, sampling }) => name && typeof name === "string" && typeof system === "string" && typeof sampling === "object");
  } catch {
    return []; // storage refused, or written by something else
  }
}

/** Equal for equal settings, in whatever order they were made. */
function fingerprint({ system, sampling }) {
  return JSON.stringify([system, Object.entries(sampling).sort()]);
}
