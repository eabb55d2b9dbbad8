// Conversations, stored in this browser and nowhere else: one entry of localStorage each, beside an index. Their tokens'
// probabilities are large but dispensable: they have entries of their own, which are the first to be removed when there is
// no room. If storage is refused or full, everything is in memory, and `persistent` is false.

import { blank, read, title, written } from "./format.js";

const INDEX = "penstock.conversations";
const ONE = "penstock.conversation.";
const TOKENS = "penstock.tokens.";
export const MOST = 200;

const memory = new Map();
export let persistent = true;

function get(key) {
  if (memory.has(key)) return memory.get(key);
  try {
    return localStorage.getItem(key);
  } catch {
    persistent = false;
    return null;
  }
}

/** Store a text: "kept", "full" if there is no room, "refused" if this browser stores nothing; then memory has it. */
function set(key, text) {
  try {
    localStorage.setItem(key, text);
    memory.delete(key);
    return "kept";
  } catch (error) {
    memory.set(key, text);
    return error.name === "QuotaExceededError" ? "full" : "refused";
  }
}

function remove(key) {
  memory.delete(key);
  try {
    localStorage.removeItem(key);
  } catch {
    persistent = false;
  }
}

function parsed(text) {
  try {
    return text === null ? null : JSON.parse(text);
  } catch {
    return null; // written by something else: treat it as missing
  }
}

/** Id, title and time of every conversation, the latest first. */
export function list() {
  const entries = parsed(get(INDEX));
  const sound = (entry) => entry && typeof entry.id === "string" && typeof entry.title === "string";
  return Array.isArray(entries) ? entries.filter(sound).sort((a, b) => b.updated - a.updated) : [];
}

/** One conversation, or null if it is gone or cannot be read. */
export function load(id) {
  const found = parsed(get(ONE + id));
  if (!found) return null;
  try {
    const conversation = read(found, id);
    for (const [at, tokens] of Object.entries(parsed(get(TOKENS + id)) ?? {})) {
      if (conversation.messages[at]) conversation.messages[at].tokens = tokens;
    }
    return conversation;
  } catch {
    return null; // written by something else, or by a newer page: it stays where it is
  }
}

/** A new conversation with the settings of another; kept only once something is said in it. */
export function create(like = null) {
  const { model = "", system = "", sampling = {}, logprobs = false } = like ?? {};
  return { ...blank(newId()), model, system, sampling: { ...sampling }, logprobs };
}

// crypto.randomUUID exists only on secure origins, and a phone reaches this page over plain http.
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Store a conversation. If there is no room, first the oldest ones' token probabilities go, then the oldest ones. */
export function save(conversation) {
  const { id } = conversation;
  const others = list().filter((entry) => entry.id !== id);
  while (others.length >= MOST) forget(others.pop().id);
  const [text, tokens] = entries(conversation);
  const aged = others.map((entry) => entry.id).reverse();
  let state = set(ONE + id, text);
  for (const old of aged) {
    if (state !== "full") break;
    remove(TOKENS + old);
    state = set(ONE + id, text);
  }
  while (state === "full" && others.length) {
    forget(others.pop().id);
    state = set(ONE + id, text);
  }
  persistent = state === "kept";
  while (set(TOKENS + id, tokens) === "full" && aged.length) remove(TOKENS + aged.shift());
  set(INDEX, JSON.stringify([entry(conversation), ...others]));
}

/** The two texts that a conversation is stored as: itself, and its tokens by the place of their message. */
function entries(conversation) {
  const tokens = conversation.messages.flatMap((message, at) => (message.tokens ? [[at, message.tokens]] : []));
  const messages = conversation.messages.map(({ tokens: _, ...rest }) => rest);
  return [JSON.stringify(written({ ...conversation, messages })), JSON.stringify(Object.fromEntries(tokens))];
}

function entry(conversation) {
  return { id: conversation.id, title: title(conversation), updated: Date.now() };
}

/** Store all of these beside the others, or none; returns whether there was room. Nothing is removed for them. */
export function saveBeside(conversations) {
  const done = [];
  for (const conversation of conversations) {
    const [text, tokens] = entries(conversation);
    done.push(conversation.id);
    if (set(ONE + conversation.id, text) !== "full" && set(TOKENS + conversation.id, tokens) !== "full") continue;
    done.forEach(forget);
    return false;
  }
  set(INDEX, JSON.stringify([...conversations.map(entry), ...list()]));
  return true;
}

/** Forget a conversation. */
export function discard(id) {
  forget(id);
  set(INDEX, JSON.stringify(list().filter((entry) => entry.id !== id)));
}

function forget(id) {
  remove(ONE + id);
  remove(TOKENS + id);
}

/** Call when another tab has changed the conversations. */
export function onChange(callback) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key === INDEX) callback();
  });
}
