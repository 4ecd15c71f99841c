// Before anything is painted: the theme that somebody has chosen. Nothing else is ever kept in the browser's storage.
(() => {
  document.documentElement.classList.add("js");
  const chosen = localStorage.getItem("fencepost-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
