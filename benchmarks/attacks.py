"""Measure how much one client's worst requests slow down /health and a short request of another key.

    python benchmarks/attacks.py [--seconds 10] [--connections 4] [--only 'unknown fields']

Each attack runs in its own process, on several connections, against a server in another process.  A third process
requests /health 20 times a second.  The line of an attack shows the times of /health and of the golden request, and the
server's answers to the attack.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
MIB = 1 << 20
BODY = 8 * MIB - 64
GOLDEN = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/detokenize", "/tokenize"
HI = [{"role": "user", "content": "Hi"}]
# the chat template of the server for "chat template", as a hostile model may have it
SLOW = (
    "{% for m in messages %}{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% elif m.content == 'large' %}{{ 'x' * 10 ** 10 }}{% endif %}{{ m.content }}{% endfor %}"
)


def fill(one: str, before: str, after: str, size: int = BODY) -> bytes:
    """Return ``before``, then ``one`` as often as ``size`` allows, then ``after``."""
    times = (size - len(before) - len(after)) // (len(one) + 1)
    return (before + ",".join([one] * times) + after).encode()


def fields(count: int, name: str = "max_tokenz_{}") -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1, **{name.format(i): 1 for i in range(count)}}).encode()


def tools(count: int) -> bytes:
    def one(i: int) -> Any:
        return {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": {}}}}

    return json.dumps({"messages": HI, "max_tokens": 1, "tools": [one(i) for i in range(count)]}).encode()


def calls() -> bytes:
    """Return the body of a chat with one call, whose arguments are a JSON text of 600,000 objects."""
    call = {"function": {"name": "f", "arguments": "[" + "{}," * 600_000 + "{}]"}}
    return json.dumps({"messages": [*HI, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}).encode()


def many(one: str, count: int, before: str, after: str) -> bytes:
    """Return the body ``before``, ``count`` times ``one`` with commas between them, and ``after``."""
    return (before + ",".join([one] * count) + after).encode()


def protocols() -> dict[str, tuple[str, bytes]]:
    """Return the attacks on routes of other protocols than chat and completions, as name -> (route, body)."""
    user, lists = '{"role":"user","content":"a"}', "[" + ",".join(["5"] * 1700) + "]"
    items, chat, end = '{"input":[', '{"max_tokens":5,"messages":[', "]}"
    tags = "<tool_call></tool_call><think></think><|im_start|>" * 100_000
    text, values = json.dumps("[" + "{}," * 500 + "{}]"), ",".join([json.dumps("x" * 100)] * 60_000)
    call = '{"type":"function_call","call_id":"a","name":"f","arguments":' + text + "}"
    use = '{"type":"tool_use","id":"a","name":"f","input":{"a":"' + "b" * 1700 + '"}}'
    function = '{"function":{"name":"f","arguments":{"a":"' + "b" * 1100 + '"}}}'
    assistant = '{"role":"assistant","content":['
    socket_item = '{"type":"response.create","input":['
    large = json.dumps("a" * 3000)
    return {
        "responses: 100,000 items": ("/v1/responses", many(user, 100_000, items, end)),
        "responses: 7 MiB of calls": ("/v1/responses", many(call, 4096, items, end)),
        "responses: 15,000 parts": ("/v1/responses", many(
            '{"type":"input_text","text":"a"}', 15_000, items + '{"role":"user","content":[', "]}]}")),
        "responses: 100,000 tags": ("/v1/responses", json.dumps({"input": tags}).encode()),
        "responses: deep lists": ("/v1/responses", many(
            '{"role":"user","content":' + "[" * 110 + "]" * 110 + "}", 180, items, end)),
        "responses, socket: calls": ("ws:/v1/responses", many(call, 4096, socket_item, end)),
        "messages: 7 MiB of calls": ("/v1/messages", many(
            use, 4000, chat + user + "," + assistant, "]}," + user + end)),
        "messages: 60,000 values": ("/v1/messages", (
            chat + user + "," + assistant + '{"type":"tool_use","id":"a","name":"f","input":{"a":[' + values
            + "]}}]}," + user + end).encode()),
        "messages: 100,000 tags": ("/v1/messages", json.dumps(
            {"max_tokens": 5, "messages": [{"role": "user", "content": tags}]}).encode()),
        "count_tokens: 4,000 blocks": ("/v1/messages/count_tokens", many(
            '{"type":"text","text":"a"}', 4000, chat + '{"role":"user","content":[', "]}]}")),
        "ollama: 7 MiB of calls": ("/api/chat", many(
            function, 6000, chat + '{"role":"assistant","tool_calls":[', "]}]}")),
        "ollama: 60,000 images": ("/api/chat", many(
            '"a"', 60_000, chat + '{"role":"user","content":"a","images":[', "]}]}")),
        "ollama: 7 MiB of context": ("/api/generate", many("5", 3_500_000, '{"prompt":"a","context":[', end)),
        "ollama: 2,000 lists of ids": ("/api/embed", many(lists, 2000, items, end)),
        "embeddings: 2,048 texts": ("/v1/embeddings", many(large, 2048, items, end)),
        "rerank: 2,048 documents": ("/v1/rerank", many(large, 2048, '{"query":"a","documents":[', end)),
        "score: 7 MiB of text": ("/v1/score", many(large, 1, '{"text_1":"' + "a" * (6 << 20) + '","text_2":[', end)),
        "apply-template: calls": ("/apply-template", many(
            function, 6000, chat + '{"role":"assistant","tool_calls":[', "]}]}")),
        "socket: 8 MiB of escapes": ("ws:/v1/ws", b'{"type":"completions","id":"a","body":{"prompt":"'
            + rb"\u0041" * (BODY // 6 - 20) + b'"}}'),
        "tokenize: 100,000 tags": (TOKENIZE, json.dumps({"prompt": tags}).encode()),
    }  # fmt: skip


def attacks() -> dict[str, tuple[str, bytes]]:
    """Return all attacks as name -> (route, body)."""
    message = '{"role":"user","content":"a"}'
    words = '"' + "the quick brown fox " * 400 + '"'
    schema = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(8000)}, "$defs": {"a": {}}}
    options = json.dumps({"prompt": "a", "stream": True, "stream_options": {f"include_{i}": 1 for i in range(10_000)}})
    found = {
        "nothing": ("", b""),
        "unknown fields": (COMPLETIONS, fields(10_000)),
        "unknown fields, 30 KiB": (COMPLETIONS, fields(1500)),
        "unknown fields, 250": (COMPLETIONS, fields(250)),
        "unknown stream options": (COMPLETIONS, options.encode()),
        "8 MiB of ids": (COMPLETIONS, fill("5", '{"max_tokens":1,"prompt":[', "]}")),
        "8 MiB of ids in lists": (COMPLETIONS, fill("[5]", '{"max_tokens":1,"prompt":[', "]}")),
        "8 MiB of objects": (COMPLETIONS, fill("{}", '{"prompt":"a","x":[', "]}")),
        "8 MiB of objects in messages": (CHAT, fill(message, '{"messages":[', "]}")),
        "4,096 messages": (CHAT, fill(message, '{"max_tokens":1,"messages":[', "]}", 4096 * 30)),
        "8 MiB of text": (COMPLETIONS, b'{"prompt":"' + b"a" * (BODY - 20) + b'"}'),
        "8 MiB of escapes": (COMPLETIONS, b'{"prompt":"' + rb"\u0041" * (BODY // 6 - 4) + b'"}'),
        "8 MiB of brackets": (COMPLETIONS, b'{"prompt":' + b"[" * (BODY - 20)),
        "8 MiB of biases": (COMPLETIONS, fill('"5":1', '{"prompt":"a","logit_bias":{', "}}")),
        "100,000 biases": (COMPLETIONS, json.dumps(
            {"prompt": "a", "logit_bias": dict.fromkeys(range(100_000), 1)}).encode()),
        "100,000 stops": (COMPLETIONS, fill('"a"', '{"prompt":"a","stop":[', "]}", 400_000)),
        "60,000 tools": (CHAT, tools(60_000)),
        "128 tools of 60 KiB": (CHAT, tools(128).replace(b'"properties": {}', b'"x": "' + b"a" * 60_000 + b'"')),
        "arguments of a call": (CHAT, calls()),
        "1 M ids to detokenize": (DETOKENIZE, fill("5", '{"tokens":[', "]}", 2 * (1 << 20))),
        "16 KiB of text to tokenize": (TOKENIZE, json.dumps({"prompt": "a quick fox " * 1300}).encode()),
        "256 prompts of 8,000": (COMPLETIONS, fill(words, '{"max_tokens":1,"prompt":[', "]}", 256 * 8000)),
        "a schema of references": (CHAT, json.dumps({"messages": HI, "max_tokens": 1, "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}).encode()),
        "prompt log-probabilities": (COMPLETIONS, json.dumps(
            {"prompt": [5] * 1000, "max_tokens": 1, "prompt_logprobs": 20}).encode()),
        "echoed log-probabilities": (COMPLETIONS, json.dumps(
            {"prompt": [5] * 1000, "max_tokens": 1, "echo": True, "logprobs": 20}).encode()),
        "log-probabilities of 64 answers": (COMPLETIONS, json.dumps(
            {"prompt": "a", "max_tokens": 40, "n": 64, "logprobs": 20, "ignore_eos": True}).encode()),
        "chunked without end": (COMPLETIONS, b""),
        "sockets: 8 MiB of objects": ("ws:/v1/ws", fill("{}", '{"type":"completions","id":"a","body":{"x":[', "]}}")),
        "sockets: unknown fields": ("ws:/v1/ws", b'{"type":"completions","id":"a","body":' + fields(10_000) + b"}"),
        "template: nested loops": (CHAT, json.dumps({"messages": [{"role": "user", "content": "loop"}]}).encode()),
        "template: gigabytes": (CHAT, json.dumps({"messages": [{"role": "user", "content": "large"}]}).encode()),
    }  # fmt: skip
    return {**found, **protocols()}


def head(path: str, key: str, *lines: str) -> bytes:
    own = ["Host: localhost", "Content-Type: application/json", f"Authorization: Bearer {key}", *lines]
    return "\r\n".join([f"POST {path} HTTP/1.1", *own, "", ""]).encode()


def frame(text: bytes) -> bytes:
    """Return a text as a masked frame of a WebSocket (RFC 6455).  The mask is zero, so the text is unchanged."""
    size = len(text)
    length = bytes([0x80 | 127]) + size.to_bytes(8, "big") if size > 125 else bytes([0x80 | size])
    return b"\x81" + length + bytes(4) + text


def send_once(address: tuple[str, int], path: str, body: bytes, key: str) -> str:
    """Send a request, and return the status of the answer as text, or "closed".

    A path that begins with "ws:" opens a WebSocket and sends ``body`` as a frame.  An empty body is sent in chunks of
    64 KiB without end."""
    with socket.create_connection(address, timeout=120) as link:
        try:
            if path.startswith("ws:"):
                nonce = base64.b64encode(os.urandom(16)).decode()
                more = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
                link.sendall(head(path[3:], key, *more, f"Sec-WebSocket-Key: {nonce}").replace(b"POST", b"GET", 1))
                link.recv(4096)
                link.sendall(frame(body))
            elif not body:
                link.sendall(head(path, key, "Transfer-Encoding: chunked"))
                chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
                for _ in range(16_000):
                    link.sendall(chunk)
            else:
                link.sendall(head(path, key, f"Content-Length: {len(body)}", "Connection: close") + body)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            got = link.recv(4096)
            found = re.match(rb"HTTP/1.1 (\d+)", got) or re.search(rb'"(?:code|status)":\s*(\d+)', got)
            return found[1].decode() if found else f"{got[:20]!r}"
    return "closed"


def attack(address: tuple[str, int], path: str, body: bytes, connections: int, seconds: float, pipe: Any) -> None:
    end, found = time.monotonic() + seconds, Counter()

    def one() -> None:
        while time.monotonic() < end:
            found[send_once(address, path, body, "attacker")] += 1

    threads = [threading.Thread(target=one) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(dict(found))


def ask(address: tuple[str, int], request: bytes) -> float:
    start = time.perf_counter()
    with socket.create_connection(address, timeout=60) as link:
        link.sendall(request)
        good = link.recv(4096).startswith(b"HTTP/1.1 200")
        while link.recv(65536):
            pass
    return time.perf_counter() - start if good else float("inf")


def probe(address: tuple[str, int], seconds: float, pipe: Any) -> None:
    """Request /health 20 times a second, and the golden request of another key twice a second."""
    body = json.dumps(GOLDEN).encode()
    golden = head(COMPLETIONS, "other", f"Content-Length: {len(body)}", "Connection: close") + body
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    took: tuple[list[float], list[float]] = ([], [])
    end = time.monotonic() + seconds

    def keep(at: int, request: bytes, every: float) -> None:
        while time.monotonic() < end:
            took[at].append(ask(address, request))
            time.sleep(every)

    threads = [threading.Thread(target=keep, args=one) for one in ((0, health, 0.05), (1, golden, 0.5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(took)


def percentile(values: list[float], share: float) -> float:
    return 1e3 * sorted(values)[min(int(share * len(values)), len(values) - 1)]


def play(address: tuple[str, int], name: str, connections: int, seconds: float) -> None:
    path, body = attacks()[name]
    mine, theirs = multiprocessing.Pipe(False)
    mine_too, theirs_too = multiprocessing.Pipe(False)
    jobs = [multiprocessing.Process(target=probe, args=(address, seconds, theirs))]
    if path:
        args = (address, path, body, connections, seconds, theirs_too)
        jobs.append(multiprocessing.Process(target=attack, args=args))
    for job in jobs:
        job.start()
    health, golden = mine.recv()
    found = mine_too.recv() if path else {}
    for job in jobs:
        job.join()
    print(
        f"{name:30} /health p50 {percentile(health, 0.5):6.1f}  p99 {percentile(health, 0.99):7.1f}  "
        f"max {1e3 * max(health):7.1f} ms   golden p50 {percentile(golden, 0.5):6.1f}  max {1e3 * max(golden):7.1f} ms"
        f"   {found}",
        flush=True,
    )


@contextlib.contextmanager
def serving(model: str, *words: str) -> Any:
    argv = [sys.executable, "-m", "minivllm", "serve", model, "--port", "0", "--api-key", "attacker"]
    argv += ["--api-key", "other", "--max-model-len", "1024", *words]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        url = next(json.loads(line)["url"] for line in process.stderr if '"url"' in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            host, _, port = url.removeprefix("http://").partition(":")
            yield host, int(port)
        finally:
            process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def slow_model() -> Any:
    """Return pocket with a template that runs the commands in its messages."""
    from minivllm.pocket import checkpoint

    source = Path(checkpoint.__file__).parent / "model"
    with tempfile.TemporaryDirectory() as folder:
        for file in source.iterdir():
            (Path(folder) / file.name).symlink_to(file)
        config = json.loads((source / "tokenizer_config.json").read_text())
        (Path(folder) / "tokenizer_config.json").unlink()
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": SLOW}))
        (Path(folder) / "chat_template.jinja").unlink(missing_ok=True)
        yield folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="of each attack")
    parser.add_argument("--connections", type=int, default=4, help="of each attack")
    parser.add_argument("--only", default="", help="attacks with this in their names")
    args = parser.parse_args()
    names = [name for name in attacks() if args.only in name]
    for templates in (False, True):
        chosen = [name for name in names if name.startswith("template:") == templates]
        if not chosen:
            continue
        with slow_model() if templates else contextlib.nullcontext("pocket") as model, serving(model) as address:
            probe_pipe = multiprocessing.Pipe(False)
            probe(address, 1.0, probe_pipe[1])
            for name in chosen:
                play(address, name, args.connections, args.seconds)


if __name__ == "__main__":
    main()
