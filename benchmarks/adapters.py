"""Measure steps with adapters (LoRA): decode and prefill by the number of adapters, and the time to load one.

    python benchmarks/adapters.py --model DIR --load-format dummy --folder /tmp/adapters --rank 16
    python benchmarks/adapters.py --model DIR --load-format dummy --folder /tmp/adapters --engine vllm --adapters 0 8

The adapters are written to --folder with random weights, for all projections of a model of Llama's layout; folders that
exist are used.  The time of a decode step is the median time between two tokens of the row whose prompt ends last, and
the prefill ends with its first token.  For vLLM, which streams no tokens here, a step is a difference: 129 tokens minus
1 token, divided by 128.  ``off`` is a second engine without ``enable_lora`` in the same process.  Each has half of the
memory, and their runs alternate.  Garbage is collected before each run, because a full collection takes tenths of a
second, and would count for one of them.

A line for each run of minivllm divides its prefill: the time to add the requests, and of each turn of the engine the
tokens that it planned, and the form and the device time of the step that it collected (an earlier one, if steps
overlap).  Collections of garbage and allocations of device memory during the run are shown if there were any.

The loads: while 32 rows decode, further requests of one token come, with adapters that are on the device (``resident``)
or that are nowhere yet (``new``).  Each line has the times between two tokens of the 32 rows, and the times from
these further requests to their token.  The difference of the latter is the time of a load.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEPS = 128
LOADS = 8  # further requests of a run, and adapters that are loaded
APART = 40  # steps between two of them
LOADED_ROWS = 32


def projections(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the projections of a layer by their path."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = head * config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """Write an adapter in PEFT's layout with random weights in bfloat16, unless it exists, and return its folder."""
    if (folder / "adapter_config.json").exists():
        return folder
    config = json.loads((model / "config.json").read_text())
    shapes = projections(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for path, (inputs, outputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{path}"
            first = torch.randn(rank, inputs, generator=generator, device=device) * 0.01
            second = torch.randn(outputs, rank, generator=generator, device=device) * 0.01
            tensors[f"{name}.lora_A.weight"] = first.bfloat16().cpu()
            tensors[f"{name}.lora_B.weight"] = second.bfloat16().cpu()
    targets = [path.split(".")[-1] for path in shapes]
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


class Run(NamedTuple):
    """The times of a run in milliseconds, and a text that divides its prefill."""

    step: float
    prefill: float
    parts: str = ""


class Pauses:
    """Counts what may interrupt a run: milliseconds of garbage collections, and allocations of device memory."""

    COUNTS = ("num_alloc_retries", "num_device_alloc", "num_device_free")

    def __init__(self) -> None:
        self.ms = 0.0
        self._begun = 0.0
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        now = 1e3 * time.perf_counter()
        if phase == "start":
            self._begun = now
        else:
            self.ms += now - self._begun

    def begin(self) -> None:
        """Collect garbage, then start to count."""
        gc.collect()
        self.ms = 0.0
        self._before = self._counts()

    def text(self) -> str:
        """Return the counts since ``begin`` that are not 0."""
        found = [f"garbage {self.ms:.1f} ms"] if self.ms > 1 else []
        now = self._counts()
        found += [f"{name} {now[name] - self._before[name]}" for name in now if now[name] != self._before[name]]
        return ", ".join(found)

    def _counts(self) -> dict[str, int]:
        if not torch.cuda.is_available():
            return {}
        counts = torch.cuda.memory_stats()
        return {name: counts.get(name, 0) for name in self.COUNTS}


class Engine:
    """minivllm or vLLM with the same calls."""

    def __init__(self, args: argparse.Namespace, adapters: int, memory: float) -> None:
        """Start the engine with room for ``adapters``, without ``enable_lora`` for 0, up to a share of the memory."""
        options: dict[str, Any] = {
            "model": args.model,
            "load_format": args.load_format,
            "skip_tokenizer_init": True,
            "max_num_seqs": max(args.rows),
            "max_model_len": 1024,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": memory,
        }
        if adapters:
            options.update(enable_lora=True, max_loras=adapters, max_lora_rank=args.rank, max_cpu_loras=2 * adapters)
        options.update(json.loads(args.options))
        if args.engine == "vllm":
            from vllm import LLM, SamplingParams
            from vllm.lora.request import LoRARequest
        else:
            from minivllm import LLM, LoRARequest, SamplingParams
        self.own = args.engine == "minivllm"
        self.lora, self.params_of = LoRARequest, SamplingParams
        begun = time.perf_counter()
        self.llm = LLM(**options)
        self.pauses = Pauses()
        print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)

    def params(self, tokens: int) -> Any:
        """Return the sampling parameters of a request."""
        return self.params_of(temperature=0.6, ignore_eos=True, max_tokens=tokens, detokenize=False)

    def request(self, folder: Path) -> Any:
        """Return the LoRARequest for a folder."""
        return self.lora(folder.name, int(folder.name[1:]) + 1, str(folder))

    def seconds(self, rows: int, prompt: int, tokens: int, folders: list[Path], seed: int) -> float:
        """Return the seconds that ``rows`` requests take, which use the adapters in turns."""
        prompts = random_prompts(rows, prompt, seed)
        requests = [self.request(folders[row % len(folders)]) for row in range(rows)] if folders else None
        begun = time.perf_counter()
        outputs = self.llm.generate(prompts, self.params(tokens), use_tqdm=False, lora_request=requests)
        spent = time.perf_counter() - begun
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == rows * tokens
        return spent

    def times(self, rows: int, prompt: int, folders: list[Path], seed: int) -> Run:
        """Return the milliseconds of a decode step of ``rows`` requests, and those of the prefill of all."""
        if not self.own:
            first = self.seconds(rows, prompt, 1, folders, seed)
            whole = self.seconds(rows, prompt, STEPS + 1, folders, 100 + seed)
            return Run(1e3 * (whole - first) / STEPS, 1e3 * first)
        from minivllm.core.timing import form_name

        prompts = random_prompts(rows, prompt, seed)
        clock = self.llm.engine.clock
        turn = clock.count
        self.pauses.begin()
        begun = time.perf_counter()
        tokens = [
            self.start(prompt, STEPS + 1, folders[row % len(folders)] if folders else None)
            for row, prompt in enumerate(prompts)
        ]
        added = time.perf_counter()
        self.run()
        pauses = self.pauses.text()
        last = max(tokens, key=lambda times: times[1])
        assert all(len(times) == STEPS + 3 for times in tokens)  # the last piece has no token
        gaps = [after - before for before, after in itertools.pairwise(last[4:-1])]
        turns = [f"add {1e3 * (added - begun):.1f}"]
        names = {number: form for form, number in clock.forms.items()}
        while turn < clock.count and clock.start[at := turn % clock.size] < last[1]:
            form = form_name(names[int(clock.form[at])])
            turns.append(f"{clock.tokens[at]} tokens, {form} {clock.device_ms[at]:.1f}")
            turn += 1
        parts = " | ".join([*turns, *([pauses] if pauses else [])])
        return Run(1e3 * median(gaps), 1e3 * (last[1] - begun), parts)

    def start(self, prompt: dict[str, Any], tokens: int, folder: Path | None) -> list[float]:
        """Start a request of minivllm, and return a list that gets the time now, of each token, and of the end."""
        from minivllm.frontend.requests import Tracked

        times = [time.perf_counter()]
        params, lora = self.params(tokens), None if folder is None else self.request(folder)
        stream = lambda _: times.append(time.perf_counter())  # noqa: E731
        Tracked(prompt, params, None, stream=stream, lora=lora).add_to(self.llm.engine)
        return times

    def run(self, stepped: Callable[[], None] = lambda: None) -> None:
        """Run the steps of minivllm until no request is left, and call ``stepped`` after each."""
        engine = self.llm.engine
        while engine.requests:
            if engine.step():
                stepped()
            else:
                time.sleep(engine.idle())

    def loads(self, folders: list[Path], later: list[Path], at_once: int = 1) -> tuple[list[float], list[float]]:
        """Return milliseconds between tokens of rows that decode, and those of each further request up to its token.

        The rows use ``folders`` in turns, and the further requests ``later``, of which ``at_once`` come together.  This
        is for minivllm."""
        tokens = APART * (len(later) // at_once + 2)
        rows = [
            self.start(prompt, tokens, folders[row % len(folders)])
            for row, prompt in enumerate(random_prompts(LOADED_ROWS, 64, 5))
        ]
        waits, left, steps = [], list(later), itertools.count()

        def stepped() -> None:
            if left and next(steps) % APART == APART - 1:
                for folder in left[:at_once]:
                    waits.append(self.start(random_prompts(1, 16, len(left))[0], 1, folder))
                del left[:at_once]

        self.run(stepped)
        gaps = [1e3 * (after - before) for times in rows for before, after in itertools.pairwise(times[21:-1])]
        return gaps, [1e3 * (times[1] - times[0]) for times in waits]


def random_prompts(rows: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    """Return prompts of random tokens."""
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(10000) for _ in range(length)]} for _ in range(rows)]


