// A browser's WebSocket: no headers, so the key goes by subprotocol.  Node's own class (22 and later) has the same interface;
// an older node needs `npm install ws` first, done here in the temporary home.
import { execSync } from "node:child_process";
import { pathToFileURL } from "node:url";
import path from "node:path";

let Socket = globalThis.WebSocket;
if (Socket === undefined) {
  execSync("npm install --silent --no-fund --no-audit ws@8", { stdio: "ignore" });
  Socket = (await import(pathToFileURL(path.resolve("node_modules/ws/wrapper.mjs")).href)).WebSocket;
}
console.log("version node", process.versions.node);
const { BASE_URL, MODEL, API_KEY } = process.env;
const url = BASE_URL.replace("http", "ws") + "/v1/ws";

function talk(messages, done) {
  return new Promise((resolve, reject) => {
    const socket = new Socket(url, ["minivllm", "key." + API_KEY]);
    const got = [];
    const limit = setTimeout(() => reject(new Error("no end after 30 s: " + JSON.stringify(got).slice(-2000))), 30000);
    socket.onopen = () => messages.forEach((m) => socket.send(JSON.stringify(m)));
    socket.onerror = (e) => reject(new Error("socket error " + (e.message ?? "")));
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      got.push(message);
      if (done(message, got, socket)) { clearTimeout(limit); socket.close(); resolve(got); }
    };
  });
}

const ask = (id, more) => ({
  type: "chat.completions", id,
  body: { model: MODEL, messages: [{ role: "user", content: "What is 2 + 3?" }], temperature: 0, max_tokens: 12, ...more },
});
const isEnd = (m, id) => m.id === id && (m.type === "done" || m.type === "error");

const one = await talk([ask("a")], (m) => isEnd(m, "a"));
const text = (got, id) => got.filter((m) => m.id === id && m.type === "chunk")
  .flatMap((m) => m.data.choices).map((c) => c.delta.content ?? "").join("");
if (!text(one, "a")) throw new Error("no text: " + JSON.stringify(one));
console.log("ok one request");

const three = await talk(["x", "y", "z"].map((id) => ask(id)), (m, got) => ["x", "y", "z"].every((id) => got.some((g) => isEnd(g, id))));
for (const id of ["x", "y", "z"]) if (text(three, id) !== text(one, "a")) throw new Error("texts differ on one socket");
console.log("ok three interleaved");

let cancelled = false;
const cut = await talk([ask("long", { max_tokens: 400, ignore_eos: true })], (m, got, socket) => {
  if (m.type === "chunk" && !cancelled) { cancelled = true; socket.send(JSON.stringify({ type: "cancel", id: "long" })); }
  return isEnd(m, "long");
});
if (cut.filter((m) => m.type === "chunk").length > 300) throw new Error("it was not cancelled");
console.log("ok cancelled");

const bad = await talk([{ type: "chat.completions", id: "b", body: { model: MODEL, messages: [], temperature: 99 } }], (m) => isEnd(m, "b"));
if (bad.at(-1).type !== "error") throw new Error("a bad body was taken");
console.log("ok a bad body is refused, the socket lives");
