"""Measure the time of an evictor per block, with a million cached blocks, in microseconds of CPU time.

    python benchmarks/evictors.py [--blocks 1000000] [lru cost-aware ...]

The cache is filled with sequences of 64 blocks.  Then blocks are evicted in calls of 64 (``victims``), and new
sequences replace them (``add``, ``free``).  One sequence in four is looked up first (``hit``, ``hold``, ``free``).
"""

from __future__ import annotations

import argparse
from time import process_time

import numpy as np

from minivllm.config.resolve import choose_seams
from minivllm.core.interfaces.evictor import BlockInfo, EvictorContext
from minivllm.registry import Catalog, build_part

CHAIN = 64


def info(keys: np.ndarray) -> BlockInfo:
    n = len(keys)
    depth = np.arange(n, dtype=np.int32)
    parent = np.concatenate((np.zeros(1, np.uint64), keys[:-1]))
    return BlockInfo(parent, depth, np.full(n, 4096, np.int64), (depth + 1) * 16.0, np.zeros(n, np.int32))


def measure(name: str, blocks: int, rounds: int = 2000) -> dict[str, float]:
    """Return microseconds per block, by call."""
    from minivllm.config import EngineConfig

    part = choose_seams(EngineConfig(evictor=name), Catalog.discover(), ("evictor",))["evictor"]
    evictor = build_part("evictor", part, EvictorContext(blocks, 16, "device"))
    rng = np.random.default_rng(0)
    chains = [rng.integers(1, 2**64 - 1, CHAIN, np.uint64) for _ in range(blocks // CHAIN)]
    spent = dict.fromkeys(("add", "hit", "hold", "free", "victims"), 0.0)
    called = dict.fromkeys(spent, 0)

    def call(what: str, keys: np.ndarray, *more: object) -> np.ndarray | None:
        start = process_time()
        found = getattr(evictor, what)(*(more or (keys,)))
        spent[what] += process_time() - start
        called[what] += len(keys)
        return found

    for keys in chains:
        evictor.add(keys, info(keys))
    for i in rng.permutation(len(chains)).tolist():
        evictor.free(chains[i])
    gone: set[int] = set()
    alive = list(range(len(chains)))
    for turn in range(rounds):
        if turn % 4 == 0:
            keys = chains[alive[int(rng.integers(len(alive)))]]
            keys = keys[[k not in gone for k in keys.tolist()]]
            for what in ("hit", "hold", "free"):
                call(what, keys)
        new = rng.integers(1, 2**64 - 1, CHAIN, np.uint64)
        out = call("victims", new, CHAIN)
        assert out is not None and len(out) == CHAIN, "it lost keys"
        gone.update(out.tolist())
        call("add", new, new, info(new))
        call("free", new)
        alive.append(len(chains))
        chains.append(new)
    return {what: 1e6 * spent[what] / called[what] for what in spent}


def main() -> None:
    builtin = [e.name for e in Catalog.discover()["evictor"].entries if e.builtin]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evictors", nargs="*", default=builtin, metavar="NAME", help="default: the built-in ones")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    args = parser.parse_args()
    print(
        f"{'evictor':14}"
        + "".join(f"{what:>9}" for what in ("add", "hit", "hold", "free", "victims"))
        + "   us a block"
    )
    for name in args.evictors:
        found = measure(name, args.blocks)
        print(f"{name:14}" + "".join(f"{us:9.2f}" for us in found.values()), flush=True)


if __name__ == "__main__":
    main()
