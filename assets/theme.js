// Before the first paint: the chosen theme.
(() => {
  document.documentElement.classList.add("js");
  let chosen = null;
  try {
    chosen = localStorage.getItem("fencepost-theme");
  } catch {
    // No local storage.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
