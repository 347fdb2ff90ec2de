// The live engine: one WebSocket, one drawing for each state, at most one drawing in a frame.
import { getKey, socketUrl } from "./api.js";
import { el } from "./render.js";
import { keepSetting, setting } from "./store.js";

const $ = (id) => document.getElementById(id);
const NAMES = ["free", "cached", "used", "shared"];
const WHY = { rows: "waits: no free row", blocks: "waits: too few blocks", loading: "waits: loads from a tier", held: "waits: held back",
  budget: "waits: the step is full", prefix: "waits: prefix comes" };
// the same for several requests, with a remedy; rows: most rows, n: number of requests
const WHY_MANY = {
  rows: (most) => `all ${most} rows of the batch are in use. A row becomes free when a running request ends.`,
  blocks: () => "too few KV blocks are free. They become free when a running request ends.",
  loading: () => "their blocks are on their way from a tier.",
  held: () => "the scheduler holds them back.",
  prefix: () => "a running request computes the beginning of their prompts now, which then is a prefix hit for them.",
  budget: () => "the tokens that one step may compute are spent. They get their turn in a later step.",
};
const FORMS = { native: () => "native code, all layers in one call", separate: () => "separate operations, not captured",
  decode: (rows) => `graph of ${rows} decoding rows`, mixed: (rows, tokens) => `graph of ${rows} rows with ${tokens} tokens` };
const PARTS = ["plan", "submit", "wait", "publish"];
const NARROW = matchMedia("(max-width: 860px)");
const MOST_ROWS = 100, MOST_WAITING = 12, MOST_LINES = 28, SECONDS = 120;

function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

function set(node, text) { if (node.nodeValue !== text) node.nodeValue = text; }
const short = (id) => id.slice(0, 6) + id.slice(32).replace(/^-0$/, ""); // of a request with several prompts also which one
const number = (n) => (n >= 1e6 ? `${(n / 1e6).toFixed(1)}M` : n >= 1e4 ? `${(n / 1e3).toFixed(0)}k` : String(Math.round(n)));
const size = (n) => (n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : `${(n / 2 ** 20).toFixed(0)} MiB`);

export class Engine {
  constructor(options) {
    this.options = options; // {needKey(), hello(engine)}
    this.state = null; this.last = null; this.cells = null; this.of = null;
    this.ended = []; this.rates = [[], [], []]; this.steps = [[], [], [], [], [], []];
    this.rows = []; this.tiles = new Map(); this.lines = []; this.wait = 500; this.marked = "";
    this.times = []; // ms of script time of each drawing, for measurements
    this.makeRows(); this.makeMap(); this.makeLegend(); this.makeWords();
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    new ResizeObserver(() => { this.colours = null; this.later(); }).observe($("engine"));
    this.open();
  }

  // ---- the connection ---------------------------------------------------------------------------------------------

  open() {
    clearTimeout(this.again);
    if (this.socket || document.hidden) return;
    const socket = this.socket = new WebSocket(socketUrl("v1/live"), ["minivllm"]);
    socket.onopen = () => { if (getKey()) socket.send(JSON.stringify({ type: "auth", key: getKey() })); };
    socket.onmessage = (event) => this.take(event.data);
    socket.onclose = (event) => {
      if (this.socket !== socket) return;
      this.socket = null;
      if (event.code === 1008) { this.link("The key is missing or wrong."); this.options.needKey(); return; }
      if (!this.refused) this.link("The engine's state is not connected. Trying again…");
      this.again = setTimeout(() => this.open(), this.wait);
      this.wait = Math.min(this.wait * 2, 5000);
    };
  }

  close() {
    clearTimeout(this.again);
    const { socket } = this;
    this.socket = null;
    socket?.close();
  }

  restart() { this.close(); this.wait = 500; this.open(); }

  link(text) { if ($("link").textContent !== text) $("link").textContent = text; }

