// What stands beside the conversation on a wide screen lies over it as a drawer on a narrow one.

const $ = (id) => document.getElementById(id);
const OPENERS = { conversations: $("open-conversations"), panel: $("open-panel") };
const SHUT = { conversations: matchMedia("(max-width: 59.99rem)"), panel: matchMedia("(max-width: 74.99rem)") };

/** A closed drawer can be reached by nobody; one that stands beside is always open. */
function arrange() {
  for (const [id, opener] of Object.entries(OPENERS)) {
    const open = $(id).classList.contains("is-open");
    $(id).inert = SHUT[id].matches && !open;
    opener.setAttribute("aria-expanded", String(open));
  }
  $("scrim").hidden = !document.querySelector(".is-open");
}

/** Whether this one lies over the page, where there is room for nothing else. */
export function isDrawer(id) {
  return SHUT[id].matches;
}

/** Have it in view: open it if it is a drawer that is shut. */
export function reveal(id) {
  if (SHUT[id].matches && !$(id).classList.contains("is-open")) openDrawer(id);
}

function openDrawer(id) {
  closeDrawers();
  $(id).classList.add("is-open");
  arrange();
  $(id).querySelector("[data-closes]").focus();
}

/** Whether there was one to close. */
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
