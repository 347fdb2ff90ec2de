"""Measure prefixes that return from a tier, the speed of copies, decode beside transfers, and the tier on disk.

    python benchmarks/tier_speed.py --model DIR --load-format dummy --prompt 4096 --tier cpu --bytes 16e9
    python benchmarks/tier_speed.py --model DIR --load-format dummy --tier disk --path /ssd/kv --parts disk

Parts:

    prefix    each prompt is computed, stored, removed from the device, and sent again
    copies    pages are read from the device and written to it, without an engine around
    decode    --rows rows generate tokens while prompts return from the tier, against prompts that hit the device
    disk      the store on disk by itself, against a file of the same size that is read and written with O_DIRECT
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.kvstore import StoreContext
from minivllm.core.mover import BATCH, READ
from minivllm.frontend.requests import Tracked
from minivllm.plugins.kvstore.disk import DiskStore
from minivllm.plugins.kvstore.options import DiskStoreOptions

NEW = 64  # new tokens of a prompt that is sent beside decoding rows
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


def settle(llm: LLM) -> None:
    """Run the engine until no page moves."""
    while llm.engine.cache.tiers.active:
        llm.engine.step()


def first_token(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the seconds until each prompt has one token."""
    begun = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], ONE, use_tqdm=False)
    return time.perf_counter() - begun


def forget(llm: LLM) -> None:
    """Remove all prefixes from the device."""
    for pool in llm.engine.cache.pools:
        pool.reset()


def prefixes(llm: LLM, made: list[list[int]], turns: int) -> None:
    """Print the times to the first token of prompts that are computed, and of the same from the tier."""
    first_token(llm, [[7] * len(made[0])])
    computed = []
    for prompt in made:
        computed.append(first_token(llm, [prompt]))
        settle(llm)
    hits = [first_token(llm, [prompt]) for prompt in made]
    print(f"first token of {len(made[0])} tokens whose blocks are on the device: {1e3 * median(hits):.1f} ms")
    for turn in range(turns):
        forget(llm)
        loaded = [first_token(llm, [prompt]) for prompt in made]
        ratio = median(computed) / median(loaded)
        facts = f"computed {1e3 * median(computed):.1f} ms, loaded {1e3 * median(loaded):.1f} ms, {ratio:.1f} x"
        print(f"turn {turn}: first token of {len(made[0])} tokens: {facts}", [round(1e3 * x, 1) for x in loaded])
    forget(llm)
    together = first_token(llm, made)
    print(f"{len(made)} at once from the tier: {1e3 * together:.1f} ms", flush=True)


