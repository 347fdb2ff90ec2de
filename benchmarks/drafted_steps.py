"""Time steps with drafts at a given acceptance, and show their parts: propose, forward, sample and the gap of the host.

    python benchmarks/drafted_steps.py --model DIR --eagle --batches 1 8 64 256 --k 4 --tokens 3.0 --captured
    python benchmarks/drafted_steps.py --model DIR --drafter mtp --batches 1 --k 1 2 3 4 --accept 0.65
    python benchmarks/drafted_steps.py --model pocket --head pocket-mtp --device cpu --real --stories 4 --cpu-time

Acceptance is emulated, because drafts of random weights are never right.  A table of random bits, one for each position
of a sequence, says whether the draft at this position is right; a bit is 1 with probability ``--accept``.  Behind the
sampler the token drawn at the position is replaced by the draft if the bit is 1, else by another token.  All other work
of a step is unchanged, and the replacement adds a few small kernels to steps with drafts.  ``--tokens`` gives the
probability for which a step with the largest k has this mean number of tokens, the target's own included.  With
``--real`` nothing is replaced: the heads of trained checkpoints guess themselves, and the tokens of all answers are
compared with those of the engine without drafts.  ``--cpu-time`` measures the CPU time of the process.  Time without a
core does not count, but other work on the same cores and caches still slows the process, so the machine must be quiet.

Each batch is generated once to warm up and then ``--turns`` times; the best time counts, prompts included.  Steps
without drafts come from an engine of their own, which stores no hidden states.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from minivllm import LLM, SamplingParams

STORIES = ("a fox", "a red ball", "a boat", "the rain", "a lost key", "a dog", "a cake", "the forest")
ANSWERS: dict[int, list[list[int]]] = {}  # batch -> tokens of its answers; the first engine has no drafts
# the tensors of an EAGLE-3 head, whose names decide its form
PRODUCTS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
NAMES = [f"midlayer.{name}.weight" for name in PRODUCTS + NORMS]
NAMES += ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]


def chance_of(tokens: float, k: int) -> float:
    """Return the acceptance of each draft for which a step with k drafts has ``tokens`` tokens in the mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(k + 1)) < tokens else (low, middle)
    return low


def write_head(folder: Path, model: str) -> str:
    """Write config.json of an EAGLE-3 head with 32,000 tokens in the published layout, and return its folder."""
    target = json.loads(Path(model, "config.json").read_text())
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps")
    more = {"num_hidden_layers": 1, "draft_vocab_size": 32000, "tie_word_embeddings": False, "hidden_act": "silu"}
    more |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16"}
    more |= {"max_position_embeddings": target["max_position_embeddings"], "rope_theta": 10000.0}
    # published heads of mixtures have a dense layer of the size of a dense model with this width
    width = target["intermediate_size"] if "num_experts" not in target else 6 * target["hidden_size"]
    config = {**{key: target[key] for key in keys}, **more, "intermediate_size": width}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def name_tensors() -> None:
    """Show the names of a head's tensors to the loader of random weights, because the names decide the form of the
    head.
    """
    from minivllm.config import own_models
    from minivllm.device.worker import build

    for module in (own_models, build):
        module.names_in = lambda folder, load_format="auto": NAMES  # type: ignore[attr-defined]


def emulate(chance: float, seed: int = 0) -> None:
    """Replace drawn tokens by drafts, as the module's text explains, in captured and in separate draws."""
    from minivllm.device.worker import drafted_steps, step

    g = torch.Generator().manual_seed(seed)
    bits = (torch.rand(1 << 17, generator=g) < chance).to("cuda" if torch.cuda.is_available() else "cpu")

    def judged(state: Any, rows: Any, tokens: torch.Tensor, width: int) -> torch.Tensor:
        guess = state.tokens[rows.slots, rows.position].long()
        return torch.where(bits[rows.position], guess, (guess + 1) % width)

    class Emulated(drafted_steps.DraftedCalls):
        def accept(self, logits: Any, rows: Any, drawn: Any, peaks: Any) -> Any:
            drawn.tokens.copy_(judged(self.state, rows, drawn.tokens, logits.shape[1]))
            return super().accept(logits, rows, drawn, peaks)

    accept = step.accept

    def accepted(state: Any, rows: Any, drawn: Any, bad: Any, width: int, *more: Any, **named: Any) -> Any:
        if named.get("draft", more[2] if len(more) > 2 else None) is not None:
            drawn = judged(state, rows, drawn, width)
        return accept(state, rows, drawn, bad, width, *more, **named)

    drafted_steps.DraftedCalls = Emulated  # type: ignore[misc]
    step.accept = accepted


