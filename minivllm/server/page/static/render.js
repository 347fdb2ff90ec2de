// Text of users and models becomes DOM here, and nowhere else.  Markup is made by marked and cleaned by DOMPurify.
const LONG = 60000; // characters of an answer from which it is shown as plain text
const TAGS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol",
  "li", "a", "table", "thead", "tbody", "tr", "th", "td", "sup", "sub"];
const CLEAN = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "align", "start"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i, RETURN_DOM_FRAGMENT: true };

export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Raw HTML in an answer is shown as the text that it is.
function escapeTags(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
}

let parser = null;

function markup(text) {
  if (!parser) {
    const { Marked } = globalThis.marked;
    parser = new Marked({ gfm: true, breaks: true, async: false });
    parser.use({ renderer: {
      html: (token) => escapeTags(token.text),
      image: (token) => escapeTags(token.raw), // an image would tell its host that the answer was read
    } });
  }
  const fragment = globalThis.DOMPurify.sanitize(parser.parse(text), CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    pre.tabIndex = 0;
    pre.append(el("button", { class: "copy", type: "button", text: "Copy", on: { click: (event) => {
      copy(pre.querySelector("code")?.textContent ?? "", event.target);
    } } }));
  }
  return fragment;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    if (button) { const before = button.textContent; button.textContent = "Copied"; setTimeout(() => { button.textContent = before; }, 1200); }
  } catch { if (button) button.textContent = "Not allowed"; }
}

export function showPlain(node, text) {
  node.className = "text plain" + (text.length > 4000 ? " long" : "");
  node.dir = "auto";
  node.textContent = text;
}

// Show markdown.  A long text, or one that cannot be parsed, is shown as it is.
export function showMarkdown(node, text) {
  if (text.length > LONG) { showPlain(node, text); return; }
  node.className = "text";
  node.dir = "auto";
  try { node.replaceChildren(markup(text)); } catch { showPlain(node, text); }
}

// Shows markdown that grows: finished paragraphs are kept, only the rest is parsed again.
export class Growing {
  constructor(node) {
    this.node = node; this.done = 0; this.text = ""; this.due = 0; this.cost = 0; this.last = 0;
    this.old = el("div"); this.tail = el("div");
    node.className = "text cursor"; node.dir = "auto";
    node.replaceChildren(this.old, this.tail);
  }

  set(text) {
    this.text = text;
    if (!this.due) this.due = requestAnimationFrame(() => this.frame());
  }

  frame() {
    this.due = 0;
    const now = performance.now();
    if (now - this.last < Math.max(40, 12 * this.cost)) { this.due = requestAnimationFrame(() => this.frame()); return; }
    const { text } = this;
    if (text.length > LONG) { this.tail.replaceChildren(text.slice(this.done)); this.tail.className = "plain"; this.last = now; this.cost = performance.now() - now; return; }
    const end = text.lastIndexOf("\n\n");
    const part = text.slice(this.done, end);
    if (end > this.done + 1500 && (part.match(/^ {0,3}(```|~~~)/gm) || []).length % 2 === 0) {
      const box = el("div"); showMarkdown(box, part); this.old.append(box); this.done = end;
    }
    showMarkdown(this.tail, text.slice(this.done));
    this.cost = performance.now() - now;
    this.last = performance.now();
  }

  end() {
    cancelAnimationFrame(this.due);
    showMarkdown(this.node, this.text);
  }
}