def wait_for_device() -> None:
    """Wait until the device has finished all work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_pages(memory: Any, blocks: list[int]) -> list[np.ndarray]:
    """Read blocks of the first group to the host in batches, as stores do, and return their pages."""
    most = max(1, READ // memory.page_bytes[0])
    parts = [blocks[at : at + most] for at in range(0, len(blocks), most)]
    batches = [memory.read(0, part) for part in parts]
    pages = [batch.page(i, True) for batch, part in zip(batches, parts, strict=True) for i in range(len(part))]
    if any(page is None for page in pages):
        raise SystemExit("no pinned memory is at hand; lower --copy-bytes")
    return pages


def copies(llm: LLM, size: int, repeats: int) -> None:
    """Print the speed of copies of pages of ``size`` bytes in all.  Blocks are written with their own contents.

    Pages are written by the step, or staged on the device before (by each method)."""
    mover = llm.engine.executor.runner.mover
    memory, pool = mover.memory, llm.engine.cache.pools[0]
    each = memory.page_bytes[0]
    blocks = list(range(1, min(pool.total, 1 + max(1, size // each))))
    random.Random(1).shuffle(blocks)
    pages = [memory.empty(each) for _ in range(2 * len(blocks))][: len(blocks)]  # leaves as many at hand
    for into, page in zip(pages, read_pages(memory, blocks), strict=True):
        into[:] = page
    reads, writes = [], []
    for _ in range(repeats):
        wait_for_device()
        begun = time.perf_counter()
        read_pages(memory, blocks)
        reads.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        memory.write(0, blocks, pages)
        wait_for_device()
        writes.append(time.perf_counter() - begun)
    total = len(blocks) * each / 1e9
    facts = f"to the host {total / median(reads):.1f} GB/s, to the device {total / median(writes):.1f} GB/s"
    print(f"copies of {len(blocks)} pages of {each / 1e6:.2f} MB, medians of {repeats}: {facts}", flush=True)
    chosen = memory.by_kernel[0]
    for way in (False, True):
        memory.by_kernel[0] = way
        staging = [staged(memory, pages[: len(pages) // 2]) for _ in range(repeats)]
        facts = " ".join(f"{speed / 1e9:.1f}" for speed in staging)
        name = "a kernel" if way else "the copy engine"
        print(f"staged by {name}: GB/s {facts}" + (", chosen" if way == chosen else ""), flush=True)
    memory.by_kernel[0] = chosen
    for note in memory.notes:
        print(note)


def staged(memory: Any, pages: list[np.ndarray]) -> float:
    """Return the bytes per second with which pages are staged on the device, in batches, as loads do."""
    begun, found = time.perf_counter(), []
    batch = max(1, BATCH // pages[0].nbytes)
    for at in range(0, len(pages), batch):
        found += memory.stage(0, pages[at : at + batch])
    while any(memory.arrived(page) is None for page in found[-1:]):
        pass
    return sum(page.nbytes for page in pages) / (time.perf_counter() - begun)


class Decoding:
    """Rows that generate tokens, and a count of their tokens."""

    def __init__(self, llm: LLM, rows: int, tokens: int, prompt: int, seed: int) -> None:
        self.llm, self.tokens, self.rng = llm, 0, random.Random(2 * seed)
        self.rows: list[Tracked] = []
        rng = random.Random(2 * seed + 1)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        for _ in range(rows):
            ids = [rng.randrange(100, 2000) for _ in range(prompt)]
            row = Tracked({"prompt_token_ids": ids}, params, None, stream=self._count)
            row.add_to(llm.engine)
            self.rows.append(row)

    def _count(self, piece: Any) -> None:
        self.tokens += len(piece.token_ids)

    def run(self, seconds: float, made: list[list[int]], every: float, drop: bool) -> float:
        """Decode for some seconds, and send a prompt every ``every`` seconds.  Return the tokens per second.

        ``drop`` removes the prompts from the device first.  The last tokens of each prompt are new, so that its step
        computes as many tokens in both cases."""
        if drop:
            forget(self.llm)
        begun = due = time.perf_counter()
        before, sent, ended = self.tokens, 0, []
        while (now := time.perf_counter()) - begun < seconds:
            if now >= due and sent < len(made):
                new = [self.rng.randrange(100, 2000) for _ in range(NEW)]
                ids = {"prompt_token_ids": [*made[sent][:-NEW], *new]}
                Tracked(ids, ONE, None, done=ended.append).add_to(self.llm.engine)
                sent, due = sent + 1, due + every
            self.llm.engine.step()
        speed = (self.tokens - before) / (time.perf_counter() - begun)
        while len(ended) < sent:
            self.llm.engine.step()
        assert not any(row.ended for row in self.rows), "the rows are too short; raise --tokens"
        return speed

    def stop(self) -> None:
        """End the rows."""
        for row in self.rows:
            self.llm.engine.abort(row.request.id)
        while self.llm.engine.busy:
            self.llm.engine.step()


def decode(llm: LLM, made: list[list[int]], args: argparse.Namespace) -> None:
    """Print the tokens per second of decoding rows while prompts come from the tier, and while they hit the device."""
    first_token(llm, made)
    settle(llm)
    every = args.seconds / len(made)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(-1, 2 * args.turns):  # the first turn is not counted
        # Each turn has new rows, because a step of longer rows takes longer, and a tier stores equal blocks once.
        rows = Decoding(llm, args.rows, args.tokens, 128, turn + 2)
        rows.run(0.5, [], every, drop=False)
        drop = turn < 0 or turn % 4 in (1, 2)
        before = llm.stats()["tiers"][0]["load_bytes"]
        speed = rows.run(args.seconds, made, every, drop)
        moved = llm.stats()["tiers"][0]["load_bytes"] - before
        rows.stop()
        settle(llm)
        if turn >= 0:
            speeds[drop].append(speed)
            name = "from the tier" if drop else "on the device"
            facts = f"{speed:.0f} tok/s, {moved / 1e9 / args.seconds:.2f} GB/s loaded"
            print(f"decode, prompts {name}: {facts}", flush=True)
    ratios = [one / other for one, other in zip(speeds[True], speeds[False], strict=True)]
    print(f"decode during transfers: {median(ratios):.3f}", [round(ratio, 3) for ratio in ratios], flush=True)


def direct(path: Path, size: int, piece: int, threads: int) -> tuple[float, float]:
    """Return the bytes per second of writing a file with O_DIRECT and fdatasync, and of reading it with O_DIRECT, in
    pieces that ``threads`` threads move."""
    from concurrent.futures import ThreadPoolExecutor

    buffers = [mmap.mmap(-1, piece) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(os.urandom(piece))
    places = list(range(0, size, piece))

    def timed(fd: int, move: Callable[..., int], sync: bool) -> float:
        def part(i: int) -> None:
            for at in places[i::threads]:
                if move(fd, [buffers[i]], at) != piece:
                    raise OSError(f"a piece of {path} was moved in part")

        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(threads)))
        if sync:
            os.fdatasync(fd)
        return len(places) * piece / (time.perf_counter() - begun)

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        return timed(fd, os.pwritev, True), timed(fd, os.preadv, False)
    finally:
        os.close(fd)
        path.unlink()


def forget_files(folder: Path) -> None:
    """Write the files of a folder to the disk, and remove their pages from the memory of the system."""
    for path in folder.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def store_speeds(path: Path, size: int, page: int, ctx: StoreContext, seed: int) -> tuple[float, float]:
    """Return the bytes per second with which the store on disk writes pages, until they are on the disk, and reads
    them back after a new start."""
    options = DiskStoreOptions(path=str(path), bytes=max(4 * size, 1 << 28))
    made = [np.random.default_rng([seed, i]).integers(0, 256, page, np.uint8) for i in range(8)]
    keys = [i.to_bytes(16, "big") for i in range(size // page)]
    store = DiskStore(options, ctx)
    begun = time.perf_counter()
    for i, key in enumerate(keys):
        if not store.put(key, made[i % 8]):
            raise SystemExit("the store has no room")
    for file in path.rglob("*.kv"):
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)
    wrote = len(keys) * page / (time.perf_counter() - begun)
    store.close()
    forget_files(path)
    store = DiskStore(options, ctx)
    begun = time.perf_counter()
    store.expect(keys)
    for i, key in enumerate(keys):
        found = store.get(key)
        if found is None or found[:64].tobytes() != made[i % 8][:64].tobytes():
            raise SystemExit("a page is lost")
    read = len(keys) * page / (time.perf_counter() - begun)
    store.drop(keys)
    store.close()
    return wrote, read


def disk(args: argparse.Namespace, page: int, empty: Callable[[int], np.ndarray] | None) -> None:
    """Print the speed of the store on disk, and of the disk itself, in turns."""
    root = Path(args.path)
    root.mkdir(parents=True, exist_ok=True)
    size = int(args.disk_bytes) // page * page
    rows = []
    for turn in range(args.turns):
        ctx = StoreContext(f"{turn:064x}")
        if empty is not None:
            ctx = StoreContext(f"{turn:064x}", empty=empty)
        raw = direct(root / "direct.bin", size, -(-page // 4096) * 4096, args.threads)
        own = store_speeds(root / "store", size, page, ctx, turn)
        rows.append((*raw, *own, own[0] / raw[0], own[1] / raw[1]))
        facts = " ".join(f"{x / 1e6:.0f}" for x in rows[-1][:4])
        print(f"O_DIRECT write, read, store write, read, MB/s: {facts}", flush=True)
    wrote, read = (median(row[i] for row in rows) for i in (4, 5))
    print(
        f"store / O_DIRECT of {size / 1e9:.1f} GB in pages of {page / 1e6:.2f} MB: write {wrote:.2f}, read {read:.2f}"
    )


def main() -> None:
    """Print the times of the parts, and the counters of the tier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--parts", nargs="+", choices=["prefix", "copies", "decode", "disk"], default=["prefix"])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tier", choices=["cpu", "disk"], default="cpu")
    parser.add_argument("--bytes", type=float, default=16e9)
    parser.add_argument("--path", default="/tmp/minivllm-tier")
    parser.add_argument("--rows", type=int, default=32, help="rows that decode")
    parser.add_argument("--tokens", type=int, default=2500, help="most tokens that a decoding row generates")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a turn of decoding")
    parser.add_argument("--copy-bytes", type=float, default=1e9)
    parser.add_argument("--disk-bytes", type=float, default=4e9)
    parser.add_argument("--page", type=int, default=2 << 20, help="bytes of a page of the part disk without a model")
    parser.add_argument("--threads", type=int, default=1, help="threads of the file with O_DIRECT")
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    args = parser.parse_args()
    if args.parts == ["disk"]:
        disk(args, args.page, None)
        return
    if args.model is None:
        parser.error("--model is required for all parts but disk")
    options: dict[str, Any] = {"bytes": int(args.bytes), "eager": True}
    if args.tier == "disk":
        options["path"] = args.path
    rng = random.Random(1)
    made = [[rng.randrange(100, 2000) for _ in range(args.prompt)] for _ in range(args.count)]
    begun = time.perf_counter()
    with LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        max_model_len=max(args.prompt, args.tokens + 128) + 256,
        kvstore={"name": args.tier, "options": options},
        **json.loads(args.options),
    ) as llm:
        print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
        if "copies" in args.parts:
            copies(llm, int(args.copy_bytes), 5)
        if "prefix" in args.parts:
            prefixes(llm, made, args.turns)
        if "decode" in args.parts:
            decode(llm, made, args)
        if "disk" in args.parts:
            memory = llm.engine.executor.runner.mover.memory
            disk(args, memory.page_bytes[0], memory.empty)
        print(json.dumps({name: llm.stats()[name] for name in ("tiers", "tier_choice")}, default=str))


if __name__ == "__main__":
    main()
