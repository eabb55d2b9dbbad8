// The form of a conversation in storage and in files: which fields it has, and whether a value from outside is one.
// Conversations that older versions of the page stored are brought up to date here, and nowhere else.

export const VERSION = 2;

const CUT_SHORT = "The connection ended before the answer did.";

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value);
const isNumbers = (value) => isObject(value) && Object.values(value).every((each) => isNumber(each) || typeof each === "boolean");
const isAlternative = (value) => Array.isArray(value) && value.length === 2 && isText(value[0]) && isNumber(value[1]);
const isToken = (value) => Array.isArray(value) && value.length === 3 && isAlternative(value.slice(0, 2)) && Array.isArray(value[2]) && value[2].every(isAlternative);

const SETTINGS = { name: isText, model: isText, sampling: isObject, logprobs: (value) => typeof value === "boolean" };
const DETAILS = { reasoning: isText, ending: isText, error: isText, answer: isText, stats: isNumbers, tokens: (value) => Array.isArray(value) && value.every(isToken) };

/** A conversation without settings and messages. */
export function blank(id) {
  return { id, name: "", model: "", system: "", sampling: {}, logprobs: false, leaf: -1, messages: [] };
}

/** The conversation that `value` describes. Throws an Error whose message says what is wrong with it. */
export function read(value, id) {
  if (!isObject(value)) throw new Error("it is no object");
  if (!Array.isArray(value.messages)) throw new Error("it has no list of messages");
  const { version = 1 } = value;
  if (!(version >= 1 && version <= VERSION)) throw new Error(`its version is ${version}, and this page knows versions up to ${VERSION}`);
  const { messages, leaf } = version === 1 ? inARow(value) : value;
  const conversation = { ...blank(id), ...fields(value, SETTINGS) };
  if (isText(value.system)) conversation.system = value.system;
  conversation.messages = messages.map((message, at) => readMessage(message, at, messages));
  if (!isPlace(leaf, messages.length)) throw new Error("its leaf is none of its messages");
  conversation.leaf = leaf;
  return conversation;
}

/** The first version: a plain list. Entries that are no messages were skipped then, and are now. */
function inARow({ messages }) {
  const sound = messages.filter((each) => isObject(each) && isRole(each.role) && isText(each.content));
  return { messages: sound.map((message, at) => ({ ...message, parent: at - 1 })), leaf: sound.length - 1 };
}

function readMessage(value, at, all) {
  const wrong = (what) => new Error(`its message ${at + 1} ${what}`);
  if (!isObject(value)) throw wrong("is no object");
  if (!isRole(value.role)) throw wrong("is neither the user's nor the assistant's");
  if (!isText(value.content)) throw wrong("has no text");
  if (!isPlace(value.parent, at)) throw wrong("follows no earlier message");
  const { role, content, parent, shown } = value;
  const message = { role, content, parent, ...fields(value, DETAILS) };
  if (Number.isInteger(shown) && all[shown]?.parent === at) message.shown = shown;
  if (value.running) message.error = CUT_SHORT; // the page was closed while it was generated
  return message;
}

function isRole(value) {
  return value === "user" || value === "assistant";
}

/** Whether `value` names one of the first `count` messages, or none. */
function isPlace(value, count) {
  return Number.isInteger(value) && value >= -1 && value < count;
}

function fields(value, known) {
  return Object.fromEntries(Object.entries(known).filter(([name, fits]) => fits(value[name])).map(([name]) => [name, value[name]]));
}

/** The part of a conversation that is stored; `read` reads it back. */
export function written({ name, model, system, sampling, logprobs, leaf, messages }) {
  return { version: VERSION, name, model, system, sampling, logprobs, leaf, messages };
}

/** A conversation's title: its name or, until it has one, the beginning of its first message. */
export function title({ name, messages }) {
  const first = name || (messages.find((message) => message.role === "user")?.content ?? "");
  const line = first.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 57)}…` : line || "New conversation";
}
