"""Time the tokenizing of a list of prompts by one thread, by threads and by processes.

    python benchmarks/tokenizer_pool.py [--model pocket] [--mode hf] [--prompts 512] [--characters 8000] [--rounds 9]

The ways take turns, so that another load on the machine falls on all of them.  ``best`` compares the fastest rounds,
which another load disturbs least.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path

from minivllm import files
from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.frontend.building import open_tokenizer
from minivllm.registry import Catalog
from minivllm.runtime.text.pool import TokenizerPool

TEXT = Path(__file__).resolve().parents[1] / "docs"


def prompts(count: int, characters: int) -> list[str]:
    """Return prompts of random words of the documentation."""
    words = [word for page in sorted(TEXT.glob("*.md")) for word in files.read_text(page).split()]
    rng = random.Random(0)
    return [" ".join(rng.choices(words, k=characters))[:characters] for _ in range(count)]


def main() -> None:
    """Print the median and the best time of each way, and how many times faster than one thread it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    for flag, default in (("prompts", 512), ("characters", 8000), ("rounds", 9), ("size", 2)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--mode", default="auto")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, tokenizer_mode=args.mode, device="cpu", load_format="dummy")
    tokenizer, _ = open_tokenizer(resolve(config, Catalog.discover(), weights=False))
    assert tokenizer is not None
    texts = prompts(args.prompts, args.characters)
    pools = {name: TokenizerPool(tokenizer, name, args.size) for name in ("none", "threads", "process")}
    ways = {"one by one": lambda: [tokenizer.encode(text) for text in texts]}
    ways |= {name: (lambda pool=pool: pool.encode_all(texts)) for name, pool in pools.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    want = [way() for way in ways.values()]  # also starts the processes
    assert all(found == want[0] for found in want)
    for _ in range(args.rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begin)
    first = times["one by one"]
    print(f"{args.prompts} prompts of {args.characters} characters, size {args.size}, load {os.getloadavg()[0]:.1f}")
    for name, found in times.items():
        pairs = [alone / other for alone, other in zip(first, found, strict=True)]
        figures = statistics.median(found), statistics.median(pairs), min(found), min(first) / min(found)
        print("{:11} median {:.3f} s, {:.2f} times; best {:.3f} s, {:.2f} times".format(name, *figures))
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