class Marks:
    """CUDA events at the parts of steps with drafts in the runner of an engine, or wall times on a CPU."""

    def __init__(self, runner: Any) -> None:
        self.cuda = runner.device.type == "cuda"
        self.on, self.steps = False, list[list[Any]]()
        drafting, forward, sample = runner.drafting, runner.forward, runner.sample
        prepare = drafting.prepare

        def prepared(running: Any) -> None:
            drafted = self.on and len(running.plan.draft) > 0
            begun = self.mark() if drafted else None
            prepare(running)
            if drafted:
                self.steps.append([begun, self.mark()])

        def forwarded(plan: Any) -> Any:
            count = len(self.steps)
            found = forward(plan)
            if len(self.steps) > count:
                self.steps[-1].append(self.mark())
            return found

        def sampled(running: Any, *late: Any) -> None:
            sample(running, *late)
            if self.steps and len(self.steps[-1]) == 3:
                self.steps[-1].append(self.mark())

        drafting.prepare, runner.forward, runner.sample = prepared, forwarded, sampled

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) if self.cuda else (b - a) * 1e3

    def parts(self) -> dict[str, float]:
        """Return the medians of the parts in milliseconds, and forget the steps."""
        found = defaultdict(list)
        whole = [step for step in self.steps if len(step) == 4]
        for i, step in enumerate(whole):
            for name, a, b in zip(("propose", "forward", "sample"), step, step[1:], strict=False):
                found[name].append(self.ms(a, b))
            if i + 1 < len(whole):
                found["host gap"].append(self.ms(step[3], whole[i + 1][0]))
        self.steps.clear()
        return {name: statistics.median(values) for name, values in found.items()}


def make(args: argparse.Namespace, drafter: Any, k: int) -> LLM:
    more = {} if args.real else {"load_format": "dummy", "skip_tokenizer_init": True, "seed": 0}
    return LLM(
        args.model,
        device=args.device,
        drafter=drafter,
        num_speculative_tokens=k,
        speculate=args.speculate,
        max_num_seqs=max(args.batches),
        max_model_len=args.length,
        enable_prefix_caching=False,
        **more,
        captured_drafts=args.captured and drafter != "none",
        drafts_ahead=args.ahead,
        **({"graph": args.graph} if args.graph else {}),
    )


def timed(args: argparse.Namespace, llm: LLM, batch: int) -> tuple[float, int]:
    """Return the seconds and the tokens of a turn.

    A turn is one batch, or with ``--real`` as many batches as ``--stories`` needs."""
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=not args.real)
    clock = time.process_time if args.cpu_time else time.perf_counter
    begun = clock()
    if args.real:
        outs = []
        for first in range(0, max(batch, args.stories), batch):
            stories = [STORIES[i % len(STORIES)] for i in range(first, first + batch)]
            chats = [[{"role": "user", "content": f"Tell me a story about {story}."}] for story in stories]
            outs += llm.chat(chats, params, use_tqdm=False)
    else:
        prompts = [[(7 * i + 13 * j) % 1000 + 10 for i in range(args.prompt)] for j in range(batch)]
        outs = llm.generate(prompts, params, use_tqdm=False)
    spent = clock() - begun
    assert not any(out.error for out in outs), [out.error for out in outs if out.error][:1]
    if args.real:
        tokens = [list(out.tokens) for out in outs]
        assert ANSWERS.setdefault(batch, tokens) == tokens, "drafts changed the tokens of an answer"
    return spent, sum(len(out.tokens) for out in outs)