  take(data) {
    const begin = performance.now();
    const message = JSON.parse(data);
    this.refused = message.type === "error";
    if (message.type === "hello") {
      this.hello = message; this.wait = 500; this.state = this.incoming = null; this.ended = [];
      this.options.hello(message.engine);
      this.explain(message.engine);
      $("whole").hidden = message.scope !== "all";
      const whose = message.scope === "all" ? "all requests" : "your requests only (the key is not the operator's)";
      this.about = `${message.engine.device}, ${message.engine.dtype}, ${number(message.engine.kv_tokens)} tokens of KV cache. Shows ${whose}, every ${message.interval} s.`;
      $("most-rows").textContent = message.engine.max_num_seqs;
      this.link(this.about);
    } else if (message.type === "state") {
      this.link(message.replicas > 1 ? `${this.about} Replica ${message.replica} of ${message.replicas}, numbered from 0.` : this.about);
      this.incoming = message;
      for (const one of message.ended) this.ended.push({ ...one, at: message.at });
      this.ended = this.ended.slice(-MOST_LINES);
      if (this.times.length < 5000) this.times.push(performance.now() - begin);
      this.later();
    } else if (message.type === "down") this.link(message.restarting ? "The engine has ended and is being restarted…" : `The engine does not run: ${message.why}`);
    else if (message.type === "error") this.link(message.error.message);
  }

  // A state is drawn in several frames, a part in each, so that no frame takes long.
  later() {
    if (this.due) { this.again = true; return; }
    this.stage = 0;
    this.due = requestAnimationFrame(() => this.frame());
  }

  frame() {
    const begin = performance.now();
    const stages = [() => this.begin(), () => this.drawMap(), () => this.drawRows(), () => this.drawLines(), () => this.drawPlots()];
    this.due = 0;
    if (!this.state && !this.incoming) return;
    stages[this.stage++]();
    const visible = NARROW.matches ? document.body.dataset.view === "engine" : true;
    if (visible && this.stage < stages.length) this.due = requestAnimationFrame(() => this.frame());
    else if (this.again) { this.again = false; this.later(); }
    if (this.times.length < 5000) this.times.push(performance.now() - begin);
  }

  begin() {
    if (this.incoming) {
      this.last = this.state; this.state = this.incoming; this.incoming = null; this.fresh = true;
      this.measure();
    }
    this.drawTiles();
  }

  // ---- figures ----------------------------------------------------------------------------------------------------

  measure() {
    const { state, last } = this;
    const seconds = last ? state.at - last.at : 0;
    let made = 0, computed = 0;
    if (seconds > 0 && state.engine && last.engine) {
      made = Math.max(0, state.engine.generated - last.engine.generated) / seconds;
      computed = Math.max(0, (state.steps?.tokens || 0) / seconds - made);
    } else if (seconds > 0) {
      const old = new Map(last.rows.id.map((id, i) => [id + last.rows.sample[i], last.rows.known[i]]));
      state.rows.id.forEach((id, i) => { made += Math.max(0, state.rows.known[i] - (old.get(id + state.rows.sample[i]) ?? state.rows.known[i])); });
      made /= seconds;
    }
    this.rate = made;
    this.push(this.rates, [state.at, made, computed]);
    const ms = state.steps?.ms;
    if (ms) this.push(this.steps, [state.at, ...PARTS.map((name) => ms[name]), state.steps.device_ms]);
  }

  push(columns, values) {
    columns.forEach((column, i) => column.push(values[i]));
    while (columns[0].length > 2 && columns[0][0] < values[0] - SECONDS) for (const column of columns) column.shift();
  }

  drawTiles() {
    const { rows, blocks, engine } = this.state;
    const running = rows.running.filter(Boolean).length;
    const tiles = [["running", engine ? engine.running : running], ["waiting", engine ? engine.waiting + engine.arriving : rows.id.length - running], ["tokens/s", number(this.rate || 0)]];
    if (engine) {
      tiles.push(["blocks in use", `${Math.round(100 * engine.held / blocks.total)} %`],
        ["prefix hits", engine.queries ? `${Math.round(100 * engine.hits / engine.queries)} %` : "–", `${engine.hits} of ${engine.queries} prompt tokens were a prefix hit`],
        ["evicted", number(engine.evictions), "KV blocks whose content was replaced"], ["preempted", number(engine.preemptions), "times that a running request lost its blocks"], ["finished", number(engine.finished)]);
    }
    for (const [name, value, more] of tiles) {
      let text = this.tiles.get(name);
      if (!text) {
        text = document.createTextNode("");
        this.tiles.set(name, text);
        $("tiles").append(el("div", { class: "tile" }, el("b", {}, text), el("span", { text: name })));
      }
      set(text, String(value));
      if (more && text.parentElement.title !== more) text.parentElement.title = more;
    }
    const tiers = engine?.tiers || [];
    if (tiers.length) $("tiers").replaceChildren(...tiers.map((tier) => el("p", { class: "dim", text: `Tier ${tier.name}: ${tier.pages} pages, ${size(tier.used)} of ${size(tier.limit)}; ${tier.hits} hits, ${tier.loads} loads, ${tier.evictions} evictions` })));
  }

