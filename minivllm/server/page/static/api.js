// Requests to the server, with the key that the user typed, and the events of a stream.
export class KeyNeeded extends Error {}

let key = "";
try { key = sessionStorage.getItem("minivllm.key") || ""; } catch { /* no storage */ }

export const getKey = () => key;

export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem("minivllm.key", value); else sessionStorage.removeItem("minivllm.key");
  } catch { /* the key is kept until the page is reloaded */ }
}

const headers = (more) => (key ? { ...more, Authorization: "Bearer " + key } : more);

async function failure(answer) {
  let text = `status ${answer.status}`;
  try {
    const found = await answer.json();
    text = typeof found.error === "string" ? found.error : found.error?.message || text;
  } catch { /* no JSON */ }
  return answer.status === 401 ? new KeyNeeded(text) : new Error(text);
}

export async function getJson(path) {
  const answer = await fetch(path, { headers: headers({}) });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

// Yield the objects of a stream of server-sent events.
export async function* stream(path, body, signal) {
  const answer = await fetch(path, {
    method: "POST", signal, headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body),
  });
  if (!answer.ok) throw await failure(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer was complete");
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message || String(event.error));
      yield event;
    }
  }
}

// The address of a WebSocket of this server, and its subprotocols.  The key goes in a message: some keys are no tokens.
export const socketUrl = (path) => new URL(path, location.href).href.replace(/^http/, "ws");
