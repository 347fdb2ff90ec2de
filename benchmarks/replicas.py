"""Measure replicas: their throughput against the same engines driven directly, and answers while engines are killed.

    python benchmarks/replicas.py speed [--replicas 4] [--rounds 8]
    python benchmarks/replicas.py deaths [--kills 50]

``speed`` alternates batches through the router with batches that are dealt to the engines by hand.  ``deaths`` kills
engines without a model at random moments.  Every answer is compared: exit status 1 for one that is wrong, repeated or
lost.  A request that has a token may end with an error behind a correct beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from minivllm import SamplingParams
from minivllm.config import load_config
from minivllm.errors import EngineDeadError
from minivllm.server.replicas.client import ReplicaClient

SIM = {"executor": {"name": "sim", "options": {"step_ms": 5}}, "max_num_seqs": 16, "max_model_len": 512}


async def opened(replicas: int, server: dict[str, Any], engine: dict[str, Any]) -> ReplicaClient:
    """Return a client of replicas that run."""
    table = {"replicas": replicas, **server}
    client = ReplicaClient(load_config(keywords={"model": "pocket", **engine, "server": table}, environ={}))
    await client.open()
    return client


async def speed(args: argparse.Namespace) -> int:
    """Print output tokens a second of both ways."""
    client = await opened(args.replicas, {"router": args.router}, {"max_num_seqs": 32})
    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0)
    rng = np.random.default_rng(0)
    names = iter(range(10**9))

    async def one(target: Any, ids: list[int]) -> int:
        stream = await target.stream(ids, params, f"r{next(names)}")
        return sum([len(piece.token_ids) async for piece in stream])

    async def batch(direct: bool) -> float:
        prompts = [rng.integers(10, 500, 100).tolist() for _ in range(12 * args.replicas)]
        targets = client.replicas if direct else [client]
        start = time.perf_counter()
        tokens = await asyncio.gather(*(one(targets[i % len(targets)], ids) for i, ids in enumerate(prompts)))
        return sum(tokens) / (time.perf_counter() - start)

    rates: dict[bool, list[float]] = {False: [], True: []}
    for direct in (False, True):
        await batch(direct)
    for turn in range(args.rounds):
        for direct in (False, True) if turn % 2 else (True, False):
            rates[direct].append(await batch(direct))
    through, by_hand = (float(np.median(rates[direct])) for direct in (False, True))
    print(json.dumps({"through": round(through), "by_hand": round(by_hand), "ratio": round(through / by_hand, 3)}))
    await client.close()
    return 0


async def deaths(args: argparse.Namespace) -> int:
    """Kill engines while users ask, and print what became of the answers."""
    client = await opened(args.replicas, {"router": args.router, "replica_retries": 20}, SIM)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    rng = random.Random(0)
    names = iter(range(10**9))
    results: Counter[str] = Counter()
    ended = False

    async def ask(number: int, pieces: bool = True) -> tuple[list[int], Exception | None]:
        tokens: list[int] = []
        try:
            stream = await client.stream([1, 2, 3 + number] * 8, params, f"r{next(names)}", pieces=pieces)
            async for piece in stream:
                tokens += piece.token_ids
        except EngineDeadError as error:
            return tokens, error
        return tokens, None

    expected = [(await ask(number))[0] for number in range(20)]

    async def user() -> None:
        while not ended:
            number = rng.randrange(20)
            tokens, error = await ask(number, rng.random() < 0.5)
            right = tokens == expected[number][: len(tokens)]
            if error is not None:
                results["ended with an error behind tokens" if right and tokens else "lost"] += 1
            else:
                results["answered" if right and len(tokens) == 20 else "wrong"] += 1

    users = [asyncio.create_task(user()) for _ in range(16)]
    for _ in range(args.kills):
        while sum(one.accepts for one in client.replicas) < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(rng.uniform(0.05, 0.4))
        victim = rng.choice([one for one in client.replicas if one.accepts])
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        while victim.accepts:
            await asyncio.sleep(0.01)
    ended = True
    await asyncio.gather(*users)
    print(json.dumps({"kills": args.kills, "moved": client.moved, **results}))
    await client.close()
    return int(bool(results["lost"] or results["wrong"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "deaths"])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--router", default="least-tokens")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kills", type=int, default=50)
    args = parser.parse_args()
    sys.exit(asyncio.run(speed(args) if args.what == "speed" else deaths(args)))


if __name__ == "__main__":
    main()
