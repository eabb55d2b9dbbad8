// Conversations, kept in this browser and nowhere else: one entry of localStorage each, beside an index. Where storage is
// refused or full they live in memory, and `persistent` says so.

const INDEX = "penstock.conversations";
const ONE = "penstock.conversation.";
const MOST = 200;
const ROLES = new Set(["user", "assistant"]);

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

function set(key, text) {
  try {
    localStorage.setItem(key, text);
    memory.delete(key);
    return true;
  } catch {
    memory.set(key, text);
    return false;
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
    return null; // written by something else: as if it were not there
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
  if (!found || !Array.isArray(found.messages)) return null;
  const messages = found.messages.filter((each) => each && ROLES.has(each.role) && typeof each.content === "string");
  return { id, system: typeof found.system === "string" ? found.system : "", sampling: { ...found.sampling }, messages };
}

/** A new conversation with the settings of another; kept only once something is said in it. */
export function create(like = null) {
  return { id: newId(), system: like?.system ?? "", sampling: { ...like?.sampling }, messages: [] };
}

// crypto.randomUUID exists only on secure origins, and a phone reaches this page over plain http.
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Keep a conversation; the oldest ones make room where there is none. */
export function save(conversation) {
  const { id, system, sampling, messages } = conversation;
  const others = list().filter((entry) => entry.id !== id);
  while (others.length >= MOST) remove(ONE + others.pop().id);
  const text = JSON.stringify({ system, sampling, messages });
  persistent = set(ONE + id, text);
  while (!persistent && others.length) {
    remove(ONE + others.pop().id);
    persistent = set(ONE + id, text);
  }
  set(INDEX, JSON.stringify([{ id, title: title(conversation), updated: Date.now() }, ...others]));
}

/** Forget a conversation. */
export function discard(id) {
  remove(ONE + id);
  set(INDEX, JSON.stringify(list().filter((entry) => entry.id !== id)));
}

/** What a conversation is called: the beginning of what was asked first. */
export function title(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.content ?? "";
  const line = first.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 57)}…` : line || "New conversation";
}

/** Call when another tab has changed the conversations. */
export function onChange(callback) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key === INDEX) callback();
  });
}
