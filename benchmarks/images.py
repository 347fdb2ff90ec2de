"""Measure requests with images: requests per second, the first token, an image that comes again, and other requests.

    python benchmarks/image_checkpoint.py /tmp/qwen3-vl-8b
    python benchmarks/images.py /tmp/qwen3-vl-8b [--load-format dummy] [--engine minivllm|vllm] [--parts first,...]

Each request has one image of random pixels, no two alike unless the line says so, between a few tokens of text.  Both
engines are driven through their asynchronous interfaces in the same way, so preparing images may overlap with steps.

* ``first``: milliseconds to the first token of a request alone: with a new image, with text of the same number of
  tokens, with the same image in the same prompt, and with the same image behind other text (its features are stored).
* ``rate``: ``--requests`` requests at once, each with a new image, ``--output`` tokens each.
* ``beside``: the time between tokens of 16 text requests, while 16 requests with an image, or with text of as many
  tokens, arrive one after another.

``floor`` is the time of the products alone: floating-point operations of the vision tower and of the prompt by
``--tflops`` (989: H200, bfloat16).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

BEFORE, BEHIND = 8, 16  # tokens of text around an image
STREAMS, ARRIVALS = 16, 16  # of ``beside``


class Ours:
    """minivllm's ``AsyncLLM``."""

    def __init__(self, args: argparse.Namespace) -> None:
        from minivllm import AsyncLLM

        self.llm = AsyncLLM(
            args.model,
            load_format=args.load_format,
            max_model_len=args.max_model_len,
            skip_tokenizer_init=True,
            **json.loads(args.options),
        )
        print("images:", dict(self.llm.resolved.notes).get("images"), "| attention:", self.attention())

    def attention(self) -> str:
        return self.llm.resolved.parts["attention"].name

    async def generate(self, prompt: dict[str, Any], tokens: int, name: str) -> AsyncIterator[int]:
        """Yield the number of new tokens of each piece."""
        from minivllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        async for piece in self.llm.generate(prompt, params, name):
            if piece.finished and piece.output.error:
                raise RuntimeError(piece.output.error)
            if piece.token_ids:
                yield len(piece.token_ids)

    async def figures(self) -> str:
        """Return the figures of the engine's images, as text."""
        return str((await self.llm.stats()).get("images"))

    def close(self) -> None:
        self.llm.close()


class Peer:
    """vLLM's asynchronous engine."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = {"limit_mm_per_prompt": {"image": 1, "video": 0}, **json.loads(args.options)}
        self.llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=args.model, load_format=args.load_format, max_model_len=args.max_model_len, seed=0, **options
            )
        )

    async def generate(self, prompt: dict[str, Any], tokens: int, name: str) -> AsyncIterator[int]:
        """Yield the number of new tokens of each piece."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        seen = 0
        async for output in self.llm.generate(prompt, params, name):
            now = len(output.outputs[0].token_ids)
            if now > seen:
                yield now - seen
                seen = now

    async def figures(self) -> str:
        return "not read"

    def close(self) -> None:
        self.llm.shutdown()


