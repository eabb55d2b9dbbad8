// Controls for sampling parameters, built from the server's description (GET engine/sampling). Only values that were set
// are sent: an untouched control shows the default and sends nothing.

import { element, iconButton } from "./dom.js";

const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"];
const LISTED = 24; // how many characters of a default are shown

// The page shows one answer as text: it has no place for several, or for the numbers behind the tokens.
const NOT_HERE = new Set(["n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "use_beam_search"]);

export class SamplingControls {
  /** Put controls into `first`, and rarely used ones into `rest`. `onChange` gets the values that are set. */
  constructor(first, rest, parameters, onChange) {
    this.onChange = onChange;
    const shown = parameters.filter((each) => each.chat && !NOT_HERE.has(each.name));
    const rank = (each) => (FIRST.includes(each.name) ? FIRST.indexOf(each.name) : FIRST.length);
    shown.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
    this.controls = shown.map((each) => new Control(each, () => this.changed()));
    first.replaceChildren(...this.controls.filter((each) => FIRST.includes(each.name)).map((each) => each.node));
    rest.replaceChildren(...this.controls.filter((each) => !FIRST.includes(each.name)).map((each) => each.node));
    this.dim();
  }

  /** Show these values, and return those that a control can show; parameters without a value show their default. */
  set(values) {
    for (const control of this.controls) control.set(control.kind.fits(values[control.name]) ? values[control.name] : undefined);
    this.dim();
    return this.values();
  }

  /** The values that are set. */
  values() {
    return Object.fromEntries(this.controls.filter(({ value }) => value !== undefined).map(({ name, value }) => [name, value]));
  }

  changed() {
    this.dim();
    this.onChange(this.values());
  }

  /** Mark the parameters that have no effect at temperature 0. */
  dim() {
    const temperature = this.controls.find((each) => each.name === "temperature");
    const greedy = (temperature?.value ?? temperature?.parameter.default) === 0;
    for (const control of this.controls) control.node.classList.toggle("moot", greedy && control.parameter.random_only);
  }
}

class Control {
  constructor(parameter, changed) {
    this.parameter = parameter;
    this.name = parameter.name;
    this.value = undefined;
    this.kind = kindOf(parameter.schema);
    const id = `sampling-${this.name}`;
    this.input = this.kind.input(parameter, { id, "aria-describedby": `${id}-doc ${id}-fault` });
    this.fault = element("p", { class: "fault", id: `${id}-fault` });
    this.slider = this.kind.slider?.(parameter, { "aria-label": `${this.name}, slider` });
    this.reset = iconButton("undo", `Reset ${this.name} to its default`, () => this.take(undefined, changed), { class: "icon-button reset", hidden: true });
    const label = element("label", { for: id, title: parameter.doc }, this.name);
    this.node = element(
      "div",
      { class: `control control-${this.kind.name}` },
      element("div", { class: "control-head" }, label, this.reset, this.kind.inHead ? this.input : null),
      this.slider,
      this.kind.inHead ? null : this.input,
      this.fault,
      element("p", { class: "doc", id: `${id}-doc` }, parameter.doc),
    );
    this.listen(changed);
    this.set(undefined);
  }

  listen(changed) {
    this.input.addEventListener("input", () => {
      const read = this.kind.read(this.input, this.parameter);
      this.complain(read.fault ?? "");
      if (read.fault) return;
      this.value = read.value;
      this.follow();
      changed();
    });
    this.slider?.addEventListener("input", () => this.take(Number(this.slider.value), changed));
  }

  take(value, changed) {
    const hadFocus = document.activeElement === this.reset;
    this.set(value);
    if (hadFocus) this.input.focus(); // the button that had the focus is hidden now
    changed();
  }

  set(value) {
    this.value = value;
    this.kind.write(this.input, value, this.parameter);
    this.complain("");
    this.follow();
  }

  follow() {
    this.reset.hidden = this.value === undefined;
    this.node.classList.toggle("is-set", this.value !== undefined);
    if (this.slider) this.slider.value = String(this.value ?? this.parameter.default);
  }

  complain(fault) {
    this.fault.textContent = fault;
    this.input.setAttribute("aria-invalid", String(Boolean(fault)));
  }
}

// ---- kinds of values, told apart by their JSON schema

function kindOf(schema) {
  if (schema.type === "boolean") return FLAG;
  if (schema.type === "number" || schema.type === "integer") return isNarrow(schema) ? RANGE : NUMBER;
  if (schema.anyOf?.some((each) => each.type === "string")) return LINES;
  if (schema.type === "array" && schema.items?.type === "integer") return NUMBERS;
  if (schema.type === "array" && schema.items?.type === "string") return LINES;
  return ANYTHING;
}

/** Whether a slider over the whole range is of use. */
function isNarrow({ minimum, exclusiveMinimum, maximum }) {
  return maximum - (minimum ?? exclusiveMinimum) <= 10;
}

function placeholder({ default: standard, name }) {
  if (standard === null || standard === undefined) return name === "max_tokens" ? "rest of context" : "none";
  return typeof standard === "object" ? JSON.stringify(standard).slice(0, LISTED) : String(standard);
}

const isList = (type) => (value) => Array.isArray(value) && value.every((each) => typeof each === type);
const isEmpty = (input) => input.value.trim() === "";

const NUMBER = {
  name: "number",
  inHead: true,
  fits: (value) => Number.isFinite(value),
  input: (parameter, attributes) =>
    element("input", { ...attributes, type: "text", inputmode: "decimal", autocomplete: "off", placeholder: placeholder(parameter) }),
  write: (input, value) => {
    input.value = value === undefined ? "" : String(value);
  },
  read: (input, { schema }) => {
    if (isEmpty(input)) return { value: undefined };
    const value = Number(input.value.trim().replace(",", "."));
    if (!Number.isFinite(value)) return { fault: "This must be a number." };
    if (schema.type === "integer" && !Number.isSafeInteger(value)) return { fault: "This must be a whole number." };
    return within(value, schema) ? { value } : { fault: `This must lie ${rangeOf(schema)}.` };
  },
};

const RANGE = {
  ...NUMBER,
  name: "range",
  slider: ({ schema }, attributes) => {
    const low = schema.minimum ?? schema.exclusiveMinimum;
    const step = schema.type === "integer" ? 1 : (schema.maximum - low) / 100;
    const min = schema.exclusiveMinimum === undefined ? low : low + step;
    return element("input", { ...attributes, type: "range", min, max: schema.maximum, step });
  },
};

function within(value, { minimum, exclusiveMinimum, maximum, exclusiveMaximum }) {
  return value >= (minimum ?? -Infinity) && value > (exclusiveMinimum ?? -Infinity) && value <= (maximum ?? Infinity) && value < (exclusiveMaximum ?? Infinity);
}

function rangeOf({ minimum, exclusiveMinimum, maximum, exclusiveMaximum }) {
  const low = minimum === undefined ? `above ${exclusiveMinimum}` : `at or above ${minimum}`;
  return maximum === undefined ? `${low} and below ${exclusiveMaximum}` : `${low} and at or below ${maximum}`;
}

const FLAG = {
  name: "flag",
  inHead: true,
  fits: (value) => typeof value === "boolean",
  input: (_, attributes) => element("input", { ...attributes, type: "checkbox", role: "switch" }),
  write: (input, value, parameter) => {
    input.checked = value ?? parameter.default ?? false;
  },
  read: (input, parameter) => ({ value: input.checked === parameter.default ? undefined : input.checked }),
};

const LINES = {
  name: "lines",
  inHead: false,
  fits: (value) => typeof value === "string" || isList("string")(value),
  input: (parameter, attributes) =>
    element("textarea", { ...attributes, rows: 2, spellcheck: "false", placeholder: `${placeholder(parameter)}; one a line, \\n is a line break` }),
  write: (input, value) => {
    input.value = value === undefined ? "" : [value].flat().map((text) => text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n")).join("\n");
  },
  read: (input) => {
    const lines = input.value.split("\n").filter((line) => line !== "");
    return { value: lines.length ? lines.map((line) => line.replace(/\\([n\\])/g, (_, sign) => (sign === "n" ? "\n" : "\\"))) : undefined };
  },
};

const NUMBERS = {
  name: "numbers",
  inHead: false,
  fits: isList("number"),
  input: (parameter, attributes) =>
    element("input", { ...attributes, type: "text", inputmode: "numeric", autocomplete: "off", placeholder: `${placeholder(parameter)}; with commas between` }),
  write: (input, value) => {
    input.value = value === undefined ? "" : value.join(", ");
  },
  read: (input) => {
    if (isEmpty(input)) return { value: undefined };
    const value = input.value.split(",").map((part) => (part.trim() ? Number(part) : Number.NaN));
    return value.every(Number.isSafeInteger) ? { value } : { fault: "These must be whole numbers with commas between them." };
  },
};

const ANYTHING = {
  name: "json",
  inHead: false,
  fits: () => true,
  input: (parameter, attributes) =>
    element("textarea", { ...attributes, rows: 2, spellcheck: "false", placeholder: `${placeholder(parameter)}; as JSON` }),
  write: (input, value) => {
    input.value = value === undefined ? "" : JSON.stringify(value);
  },
  read: (input) => {
    if (isEmpty(input)) return { value: undefined };
    try {
      return { value: JSON.parse(input.value) };
    } catch {
      return { fault: "This is not JSON yet." };
    }
  },
};