def measure(engines: dict[str, Engine], rows: int, folders: list[Path], args: argparse.Namespace) -> None:
    """Print milliseconds of a decode step and of the prefill of all rows, for each number of adapters."""
    prompt = args.prompt if rows <= args.long_rows else args.short_prompt
    cases = [("off", engines["off"], 0)] if "off" in engines else []
    cases += [(f"{count} adapters", engines["on"], count) for count in args.adapters if count <= max(rows, 1)]
    runs: dict[str, list[Run]] = {name: [] for name, *_ in cases}
    for turn in range(-1, args.repeat):
        for name, engine, count in cases:
            if turn < 0:
                engine.seconds(rows, prompt, 8, folders[:count], 99)
                continue
            run = engine.times(rows, prompt, folders[:count], turn)
            runs[name].append(run)
            print(
                f"  run {turn} of {rows} rows, {name}: step {run.step:.3f}, prefill {run.prefill:.1f} | {run.parts}",
                flush=True,
            )
    base = [median(values) for values in list(zip(*runs[cases[0][0]], strict=True))[:2]]
    for name, found in runs.items():
        steps = [run.step for run in found]
        prefills = [run.prefill for run in found]
        step, prefill = median(steps), median(prefills)
        each = " ".join(f"{value:.2f}" for value in steps)
        print(
            f"{rows:4} rows of {prompt}, {name:>11}: step {step:7.3f} ms ({step / base[0]:.3f}), "
            f"prefill {prefill:8.1f} ms ({prefill / base[1]:.3f})   steps {each}",
            flush=True,
        )


