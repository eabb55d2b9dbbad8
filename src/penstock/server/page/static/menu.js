// A small menu beside a button. It is a popover: the browser shows it above everything, and closes it on Escape or a click
// elsewhere.

import { element, icon } from "./dom.js";

/** Show `items`, each `[drawing, words, action]`, below `anchor`, which gets the focus back when the menu closes. */
export function openMenu(anchor, items) {
  const menu = element("div", { class: "menu", role: "menu", popover: "auto" });
  for (const [drawing, words, action] of items) {
    const choose = () => {
      menu.hidePopover();
      action();
    };
    menu.append(element("button", { type: "button", role: "menuitem", click: choose }, icon(drawing), words));
  }
  menu.addEventListener("keydown", (event) => move(menu, event));
  menu.addEventListener("toggle", (event) => {
    anchor.setAttribute("aria-expanded", String(event.newState === "open"));
    if (event.newState === "closed") menu.remove();
  });
  anchor.after(menu);
  menu.showPopover({ source: anchor });
  place(menu, anchor.getBoundingClientRect());
  menu.firstChild.focus();
}

/** Put an element that is over the page below `box`, or above it if there is no room, and within the window. */
export function place(node, box) {
  const { width, height } = node.getBoundingClientRect();
  const below = box.bottom + 4 + height <= innerHeight - 4;
  node.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  node.style.top = `${below ? box.bottom + 4 : Math.max(8, box.top - height - 4)}px`;
}

function move(menu, event) {
  const items = [...menu.children];
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
}
