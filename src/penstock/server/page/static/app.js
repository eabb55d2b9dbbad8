// The page: joins conversations, answers, settings and the engine's view. Everything that the page can do is wired here.

import { exportFile, importFile } from "./archive.js";
import { CacheView } from "./cache.js";
import { Answering, requestFor } from "./conversation.js";
import { announce, element, grouped, icon } from "./dom.js";
import { closeDrawers, isDrawer, reveal } from "./drawers.js";
import { EngineView } from "./engine.js";
import { PrefixesView } from "./prefixes.js";
import { StepsView } from "./steps.js";
import { TenantsView } from "./tenants.js";
import { title } from "./format.js";
import { ConversationList } from "./list.js";
import { MessageView, copy } from "./messages.js";
import { notice } from "./notice.js";
import { Presets } from "./presets.js";
import { SamplingControls } from "./sampling.js";
import * as store from "./store.js";
import * as thread from "./thread.js";
import { apiKey, getJson, setApiKey } from "./api.js";

const $ = (id) => document.getElementById(id);
const CURRENT = "penstock.current";
const NEAR = 80; // pixels from the end within which a growing answer is followed
const STARTERS = [
  "Explain how a water turbine works, in three sentences.",
  "Write a short poem about rivers.",
  "List five uses of Python, with one line each.",
];

let models = [];
let conversation = store.create();
let answering = null;
let controls = null;
let follows = true;
const views = new Map();
const cache = new CacheView();

// ---- the conversation on the page

function show(next) {
  conversation = next;
  remember(next.id);
  views.clear();
  $("messages").replaceChildren();
  showSettings();
  showBranch();
  showList();
  showComposer();
  toLatest();
}

/** Show the messages from the first to the leaf; messages that are already on the page keep their elements. */
function showBranch() {
  const shown = thread.path(conversation);
  const nodes = shown.map((message) => viewOf(message).node);
  const host = $("messages");
  const same = nodes.findIndex((node, at) => host.children[at] !== node);
  while (host.children.length > (same < 0 ? nodes.length : same)) host.lastChild.remove();
  if (same >= 0) host.append(...nodes.slice(same));
  cache.showAnswers(shown);
  $("welcome").hidden = shown.length > 0;
  document.title = shown.length ? `${title(conversation)} · Penstock` : "Penstock";
}

const actions = { regenerate, edit, turn, versions: (message) => thread.versions(conversation, message), byTokens: () => conversation.logprobs };

function viewOf(message) {
  if (!views.has(message)) views.set(message, new MessageView(message, actions));
  return views.get(message);
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

function send(text, parent = conversation.leaf) {
  if (answering || !text.trim()) return;
  follows = true;
  thread.add(conversation, { role: "user", content: text }, parent);
  answer(conversation.leaf);
}

/** Have the message at `parent` answered: in `message`, an earlier answer that stayed empty, or else in a new one. */
function answer(parent, message = null) {
  if (message) for (const left of ["error", "ending", "tokens", "stats", "answer"]) delete message[left];
  else thread.add(conversation, (message = { role: "assistant", content: "" }), parent);
  message.running = true;
  answering = new Answering(conversation, message, { onProgress: progressed, onEnd: ended });
  keep(conversation);
  showBranch();
  viewOf(message).refresh();
  showComposer();
  toLatest();
  announce("Answering.");
  answering.run(requestFor(conversation, modelOf(conversation).id));
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
  cache.showAnswers(thread.path(conversation));
  showComposer();
  if (follows) toLatest();
  if (failure?.status === 401 || failure?.status === 403) askForKey();
  if (!failure) announce(`Answer: ${view ? view.spoken().slice(0, 2000) : "finished in another conversation"}`);
}

/** Answer the message before `message` again: as another version, or in place of `message` if that is empty. */
function regenerate(message) {
  if (answering) return;
  answer(message.parent, message.content || message.reasoning ? null : message);
  $("text").focus();
}

/** Replace `message` by another text, as a new version, and have that answered. */
function edit(message, text) {
  if (answering) return notice("Wait for the answer, or stop it.");
  views.delete(message); // so that its editor is closed when this version is shown again
  send(text, message.parent);
  $("text").focus();
}

/** Show another version of a message, and the messages that followed it. */
function turn(message, version) {
  const forward = conversation.messages.indexOf(version) > conversation.messages.indexOf(message);
  follows = false;
  thread.turnTo(conversation, version);
  if (conversation !== answering?.conversation) keep(conversation);
  showBranch();
  const view = viewOf(version);
  view.refreshVersions();
  view.node.scrollIntoView({ block: "nearest" });
  const [back, on] = view.node.querySelectorAll(".branches button");
  (forward && !on.disabled ? on : back.disabled ? on : back).focus();
  announce(view.node.querySelector(".branches").getAttribute("aria-label"));
}

// ---- the list of conversations

const list = new ConversationList($("conversation-list"), $("search"), $("search-status"), {
  open: openConversation,
  rename,
  discard,
  exportOne: (id) => exportFile([found(id)], title(found(id))),
});

function showList() {
  list.show(conversation.id);
  $("export").disabled = !store.list().length;
}

/** The latest state of a conversation: if it is on the page or being answered, it may be newer than what is stored. */
function found(id) {
  return [conversation, answering?.conversation].find((each) => each?.id === id) ?? store.load(id);
}

function rename(id, name) {
  const named = found(id);
  named.name = name;
  keep(named);
  if (conversation.id === id) showBranch();
}

$("export").addEventListener("click", () => exportFile(store.list().map(({ id }) => found(id)).filter(Boolean), "penstock-conversations"));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  if (file) await takeIn(file);
});

