// The page: joins conversations, answers, settings and the engine's view. Everything that the page can do is wired here.

import { Answering, requestFor } from "./conversation.js";
import { announce, element, grouped, icon, iconButton } from "./dom.js";
import { EngineView } from "./engine.js";
import { MessageView, copy } from "./messages.js";
import { SamplingControls } from "./sampling.js";
import * as store from "./store.js";
import { apiKey, getJson, setApiKey } from "./api.js";

const $ = (id) => document.getElementById(id);
const CURRENT = "penstock.current";
const NEAR = 80; // pixels from the end within which a growing answer is followed
const STARTERS = [
  "Explain how a water turbine works, in three sentences.",
  "Write a short poem about rivers.",
  "List five uses of Python, with one line each.",
];

let model = "";
let conversation = store.create();
let answering = null;
let controls = null;
let follows = true;
const views = new Map();

// ---- the conversation on the page

function show(next) {
  conversation = next;
  remember(next.id);
  views.clear();
  $("messages").replaceChildren(...next.messages.map((message) => viewOf(message).node));
  $("system").value = next.system;
  controls?.set(next.sampling);
  $("welcome").hidden = next.messages.length > 0;
  document.title = next.messages.length ? `${store.title(next)} · Penstock` : "Penstock";
  showList();
  showComposer();
  toLatest();
}

function viewOf(message) {
  const view = new MessageView(message, { regenerate, edit });
  views.set(message, view);
  return view;
}

function remember(id) {
  try {
    sessionStorage.setItem(CURRENT, id);
  } catch {
    return; // without storage, a reload begins a new conversation
  }
}

function remembered() {
  try {
    return store.load(sessionStorage.getItem(CURRENT) ?? "");
  } catch {
    return null;
  }
}

function keep(kept) {
  store.save(kept);
  $("storage-note").textContent = store.persistent
    ? "Conversations are kept in this browser only."
    : "This browser keeps nothing: conversations end with the tab.";
  showList();
}

function send(text) {
  if (answering || !text.trim()) return;
  follows = true;
  add({ role: "user", content: text });
  answer();
}

function add(message) {
  conversation.messages.push(message);
  $("messages").append(viewOf(message).node);
  $("welcome").hidden = true;
}

/** Have the conversation's last message answered. */
function answer() {
  const body = requestFor(conversation, model);
  const message = { role: "assistant", content: "", running: true };
  add(message);
  answering = new Answering(conversation, message, { onProgress: progressed, onEnd: ended });
  keep(conversation);
  document.title = `${store.title(conversation)} · Penstock`;
  showComposer();
  toLatest();
  announce("Answering.");
  answering.run(body);
}

function progressed({ message }) {
  views.get(message)?.refresh();
  if (follows) toLatest();
}

function ended({ conversation: answered, message, failure }) {
  answering = null;
  if (store.list().some((entry) => entry.id === answered.id)) keep(answered);
  const view = views.get(message);
  view?.refresh();
  showComposer();
  if (follows) toLatest();
  if (failure?.status === 401 || failure?.status === 403) askForKey();
  if (!failure) announce(`Answer: ${view ? view.body.innerText.slice(0, 2000) : "finished in another conversation"}`);
}

/** Forget everything from `message` on, and answer what is before it anew. */
function regenerate(message) {
  if (answering) return;
  cut(conversation.messages.indexOf(message));
  answer();
  $("text").focus();
}

function edit(message, text) {
  if (answering) return;
  cut(conversation.messages.indexOf(message));
  send(text);
  $("text").focus();
}

function cut(at) {
  for (const message of conversation.messages.splice(at)) {
    views.get(message)?.node.remove();
    views.delete(message);
  }
}

// ---- the list of conversations

function showList() {
  const entries = store.list().map((entry) => {
    const open = element("button", { type: "button", class: "conversation", "aria-current": entry.id === conversation.id ? "true" : null, click: () => openConversation(entry.id) }, entry.title);
    const bin = iconButton("bin", `Delete conversation: ${entry.title}`, () => discard(entry.id));
    return element("li", {}, open, bin);
  });
  $("conversation-list").replaceChildren(...entries);
}

function openConversation(id) {
  const found = answering?.conversation.id === id ? answering.conversation : store.load(id);
  closeDrawers();
  if (!found) return notice("This conversation is gone.");
  show(found);
  $("text").focus();
}

function newConversation() {
  closeDrawers();
  show(store.create(conversation));
  $("text").focus();
}

function discard(id) {
  const gone = answering?.conversation.id === id ? answering.conversation : store.load(id);
  if (answering?.conversation.id === id) answering.stop();
  store.discard(id);
  if (conversation.id === id) show(store.create(conversation));
  else showList();
  $("new-chat").focus();
  notice("Conversation deleted.", () => {
    keep(gone);
    show(gone);
  });
}

// ---- writing

const text = $("text");

function showComposer() {
  const busy = Boolean(answering);
  $("send").classList.toggle("is-stop", busy);
  $("send").disabled = !busy && !text.value.trim();
  $("send").setAttribute("aria-label", busy ? "Stop answering" : "Send message");
  $("send-icon").setAttribute("href", busy ? "#icon-stop" : "#icon-send");
  grow();
}

/** As high as its text, where the style sheet cannot say so. */
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
}

