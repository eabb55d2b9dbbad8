// Runs before the first paint, so that a chosen theme never flashes. What was chosen is "light", "dark" or nothing.
(() => {
  try {
    const chosen = localStorage.getItem("penstock.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    document.documentElement.dataset.storage = "refused"; // the page works without storage, and says so
  }
})();
