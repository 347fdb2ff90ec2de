"""Measure the host's time in steps with further results, such as log-probabilities and masks of grammars.

    python benchmarks/host_step.py logprobs           256 requests of 100 to 1,024 tokens, plain and with logprobs=1
    python benchmarks/host_step.py masks --rows 64    structured output (llguidance, 151,936 ids), and plain

``LLM.generate`` runs on a device that is only a clock.  FORWARD takes ``--forward`` milliseconds and ``--row`` for each
row, SAMPLE takes ``--sample``, one after the other.  Results are made up and take no time.  The time of launches on a
GPU's host is given by ``--submit`` and, for masks, ``--supply``.  Time is the CPU time of this thread plus its waits
for the device, so other work on the machine has little effect.

A line for each case shows medians of ``--rounds`` runs in turns.  It has tokens per second relative to plain, and then
milliseconds: of a step, of the part in which the device was *idle*, of its parts (medians), of all work of the *host*
(mean), of the grammar library and of the garbage collector (means).  The last figures are the collections of each
generation.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from minivllm.core import timing
from minivllm.plugins.executor.sim import Sim
from minivllm.plugins.executor.spec import SIM

VOCAB, EOS = 151_936, 151_643


class Time:
    """A clock of this thread's CPU time plus the skipped time."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def now(self) -> float:
        return time.thread_time() + self.skipped

    def until(self, when: float) -> None:
        """Skip to a time."""
        self.skipped += max(0.0, when - self.now())

    @contextlib.contextmanager
    def free(self):
        """Run the block without counting its time."""
        begun = time.thread_time()
        yield
        self.skipped -= time.thread_time() - begun


CLOCK = Time()
# milliseconds of a shape with 0.6B parameters on one H200, for `nano` of nano-vllm and for 64 rows of short contexts
MS = {
    "logprobs": {"forward": 0.7, "row": 0.016, "sample": 0.2, "submit": 0.15, "supply": 0.0},
    "masks": {"forward": 1.0, "row": 0.0, "sample": 0.3, "submit": 0.15, "supply": 0.06},
}


class Device(Sim):
    """A device with one stream whose launches take time on the clock; making up results takes none."""

    spec = replace(SIM, impl=f"{__name__}:Device")
    launch_ms = {"submit": 0.0, "supply": 0.0}

    def __init__(self, options=None):
        super().__init__(options)
        self.clock, self.idle = CLOCK, 0.0  # idle counts the seconds without work

    def submit(self, plan):
        CLOCK.skipped += self.launch_ms["submit"] / 1e3
        super().submit(plan)

    def supply(self, step, late):
        CLOCK.skipped += self.launch_ms["supply"] / 1e3
        super().supply(step, late)

    def _work(self, ms):
        self.idle += max(0.0, CLOCK.now() - self._free_at)
        super()._work(ms)

    def _delta(self, d):
        with CLOCK.free():
            super()._delta(d)

    def _run(self, plan, late, ms):
        with CLOCK.free():
            return super()._run(plan, late, ms)

    def rest(self):
        """Begin to count."""
        self._free_at, self.idle = CLOCK.now(), 0.0


# ---- a model that is a vocabulary ------------------------------------------------------------------------------------


def vocabulary(rng: random.Random) -> list[bytes]:
    """Return the bytes of tokens: single bytes, numbers, signs, spaces, word-like syllables with and without a space,
    other scripts.

    The token EOS ends them.
    """
    made = dict.fromkeys([bytes([i]) for i in range(256)] + [str(i).encode() for i in range(1000)])
    signs = b"\"'{}[]():;,.<>/\\|!?@#$%^&*-_=+`~"
    for k in range(2, 40):
        made.update(dict.fromkeys((b" " * k, b"\n" * k, b"\t" * k, b"\n" + b" " * k)))
    while len(made) < 6000:
        made[(b" " if rng.random() < 0.3 else b"") + bytes(rng.choices(signs, k=rng.randint(2, 4)))] = None
    heads, vowels = [*"bcdfghjklmnprstvw", "st", "tr", "pl", "sh", "ch", "th", "qu", "br"], [*"aeiou", "ai", "ea", "ou"]
    tails = ["", *"nrstl", "ng", "ck", "st"]
    while len(made) < EOS - 20_000:
        parts = [rng.choice(heads) + rng.choice(vowels) + rng.choice(tails) for _ in range(rng.randint(1, 3))]
        word, kind = "".join(parts), rng.random()
        made[(" " + word if kind < 0.6 else word.capitalize() if kind < 0.7 else word).encode()] = None
    while len(made) < EOS:
        first, span = rng.choice([(0x4E00, 4000), (0xAC00, 4000), (0x430, 30), (0x3B1, 20), (0x621, 25)])
        made["".join(chr(first + rng.randint(0, span)) for _ in range(rng.randint(1, 3))).encode()] = None
    return list(made)


