// Conversations as a file: one JSON object that names its format. A file is checked to the last field before anything
// from it is stored, and it replaces no conversation that is stored here.

import { read, written } from "./format.js";
import * as store from "./store.js";

const FORMAT = "penstock-conversations";
const LARGEST = 50_000_000; // bytes

/** Have the browser save these conversations as a file. */
export function exportFile(conversations, name) {
  const all = conversations.map((conversation) => ({ id: conversation.id, ...written(conversation) }));
  const text = JSON.stringify({ format: FORMAT, exported: new Date().toISOString(), conversations: all }, null, 1);
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `${fileName(name)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function fileName(text) {
  return text.normalize("NFKD").replace(/[^\w-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60).toLowerCase() || "conversation";
}

/**
 * Store the conversations of a file beside the existing ones. Returns how many were new, and how many were here already.
 * Throws an Error with a message for users; nothing was stored then.
 */
export async function importFile(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} was not imported: it is larger than ${LARGEST / 1e6} MB.`);
  let found;
  try {
    found = parse(await file.text());
  } catch (error) {
    throw new Error(`${file.name} was not imported: ${error.message}.`);
  }
  const strange = found.filter((conversation) => !isHere(conversation));
  const count = store.list().length + strange.length;
  if (count > store.MOST) throw new Error(`${file.name} was not imported: with it there would be ${count} conversations, and at most ${store.MOST} are kept.`);
  for (const conversation of strange) if (store.load(conversation.id)) conversation.id = store.newId();
  if (!store.saveBeside(strange)) throw new Error(`${file.name} was not imported: this browser has no room for it.`);
  return { added: strange, known: found.length - strange.length };
}

function parse(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("it is no JSON file");
  }
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) throw new Error("it is no file that this page has exported");
  return value.conversations.map((each, at) => {
    try {
      return read(each, /^[\w-]{1,64}$/.test(each?.id) ? each.id : store.newId());
    } catch (error) {
      throw new Error(`of conversation ${at + 1}, ${error.message}`);
    }
  });
}

/** Whether the same conversation is stored already: a file that is read twice adds nothing. */
function isHere(conversation) {
  const here = store.load(conversation.id);
  return here !== null && JSON.stringify(written(here)) === JSON.stringify(written(conversation));
}