async function takeIn(file) {
  try {
    const { added, known } = await importFile(file);
    showList();
    if (added.length) openConversation(added[0].id);
    notice(`Conversations imported: ${added.length}.${known ? ` Here already: ${known}.` : ""}`, null, { long: true });
  } catch (error) {
    notice(error.message, null, { long: true });
  }
}

function openConversation(id) {
  const opened = found(id);
  closeDrawers();
  if (!opened) return notice("This conversation is gone.");
  if (opened !== conversation) show(opened);
  $("text").focus();
}

function newConversation() {
  closeDrawers();
  show(store.create(conversation));
  $("text").focus();
}

function discard(id) {
  const gone = found(id);
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

/** Make the field as high as its text, if the browser's CSS cannot. */
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
    if (document.querySelector(":popover-open")) return; // Escape closes the popover
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

// Following ends only when the reader scrolls up, not when the text grows while the reader does nothing.
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

$("new-chat").addEventListener("click", newConversation);
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
    return; // the theme lasts as long as the page
  }
});
showTheme(document.documentElement.dataset.theme ?? "auto");

// ---- settings and access

const tenants = new TenantsView();
const engine = new EngineView([cache, new StepsView(), new PrefixesView(), tenants], askForKey);

const presets = new Presets(
  { select: $("preset"), form: $("preset-form"), name: $("preset-name"), add: $("preset-add"), remove: $("preset-remove") },
  () => conversation,
  ({ system, sampling }) => {
    conversation.system = system;
    conversation.sampling = { ...sampling };
    showSettings();
    settingsChanged();
  },
);

function settingsChanged() {
  presets.show();
  if (conversation.messages.length) store.save(conversation);
}

function showSettings() {
  $("system").value = conversation.system;
  if (controls) conversation.sampling = controls.set(conversation.sampling);
  $("logprobs").checked = conversation.logprobs;
  presets.show();
  showModel();
}

$("logprobs").addEventListener("change", () => {
  conversation.logprobs = $("logprobs").checked;
  settingsChanged();
  for (const [message, view] of views) {
    view.byTokens = null;
    if (message.tokens) view.refresh();
  }
});

$("system").addEventListener("input", () => {
  conversation.system = $("system").value;
  settingsChanged();
});

$("key").value = apiKey();
$("key-form").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", () => {
  setApiKey($("key").value.trim());
  tenants.forget(engine.model);
  start();
});

function askForKey() {
  reveal("panel");
  $("key").focus();
  notice("This server wants an API key.");
  announce("This server wants an API key. Its field has the focus now.");
}

async function start() {
  engine.restart();
  try {
    const [served, sampling] = await Promise.all([getJson("v1/models"), getJson("engine/sampling")]);
    models = served.data;
    controls = new SamplingControls($("sampling-first"), $("sampling-rest"), sampling.data, (values) => {
      conversation.sampling = values;
      settingsChanged();
    });
    showSettings();
  } catch (error) {
    if (error.status !== 401 && error.status !== 403) notice(error.message); // for these, the engine's view asks for a key
  }
}

/** The model that answers in a conversation: the one chosen for it, if it is served here, otherwise the first. */
function modelOf({ model }) {
  return models.find(({ id }) => id === model) ?? models[0] ?? { id: "" };
}

function showModel() {
  if (!models.length) return;
  const { id, max_model_len: context } = modelOf(conversation);
  $("model-name").textContent = id;
  $("model-name").hidden = models.length > 1;
  $("models").hidden = models.length < 2;
  $("model-choice").replaceChildren(...models.map((each) => element("option", { value: each.id }, each.id)));
  $("model-choice").value = id;
  engine.choose(models.length > 1 ? id : "");
  $("welcome-model").textContent = [id, context ? `a context of ${grouped(context)} tokens` : ""].filter(Boolean).join(" · ");
}

$("model-choice").addEventListener("change", () => {
  conversation.model = $("model-choice").value;
  showModel();
  settingsChanged();
});

$("starters").replaceChildren(
  ...STARTERS.map((starter) => element("button", { type: "button", class: "starter", click: () => send(starter) }, starter, icon("send"))),
);
store.onChange(showList);
show(remembered() ?? store.create());
start();
addEventListener("pagehide", () => {
  if (answering) store.save(answering.conversation);
});
if (!isDrawer("conversations")) text.focus();
