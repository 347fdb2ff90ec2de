// The page of the API: openapi.json as text.  Everything is set as text, never as markup.
import { KeyNeeded, getJson, setKey } from "./api.js";
import { copy, el } from "./render.js";

const $ = (id) => document.getElementById(id);

function kind(schema) {
  if (!schema) return "";
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const parts = schema.anyOf || schema.oneOf;
  if (parts) return [...new Set(parts.map(kind))].join(" | ");
  if (schema.type === "array") return `list of ${kind(schema.items) || "anything"}`;
  return schema.type || "anything";
}

function fields(schema) {
  const required = new Set(schema.required || []);
  const rows = Object.entries(schema.properties || {}).map(([name, one]) => el("tr", {},
    el("td", {}, el("code", { text: name }), required.has(name) ? " (required)" : ""),
    el("td", { text: kind(one) }),
    el("td", { text: [one.description, one.default != null ? `default ${JSON.stringify(one.default)}` : ""].filter(Boolean).join("; ") })));
  if (!rows.length) return el("p", { class: "dim", text: "an object" });
  const head = ["field", "type", "meaning"].map((text) => el("th", { scope: "col", text }));
  return el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
}

const SAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "Hello" }] },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 16 },
  "/v1/embeddings": { input: "Hello" }, "/tokenize": { prompt: "Hello" }, "/v1/responses": { input: "Hello" },
  "/v1/messages": { max_tokens: 64, messages: [{ role: "user", content: "Hello" }] },
};

function curl(method, path, body) {
  const url = new URL(path.slice(1), location.href).href;
  const lines = [`curl${method === "GET" ? "" : " -X " + method} '${url}'`, "-H 'Authorization: Bearer KEY'"];
  if (body) lines.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(SAMPLES[path] || {})}'`);
  return lines.join(" \\\n  ");
}

function route(path, method, one) {
  const body = one.requestBody?.content?.["application/json"]?.schema;
  const text = curl(method, path, body);
  const codes = Object.entries(one.responses || {});
  const box = el("details", { class: "route" },
    el("summary", {}, el("span", { class: "method", text: method }), el("code", { text: path }), el("span", { class: "dim", text: one.description?.split("\n")[0] || one.summary || "" })),
    el("p", { text: one.description || "" }));
  box.dataset.words = [path, method, one.description, ...Object.keys(body?.properties || {})].join(" ").toLowerCase();
  box.addEventListener("toggle", () => {
    if (box.dataset.filled) return;
    box.dataset.filled = "1";
    for (const parameter of one.parameters || []) box.append(el("p", {}, el("code", { text: parameter.name }), ` in the ${parameter.in}`));
    if (body) box.append(el("h2", { text: "Body" }), fields(body));
    const pre = el("pre", { text });
    pre.append(el("button", { class: "copy", text: "Copy", on: { click: (event) => copy(text, event.target) } }));
    box.append(el("h2", { text: "Example" }), pre, el("h2", { text: "Answers" }),
      el("p", { text: codes.map(([code, about]) => `${code}: ${about.description}`).join("; ") }));
  });
  return box;
}

async function show() {
  try {
    const found = await getJson("openapi.json");
    const boxes = [];
    for (const [path, methods] of Object.entries(found.paths)) {
      for (const [method, one] of Object.entries(methods)) boxes.push(route(path, method.toUpperCase(), one));
    }
    $("about").append(` Version ${found.info.version}, ${boxes.length} routes.`);
    $("routes").replaceChildren(...boxes);
    $("key-form").hidden = true;
  } catch (error) {
    if (!(error instanceof KeyNeeded)) { $("about").textContent = `openapi.json cannot be read: ${error.message}`; return; }
    $("key-form").hidden = false;
    $("key").focus();
    $("key-error").textContent = $("key").value ? error.message : "";
  }
}

$("key-form").addEventListener("submit", (event) => { event.preventDefault(); setKey($("key").value.trim()); show(); });
$("find").addEventListener("input", (event) => {
  const word = event.target.value.trim().toLowerCase();
  for (const box of document.querySelectorAll(".route")) box.hidden = !box.dataset.words.includes(word);
});
show();
