// Set the colours before the first paint.
(() => {
  let theme = null;
  try { theme = localStorage.getItem("minivllm.theme"); } catch { /* no storage */ }
  if (theme) document.documentElement.dataset.theme = theme;
})();
