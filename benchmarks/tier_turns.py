"""Measure conversations of many users in turn, with and without a tier behind the KV cache of the device.

    python benchmarks/tier_turns.py --model DIR --load-format dummy [--cases device tier fits tier-fits]

Each turn of a user sends the whole conversation and --new random tokens, and gets --output tokens.  The users take
their turns in a random order (--seed), --parallel of them at a time.  With --begin N the conversations already have N
turns, with answers of random tokens, whose prompts are computed before the measurement; so the last turns of long
conversations can be measured in a short time.

    device      a device cache of --device-bytes alone
    tier        the same, with a tier of --tier-bytes in CPU memory
    tier-eager  the same, and blocks are stored as soon as they were computed
    fits        a device cache that all conversations fit in, alone
    tier-fits   the same, with the tier
    vllm        vLLM with a device cache of --device-bytes; needs an environment with vLLM
    vllm-tier   the same, with its connector for CPU memory
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORDS = (100, 2000)  # range of the random token ids


class Turns(Protocol):
    """An engine that runs turns.  ``add`` starts one, and ``step`` returns the turns that have ended as (user, seconds
    to the first token, prompt tokens found in a cache, generated ids)."""

    def add(self, user: int, prompt: list[int], tokens: int) -> None: ...

    def step(self) -> list[tuple[int, float, int, list[int]]]: ...

    def facts(self) -> str: ...

    def close(self) -> None: ...


def order(users: int, turns: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield the users of each round of turns in a random order."""
    for _ in range(turns):
        yield rng.sample(range(users), users)


def play(
    engine: Turns, histories: list[list[int]], args: argparse.Namespace, turns: int, tokens: int, rng: random.Random
) -> tuple[float, list[float], list[int], int]:
    """Run ``turns`` turns of each user.  Return the seconds, and for each turn the seconds to the first token, the
    prompt tokens found in a cache, and the sum of prompt tokens.  The histories grow."""
    pending = [user for round_ in order(len(histories), turns, rng) for user in round_]
    running: set[int] = set()
    waits: list[float] = []
    cached: list[int] = []
    prompts, begun = 0, time.perf_counter()
    while pending or running:
        while len(running) < args.parallel:
            at = next((i for i, user in enumerate(pending[: 2 * args.parallel]) if user not in running), None)
            if at is None:
                break
            user = pending.pop(at)
            if tokens:
                histories[user] += [rng.randrange(*WORDS) for _ in range(args.new)]
            prompts += len(histories[user])
            running.add(user)
            engine.add(user, histories[user], max(tokens, 1))
        for user, wait, found, answer in engine.step():
            running.remove(user)
            waits.append(wait)
            cached.append(found)
            if tokens:
                histories[user] += answer
    return time.perf_counter() - begun, waits, cached, prompts


