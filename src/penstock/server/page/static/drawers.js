// What is beside the conversation on a wide screen is a drawer over it on a narrow one.

const $ = (id) => document.getElementById(id);
const OPENERS = { conversations: $("open-conversations"), panel: $("open-panel") };
const SHUT = { conversations: matchMedia("(max-width: 59.99rem)"), panel: matchMedia("(max-width: 74.99rem)") };

/** A closed drawer cannot be reached at all; one beside the conversation is always open. */
function arrange() {
  for (const [id, opener] of Object.entries(OPENERS)) {
    const open = $(id).classList.contains("is-open");
    $(id).inert = SHUT[id].matches && !open;
    opener.setAttribute("aria-expanded", String(open));
  }
  $("scrim").hidden = !document.querySelector(".is-open");
}

/** Whether this one is a drawer over the page, because the screen is narrow. */
export function isDrawer(id) {
  return SHUT[id].matches;
}

/** Bring it into view: open it if it is a closed drawer. */
export function reveal(id) {
  if (SHUT[id].matches && !$(id).classList.contains("is-open")) openDrawer(id);
}

function openDrawer(id) {
  closeDrawers();
  $(id).classList.add("is-open");
  arrange();
  $(id).querySelector("[data-closes]").focus();
}

/** Close the open drawer; returns whether there was one. */
export function closeDrawers() {
  const open = document.querySelector(".is-open");
  if (!open) return false;
  open.classList.remove("is-open");
  arrange();
  OPENERS[open.id].focus();
  return true;
}

for (const [id, opener] of Object.entries(OPENERS)) {
  opener.addEventListener("click", () => openDrawer(id));
  SHUT[id].addEventListener("change", () => {
    $(id).classList.remove("is-open");
    arrange();
  });
}
for (const button of document.querySelectorAll("[data-closes]")) button.addEventListener("click", closeDrawers);
$("scrim").addEventListener("click", closeDrawers);
arrange();
