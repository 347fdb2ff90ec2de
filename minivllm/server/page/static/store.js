// Conversations in localStorage.  A conversation is a tree of messages; ``pick`` names the child that is shown.
//
//   {id, title, at, nodes: {id: {id, parent, role, content, ...}}, pick: {parent id or "": child id}}
const LIST = "minivllm.list";
const ONE = "minivllm.c.";
const IMAGES = "minivllm.i."; // of a conversation: {id of a message: [data URL or ""]}
const MOST_IMAGES = 1_500_000; // characters of the images that are stored for a conversation, the newest first
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (b) => b.toString(36).padStart(2, "0")).join("");

let trouble = () => {};
export const onTrouble = (call) => { trouble = call; };

function read(name, other) {
  try { return JSON.parse(localStorage.getItem(name)) ?? other; } catch { return other; }
}

function write(name, value) {
  try { localStorage.setItem(name, JSON.stringify(value)); return true; } catch {
    trouble("The browser's storage is full: this conversation will be lost at a reload. Export it, and delete old ones.");
    return false;
  }
}

export const list = () => read(LIST, []).filter((one) => one && typeof one.id === "string");
export const setting = (name, other) => read("minivllm." + name, other);
export const keepSetting = (name, value) => write("minivllm." + name, value);

export function load(id) {
  const found = read(ONE + id, null);
  if (!found || !found.nodes || !found.pick) return null;
  for (const [node, urls] of Object.entries(read(IMAGES + id, {}))) {
    found.nodes[node]?.images?.forEach((image, i) => { image.url = urls[i]; });
  }
  return found;
}

// Store the images of a conversation.  They are apart from its text, which is stored again and again.
export function saveImages(talk) {
  const kept = {};
  let room = MOST_IMAGES;
  for (const node of Object.values(talk.nodes).filter((one) => one.images?.length).sort((a, b) => b.at - a.at)) {
    kept[node.id] = node.images.map(({ url }) => { room -= url?.length || 0; return room >= 0 ? url : ""; });
  }
  const others = list().map((one) => one.id).filter((id) => id !== talk.id);
  for (;;) {
    try { localStorage.setItem(IMAGES + talk.id, JSON.stringify(kept)); return; } catch { /* full */ }
    const oldest = others.pop();
    if (!oldest) { trouble("The browser's storage is full: the images of this conversation will be lost at a reload."); return; }
    localStorage.removeItem(IMAGES + oldest);
  }
}

export function save(talk) {
  const nodes = {};
  for (const [id, node] of Object.entries(talk.nodes)) {
    const { tokens, busy, ...kept } = node;
    if (kept.images) kept.images = kept.images.map(({ url, ...facts }) => facts);
    nodes[id] = kept;
  }
  if (!write(ONE + talk.id, { ...talk, nodes })) return;
  const others = list().filter((one) => one.id !== talk.id);
  write(LIST, [{ id: talk.id, title: talk.title, at: Date.now() }, ...others]);
}

export function remove(id) {
  try { localStorage.removeItem(ONE + id); localStorage.removeItem(IMAGES + id); } catch { /* no storage */ }
  write(LIST, list().filter((one) => one.id !== id));
}

export const create = () => ({ id: newId(), title: "", nodes: {}, pick: {} });

export function add(talk, parent, values) {
  const node = { id: newId(), parent, at: Date.now(), ...values };
  talk.nodes[node.id] = node;
  talk.pick[parent] = node.id;
  return node;
}

export const children = (talk, parent) => Object.values(talk.nodes).filter((node) => node.parent === parent).sort((a, b) => a.at - b.at);

export function path(talk) {
  const found = [];
  for (let id = talk.pick[""]; id && talk.nodes[id]; id = talk.pick[id]) found.push(talk.nodes[id]);
  return found;
}