  // ---- the map of blocks ------------------------------------------------------------------------------------------

  makeLegend() {
    const about = { free: "free", cached: "cached", used: "used", shared: "shared", evicted: "just evicted", tier: "also in a tier" };
    this.counts = {};
    for (const [name, text] of Object.entries(about)) {
      const count = document.createTextNode("");
      this.counts[name] = count;
      $("legend").append(el("span", {}, el("span", { class: `key ${name}` }), text + " ", count));
    }
  }

  // The explanation of the words is open until somebody closes it.
  makeWords() {
    const words = $("words");
    words.open = setting("words", true);
    words.addEventListener("toggle", () => keepSetting("words", words.open));
  }

  makeMap() {
    const map = $("map");
    this.small = document.createElement("canvas");
    map.addEventListener("mousemove", (event) => this.hover(event));
    map.addEventListener("mouseleave", () => { this.at = -1; $("map-text").textContent = ""; });
  }

  palette() {
    if (this.colours) return this.colours;
    const style = getComputedStyle(document.documentElement);
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const colour = (name) => {
      probe.fillStyle = style.getPropertyValue(`--${name}`).trim(); probe.fillRect(0, 0, 1, 1);
      const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
      return (255 << 24) | (b << 16) | (g << 8) | r;
    };
    const names = [...NAMES, "tier", "evicted", "ink"];
    const width = $("map-box").clientWidth;
    this.colours = { ...Object.fromEntries(names.map((name) => [name, colour(name)])), card: style.getPropertyValue("--card").trim(), width };
    return this.colours;
  }

  drawMap() {
    const { blocks } = this.state;
    if (this.mapped !== blocks) {
      this.before = this.cells?.length === blocks.total || this.cells?.length === this.count ? this.cells : null;
      this.cells = bytes(blocks.cells); this.of = new Int16Array(bytes(blocks.of).buffer); this.count = this.cells.length;
      this.mapped = blocks;
      if ($("block-tokens").textContent !== String(blocks.block)) $("block-tokens").textContent = blocks.block;
      const square = blocks.per > 1 ? `${blocks.per} blocks` : "one block";
      if ($("square").textContent !== square) $("square").textContent = square;
    }
    const colours = this.palette(), { cells, before } = this;
    const wide = colours.width || 300;
    const side = Math.max(2, Math.min(14, Math.floor(Math.sqrt(wide * 330 / cells.length))));
    const across = Math.max(1, Math.floor(wide / side)), down = Math.ceil(cells.length / across);
    const { small } = this;
    if (small.width !== across || small.height !== down || !this.image) { small.width = across; small.height = down; this.pen = small.getContext("2d"); this.image = this.pen.createImageData(across, down); this.pixels = new Uint32Array(this.image.data.buffer); }
    const table = NAMES.map((name) => colours[name]), counts = [0, 0, 0, 0, 0, 0], marked = this.marked ? this.state.rows.id.indexOf(this.marked) : -2;
    this.pixels.fill(0);
    for (let i = 0; i < cells.length; i++) {
      const state = cells[i] & 7;
      counts[state]++;
      let colour = table[state];
      if (cells[i] & 8) { counts[5]++; if (state === 1) colour = colours.tier; }
      if (before && (before[i] & 7) === 1 && state !== 1 && (state === 0 || this.evicts())) { counts[4]++; colour = state === 0 ? colours.evicted : colour; }
      this.pixels[i] = this.of[i] === marked ? colours.ink : colour;
    }
    this.pen.putImageData(this.image, 0, 0);
    const map = $("map"), ratio = Math.min(2, devicePixelRatio || 1), w = across * side, h = down * side;
    if (map.width !== w * ratio || map.height !== h * ratio) { map.width = w * ratio; map.height = h * ratio; map.style.width = `${w}px`; map.style.height = `${h}px`; }
    const pen = map.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.clearRect(0, 0, w, h);
    pen.drawImage(small, 0, 0, w, h);
    if (side >= 4) {
      pen.fillStyle = colours.card;
      for (let x = side - 1; x < w; x += side) pen.fillRect(x, 0, 1, h);
      for (let y = side - 1; y < h; y += side) pen.fillRect(0, y, w, 1);
    }
    this.grid = { side, across };
    NAMES.forEach((name, i) => set(this.counts[name], String(counts[i])));
    set(this.counts.evicted, String(counts[4])); set(this.counts.tier, String(counts[5]));
    const unit = blocks.per > 1 ? `cells of ${blocks.per} blocks` : "blocks";
    map.setAttribute("aria-label", `Map of the KV ${unit}: ${counts[0]} free, ${counts[1]} cached, ${counts[2]} used, ${counts[3]} shared`);
    if (this.at >= 0) this.describe();
  }