class OwnEngine:
    """This engine, driven step by step."""

    def __init__(self, args: argparse.Namespace, cache_bytes: float, name: str) -> None:
        from minivllm import LLM

        more: dict[str, Any] = json.loads(args.options)
        if "tier" in name:
            store = {"bytes": int(args.tier_bytes), "eager": "eager" in name, **json.loads(args.store)}
            more["kvstore"] = {"name": "cpu", "options": store}
        if args.load_format is not None:
            more["load_format"] = args.load_format
        self.llm = LLM(
            args.model,
            skip_tokenizer_init=True,
            max_model_len=args.longest,
            max_num_seqs=args.parallel,
            kvcache_block_size=args.block,
            num_kvcache_blocks=int(cache_bytes // (args.token_bytes * args.block)) + 1,
            **more,
        )
        self.ended: list[Any] = []
        self.users: dict[str, int] = {}

    def add(self, user: int, prompt: list[int], tokens: int) -> None:
        from minivllm import SamplingParams
        from minivllm.frontend.requests import Tracked

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        tracked = Tracked({"prompt_token_ids": list(prompt)}, params, None, done=self.ended.append)
        self.users[tracked.request.id] = user
        tracked.add_to(self.llm.engine)

    def step(self) -> list[tuple[int, float, int, list[int]]]:
        if not self.llm.engine.step():
            time.sleep(self.llm.engine.idle())
        ended, found = list(self.ended), []
        self.ended.clear()
        for tracked in ended:
            output = tracked.output()
            wait = tracked.request.first_token - tracked.request.arrival
            answer = list(output.outputs[0].token_ids)
            found.append((self.users.pop(tracked.request.id), wait, tracked.request.cached_tokens, answer))
        return found

    def facts(self) -> str:
        stats = self.llm.stats()
        names = ("pages", "stores", "loads", "hits", "misses", "evictions", "skipped", "late", "lost", "faults")
        tiers = [{name: tier[name] for name in names} for tier in stats.get("tiers", ())]
        choice = stats.get("tier_choice", {})
        rounded = {name: float(f"{v:.3g}") if isinstance(v, float) else v for name, v in choice.items()}
        return f"preemptions {stats['preemptions']} evictions {stats['evictions']} {tiers or ''} {rounded or ''}"

    def close(self) -> None:
        self.llm.close()


class VllmEngine:
    """vLLM's engine, driven step by step."""

    def __init__(self, args: argparse.Namespace, cache_bytes: float, name: str) -> None:
        from vllm import LLM

        more: dict[str, Any] = json.loads(args.vllm_options)
        if "tier" in name:
            extra = {"cpu_bytes_to_use": int(args.tier_bytes)}
            more["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        self.llm = LLM(
            model=args.model,
            skip_tokenizer_init=True,
            load_format=args.load_format or "auto",
            max_model_len=args.longest,
            max_num_seqs=args.parallel,
            kv_cache_memory_bytes=int(cache_bytes),
            enable_prefix_caching=True,
            **more,
        )
        self.live: dict[str, list[Any]] = {}
        self.number = 0

    def add(self, user: int, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        self.number += 1
        name = str(self.number)
        self.live[name] = [user, time.perf_counter(), None]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> list[tuple[int, float, int, list[int]]]:
        found = []
        for output in self.llm.llm_engine.step():
            live = self.live[output.request_id]
            if live[2] is None and output.outputs[0].token_ids:
                live[2] = time.perf_counter() - live[1]
            if output.finished:
                del self.live[output.request_id]
                cached = output.num_cached_tokens or 0
                found.append((live[0], live[2], cached, list(output.outputs[0].token_ids)))
        return found

    def facts(self) -> str:
        return ""

    def close(self) -> None:
        engine = self.llm.llm_engine
        engine.engine_core.shutdown()


def token_bytes(folder: str, itemsize: int) -> int:
    """Return the bytes of a token in the KV cache of a model with plain attention, from its config.json."""
    config = json.loads((Path(folder) / "config.json").read_text())
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * itemsize * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * dim


def case(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Run a case, and print its line."""
    rng = random.Random(args.seed)
    all_bytes = args.users * (args.longest + args.block) * args.token_bytes
    cache_bytes = all_bytes if "fits" in name else args.device_bytes
    make: Callable[..., Turns] = VllmEngine if name.startswith("vllm") else OwnEngine
    begun = time.perf_counter()
    engine = make(args, cache_bytes, name)
    ready = time.perf_counter() - begun
    size = args.begin * (args.new + args.output)
    histories = [[rng.randrange(*WORDS) for _ in range(size)] for _ in range(args.users)]
    warm = [[rng.randrange(*WORDS) for _ in range(args.new)] for _ in range(args.parallel)]
    play(engine, warm, args, 2, args.output, random.Random(0))  # compiles kernels
    fill = play(engine, histories, args, 1, 0, rng)[0] if args.begin else 0.0
    seconds, waits, cached, prompts = play(engine, histories, args, args.turns, args.output, rng)
    speed = args.users * args.turns * args.output / seconds
    p50, p90, p99 = (1e3 * float(np.percentile(waits, p)) for p in (50, 90, 99))
    share = 100 * sum(cached) / prompts
    print(
        f"{name:10} {speed:8.0f} {p50:8.1f} {p90:8.1f} {p99:8.1f} {share:7.1f} {seconds:8.1f} {fill:6.1f} {ready:6.1f}"
    )
    print(f"           {engine.facts()}", flush=True)
    engine.close()
    return {"speed": speed, "p50": p50}


def main() -> None:
    """Print a line for each case, and the ratios of the cases that belong together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format")
    parser.add_argument("--cases", nargs="+", default=["device", "tier", "fits", "tier-fits"])
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--begin", type=int, default=0, help="turns that the conversations already have")
    parser.add_argument("--new", type=int, default=50, help="tokens of a user's turn")
    parser.add_argument("--output", type=int, default=50, help="generated tokens of a turn")
    parser.add_argument("--parallel", type=int, default=32, help="turns that run at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device-bytes", type=float, default=8e9)
    parser.add_argument("--tier-bytes", type=float, default=64e9)
    parser.add_argument("--block", type=int, default=16, help="tokens of a block")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of a number in the KV cache")
    parser.add_argument("--store", default="{}", help="further options of the tier, as JSON")
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    parser.add_argument("--vllm-options", default="{}", help="further options of vLLM, as JSON")
    args = parser.parse_args()
    args.token_bytes = token_bytes(args.model, args.itemsize)
    args.longest = (args.begin + args.turns) * (args.new + args.output) + args.block
    print(f"{args.users} users, turns {args.begin + 1} to {args.begin + args.turns}, {args.parallel} at a time")
    print("case          tok/s   p50 ms   p90 ms   p99 ms  cached%        s   fill  ready")
    found = {name: case(name, args) for name in args.cases}
    for one, other in (("tier", "device"), ("tier-eager", "device"), ("tier-fits", "fits"), ("vllm-tier", "vllm")):
        if one in found and other in found:
            speed = found[one]["speed"] / found[other]["speed"]
            first = found[one]["p50"] / found[other]["p50"]
            print(f"{one} / {other}: {speed:.2f} x tokens per second, {first:.2f} x p50 of first tokens")


if __name__ == "__main__":
    main()
