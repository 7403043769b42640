// Runs before the first paint: apply the theme chosen earlier.
(() => {
  try {
    const chosen = localStorage.getItem("verbatim-theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch {
    // Without storage the system's theme applies.
  }
})();