class Load:
    """Draws prompts, and measures requests of one engine."""

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        config = json.loads((Path(args.model) / "config.json").read_text())
        self.config, vision = config, config["vision_config"]
        self.draw = np.random.default_rng(args.seed)
        edge = vision["patch_size"] * vision["spatial_merge_size"]
        self.image_tokens = (args.side // edge) ** 2
        self.marks = [config["vision_start_token_id"], config["image_token_id"], config["vision_end_token_id"]]
        self.sent = 0

    def picture(self) -> Any:
        """Return a PIL image of random pixels."""
        from PIL import Image

        side = self.args.side
        return Image.fromarray(self.draw.integers(0, 256, (side, side, 3), np.uint8))

    def text(self, count: int) -> list[int]:
        return self.draw.integers(10, 100_000, count).tolist()

    def of_image(self, picture: Any, before: list[int] | None = None) -> dict[str, Any]:
        """Return a prompt with an image."""
        ids = [*(before or self.text(BEFORE)), *self.marks, *self.text(BEHIND)]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}

    def of_text(self) -> dict[str, Any]:
        """Return a prompt of text with as many tokens as one with an image."""
        return {"prompt_token_ids": self.text(BEFORE + 2 + self.image_tokens + BEHIND)}

    async def times(self, prompt: dict[str, Any], tokens: int) -> list[float]:
        """Return the seconds from sending a request to each of its tokens."""
        self.sent += 1
        start, found = time.perf_counter(), []
        async for count in self.engine.generate(prompt, tokens, f"{self.args.engine}-{self.sent}"):
            found += [time.perf_counter() - start] * count
        assert len(found) == tokens, (len(found), tokens)
        return found

    async def together(self, prompts: list[dict[str, Any]], tokens: int) -> list[list[float]]:
        return await asyncio.gather(*(self.times(prompt, tokens) for prompt in prompts))

    # ---- parts ---------------------------------------------------------------------------------------------------

    async def warm(self) -> None:
        """Run each kind of request, without measuring."""
        for count in (1, 1, 4):
            await self.together([self.of_image(self.picture()) for _ in range(count)], 8)
        await self.together([self.of_text() for _ in range(4)], 8)

    async def first(self) -> None:
        found: dict[str, list[float]] = {}
        for _ in range(self.args.repeat):
            new = self.of_image(self.picture())
            again = self.of_image(new["multi_modal_data"]["image"].copy(), new["prompt_token_ids"][:BEFORE])
            moved = self.of_image(new["multi_modal_data"]["image"].copy())
            kinds = {"text": self.of_text(), "new image": new, "same prompt": again, "same image, other text": moved}
            for kind, prompt in kinds.items():
                found.setdefault(kind, []).append((await self.times(prompt, 1))[0])
                await asyncio.sleep(0.02)
        for kind, seconds in found.items():
            listed = sorted(1e3 * one for one in seconds)
            print(f"first  {kind:24} {statistics.median(listed):8.1f} ms  ({listed[0]:.1f} to {listed[-1]:.1f})")
        new, text, again, moved = (
            statistics.median(found[kind]) for kind in ("new image", "text", "same prompt", "same image, other text")
        )
        stored = (new - text) / max(moved - text, 1e-4)
        print(f"first  new image / same prompt: {new / again:.1f}; its cost above text, new / stored: {stored:.1f}")

    async def rate(self) -> None:
        args = self.args
        for turn in range(2):
            prompts = [self.of_image(self.picture()) for _ in range(args.requests)]
            start = time.perf_counter()
            found = await self.together(prompts, args.output)
            seconds = time.perf_counter() - start
            firsts = sorted(one[0] for one in found)
            print(
                f"rate   {args.requests} requests x {args.output} tokens, turn {turn}: {seconds:.3f} s, "
                f"{args.requests / seconds:.2f} requests/s; first token p50 {firsts[len(firsts) // 2]:.2f} s",
                flush=True,
            )
        prompts = [self.of_text() for _ in range(args.requests)]
        start = time.perf_counter()
        await self.together(prompts, args.output)
        seconds = time.perf_counter() - start
        print(f"rate   text of as many tokens: {seconds:.3f} s, {args.requests / seconds:.2f} requests/s", flush=True)

    async def beside(self) -> None:
        late = {}
        for kind in ("nothing", "text", "image", "text", "image"):
            gaps = await self._gaps(kind)
            p50, p90, p99 = (gaps[int(len(gaps) * share)] for share in (0.5, 0.9, 0.99))
            late.setdefault(kind, []).append(p99)
            shown = f"p50 {p50:.2f}  p90 {p90:.2f}  p99 {p99:.2f}  largest {gaps[-1]:.1f}"
            print(f"beside {kind:8} ms between tokens: {shown}", flush=True)
        ratio = statistics.mean(late["image"]) / statistics.mean(late["text"])
        print(f"beside p99 next to images / next to text: {ratio:.2f}", flush=True)

    async def _gaps(self, kind: str) -> list[float]:
        """Return the sorted milliseconds between tokens of text requests beside arrivals of a kind."""
        make = {"text": self.of_text, "image": lambda: self.of_image(self.picture()), "nothing": lambda: None}[kind]
        prompts = [make() for _ in range(ARRIVALS)]
        streams = [
            asyncio.ensure_future(self.times({"prompt_token_ids": self.text(64)}, self.args.stream))
            for _ in range(STREAMS)
        ]
        await asyncio.sleep(self.args.gap * 3)
        arrived = []
        for prompt in prompts:
            if prompt is not None:
                arrived.append(asyncio.ensure_future(self.times(prompt, 8)))
            await asyncio.sleep(self.args.gap)
        found = await asyncio.gather(*streams)
        await asyncio.gather(*arrived)
        return sorted(1e3 * (b - a) for one in found for a, b in pairwise(one))

    def floor(self) -> str:
        """Return the time of the products of a request with an image, as text."""
        tower, prompt = (
            tower_operations(self.config, self.image_tokens),
            prompt_operations(self.config, self.image_tokens),
        )
        ms = [1e-9 * one / self.args.tflops for one in (tower, prompt)]
        return (
            f"floor  {self.image_tokens} tokens of an image: tower {1e-12 * tower:.1f} TFLOP = {ms[0]:.1f} ms, prompt "
            f"{1e-12 * prompt:.1f} TFLOP = {ms[1]:.1f} ms at {self.args.tflops:.0f} TFLOP/s: {sum(ms):.1f} ms, "
            f"{1e3 / sum(ms):.1f} requests/s"
        )


