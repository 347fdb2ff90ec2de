// The fields of the sampling settings, their form, and the body of a request.
import { el } from "./render.js";

export const FIELDS = [
  ["temperature", "Temperature", "number", { min: 0, step: 0.1 }],
  ["top_p", "Top p", "number", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", "number", { min: -1, step: 1 }],
  ["min_p", "Min p", "number", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "Repetition penalty", "number", { min: 0.01, step: 0.05 }],
  ["max_tokens", "Most tokens", "number", { min: 1, step: 1 }],
  ["seed", "Seed", "number", { step: 1 }],
  ["stop", "Stop before (one a line)", "lines", {}],
  ["system", "System message", "text", {}],
  ["tools", "Tools (JSON list)", "json", {}],
  ["extra", "More fields of the request (JSON object)", "json", {}],
];

export function form(box, values, changed, names = FIELDS.map(([name]) => name)) {
  box.replaceChildren(...FIELDS.filter(([name]) => names.includes(name)).map(([name, label, kind, more]) => {
    const long = kind !== "number";
    const input = long ? el("textarea", { rows: name === "system" ? 2 : 1, spellcheck: "false" }) : el("input", { type: "number", placeholder: "default", ...more });
    input.value = values[name] ?? "";
    input.addEventListener("change", () => { values[name] = input.value; changed(); });
    return el("label", { class: long ? "wide" : "" }, label, input);
  }));
}

function json(text, name, check) {
  let found;
  try { found = JSON.parse(text); } catch (error) { throw new Error(`${name}: expected JSON: ${error.message}`); }
  if (!check(found)) throw new Error(`${name}: expected ${name === "Tools" ? "a list" : "an object"} in JSON`);
  return found;
}

// The fields of a request for these settings.  An Error names a field that is malformed.
export function body(values) {
  const found = {};
  for (const [name, label, kind] of FIELDS) {
    const value = (values[name] ?? "").toString();
    if (!value.trim() || name === "system") continue;
    if (kind === "number") {
      if (Number.isNaN(Number(value))) throw new Error(`${label}: expected a number`);
      found[name] = Number(value);
    } else if (kind === "lines") found[name] = value.split("\n").filter(Boolean);
    else if (name === "tools") found.tools = json(value, "Tools", Array.isArray);
  }
  if ((values.extra ?? "").trim()) Object.assign(found, json(values.extra, "More fields", (one) => one && typeof one === "object" && !Array.isArray(one)));
  return found;
}
