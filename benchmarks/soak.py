"""Whether a server that runs for long stays as it is: memory and blocks while clients come, go, and leave halfway.

    python benchmarks/soak.py --minutes 10 --csv soak.csv

Starts ``minivllm serve`` on the loopback interface and asks it with ``--clients`` concurrent clients (completions and
chats, streams and whole answers, one to three choices), of which a fifth leave before their answer has ended.  Samples
every ``--every`` seconds the resident memory of both processes, the share of the KV cache's blocks in use, and what
runs, waits and has ended.  At the end, with nobody inside, every block has to be free again and the memory flat: the
largest of the last quarter at most ``SLACK`` above the largest of the second (the first fills caches).  Exit status 1
if not; it ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import random
import re
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from serving import _children, start_server

LEAVE = 0.2  # share of the clients that leave early
SLACK = 16.0  # MiB
BLOCKS = "num_kvcache_blocks=512"  # few, so that the prefix cache is full before the first quarter ends
WORDS = ("once", "upon", "a", "time", "little", "red", "fox", "and", "the", "big", "bear", "likes", "sweet", "honey")


def body(rng: random.Random) -> tuple[str, dict]:
    """(path, body) of some request; prompts differ, and many begin alike."""
    text = "Once upon a time " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
    more = {
        "max_tokens": rng.randint(4, 96), "ignore_eos": rng.random() < 0.5, "temperature": rng.choice([0, 0.8]),
        "n": rng.choice([1, 1, 1, 3]), "stream": rng.random() < 0.7,
    }  # fmt: skip
    if rng.random() < 0.3:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more}
    return "/v1/completions", {"prompt": text, "logprobs": rng.choice([None, None, 2]), **more}


async def ask(address: tuple[str, int], rng: random.Random, counts: dict[str, int]) -> None:
    path, what = body(rng)
    data = json.dumps(what).encode()
    leaves = rng.random() < LEAVE
    reader, writer = await asyncio.open_connection(*address)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
        if leaves:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(rng.randint(1, 4000)), rng.uniform(0, 0.5))
            counts["left"] += 1
            return
        answer = await asyncio.wait_for(reader.read(), 120)
        status = int(answer.split(b" ", 2)[1]) if answer else 0
        counts["answered" if status == 200 else "refused" if status == 429 else "wrong"] += 1
    except (OSError, asyncio.TimeoutError):
        counts["wrong"] += 1
    finally:
        writer.transport.abort() if leaves else writer.close()


async def client(address: tuple[str, int], rng: random.Random, until: float, counts: dict[str, int]) -> None:
    while time.monotonic() < until:
        await ask(address, rng, counts)


def rss(pid: int) -> float:
    """MiB that are resident."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024


def metric(text: str, name: str) -> float:
    return float(re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.M)[1])


def sample(url: str, pid: int, start: float, counts: dict[str, int]) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        "seconds": round(time.monotonic() - start, 1), "http_mib": round(rss(pid), 1),
        "engine_mib": round(max(rss(child) for child in _children(pid)), 1),
        "kv_in_use": metric(text, "vllm:kv_cache_usage_perc"), "running": metric(text, "vllm:num_requests_running"),
        "waiting": metric(text, "vllm:num_requests_waiting"), **counts,
    }  # fmt: skip


async def soak(url: str, pid: int, minutes: float, clients: int, every: float, path: str) -> list[dict[str, float]]:
    where = urlsplit(url)
    address = (where.hostname, where.port)
    start = time.monotonic()
    until = start + 60 * minutes
    counts = dict.fromkeys(("answered", "left", "refused", "wrong"), 0)
    tasks = [asyncio.create_task(client(address, random.Random(i), until, counts)) for i in range(clients)]
    rows = []
    with open(path, "w", newline="") as file:
        out = None
        while True:
            done = all(task.done() for task in tasks)
            rows.append(await asyncio.to_thread(sample, url, pid, start, counts))
            out = out or csv.DictWriter(file, list(rows[0]))
            if len(rows) == 1:
                out.writeheader()
            out.writerow(rows[-1])
            file.flush()
            if done and not rows[-1]["running"] and not rows[-1]["waiting"]:
                return rows
            if time.monotonic() > until + 180:
                raise SystemExit(f"requests had not ended 3 minutes after the last was asked: {rows[-1]}")
            await asyncio.sleep(1.0 if time.monotonic() > until else every)


def verdict(rows: list[dict[str, float]]) -> list[str]:
    """What is wrong."""
    found = []
    quarter = max(len(rows) // 4, 1)
    for name in ("http_mib", "engine_mib"):
        second, last = (max(row[name] for row in part) for part in (rows[quarter : 2 * quarter + 1], rows[-quarter:]))
        print(f"{name}: {rows[0][name]} at first, {second} in the second quarter, {last} in the last")
        if last > second + SLACK:
            found.append(f"{name} grew from {second} to {last}")
    if rows[-1]["kv_in_use"]:
        found.append(f"{100 * rows[-1]['kv_in_use']:.3f} % of the blocks are in use with nobody inside")
    if rows[-1]["wrong"]:
        found.append(f"{rows[-1]['wrong']} answers were neither 200 nor 429")
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
    args = parser.parse_args()
    sets = [BLOCKS, *args.set]
    process, url = start_server(args.model, [part for one in sets for part in ("--set", one)])
    try:
        rows = asyncio.run(soak(url, process.pid, args.minutes, args.clients, args.every, args.csv))
    finally:
        process.terminate()
        status = process.wait()
    last = rows[-1]
    ended = ", ".join(f"{last[name]} {name}" for name in ("answered", "left", "refused", "wrong"))
    print(f"{last['seconds']:.0f} s: {ended}; the server ended with {status}")
    found = verdict(rows) + ([f"the server ended with {status}"] if status else [])
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
