// Building elements. Text is only ever set as text: nothing on this page turns a string into markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children, or lists of them; `true` sets a bare attribute, `false` and `null` set none. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svgElement(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  // One by one: thousands of arguments would overflow the stack.
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

/** One of the drawings of the page's sprite. It is decoration: the element that uses it has the accessible name. */
export function icon(name) {
  return svgElement("svg", { class: "icon", "aria-hidden": "true" }, svgElement("use", { href: `#icon-${name}` }));
}

/** A button with a drawing, and a name for screen readers. */
export function iconButton(name, label, click, extra = {}) {
  return element("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click, ...extra }, icon(name));
}

const said = document.getElementById("said");

/** Have screen readers speak a sentence, politely, one at a time. */
export function announce(text) {
  said.textContent = "";
  requestAnimationFrame(() => {
    said.textContent = text;
  });
}

const count = new Intl.NumberFormat("en-US");

/** 1234 -> "1,234". */
export function grouped(number) {
  return count.format(number);
}