def best(args: argparse.Namespace, llm: LLM, batch: int) -> float:
    """Return the tokens per second of the fastest turn."""
    timed(args, llm, batch)
    turns = [timed(args, llm, batch) for _ in range(args.turns)]
    return max(tokens / spent for spent, tokens in turns)


def drafted(args: argparse.Namespace, drafter: Any, plain: dict[int, float]) -> None:
    with make(args, drafter, max(args.k)) as llm:
        runner, spec = llm.engine.executor.runner, llm.engine.speculation
        marks = Marks(runner)
        # ``auto`` chooses k itself, so it is measured once, with the largest k
        for k in args.k if args.speculate == "always" else [max(args.k)]:
            spec.k = k
            for batch in args.batches:
                timed(args, llm, batch)
                timed(args, llm, batch)
                before = spec.summary()
                rate = 0.0
                for _ in range(args.turns):
                    spent, tokens = timed(args, llm, batch)
                    rate = max(rate, tokens / spent)
                after = llm.stats()["speculation"]
                steps = after["steps"] - before["steps"]
                marks.on = True
                timed(args, llm, batch)
                marks.on = False
                parts = marks.parts()
                received = "  ".join(f"{name} {ms:.3f}" for name, ms in parts.items())
                chosen = after["batch"].get(str(1 << max(batch - 1, 0).bit_length()), after["batch"])
                print(
                    f"batch {batch:<4} k={k if args.speculate == 'always' else 'auto'} {plain[batch]:9.1f} tokens/s "
                    f"{rate:9.1f} with drafts {rate / plain[batch]:5.2f} x  {after['tokens_per_row']} tokens a row, "
                    f"{steps} steps with drafts | ms: {received}",
                    flush=True,
                )
                if args.speculate == "auto":
                    print(f"    {chosen}")
        graphs = runner.graphs
        print("notes:", [*runner.worker.notes, *(graphs.notes if graphs is not None else [])])
        if runner.drafted is not None:
            captured = runner.drafting.captured
            made = len(captured.made) if captured is not None else 0
            counts = len(runner.drafted.forwards), len(runner.drafted.samples), made
            print("captures of forward, sample, proposals:", counts)
        print("speculation:", {**after, "batch": "above"}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", default="mtp")
    parser.add_argument("--head", help="files of the drafter's head, if the model's do not hold it")
    parser.add_argument("--eagle", action="store_true", help="an EAGLE-3 head of 32,000 tokens with random weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--k", type=int, nargs="+", default=[4])
    parser.add_argument("--accept", type=float, default=0.65)
    parser.add_argument("--tokens", type=float, help="mean tokens of a step with the largest k")
    parser.add_argument("--speculate", choices=["auto", "always"], default="always")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--graph", help="option graph of the engines")
    parser.add_argument("--captured", action="store_true", help="option captured_drafts of the engine with drafts")
    parser.add_argument("--ahead", choices=["auto", "off"], default="auto", help="option drafts_ahead of the engines")
    parser.add_argument("--real", action="store_true", help="emulate nothing")
    parser.add_argument("--stories", type=int, default=1, help="least stories of a turn with --real")
    parser.add_argument("--cpu-time", action="store_true", help="measure the CPU time of the process")
    args = parser.parse_args()
    if args.tokens:
        args.accept = chance_of(args.tokens, max(args.k))
    with tempfile.TemporaryDirectory() as folder:
        drafter: Any = args.drafter
        if args.eagle:
            name_tensors()
            drafter = {"name": "eagle3", "options": {"model": write_head(Path(folder), args.model)}}
        elif args.head:
            drafter = {"name": drafter, "options": {"model": args.head}}
        with make(args, "none", 1) as llm:
            plain = {batch: best(args, llm, batch) for batch in args.batches}
        gc.collect()
        if not args.real:
            emulate(args.accept)
            print(f"each draft is right with probability {args.accept:.3f}")
        drafted(args, drafter, plain)


if __name__ == "__main__":
    main()
