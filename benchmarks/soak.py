"""Run a server for long under clients that come, go, and leave halfway, and check its memory and blocks.

    python benchmarks/soak.py --minutes 10 --csv soak.csv
    python benchmarks/soak.py --minutes 120 --faults 0.05 --every 30

Starts ``minivllm serve`` on the loopback interface and asks it with ``--clients`` concurrent clients of a mixed load:
whole answers and streams over HTTP, sockets with several requests at once, regular expressions (few clients send the
same one), beams, ``n = 4``, prompts that share long prefixes; a fifth of all leave, or cancel, before their answer has
ended.  Samples every ``--every`` seconds the resident memory of both processes, what of the engine's is KV pages, the
share of the KV cache's blocks in use, and what runs, waits and has ended.

Before the load comes, prompts are tokenized until the server's cache of token ids is full, which takes an hour else.  A
page of the KV cache is taken when a token is first written to it, so the engine's memory grows until every block was
used once.  That is no leak: ``kv_mib`` (what the engine says of its own pages) is told apart, and ``rest_mib`` is what
has to be flat: the largest of the last quarter at most ``SLACK`` above the largest of the second (the first fills
caches); in a run of ``LONG`` minutes or more the slope of a straight line through all samples after the first half hour
at most ``SLOPE``.  At the end, with nobody inside, every block has to be free again, every table of requests empty, and
no more descriptors open than at the start.

``--faults SHARE``: so many of the requests fail on purpose, or their clients misbehave (``soak_faults.py``).

Exit status 1 if something of this does not hold.  It ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import random
import re
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

import soak_faults
from serving import start_server
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

WHO = {"Authorization": f"Bearer {soak_faults.KEY}"}
LEAVE = 0.2  # share of the requests whose clients leave or cancel early
SLACK = 16.0  # MiB
LONG, SETTLED, SLOPE = 90.0, 1800.0, 1.0  # minutes; seconds at the start that are not counted; MiB per hour
# small limits, so that caches are full before the second quarter
FULL = ("num_kvcache_blocks=512", "grammar_cache_mb=8")
WORDS = ("once", "upon", "a", "time", "little", "red", "fox", "and", "the", "big", "bear", "likes", "sweet", "honey")
PREFIXES = [" ".join(random.Random(i).choices(WORDS, k=300)) for i in range(8)]
FDS = 2  # allowed further descriptors: a log, a connection that is being closed
ENDS = ("answered", "left", "refused", "faults", "wrong")


def text(rng: random.Random) -> str:
    return "Once upon a time " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))


def regex(rng: random.Random) -> str:
    """Return a regular expression that hardly any other client sends."""
    letters = "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 8))
    shapes = (
        f"[{letters}]{{2,40}}",
        f"({letters[:3]}|{letters[3:]})+[0-9]{{1,9}}",
        f"[A-Z][{letters}]+( [{letters}]+)*",
    )
    return rng.choice(shapes)


def plain(rng: random.Random) -> dict:
    return {"prompt": text(rng), "logprobs": rng.choice([None, None, 2])}


KINDS: dict[str, Callable[[random.Random], dict]] = {
    "whole": lambda rng: {**plain(rng), "stream": False},
    "stream": lambda rng: {**plain(rng), "stream": True},
    "chat": lambda rng: {"messages": [{"role": "user", "content": text(rng)}], "stream": rng.random() < 0.7},
    "regex": lambda rng: {**plain(rng), "structured_outputs": {"regex": regex(rng)}, "stream": rng.random() < 0.5},
    "beam": lambda rng: {"prompt": text(rng), "beam_width": rng.choice([2, 4]), "max_tokens": 16},
    "four": lambda rng: {**plain(rng), "n": 4, "temperature": 0.8, "stream": rng.random() < 0.5},
    "prefix": lambda rng: {"prompt": f"{rng.choice(PREFIXES)} {text(rng)}", "stream": rng.random() < 0.5},
}


def body(rng: random.Random) -> dict:
    """Return a random request.  Prompts differ, and many have a common beginning."""
    more = {
        "max_tokens": rng.randint(4, 96),
        "ignore_eos": rng.random() < 0.5,
        "temperature": rng.choice([0, 0.8]),
    }
    made = {**more, **KINDS[rng.choice(list(KINDS))](rng)}
    if "structured_outputs" in made:
        made["ignore_eos"] = False
    if "beam_width" in made:
        del made["temperature"]
    return made


async def ask(address: tuple[str, int], rng: random.Random, counts: Counter[str]) -> None:
    """Send one request over HTTP."""
    what = body(rng)
    path = "/v1/chat/completions" if "messages" in what else "/v1/completions"
    data = json.dumps(what).encode()
    leaves = rng.random() < LEAVE
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request_head(path, data) + data)
        if leaves:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(rng.randint(1, 4000)), rng.uniform(0, 0.5))
            counts["left"] += 1
            return
        answer = await asyncio.wait_for(reader.read(), 120)
        count(counts, int(answer.split(b" ", 2)[1]) if answer else 0, answer[-300:])
    except (OSError, asyncio.TimeoutError) as e:
        count(counts, 0, e)
    finally:
        writer.transport.abort() if leaves else writer.close()


def count(counts: Counter[str], status: int, what: object) -> None:
    """Count an answer with this status (0 means none).  ``what`` is shown if it is wrong."""
    end = {200: "answered", 429: "refused"}.get(status, "wrong")
    counts[end] += 1
    if end == "wrong" and counts["wrong"] <= 20:
        print(f"wrong: status {status}: {what!r}", file=sys.stderr, flush=True)


async def ask_many(address: tuple[str, int], rng: random.Random, counts: Counter[str]) -> None:
    """Send some requests at once on a WebSocket.  Some are cancelled, at once or later, or all by a leaving client."""
    names = [f"{number}" for number in range(rng.randint(1, 8))]
    where = f"ws://{address[0]}:{address[1]}/v1/ws"
    async with connect(where, additional_headers=WHO, proxy=None, max_size=None) as socket:
        for name in names:
            what = body(rng)
            kind = "chat.completions" if "messages" in what else "completions"
            await socket.send(json.dumps({"type": kind, "id": name, "body": what}))
            if rng.random() < LEAVE / 2:
                await socket.send(json.dumps({"type": "cancel", "id": name}))
        leaves_after = rng.randint(1, 40) if rng.random() < LEAVE else None
        heard, running = 0, set(names)
        while running:
            message = json.loads(await asyncio.wait_for(socket.recv(), 120))
            heard += 1
            if heard == leaves_after:
                counts["left"] += len(running)
                return
            if message["type"] == "chunk":
                if rng.random() < LEAVE / 40:
                    await socket.send(json.dumps({"type": "cancel", "id": message["id"]}))
                continue
            running.remove(message["id"])
            status = message["error"]["code"] if message["type"] == "error" else 200
            if message.get("cancelled"):
                counts["left"] += 1
            else:
                count(counts, status, message)


async def fail(address: tuple[str, int], rng: random.Random, counts: Counter[str]) -> None:
    """Send a request that fails on purpose, or behave as a faulty client."""
    if rng.random() < 0.5:
        await soak_faults.misbehave(address, rng)
        counts["faults"] += 1
        return
    what, wanted = soak_faults.failing_body(rng)
    status, answer = await post(address, "/v1/completions", what)
    if status == wanted:
        counts["faults"] += 1
    else:
        count(counts, 0, (what, status, answer[-300:]))


async def post(address: tuple[str, int], path: str, body: dict) -> tuple[int, bytes]:
    """Return the status and all bytes of the answer."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request_head(path, data) + data)
        answer = await asyncio.wait_for(reader.read(), 120)
        return int(answer.split(b" ", 2)[1]) if answer else 0, answer
    finally:
        writer.close()


