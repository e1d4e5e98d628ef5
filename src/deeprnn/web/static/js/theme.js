// Light, dark or the system's choice; runs before the first paint so that nothing flashes.
(() => {
  const order = ["auto", "light", "dark"];
  const read = () => {
    try { return localStorage.getItem("deeprnn-theme") || "auto"; } catch { return "auto"; }
  };
  const apply = (name) => {
    document.documentElement.dataset.theme = name;
    const label = document.getElementById("theme-name");
    if (label) {
      label.textContent = name;
      label.parentElement.setAttribute("aria-label", `Colours: ${name}. Press to change.`);
    }
    document.dispatchEvent(new Event("themechange"));
  };
  apply(read());
  document.documentElement.dataset.at = location.hash.length > 2 ? "detail" : "home";
  document.addEventListener("DOMContentLoaded", () => {
    apply(read());
    document.getElementById("theme").addEventListener("click", () => {
      const next = order[(order.indexOf(read()) + 1) % order.length];
      try { localStorage.setItem("deeprnn-theme", next); } catch { /* private windows may refuse */ }
      apply(next);
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(read()));
})();
