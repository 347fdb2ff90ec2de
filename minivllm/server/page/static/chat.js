// The chat: a conversation with branches, streams of answers, token probabilities, tool calls, export.
import { KeyNeeded, stream } from "./api.js";
import { Attached, isImage, pictures } from "./images.js";
import { Growing, copy, el, showMarkdown, showPlain } from "./render.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = ["What is 2 + 3?", "Tell me a story about a fox.", "Repeat: red, blue, green."];

export class Chat {
  constructor(options) {
    this.options = options; // {needKey(), why(requestId), model()}
    this.values = store.setting("settings", {});
    this.running = null; // {node, abort}
    this.growing = null;
    this.attached = new Attached((text) => this.notice(text));
    this.mostBytes = Infinity; // of a request
    const first = store.list()[0];
    this.talk = (first && store.load(first.id)) || store.create();
    this.bind();
    this.draw();
  }

  bind() {
    store.onTrouble((text) => this.notice(text));
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("ask").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape" && this.running) this.stop(); });
    $("stop").addEventListener("click", () => this.stop());
    $("new").addEventListener("click", () => { this.stop(); this.talk = store.create(); this.draw(); $("ask").focus(); });
    $("rename").addEventListener("click", () => {
      const title = prompt("Title of the conversation", this.talk.title);
      if (title) { this.talk.title = title.slice(0, 80); store.save(this.talk); this.drawList(); }
    });
    $("delete").addEventListener("click", () => {
      if (!confirm("Delete this conversation?")) return;
      this.stop(); store.remove(this.talk.id);
      const next = store.list()[0];
      this.talk = (next && store.load(next.id)) || store.create(); this.draw();
    });
    $("conversations").addEventListener("change", (event) => {
      this.stop(); this.talk = store.load(event.target.value) || store.create(); this.draw();
    });
    $("export").addEventListener("change", (event) => { this.export(event.target.value); event.target.value = ""; });
    $("settings-button").addEventListener("click", () => {
      const box = $("settings"); box.hidden = !box.hidden; $("settings-button").setAttribute("aria-expanded", String(!box.hidden));
    });
    addEventListener("pagehide", () => { if (this.running) store.save(this.talk); });
    this.drawSettings();
  }

  // Take the limits of the server, which come with the state of the engine.
  allow(engine) { this.attached.allow(engine.images); this.mostBytes = engine.max_body_bytes; }

  drawSettings() {
    const keep = () => store.keepSetting("settings", this.values);
    const fields = el("div", { class: "fields" });
    settings.form(fields, this.values, keep);
    const box = el("input", { type: "checkbox" });
    box.checked = this.values.probabilities === true;
    box.addEventListener("change", () => { this.values.probabilities = box.checked; keep(); });
    fields.append(el("label", { class: "check wide" }, box, "Ask for the probabilities of tokens (hover over a token, click it to continue from another)"));
    $("settings").replaceChildren(fields);
  }

  notice(text) { $("notice").textContent = text; $("notice").hidden = !text; }

  // ---- drawing ----------------------------------------------------------------------------------------------------

  drawList() {
    const known = store.list();
    const rows = known.some((one) => one.id === this.talk.id) ? known : [{ id: this.talk.id, title: "New conversation" }, ...known];
    $("conversations").replaceChildren(...rows.map((one) => el("option", { value: one.id, text: (one.title || "Conversation").slice(0, 60) })));
    $("conversations").value = this.talk.id;
  }

  draw() {
    this.drawList();
    const nodes = store.path(this.talk);
    $("messages").replaceChildren(...(nodes.length ? nodes.map((node) => this.message(node)) : [this.empty()]));
    this.scroll();
  }

  empty() {
    const buttons = EXAMPLES.map((text) => el("button", { type: "button", text, on: { click: () => { $("ask").value = text; this.send(); } } }));
    return el("div", { class: "empty" }, el("p", { text: "Ask the model something, and watch the engine work beside." }), ...buttons);
  }

  message(node) {
    const box = el("article", { class: `message ${node.role}`, "data-id": node.id, "aria-label": node.role === "user" ? "You" : node.role === "tool" ? "Tool" : "Model" });
    this.fill(box, node);
    return box;
  }