def request_head(path: str, data: bytes) -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {soak_faults.KEY}", "Connection: close"
    return "\r\n".join([*lines, "Content-Type: application/json", f"Content-Length: {len(data)}", "", ""]).encode()


async def client(
    address: tuple[str, int], rng: random.Random, until: float, counts: Counter[str], faults: float
) -> None:
    while time.monotonic() < until:
        if rng.random() < faults:
            try:
                await fail(address, rng, counts)
            except (OSError, asyncio.TimeoutError, ValueError) as e:
                count(counts, 0, e)
        elif rng.random() < 0.9:
            await ask(address, rng, counts)
            continue
        try:
            await ask_many(address, rng, counts)
        except (OSError, asyncio.TimeoutError, KeyError, ConnectionClosed) as e:
            count(counts, 0, e)


async def fill(url: str, address: tuple[str, int]) -> None:
    """Tokenize prompts like those of the load until the server's cache of ids is full."""
    rng, before, now = random.Random(0), -1, 0
    while now > before:
        for _ in range(500):
            status, reported = await post(address, "/tokenize", {"prompt": text(rng)})
            if status != 200:
                raise SystemExit(f"/tokenize: {status} {reported[-300:]!r}")
        state = json.loads(await asyncio.to_thread(fetch, f"{url}/debug/state"))
        before, now = now, state["server"]["memory"]["token_cache_bytes"] >> 16


def metric(text: str, name: str) -> float:
    return float(re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.M)[1])


def fetch(url: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=WHO), timeout=30) as answer:
        return answer.read().decode()