def tower_operations(config: dict[str, Any], tokens: int) -> float:
    """Return the floating-point operations of a tower of Qwen3-VL for an image."""
    v = config["vision_config"]
    patches, width = tokens * v["spatial_merge_size"] ** 2, v["hidden_size"]
    layer = 2 * patches * (4 * width**2 + 2 * width * v["intermediate_size"]) + 4 * patches**2 * width
    embed = 2 * patches * 3 * v["temporal_patch_size"] * v["patch_size"] ** 2 * width
    merged = v["spatial_merge_size"] ** 2 * width
    mergers = 1 + len(v.get("deepstack_visual_indexes") or ())
    return v["depth"] * layer + embed + mergers * 2 * tokens * (merged**2 + merged * v["out_hidden_size"])


def prompt_operations(config: dict[str, Any], tokens: int) -> float:
    """Return the floating-point operations of a text model for a prompt, without its output layer."""
    t = config["text_config"]
    heads = t["num_attention_heads"] * t["head_dim"]
    keys = t["num_key_value_heads"] * t["head_dim"]
    weights = t["hidden_size"] * (2 * heads + 2 * keys + 3 * t["intermediate_size"])
    return t["num_hidden_layers"] * (2 * tokens * weights + 2 * tokens**2 * heads)


async def run(load: Load) -> None:
    start = time.perf_counter()
    await load.warm()
    print(f"warm   {time.perf_counter() - start:.1f} s", flush=True)
    for part in load.args.parts.split(","):
        await getattr(load, part)()
    print("images of the engine:", await load.engine.figures())


def prepare_alone(load: Load) -> str:
    """Return the time of ``prepare`` of one image in this process, as text."""
    pictures = [load.picture() for _ in range(6)]
    found = []
    for picture in pictures:
        start = time.perf_counter()
        load.engine.llm.images.prepare(picture)
        found.append(1e3 * (time.perf_counter() - start))
    return f"prepare on the host, one image at a time: {statistics.median(found[1:]):.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", choices=("minivllm", "vllm"), default="minivllm")
    parser.add_argument("--parts", default="first,rate,beside")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--side", type=int, default=1024, help="pixels along each side of an image")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer of rate")
    parser.add_argument("--stream", type=int, default=256, help="tokens of each text request of beside")
    parser.add_argument("--gap", type=float, default=0.12, help="seconds between arrivals of beside")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tflops", type=float, default=989.0)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    args = parser.parse_args()
    start = time.perf_counter()
    engine = Ours(args) if args.engine == "minivllm" else None
    if engine is not None:
        load = Load(engine, args)
        print(f"{args.engine}: started in {time.perf_counter() - start:.1f} s\n{load.floor()}\n{prepare_alone(load)}")
        asyncio.run(run(load))
        engine.close()
        return

    async def peer() -> None:
        engine = Peer(args)  # it starts tasks of the running loop
        load = Load(engine, args)
        print(f"{args.engine}: started in {time.perf_counter() - start:.1f} s\n{load.floor()}", flush=True)
        await run(load)
        engine.close()

    asyncio.run(peer())


if __name__ == "__main__":
    main()