  fill(box, node) {
    const who = { user: "You", assistant: "Model", tool: `Result of ${node.name || "the tool"}` }[node.role];
    const parts = [el("div", { class: "who", text: who })];
    if (node.reasoning) {
      const text = el("div"); showPlain(text, node.reasoning); text.className = "plain";
      const thought = el("details", { class: "thought" }, el("summary", { text: "Reasoning" }), text);
      thought.open = Boolean(node.busy && !node.content);
      parts.push(thought);
    }
    if (node.images?.length) parts.push(pictures(node.images));
    const text = el("div");
    if (node.images?.length && !node.content) text.hidden = true;
    else if (node.role !== "assistant") showPlain(text, node.content);
    else if (node.showTokens && node.tokens) this.tokens(text, node);
    else if (node.busy) { this.growing = new Growing(text); this.growing.set(node.content); } else showMarkdown(text, node.content);
    parts.push(text);
    for (const call of node.calls || []) parts.push(this.call(node, call));
    if (node.error) parts.push(el("p", { class: "error", text: node.error }));
    parts.push(this.actions(node));
    box.replaceChildren(...parts);
  }

  call(node, call) {
    const box = el("div", { class: "call" }, el("strong", { text: `Calls ${call.name}` }), el("pre", { text: call.arguments }));
    const last = store.path(this.talk).at(-1);
    if (node.busy || last !== node) return box;
    const input = el("input", { "aria-label": `Result of ${call.name}`, placeholder: "result of the call" });
    const send = () => {
      call.result = input.value;
      if (!node.calls.every((one) => one.result != null)) { store.save(this.talk); this.draw(); return; }
      let parent = node.id;
      for (const one of node.calls) parent = store.add(this.talk, parent, { role: "tool", content: one.result, name: one.name, call: one.id }).id;
      this.answer(parent);
    };
    if (call.result == null) box.append(input, el("button", { text: "Send the result", on: { click: send } }));
    return box;
  }

  actions(node) {
    const row = el("div", { class: "actions" });
    const button = (text, click, label) => row.append(el("button", { type: "button", text, "aria-label": label || text, on: { click } }));
    const brothers = store.children(this.talk, node.parent);
    const at = brothers.indexOf(node);
    const go = (by) => { this.stop(); this.talk.pick[node.parent] = brothers[at + by].id; store.save(this.talk); this.draw(); };
    if (brothers.length > 1) {
      if (at > 0) button("‹", () => go(-1), "Earlier branch");
      row.append(el("span", { text: `${at + 1} / ${brothers.length}` }));
      if (at + 1 < brothers.length) button("›", () => go(1), "Later branch");
    }
    if (node.busy) return row;
    if (node.role === "user") button("Edit", () => this.edit(node));
    if (node.role === "assistant") button("Regenerate", () => this.answer(node.parent));
    button("Copy", (event) => copy(node.content, event.target));
    if (node.tokens) button(node.showTokens ? "Text" : "Tokens", () => { node.showTokens = !node.showTokens; this.refill(node); });
    if (node.request) button("Timeline", () => this.options.why(node.request));
    if (node.facts) row.append(el("span", { text: node.facts }));
    return row;
  }

  refill(node) {
    const box = $("messages").querySelector(`[data-id="${node.id}"]`);
    if (box) this.fill(box, node);
  }

  scroll() { const box = $("messages"); box.scrollTop = box.scrollHeight; }

  follow(draw) {
    const box = $("messages");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
    draw();
    if (atEnd) this.scroll();
  }

  edit(node) {
    const box = $("messages").querySelector(`[data-id="${node.id}"]`);
    const input = el("textarea", { rows: 4, dir: "auto", "aria-label": "Edited message" });
    input.value = node.content;
    const save = () => {
      this.stop();
      const made = store.add(this.talk, node.parent, { role: "user", content: input.value, ...(node.images && { images: node.images }) });
      if (node.images) store.saveImages(this.talk);
      this.answer(made.id);
    };
    box.replaceChildren(input, el("div", { class: "actions" }, el("button", { class: "main", text: "Send", on: { click: save } }),
      el("button", { text: "Cancel", on: { click: () => this.refill(node) } })));
    input.focus();
  }

  // ---- requests ---------------------------------------------------------------------------------------------------

  send() {
    const text = $("ask").value;
    if ((!text.trim() && !this.attached.list.length) || this.running) return;
    $("ask").value = "";
    const images = this.attached.take();
    const last = store.path(this.talk).at(-1);
    if (!this.talk.title) this.talk.title = text.trim().slice(0, 50) || images[0].name;
    const made = store.add(this.talk, last ? last.id : "", { role: "user", content: text, ...(images.length && { images }) });
    if (images.length) store.saveImages(this.talk);
    this.answer(made.id);
  }

  stop() { this.running?.abort.abort(); }

