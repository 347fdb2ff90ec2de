"""Puts numbers on pocket: exact match on the tasks, and held-out perplexity.

`evaluate(generate, cases)` works with any engine: `generate(messages_list, max_tokens)` answers conversations
greedily with texts.  `python -m minivllm.pocket.evaluate DIR` does it with transformers.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from .tasks import TASKS, TaskCase, cases, fits_schema, plain_story, score, user

MAX_TOKENS = {"needle": 16, "copy": 64, "sums": 24, "json": 128, "story": 320, "echo": 48}
"""Tokens that an answer of each task may have."""

Generate = Callable[[list[list[dict[str, str]]], int], list[str]]
Row = tuple[str, int, float]


def default_cases(n: int = 500, seed: int = 0, tasks: Sequence[str] = tuple(TASKS)) -> list[TaskCase]:
    """`n` held-out cases of each task."""
    return [case for task in tasks for case in cases(task, n, seed)]


def evaluate(generate: Generate, cases: list[TaskCase], wrong: list | None = None) -> list[Row]:
    """Rows (task, number of cases, share right); wrong answers are added to `wrong` as (case, text).

    For JSON a second row says how many answers parse and fit their schema, whatever their values.
    """
    rows: list[Row] = []
    for task in dict.fromkeys(case.task for case in cases):
        mine = [case for case in cases if case.task == task]
        texts = generate([case.messages for case in mine], MAX_TOKENS[task])
        right = [score(case, text) for case, text in zip(mine, texts, strict=True)]
        rows.append((task, len(mine), sum(right) / len(mine)))
        if task == "json":
            fit = [fits_schema(case, text) for case, text in zip(mine, texts, strict=True)]
            rows.append(("json schema", len(mine), sum(fit) / len(mine)))
        if wrong is not None:
            wrong += [(case, text) for case, text, ok in zip(mine, texts, right, strict=True) if not ok]
    return rows


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'task':<14}{'cases':>6}{'right':>9}"]
    return "\n".join(lines + [f"{task:<14}{n:>6}{share:>9.1%}" for task, n, share in rows])


def perplexity(log_likelihood: Callable[[list[str]], tuple[float, int]], stories: int = 200, seed: int = 0) -> float:
    """Perplexity per token on held-out stories.

    `log_likelihood(texts)` gives the sum of the log probabilities of all tokens but each text's first, and their
    number.
    """
    rng = Random(f"perplexity {seed}")
    total, tokens = log_likelihood([plain_story(rng, held_out=True) for _ in range(stories)])
    return math.exp(-total / tokens)


class Minivllm:
    """pocket run by the engine: `llm` is a `minivllm.LLM`."""

    def __init__(self, llm: Any, progress: bool = False):
        self.llm, self.progress = llm, progress

    def generate(self, conversations: list[list[dict[str, str]]], max_tokens: int) -> list[str]:
        """Greedy answers to conversations."""
        from minivllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return [out.text for out in self.llm.chat(conversations, params, use_tqdm=self.progress)]

    def log_likelihood(self, texts: list[str]) -> tuple[float, int]:
        """What `perplexity` asks for, token by token through the KV cache: each next token is chosen on the host, so a
        coarser cache or coarser weights show in it."""
        import numpy as np

        from minivllm import SamplingParams

        total = 0.0

        def follow(ids: list[int]) -> Callable[..., int]:
            def choose(logits: np.ndarray, known: Sequence[int]) -> int:
                nonlocal total
                token = ids[len(known)]
                total += float(logits[token] - np.logaddexp.reduce(logits.astype(np.float64)))
                return token

            return choose

        stories = [self.llm.tokenizer.encode(text + "<|endoftext|>") for text in texts]
        keep = {"ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=len(ids) - 1, choose_fn=follow(ids), **keep) for ids in stories]
        self.llm.generate([ids[:1] for ids in stories], params, use_tqdm=self.progress)
        return total, sum(len(ids) - 1 for ids in stories)


class Transformers:
    """pocket run by transformers, as the reference."""

    def __init__(self, folder: Path, batch: int = 128):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch, self.batch = torch, batch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(self.device).eval()

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        """Greedy continuations of plain prompts."""
        texts: list[str] = []
        for i in range(0, len(prompts), self.batch):
            inputs = self.tokenizer(
                prompts[i : i + self.batch], return_tensors="pt", padding=True, return_token_type_ids=False
            ).to(self.device)
            with self.torch.no_grad():
                out = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            new = out[:, inputs["input_ids"].shape[1] :]
            texts += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts

    def generate(self, conversations: list[list[dict[str, str]]], max_tokens: int) -> list[str]:
        """Greedy answers to conversations."""
        prompts = [
            self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations
        ]
        return self.complete(prompts, max_tokens)

    def log_likelihood(self, texts: list[str]) -> tuple[float, int]:
        """What `perplexity` asks for."""
        total, tokens = 0.0, 0
        for text in texts:
            ids = self.tokenizer(text + "<|endoftext|>", return_tensors="pt")["input_ids"].to(self.device)
            with self.torch.no_grad():
                logits = self.model(ids).logits[0, :-1].float().log_softmax(-1)
            total += logits.gather(1, ids[0, 1:, None]).sum().item()
            tokens += ids.shape[1] - 1
        return total, tokens


def main() -> None:
    """Evaluate a model directory with transformers and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=["transformers"], default="transformers")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--show", type=int, default=3, help="wrong answers to show of each task")
    args = parser.parse_args()
    begin = time.monotonic()
    model = Transformers(args.folder, args.batch)
    wrong: list[tuple[TaskCase, str]] = []
    rows = []
    for task in args.tasks:
        rows += evaluate(model.generate, cases(task, args.cases, args.seed), wrong)
        print(f"{task} done at {time.monotonic() - begin:.0f} s", flush=True)
    for task in args.tasks:
        for case, text in [w for w in wrong if w[0].task == task][: args.show]:
            print(f"wrong {task}: {case.messages[-1]['content'][-160:]!r} -> {text!r}, not {case.answer[:160]!r}")
    for prompt in ("Tell me a story about a fox and a lantern.", "Hello!", "Tell me a story about a girl named Mia."):
        print(f"\n> {prompt}\n{model.generate([user(prompt)], 320)[0]}")
    print(f"\nOnce upon a time{model.complete(['Once upon a time'], 320)[0]}\n")
    print(table(rows))
    print(f"held-out perplexity {perplexity(model.log_likelihood):.3f}")


if __name__ == "__main__":
    main()
