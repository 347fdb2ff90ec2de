// The page: views, theme, key, and the three parts.
import { setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { Engine } from "./engine.js";

const $ = (id) => document.getElementById(id);

function needKey() {
  const dialog = $("key-dialog");
  if (!dialog.open) dialog.showModal();
}

function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("nav button")) button.setAttribute("aria-pressed", String(button.dataset.view === view));
  engine.later();
}

function hello(facts) {
  $("model").textContent = facts.models[0];
  $("model").title = facts.models.join(", ");
  document.title = `minivllm: ${facts.models[0]}`;
  chat.allow(facts);
}

const engine = new Engine({ needKey, hello });
const chat = new Chat({ needKey, why: async (request) => {
  // the end of a request comes with the next state
  if (!engine.why(request)) await new Promise((resolve) => { setTimeout(resolve, 1000 * (engine.hello?.interval || 0) + 300); });
  chat.notice(engine.why(request) || "This request ended before the page was connected to the engine, so its timeline is not known.");
} });
const compare = new Compare(needKey);

for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => show(button.dataset.view));
$("key-button").addEventListener("click", needKey);
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue === "save") { setKey($("key").value.trim()); engine.restart(); }
  $("key").value = "";
});
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = dark ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("minivllm.theme", theme); } catch { /* no storage */ }
  engine.themed();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.themed());
globalThis.minivllm = { chat, engine, compare }; // for measurements and tests