function submit() {
  if (answering) return;
  const written = text.value;
  if (!written.trim()) return;
  text.value = "";
  send(written);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) answering.stop();
  else submit();
});
text.addEventListener("input", showComposer);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  const writing = event.target.closest("input, textarea, select");
  if (event.key === "Escape") {
    if (!closeDrawers()) answering?.stop();
  } else if (event.key === "/" && !writing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    closeDrawers();
    text.focus();
  }
});

// ---- following the answer

const transcript = $("transcript");

function toLatest() {
  transcript.scrollTop = transcript.scrollHeight;
}

let lastTop = 0;

// Only the reader's own scrolling up ends the following: text that grows under a resting reader does not.
transcript.addEventListener("scroll", () => {
  const near = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < NEAR;
  if (near) follows = true;
  else if (transcript.scrollTop < lastTop) follows = false;
  lastTop = transcript.scrollTop;
  $("to-latest").hidden = follows;
});
new ResizeObserver(() => {
  if (follows) toLatest();
}).observe($("messages"));
$("to-latest").addEventListener("click", () => {
  follows = true;
  toLatest();
  text.focus();
});
document.addEventListener("copy-text", (event) => copy(event.detail));

// ---- drawers: what stands beside the conversation on a wide screen lies over it on a narrow one

const DRAWERS = { conversations: $("open-conversations"), panel: $("open-panel") };
const SHUT = { conversations: matchMedia("(max-width: 59.99rem)"), panel: matchMedia("(max-width: 74.99rem)") };

/** A closed drawer can be reached by nobody; one that stands beside is always open. */
function arrange() {
  for (const [id, opener] of Object.entries(DRAWERS)) {
    const drawer = $(id);
    const open = drawer.classList.contains("is-open");
    drawer.inert = SHUT[id].matches && !open;
    opener.setAttribute("aria-expanded", String(open));
  }
  $("scrim").hidden = !document.querySelector(".is-open");
}

function openDrawer(id) {
  closeDrawers();
  $(id).classList.add("is-open");
  arrange();
  $(id).querySelector("[data-closes]").focus();
}

/** Whether there was one to close. */
function closeDrawers() {
  const open = document.querySelector(".is-open");
  if (!open) return false;
  open.classList.remove("is-open");
  arrange();
  DRAWERS[open.id].focus();
  return true;
}

for (const [id, opener] of Object.entries(DRAWERS)) {
  opener.addEventListener("click", () => openDrawer(id));
  SHUT[id].addEventListener("change", () => {
    $(id).classList.remove("is-open");
    arrange();
  });
}
for (const button of document.querySelectorAll("[data-closes]")) button.addEventListener("click", closeDrawers);
$("scrim").addEventListener("click", closeDrawers);
$("new-chat").addEventListener("click", newConversation);
arrange();

// ---- notices

let noticeTimer = 0;

function notice(words, undo = null) {
  clearTimeout(noticeTimer);
  $("notice-text").textContent = words;
  $("notice-action").hidden = !undo;
  $("notice-action").onclick = () => {
    $("notice").hidden = true;
    undo();
  };
  $("notice").hidden = false;
  if (undo) announce(`${words} There is an undo button at the end of the page.`);
  noticeTimer = setTimeout(() => {
    $("notice").hidden = true;
  }, undo ? 8000 : 2000);
}

document.addEventListener("notice", (event) => notice(event.detail));

// ---- theme

const THEMES = ["auto", "light", "dark"];
const THEME_NAMES = { auto: "as the system", light: "light", dark: "dark" };

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme-icon").setAttribute("href", `#icon-${theme}`);
  $("theme").setAttribute("aria-label", `Theme: ${THEME_NAMES[theme]}`);
  $("theme").title = `Theme: ${THEME_NAMES[theme]}`;
}

$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  const theme = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  showTheme(theme);
  announce(`Theme: ${THEME_NAMES[theme]}`);
  try {
    localStorage.setItem("penstock.theme", theme);
  } catch {
    return; // it lasts as long as the page
  }
});
showTheme(document.documentElement.dataset.theme ?? "auto");

// ---- settings and access

const engine = new EngineView(askForKey);

function settingsChanged() {
  if (conversation.messages.length) store.save(conversation);
}

$("system").addEventListener("input", () => {
  conversation.system = $("system").value;
  settingsChanged();
});

$("key").value = apiKey();
$("key-form").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", () => {
  setApiKey($("key").value.trim());
  start();
});

function askForKey() {
  if (SHUT.panel.matches && !$("panel").classList.contains("is-open")) openDrawer("panel");
  $("key").focus();
  notice("This server wants an API key.");
  announce("This server wants an API key. Its field has the focus now.");
}

async function start() {
  engine.restart();
  try {
    const [models, sampling] = await Promise.all([getJson("v1/models"), getJson("engine/sampling")]);
    showModel(models.data[0]);
    controls = new SamplingControls($("sampling-first"), $("sampling-rest"), sampling.data, (values) => {
      conversation.sampling = values;
      settingsChanged();
    });
    controls.set(conversation.sampling);
  } catch (error) {
    if (error.status !== 401 && error.status !== 403) notice(error.message); // those are asked about by the engine's view
  }
}

function showModel({ id, max_model_len: context }) {
  model = id;
  $("model").textContent = id;
  $("welcome-model").textContent = `${id} · a context of ${grouped(context)} tokens`;
}

$("starters").replaceChildren(
  ...STARTERS.map((starter) => element("button", { type: "button", class: "starter", click: () => send(starter) }, starter, icon("send"))),
);
store.onChange(showList);
show(remembered() ?? store.create());
start();
if (!SHUT.conversations.matches) text.focus();