def sample(url: str, start: float, counts: Counter[str]) -> dict[str, float]:
    state, text = json.loads(fetch(f"{url}/debug/state")), fetch(f"{url}/metrics")
    engine, kv = state["engine"]["process"]["rss_bytes"], state["engine"]["memory"]["kv_resident_bytes"] or 0
    if state["engine"]["fault"] is not None:
        raise SystemExit(f"the walk over the KV cache found: {state['engine']['fault']}")
    server = state["server"]["process"]
    sizes = {"http": server["rss_bytes"], "engine": engine, "kv": kv, "rest": engine - kv}
    tables = {**state["server"]["tables"], **state["engine"]["tables"]}
    held = sum(tables[name] for name in tables if name not in ("tasks", "inside"))
    return {
        "seconds": round(time.monotonic() - start, 1),
        **{f"{name}_mib": round(size / 2**20, 1) for name, size in sizes.items()},
        "kv_in_use": metric(text, "vllm:kv_cache_usage_perc"),
        "running": metric(text, "vllm:num_requests_running"),
        "waiting": metric(text, "vllm:num_requests_waiting"),
        "http_fds": server["fds"],
        "engine_fds": state["engine"]["process"]["fds"],
        "held": held,
        **{name: counts[name] for name in ENDS},
    }


async def soak(url: str, args: argparse.Namespace) -> list[dict[str, float]]:
    where = urlsplit(url)
    address = (where.hostname, where.port)
    start = time.monotonic()
    until = start + 60 * args.minutes
    counts: Counter[str] = Counter()
    await fill(url, address)
    rows = [await asyncio.to_thread(sample, url, start, counts)]  # before other clients begin
    randoms = [random.Random(i) for i in range(args.clients)]
    tasks = [asyncio.create_task(client(address, rng, until, counts, args.faults)) for rng in randoms]
    with open(args.csv, "w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        while True:
            out.writerow(rows[-1])
            file.flush()
            await asyncio.sleep(1.0 if time.monotonic() > until else args.every)
            done = all(task.done() for task in tasks)
            rows.append(await asyncio.to_thread(sample, url, start, counts))
            if done and not rows[-1]["running"] and not rows[-1]["waiting"]:
                for task in tasks:
                    task.result()
                out.writerow(rows[-1])
                return rows
            if time.monotonic() > until + 180:
                raise SystemExit(f"requests had not ended 3 minutes after the last was asked: {rows[-1]}")


def slope(rows: list[dict[str, float]], name: str) -> float:
    """Return the slope per hour of the least-squares line through ``name``."""
    hours = [row["seconds"] / 3600 for row in rows]
    return statistics.linear_regression(hours, [row[name] for row in rows]).slope


def verdict(rows: list[dict[str, float]]) -> list[str]:
    """Return the violated conditions."""
    found = []
    quarter = max(len(rows) // 4, 1)
    settled = [row for row in rows if row["seconds"] >= SETTLED]
    for name in ("http_mib", "rest_mib"):
        second, last = (max(row[name] for row in part) for part in (rows[quarter : 2 * quarter + 1], rows[-quarter:]))
        print(f"{name}: {rows[0][name]} at first, {second} in the second quarter, {last} in the last")
        if last > second + SLACK:
            found.append(f"{name} grew from {second} to {last}")
        if len(settled) > 2:
            by_hour = slope(settled, name)
            print(f"{name}: {by_hour:+.2f} MiB an hour after the first {SETTLED / 60:.0f} minutes")
            if by_hour > SLOPE and rows[-1]["seconds"] >= 60 * LONG:
                found.append(f"{name} grows by {by_hour:.2f} MiB an hour; at most {SLOPE} is allowed")
    # the engine's process has no descriptor for a request, and opens some permanently with the first grammar
    for name, before in (("http_fds", rows[0]), ("engine_fds", rows[min(1, len(rows) - 1)])):
        if rows[-1][name] > before[name] + FDS:
            found.append(f"{name}: {rows[-1][name]} are open with nobody inside, {before[name]} were at the start")
    if rows[-1]["held"]:
        found.append(f"{rows[-1]['held']} entries are left in tables of requests, slots and ids")
    if rows[-1]["kv_in_use"]:
        found.append(f"{100 * rows[-1]['kv_in_use']:.3f} % of the blocks are in use with nobody inside")
    if rows[-1]["wrong"]:
        found.append(f"{rows[-1]['wrong']} answers were neither 200 nor 429, nor the error that was provoked")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for the server that is started"
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--csv", default="soak.csv")
    parser.add_argument("--faults", type=float, default=0.0, metavar="SHARE", help="of the requests; 0: none")
    args = parser.parse_args()
    sets = [*FULL, *(soak_faults.SETS if args.faults else ()), *args.set]
    more = ["--admin", *(part for one in sets for part in ("--set", one))]
    process, url = start_server(args.model, more, {"MINIVLLM_API_KEY": soak_faults.KEY})
    try:
        rows = asyncio.run(soak(url, args))
    finally:
        process.terminate()
        status = process.wait()
    last = rows[-1]
    ended = ", ".join(f"{last[name]} {name}" for name in ENDS)
    print(f"{last['seconds']:.0f} s: {ended}; the server ended with {status}")
    found = verdict(rows) + ([f"the server ended with {status}"] if status else [])
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