def write_model(folder: Path, rng: random.Random) -> None:
    cfg = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCAB,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000,
        tie_word_embeddings=True,
        hidden_act="silu",
        torch_dtype="bfloat16",
        eos_token_id=EOS,
        bos_token_id=None,
        attention_bias=False,
    )
    (folder / "config.json").write_text(json.dumps(cfg))
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = {b: chr(b) if b in plain else chr(next(others)) for b in range(256)}
    tok = Tokenizer(models.BPE({"".join(letters[b] for b in t): i for i, t in enumerate(vocabulary(rng))}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.add_special_tokens(["<|endoftext|>"])
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(llm, prompts, params) -> dict[str, float]:
    """Run ``generate`` once and return its figures in milliseconds per step."""
    clock, device, pauses = llm.engine.clock, llm.engine.executor, []
    llm.reset_prefix_cache()
    gc.collect()
    collections = [s["collections"] for s in gc.get_stats()]

    def collecting(phase, info):
        pauses.append(CLOCK.now() * (1 if phase == "stop" else -1))

    gc.callbacks.append(collecting)
    before, begun = clock.count, CLOCK.now()
    device.rest()
    try:
        outs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        gc.callbacks.remove(collecting)
    errors = [o.error for o in outs if o.error]
    assert not errors, errors[0]
    tokens = sum(len(o.outputs[0].token_ids) for o in outs)
    del outs
    seconds, steps = CLOCK.now() - begun, clock.count - before
    rows = np.arange(max(before, clock.count - clock.size), clock.count) % clock.size
    part = clock.part[rows] * 1e3
    return {
        "tok/s": tokens / seconds,
        "steps": steps,
        "step": seconds * 1e3 / steps,
        "idle": device.idle * 1e3 / steps,
        **{name: float(np.median(part[:, i])) for i, name in enumerate(timing.PARTS)},
        "host": float(part[:, [timing.PLAN, timing.SUBMIT, timing.PUBLISH]].sum(axis=1).mean()),
        "grammar": float(clock.seam["grammar"][rows].mean()) * 1e3 if "grammar" in clock.seam else 0.0,
        "gc": sum(pauses) * 1e3 / steps,
        **{f"gc{g}": s["collections"] - collections[g] for g, s in enumerate(gc.get_stats())},
    }


def table(llm, cases, rounds: int) -> None:
    """Run every case once to warm up, then ``rounds`` times in turns."""
    found: dict[str, list] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, arguments in cases.items():
            one = run(llm, *arguments)
            if turn:
                found[name].append(one)
    plain = statistics.median(one["tok/s"] for one in found["plain"])
    print(f"{'':28}" + " ".join(f"{name:>7}" for name in ("share", *found["plain"][0])))
    for name, runs in found.items():
        middle = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        cells = (f"{v:7.0f}" if v >= 100 or k[:-1] == "gc" else f"{v:7.3f}" for k, v in middle.items())
        print(f"{name:28}{middle['tok/s'] / plain:7.3f} " + " ".join(cells), flush=True)


def an_object(properties: dict, **more) -> dict:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {**schema, **more}


def many(schema: dict) -> dict:
    """Return a schema of an endless sequence of values of a schema, one per line."""
    return {"grammar": f'start: item+\nitem: %json {json.dumps(schema)} "\\n"'}


TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 999}
FREE = an_object({"name": TEXT, "age": WHOLE, "tags": {"type": "array", "items": TEXT, "maxItems": 5}})
TIGHT = {"x": WHOLE, "kind": {"enum": ["red", "green", "blue"]}, "ok": {"type": "boolean"}}
REQUESTED = {
    "objects, free strings": many(FREE),
    "objects, no strings": many(an_object(TIGHT, **{"x-guidance": {"whitespace_flexible": False}})),
    "an array of objects": {"json": {"type": "array", "items": FREE, "minItems": 200}, "disable_any_whitespace": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(MS))
    parser.add_argument("--rows", type=int, help="256 for logprobs, 64 for masks")
    parser.add_argument("--tokens", type=int, help="of an answer, at most (1,024) for logprobs, each (128) for masks")
    parser.add_argument("--rounds", type=int, default=3)
    for name in MS["masks"]:
        parser.add_argument(f"--{name}", type=float, metavar="MS")
    args = parser.parse_args()
    ms = {name: ms if getattr(args, name) is None else getattr(args, name) for name, ms in MS[args.what].items()}
    Device.launch_ms = {name: ms[name] for name in ("submit", "supply")}
    pace = {"step_ms": ms["forward"], "row_ms": ms["row"], "sample_ms": ms["sample"]}
    from minivllm import LLM, SamplingParams

    timing.perf_counter, rng = CLOCK.now, random.Random(0)
    masks, rows = args.what == "masks", args.rows or (64 if args.what == "masks" else 256)
    most = args.tokens or (128 if masks else 1024)
    lengths = [most if masks else rng.randint(most // 10, most) for _ in range(rows)]
    prompts = [[rng.randrange(1000, 100_000) for _ in range(rng.randint(8, 24) if masks else 500)] for _ in range(rows)]

    def asking(**more):
        return prompts, [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **more) for n in lengths]

    structured = {name: asking(structured_outputs=requested) for name, requested in REQUESTED.items()}
    cases = {"plain": asking(), **(structured if masks else {"logprobs=1": asking(logprobs=1)})}
    with tempfile.TemporaryDirectory() as tmp:
        write_model(Path(tmp), rng)
        with LLM(
            model=tmp,
            load_format="dummy",
            device="cpu",
            max_num_seqs=rows,
            max_model_len=4096,
            seed=0,
            executor={"name": f"{__name__}:Device", "options": pace},
            allow_targets=[__name__],
            skip_tokenizer_init=not masks,
        ) as llm:
            table(llm, cases, args.rounds)


if __name__ == "__main__":
    main()