  messages(upto) {
    const found = [];
    for (let node = this.talk.nodes[upto]; node; node = this.talk.nodes[node.parent]) {
      const one = { role: node.role, content: content(node) };
      if (node.role === "tool") one.tool_call_id = node.call;
      if (node.calls?.length) one.tool_calls = node.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      if (node.role !== "assistant" || node.content || node.calls?.length) found.unshift(one);
    }
    if (this.values.system?.trim()) found.unshift({ role: "system", content: this.values.system });
    return found;
  }

  body(upto, prefix) {
    const body = { ...settings.body(this.values), messages: this.messages(upto), stream: true, stream_options: { include_usage: true } };
    if (this.values.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    if (prefix) {
      body.messages.push({ role: "assistant", content: prefix });
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    return body;
  }

  // Refuse a request that the server would not read.  Only images make requests that large.
  checkSize(body) {
    if (!body.messages.some((one) => Array.isArray(one.content))) return;
    const bytes = new Blob([JSON.stringify(body)]).size, mib = (n) => `${(n / 2 ** 20).toFixed(1)} MiB`;
    if (bytes > this.mostBytes) throw new Error(`With all its images this conversation has ${mib(bytes)}; the server reads at most ${mib(this.mostBytes)} (max_body_bytes). Begin a new conversation, or send fewer images.`);
  }

  async answer(parent, prefix = "", tokens = []) {
    this.stop();
    this.notice("");
    let body;
    try { body = this.body(parent, prefix); this.checkSize(body); } catch (error) { this.notice(error.message); store.save(this.talk); this.draw(); return; }
    const node = store.add(this.talk, parent, { role: "assistant", content: prefix, reasoning: "", calls: [], busy: true });
    if (this.values.probabilities) { node.tokens = tokens; }
    const run = { node, abort: new AbortController(), start: performance.now(), first: 0, count: 0 };
    this.running = run;
    this.buttons();
    store.save(this.talk);
    this.draw();
    try {
      for await (const event of stream("v1/chat/completions", body, run.abort.signal)) this.take(run, event);
      $("said").textContent = "The answer is complete.";
    } catch (error) {
      if (run.abort.signal.aborted) { node.facts = [node.facts, "stopped"].filter(Boolean).join(" · "); $("said").textContent = "The answer was stopped."; } else {
        node.error = error.message;
        if (error instanceof KeyNeeded) this.options.needKey();
      }
    }
    node.busy = false;
    if (this.running === run) { this.running = null; this.growing = null; this.buttons(); }
    store.save(this.talk);
    this.drawList();
    this.follow(() => (store.path(this.talk).includes(node) ? this.refill(node) : null));
  }

  take(run, event) {
    const { node } = run;
    node.request ||= (event.id || "").replace(/^chatcmpl-/, "");
    const now = performance.now();
    const choice = event.choices?.[0];
    const delta = choice?.delta || {};
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (!run.first && (delta.content || thought || delta.tool_calls)) run.first = now;
    if (thought) { node.reasoning += thought; }
    if (delta.content) node.content += delta.content;
    for (const part of delta.tool_calls || []) {
      const call = (node.calls[part.index] ||= { id: "", name: "", arguments: "" });
      if (part.id) call.id = part.id;
      call.name += part.function?.name || "";
      call.arguments += part.function?.arguments || "";
    }
    if (node.tokens) for (const token of choice?.logprobs?.content || []) node.tokens.push(token);
    if (event.usage) this.facts(run, event.usage, now);
    if (choice?.finish_reason === "length") node.cut = true;
    this.grow(node, Boolean(thought || delta.tool_calls));
    if (now - (run.saved || 0) > 1500) { run.saved = now; store.save(this.talk); }
  }

  grow(node, whole) {
    const box = $("messages").querySelector(`[data-id="${node.id}"]`);
    if (!box) return;
    this.follow(() => {
      if (!whole && this.growing?.node.isConnected) this.growing.set(node.content);
      else if (!this.due) this.due = requestAnimationFrame(() => { this.due = 0; if (node.busy) this.fill(box, node); });
    });
  }

  facts(run, usage, now) {
    const seconds = (now - run.first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens || 0;
    const parts = [`${usage.completion_tokens} tokens`];
    if (seconds > 0.02) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (run.first) parts.push(`first after ${(run.first - run.start).toFixed(0)} ms`);
    parts.push(`prompt of ${usage.prompt_tokens} tokens, ${cached} of them a prefix hit`);
    if (run.node.cut) parts.push("cut at the most tokens");
    run.node.facts = parts.join(" · ");
  }

  buttons() {
    const busy = Boolean(this.running);
    $("stop").hidden = !busy; $("send").hidden = busy;
  }

  // ---- token probabilities ----------------------------------------------------------------------------------------

  tokens(box, node) {
    box.className = "text tokens";
    box.replaceChildren(...node.tokens.map((token, i) => {
      const p = Math.exp(token.logprob);
      const level = p < 0.1 ? 0 : p < 0.4 ? 1 : p < 0.8 ? 2 : 3;
      const span = el("button", { type: "button", class: `p${level}`, text: token.token, "aria-label": `${token.token.trim() || "space"}, ${(100 * p).toFixed(0)} percent` });
      const show = () => this.tip(span, node, i);
      span.addEventListener("mouseenter", show); span.addEventListener("click", () => { show(); $("tip").querySelector("button")?.focus(); });
      return span;
    }));
    box.addEventListener("mouseleave", (event) => { if (!$("tip").contains(event.relatedTarget)) this.hideSoon(); });
  }

  hideSoon() { clearTimeout(this.hiding); this.hiding = setTimeout(() => { if (!$("tip").matches(":hover, :focus-within")) $("tip").hidden = true; }, 400); }

  tip(span, node, i) {
    clearTimeout(this.hiding);
    const token = node.tokens[i];
    const rows = (token.top_logprobs || []).map((one) => {
      const p = Math.exp(one.logprob);
      const meter = el("div", { class: "meter" }); meter.style.width = `${(100 * p).toFixed(1)}%`;
      const button = el("button", { text: JSON.stringify(one.token), title: "Continue from this token", on: { click: () => this.continueFrom(node, i, one) } });
      return el("tr", {}, el("td", {}, button), el("td", { text: `${(100 * p).toFixed(1)} %` }), el("td", { class: "w" }, meter));
    });
    const tip = $("tip");
    const close = el("button", { text: "×", "aria-label": "Close", on: { click: () => { tip.hidden = true; span.focus(); } } });
    tip.replaceChildren(el("div", { class: "bar" }, el("strong", { text: `${JSON.stringify(token.token)}: ${(100 * Math.exp(token.logprob)).toFixed(1)} %` }), el("span", { class: "grow" }), close),
      el("table", {}, el("tbody", {}, ...rows)), el("small", { class: "dim", text: "Choose a token to continue the answer from it, in a new branch." }));
    tip.hidden = false;
    const at = span.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${at.bottom + tip.offsetHeight + 6 > innerHeight ? Math.max(4, at.top - tip.offsetHeight - 4) : at.bottom + 4}px`;
    tip.onmouseleave = () => this.hideSoon();
    tip.onkeydown = (event) => { if (event.key === "Escape") { tip.hidden = true; span.focus(); } };
  }

  continueFrom(node, i, other) {
    $("tip").hidden = true;
    if (node.reasoning || node.calls?.length) { this.notice("An answer with reasoning or calls cannot be continued from a token."); return; }
    const kept = [...node.tokens.slice(0, i), { ...other, top_logprobs: node.tokens[i].top_logprobs }];
    const bytes = kept.flatMap((token) => token.bytes || [...new TextEncoder().encode(token.token)]);
    const prefix = new TextDecoder().decode(new Uint8Array(bytes));
    this.answer(node.parent, prefix, kept);
  }

  // ---- export -----------------------------------------------------------------------------------------------------

  export(kind) {
    const nodes = store.path(this.talk);
    if (!kind || !nodes.length) return;
    const name = (this.talk.title || "conversation").replace(/[^\p{L}\p{N} _-]/gu, "").slice(0, 40);
    if (kind === "json") { download(`${name}.json`, JSON.stringify({ title: this.talk.title, messages: this.messages(nodes.at(-1).id), settings: this.values }, null, 2)); return; }
    if (kind === "curl") {
      const asked = nodes.findLast((node) => node.role === "user");
      const { stream: _, stream_options: __, ...body } = this.body(asked.id);
      const data = JSON.stringify(body).replaceAll("'", "'\\''");
      copy(`curl ${new URL("v1/chat/completions", location.href).href} \\\n  -H 'Content-Type: application/json' -H "Authorization: Bearer $KEY" \\\n  -d '${data}'`);
      $("said").textContent = "The command is copied."; return;
    }
    const named = (node) => (node.images || []).map((image) => `(image: ${image.name})\n\n`).join("");
    download(`${name}.md`, nodes.map((node) => `## ${node.role}\n\n${named(node)}${node.content}\n`).join("\n"));
  }
}

// The content of a message for the server: its text, or its images and its text.
function content(node) {
  const images = (node.images || []).filter((image) => isImage(image.url));
  if (!images.length) return node.content;
  const parts = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  return node.content ? [...parts, { type: "text", text: node.content }] : parts;
}

function download(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text])), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}
