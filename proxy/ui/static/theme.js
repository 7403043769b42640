// Before anything is painted: the theme that was chosen here, if one was.
(() => {
  try {
    const chosen = localStorage.getItem("verbatim-theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage may be forbidden; the system's theme it is.
  }
})();
