// One prompt with two settings, generated at the same time.
import { KeyNeeded, stream } from "./api.js";
import { Growing, el } from "./render.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const NAMES = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "system", "extra"];

export class Compare {
  constructor(needKey) {
    this.needKey = needKey;
    this.sides = store.setting("compare", null) || [{ temperature: "0" }, { temperature: "1" }];
    for (const side of [0, 1]) settings.form(this.of("fields", side), this.sides[side], () => store.keepSetting("compare", this.sides), NAMES);
    $("compare-run").addEventListener("click", () => this.run());
    $("compare-stop").addEventListener("click", () => this.abort?.abort());
  }

  of(name, side) { return document.querySelector(`#compare .${name}[data-side="${side}"]`); }

  async run() {
    const prompt = $("compare-prompt").value;
    if (!prompt.trim()) { $("compare-prompt").focus(); return; }
    this.abort = new AbortController();
    $("compare-run").disabled = true; $("compare-stop").hidden = false;
    await Promise.all([0, 1].map((side) => this.one(side, prompt)));
    $("compare-run").disabled = false; $("compare-stop").hidden = true;
    $("said").textContent = "Both answers have ended.";
  }

  async one(side, prompt) {
    const facts = this.of("facts", side);
    const box = el("div");
    this.of("reply", side).replaceChildren(box);
    const growing = new Growing(box);
    const values = this.sides[side];
    const start = performance.now();
    let text = "", first = 0, usage = null, ended = "";
    facts.textContent = "";
    try {
      const messages = [{ role: "user", content: prompt }];
      if (values.system?.trim()) messages.unshift({ role: "system", content: values.system });
      const body = { ...settings.body(values), messages, stream: true, stream_options: { include_usage: true } };
      for await (const event of stream("v1/chat/completions", body, this.abort.signal)) {
        const delta = event.choices?.[0]?.delta;
        if (delta?.content) { first ||= performance.now(); text += delta.content; growing.set(text); }
        usage = event.usage || usage;
      }
    } catch (error) {
      ended = this.abort.signal.aborted ? "stopped" : error.message;
      if (error instanceof KeyNeeded) this.needKey();
    }
    growing.text = text;
    growing.end();
    const now = performance.now();
    const parts = [];
    if (usage) parts.push(`${usage.completion_tokens} tokens`, `${((usage.completion_tokens - 1) / Math.max(0.001, (now - first) / 1000)).toFixed(1)} tokens/s`, `first after ${(first - start).toFixed(0)} ms`);
    facts.textContent = [...parts, ended].filter(Boolean).join(" · ");
  }
}