  evicts() { return this.state.engine && this.last?.engine && this.state.engine.evictions > this.last.engine.evictions; }

  hover(event) {
    if (!this.grid) return;
    const box = $("map").getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / this.grid.side), y = Math.floor((event.clientY - box.top) / this.grid.side);
    this.at = x < this.grid.across ? y * this.grid.across + x : -1;
    this.describe();
  }

  describe() {
    const { at, cells, of, state } = this;
    if (at < 0 || at >= cells.length) { $("map-text").textContent = ""; return; }
    const id = of[at] >= 0 ? state.rows.id[of[at]] : "";
    const many = state.blocks.per > 1 ? ` to ${Math.min((at + 1) * state.blocks.per, state.blocks.total)}` : "";
    $("map-text").textContent = `Block ${at * state.blocks.per + 1}${many}: ${NAMES[cells[at] & 7]}${cells[at] & 8 ? ", also in a tier" : ""}${id ? `, of request ${short(id)}` : ""}`;
  }

  // ---- requests ---------------------------------------------------------------------------------------------------

  makeRows() {
    const body = $("rows").tBodies[0];
    const find = (event) => { const row = event.target.closest("tr"); return row ? this.ids?.[this.rows.findIndex((one) => one.row === row)] : ""; };
    body.addEventListener("mouseover", (event) => { this.marked = find(event) || ""; this.later(); });
    body.addEventListener("mouseleave", () => { this.marked = ""; this.later(); });
  }

  drawRows() {
    const { rows } = this.state, body = $("rows").tBodies[0];
    const order = this.order(), n = order.length, several = rows.owner.some((owner) => owner !== rows.owner[0]);
    this.ids = order.map((at) => rows.id[at]);
    while (this.rows.length < n) {
      const texts = Array.from({ length: 5 }, () => document.createTextNode(""));
      const row = el("tr", {}, ...texts.map((text) => el("td", {}, text)));
      this.rows.push({ row, texts }); body.append(row);
    }
    for (let k = 0; k < this.rows.length; k++) {
      const { row, texts } = this.rows[k], hidden = k >= n, i = order[k];
      if (row.hidden !== hidden) row.hidden = hidden;
      if (hidden) continue;
      const phase = rows.prompt[i] - rows.computed[i] > 1 ? `prompt ${Math.round(100 * rows.computed[i] / rows.prompt[i])} %` : "generates";
      set(texts[0], short(rows.id[i]) + (rows.sample[i] ? `/${rows.sample[i]}` : "") + (several && rows.owner[i].startsWith("key") ? ` ${rows.owner[i]}` : ""));
      set(texts[1], rows.running[i] ? phase : WHY[rows.why[i]] || "waits");
      set(texts[2], `${rows.prompt[i]} + ${Math.max(0, rows.known[i] - rows.prompt[i])}`);
      set(texts[3], rows.cached[i] ? String(rows.cached[i]) : "–");
      set(texts[4], rows.blocks[i] + (rows.preempted[i] ? ` (preempted ${rows.preempted[i]}×)` : ""));
      const look = rows.id[i] === this.marked ? "on" : rows.running[i] ? "" : "waits";
      if (row.className !== look) row.className = look;
      if (row.title !== texts[1].nodeValue) row.title = texts[1].nodeValue;
    }
    const text = rows.id.length > n ? `(${n} of ${rows.id.length})` : rows.id.length ? "" : "(none now)";
    if ($("rows-count").textContent !== text) $("rows-count").textContent = text;
    this.drawWhy();
  }

  // The indices of the rows of the table: some waiting requests, then running ones.
  order() {
    const { rows } = this.state, waiting = [], running = [];
    rows.running.forEach((runs, i) => (runs ? running : waiting).push(i));
    return [...waiting.slice(0, Math.max(MOST_WAITING, MOST_ROWS - running.length)), ...running].slice(0, MOST_ROWS);
  }

  // Why requests wait, as sentences.
  drawWhy() {
    const { rows, engine } = this.state, counts = new Map();
    rows.why.forEach((why) => { if (why) counts.set(why, (counts.get(why) || 0) + 1); });
    const seen = [...counts.values()].reduce((sum, n) => sum + n, 0), all = engine ? Math.max(seen, engine.waiting + engine.arriving) : seen;
    const sentences = [...counts].sort((a, b) => b[1] - a[1]).map(([why, n]) => {
      const many = counts.size === 1 ? all : n;
      return `${many} ${many === 1 ? "request waits" : "requests wait"}: ${WHY_MANY[why]?.(this.hello?.engine.max_num_seqs) || why}`;
    });
    const text = sentences.join(" ");
    if ($("why").textContent !== text) { $("why").textContent = text; $("why").hidden = !text; }
  }

  drawLines() {
    const { state } = this, { rows } = state, all = [];
    for (const one of this.ended.slice(-MOST_LINES)) {
      const age = state.at - one.at;
      all.push({ id: one.id, arrival: one.arrival + age, scheduled: one.scheduled == null ? null : one.scheduled + age, first: one.first == null ? null : one.first + age, end: one.finished + age });
    }
    for (let i = 0; i < rows.id.length && all.length < 2 * MOST_LINES; i++) if (!rows.sample[i]) all.push({ id: rows.id[i], arrival: rows.arrival[i], scheduled: rows.scheduled[i], first: rows.first[i], end: 0 });
    const shown = all.slice(-MOST_LINES);
    const span = Math.max(1, ...shown.map((one) => one.arrival));
    while (this.lines.length < shown.length) {
      const segments = ["waits", "prompt", "answer"].map((name) => el("i", { class: `seg ${name}` }));
      const text = document.createTextNode("");
      const line = el("div", { class: "line" }, ...segments, el("span", {}, text));
      this.lines.push({ line, segments, text }); $("timeline").append(line);
    }
    this.lines.forEach(({ line, segments, text }, k) => {
      const one = shown[k];
      if (line.hidden !== !one) line.hidden = !one;
      if (!one) return;
      const edges = [one.arrival, one.scheduled ?? one.end, one.first ?? one.end, one.end];
      segments.forEach((segment, j) => {
        const left = 100 * (1 - edges[j] / span), width = Math.max(0, 100 * (edges[j] - edges[j + 1]) / span);
        segment.style.left = `${left.toFixed(2)}%`; segment.style.width = width ? `${width.toFixed(2)}%` : "0"; segment.hidden = !width;
      });
      set(text, this.wanted && one.id.startsWith(this.wanted) ? `${short(one.id)} ◀` : short(one.id));
    });
    if (!shown.length && !$("timeline").dataset.empty) { $("timeline").dataset.empty = "1"; $("timeline").append(el("p", { class: "dim", text: "No request since this page was opened." })); }
    if (shown.length && $("timeline").dataset.empty) { delete $("timeline").dataset.empty; $("timeline").querySelector("p")?.remove(); }
  }

  // The facts of a request as a sentence; null if it was not seen.
  why(request) {
    this.wanted = request;
    this.later();
    const one = this.ended.findLast((row) => row.id.startsWith(request));
    if (!one) return null;
    const ms = (a, b) => (a == null || b == null ? "?" : `${Math.max(0, 1000 * (a - b)).toFixed(0)} ms`);
    const hit = one.cached ? `${one.cached} of its ${one.prompt} prompt tokens were a prefix hit, and cost nothing` : `none of its ${one.prompt} prompt tokens was a prefix hit`;
    return `Waited ${ms(one.arrival, one.scheduled)}, computed its prompt in ${ms(one.scheduled, one.first)}, generated ${one.tokens} tokens in ${ms(one.first, one.finished)}; ${hit}. Ended: ${one.why}${one.preempted ? `; preempted ${one.preempted} times` : ""}.`;
  }

  // ---- plots and explain ------------------------------------------------------------------------------------------

  plot(box, labels, colours) {
    const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--dim").trim(), grid = { stroke: style.getPropertyValue("--line").trim(), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid, font: "11px system-ui", size: 44 };
    const series = labels.map((label, i) => ({ label, stroke: colours[i].startsWith("--") ? style.getPropertyValue(colours[i]).trim() : colours[i], width: 1.5, points: { show: false } }));
    return new globalThis.uPlot({ width: Math.max(200, box.clientWidth), height: 120, cursor: { show: false }, legend: { live: false }, axes: [{ ...axis, size: 24 }, axis], scales: { y: { range: (_, __, high) => [0, Math.max(1e-3, high * 1.1)] } }, series: [{}, ...series] }, [[]], box);
  }

  drawPlots() {
    const now = performance.now();
    if (!this.fresh || !this.state.engine || now - (this.plotted || 0) < 450) return; // twice a second, one plot each time
    this.fresh = false;
    this.plotted = now;
    if (!this.plots) {
      this.plots = [this.plot($("rate"), ["generated", "prompt and other"], ["--answer", "--prompt"]), this.plot($("step-plot"), [...PARTS, "device"].map((name) => `${name} ms`), ["#7b5bd6", "#2f6fd6", "#98a1b0", "#23865b", "#d4351c"])];
    }
    const width = Math.max(200, this.palette().width);
    for (const plot of this.plots) if (Math.abs(plot.width - width) > 2) plot.setSize({ width, height: 120 });
    if (this.odd = !this.odd) this.plots[0].setData(this.rates); else if (this.steps[0].length) this.plots[1].setData(this.steps);
    const { steps } = this.state;
    if (!steps?.ms) return;
    const total = PARTS.reduce((sum, name) => sum + steps.ms[name], 0) || 1;
    if (!this.stack) {
      this.stack = PARTS.map((_, i) => el("i", { class: `part${i}` })); this.stackText = document.createTextNode("");
      this.formText = document.createTextNode("");
      $("parts").append(el("div", { class: "stack" }, ...this.stack), el("p", { class: "dim" }, this.stackText), el("p", { id: "forms", class: "dim" }, this.formText));
    }
    PARTS.forEach((name, i) => { this.stack[i].style.width = `${(100 * steps.ms[name] / total).toFixed(1)}%`; });
    set(this.stackText, `${PARTS.map((name) => `${name} ${steps.ms[name].toFixed(2)}`).join(", ")} ms; device ${steps.device_ms.toFixed(2)} ms; ${steps.rows} ${steps.rows === 1 ? "row" : "rows"} a step`);
    set(this.formText, this.forms(steps));
    if ($("seams").parentElement.open) $("seams").replaceChildren(el("table", {}, el("tbody", {}, ...Object.entries(steps.seams).sort((a, b) => b[1] - a[1]).map(([name, ms]) => el("tr", {}, el("td", { text: name }), el("td", { text: `${ms.toFixed(3)} ms` }))))));
  }

  // How the layers of the last steps ran: in which captures.
  forms(steps) {
    const found = steps.forms || [], all = found.reduce((sum, one) => sum + one[3], 0);
    if (!all) return "Captures used: this executor does not report them.";
    return `Captures used: ${found.map(([kind, rows, tokens, n]) => `${FORMS[kind]?.(rows, tokens) || kind} (${Math.round(100 * n / all)} %)`).join(", ")}.`;
  }

  explain(engine) {
    const box = $("explain");
    box.replaceChildren(...engine.explained.map(([seam, chosen, text]) => {
      const head = el("span", {}, el("strong", { text: seam }), ` ${chosen}`);
      return text ? el("details", {}, el("summary", {}, head), el("pre", { text })) : el("p", {}, head);
    }));
  }

  themed() { this.colours = null; this.plots?.forEach((plot) => plot.destroy()); this.plots = null; this.later(); }
}
