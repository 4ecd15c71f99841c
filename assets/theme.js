// Before anything is painted: the theme that somebody has chosen.
(() => {
  document.documentElement.classList.add("js");
  let chosen = null;
  try {
    chosen = localStorage.getItem("fencepost-theme");
  } catch {
    // A browser may keep nothing.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
