// One short sentence above the message field, for a moment, with at most one action.

import { announce } from "./dom.js";

const $ = (id) => document.getElementById(id);
let timer = 0;

/** Show and announce a sentence; with `undo` a button calls that. A `long` one stays until the next or a click. */
export function notice(words, undo = null, { long = false } = {}) {
  clearTimeout(timer);
  $("notice-text").textContent = words;
  $("notice-action").hidden = !undo && !long;
  $("notice-action").textContent = undo ? "Undo" : "Close";
  $("notice-action").onclick = () => {
    $("notice").hidden = true;
    undo?.();
  };
  $("notice").hidden = false;
  if (undo || long) announce(undo ? `${words} There is an undo button at the end of the page.` : words);
  if (!long) timer = setTimeout(() => { $("notice").hidden = true; }, undo ? 8000 : 2000);
}
