// Conversations in localStorage.  A conversation is a tree of messages; ``pick`` names the child that is shown.
//
//   {id, title, at, nodes: {id: {id, parent, role, content, ...}}, pick: {parent id or "": child id}}
const LIST = "minivllm.list";
const ONE = "minivllm.c.";
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
  return found && found.nodes && found.pick ? found : null;
}

export function save(talk) {
  const nodes = {};
  for (const [id, node] of Object.entries(talk.nodes)) { const { tokens, busy, ...kept } = node; nodes[id] = kept; }
  if (!write(ONE + talk.id, { ...talk, nodes })) return;
  const others = list().filter((one) => one.id !== talk.id);
  write(LIST, [{ id: talk.id, title: talk.title, at: Date.now() }, ...others]);
}

export function remove(id) {
  try { localStorage.removeItem(ONE + id); } catch { /* no storage */ }
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