def report_loads(engine: Engine, folders: list[Path], new: list[Path]) -> None:
    """Print the times between tokens while new adapters are loaded, and while loaded adapters are used.

    The last of the new adapters come at once."""
    engine.loads(folders, [])
    for turn in range(0, len(new), LOADS):
        at_once = LOADS if turn + LOADS == len(new) else 1
        for kind, later in (("resident", folders[:LOADS]), ("new", new[turn : turn + LOADS])):
            gaps, waits = engine.loads(folders, later, at_once)
            gaps.sort()
            p50, p99, p999 = (gaps[int(share * len(gaps))] for share in (0.5, 0.99, 0.999))
            each = " ".join(f"{wait:.1f}" for wait in waits)
            print(
                f"loads of {at_once}, {kind:>8}: between tokens p50 {p50:.2f}, p99 {p99:.2f}, p99.9 {p999:.2f}, most "
                f"{gaps[-1]:.2f} ms; to the token median {median(waits):.1f} ms: {each}",
                flush=True,
            )


def main() -> None:
    """Print a line for each number of rows and adapters, then the lines of the loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", choices=["minivllm", "vllm"], default="minivllm")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--short-prompt", type=int, default=128, help="those with more than --long-rows rows")
    parser.add_argument("--long-rows", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--places", type=int, help="adapters on the device; by default the largest of --adapters")
    parser.add_argument("--skip-off", action="store_true", help="leave out the engine without enable_lora")
    parser.add_argument("--off-first", action="store_true", help="start the engine without enable_lora first")
    parser.add_argument("--skip-loads", action="store_true", help="leave out the loads of adapters")
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    args = parser.parse_args()
    most, own = max(args.adapters), args.engine == "minivllm"
    loads = own and not args.skip_loads
    count = most + (3 * LOADS if loads else 0)
    begun = time.perf_counter()
    folders = [write_adapter(Path(args.model), args.folder / f"a{i}", args.rank, i) for i in range(count)]
    print(f"{count} adapters after {time.perf_counter() - begun:.1f} s", flush=True)
    both = own and not args.skip_off
    names = ["on"] if not both else ["off", "on"] if args.off_first else ["on", "off"]
    engines = {}
    for name in names:
        memory = 0.45 if both and not engines else 0.9
        engines[name] = Engine(args, (args.places or most) if name == "on" else 0, memory)
    for rows in args.rows:
        measure(engines, rows, folders, args)
    if loads:
        # the rows that decode use at most half of the places, so that others have room
        decoding = min(8, max(1, (args.places or most) // 2))
        report_loads(engines["on"], folders[:decoding], folders[most:])
    if own:
        for engine in engines.values():
            engine.llm.close()


if __name__ == "__main__":
    main()
