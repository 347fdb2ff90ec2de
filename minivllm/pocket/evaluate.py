"""Measure pocket: exact match on the tasks, and perplexity on held-out stories.

`evaluate(generate, cases)` works with any engine: `generate(conversations, max_tokens)` returns the greedy answers.
`python -m minivllm.pocket.evaluate DIR` measures a model directory with transformers.
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
"""The most tokens of an answer, by task."""

Generate = Callable[[list[list[dict[str, str]]], int], list[str]]
Row = tuple[str, int, float]  # task, number of cases, share of right answers


def default_cases(n: int = 500, seed: int = 0, tasks: Sequence[str] = tuple(TASKS)) -> list[TaskCase]:
    """Return `n` held-out cases of each task."""
    found: list[TaskCase] = []
    for task in tasks:
        found += cases(task, n, seed)
    return found


def evaluate(generate: Generate, cases: list[TaskCase], wrong: list | None = None) -> list[Row]:
    """Return a row for each task; wrong answers are added to `wrong` as (case, text).

    JSON has a second row: the share of answers that fit their schema, with any values.
    """
    rows: list[Row] = []
    for task in dict.fromkeys(case.task for case in cases):
        of_task = [case for case in cases if case.task == task]
        count = len(of_task)
        conversations = [case.messages for case in of_task]
        texts = generate(conversations, MAX_TOKENS[task])
        answered = list(zip(of_task, texts, strict=True))
        failed = [(case, text) for case, text in answered if not score(case, text)]
        right = count - len(failed)
        rows.append((task, count, right / count))
        if task == "json":
            fitting = sum(fits_schema(case, text) for case, text in answered)
            rows.append(("json schema", count, fitting / count))
        if wrong is not None:
            wrong += failed
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as a table."""
    lines = [f"{'task':<14}{'cases':>6}{'right':>9}"]
    return "\n".join(lines + [f"{task:<14}{n:>6}{share:>9.1%}" for task, n, share in rows])


def perplexity(log_likelihood: Callable[[list[str]], tuple[float, int]], stories: int = 200, seed: int = 0) -> float:
    """Return the perplexity per token on held-out stories.

    `log_likelihood(texts)` returns the sum of the log probabilities of all tokens except the first of each text, and
    the number of these tokens.
    """
    rng = Random(f"perplexity {seed}")
    texts = [plain_story(rng, held_out=True) for _ in range(stories)]
    total, tokens = log_likelihood(texts)
    return math.exp(-total / tokens)


class Minivllm:
    """pocket in minivllm.  `llm` is a `minivllm.LLM`; `progress` shows a progress bar."""

    def __init__(self, llm: Any, progress: bool = False):
        self.llm = llm
        self.progress = progress

    def generate(self, conversations: list[list[dict[str, str]]], max_tokens: int) -> list[str]:
        """Return the greedy answers to conversations."""
        from minivllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = self.llm.chat(conversations, params, use_tqdm=self.progress)
        return [out.text for out in outputs]

    def log_likelihood(self, texts: list[str]) -> tuple[float, int]:
        """Return the sum of log probabilities and the number of tokens, for `perplexity`.

        The texts pass token by token through the KV cache: a function on the host chooses each next token.  So a cache
        or weights of lower precision change the result.
        """
        import numpy as np

        from minivllm import SamplingParams

        total = 0.0

        def follow(ids: list[int]) -> Callable[..., int]:
            def choose(logits: np.ndarray, known: Sequence[int]) -> int:
                nonlocal total
                token = ids[len(known)]
                norm = np.logaddexp.reduce(logits.astype(np.float64))
                total += float(logits[token] - norm)
                return token

            return choose

        prompts, params = [], []
        count = 0
        for text in texts:
            ids = self.llm.tokenizer.encode(text + "<|endoftext|>")
            further = len(ids) - 1
            prompts.append(ids[:1])
            settings = SamplingParams(max_tokens=further, choose_fn=follow(ids), ignore_eos=True, detokenize=False)
            params.append(settings)
            count += further
        self.llm.generate(prompts, params, use_tqdm=self.progress)
        return total, count


class Transformers:
    """pocket in transformers, as the reference.  `batch` is the number of prompts of a call."""

    def __init__(self, folder: Path, batch: int = 128):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.batch = batch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(self.device).eval()

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        """Return the greedy continuations of plain prompts."""
        texts: list[str] = []
        for i in range(0, len(prompts), self.batch):
            part = prompts[i : i + self.batch]
            inputs = self.tokenizer(part, return_tensors="pt", padding=True, return_token_type_ids=False)
            inputs = inputs.to(self.device)
            with self.torch.no_grad():
                out = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            length = inputs["input_ids"].shape[1]
            texts += self.tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
        return texts

    def generate(self, conversations: list[list[dict[str, str]]], max_tokens: int) -> list[str]:
        """Return the greedy answers to conversations."""
        template = self.tokenizer.apply_chat_template
        prompts = []
        for messages in conversations:
            prompt = template(messages, tokenize=False, add_generation_prompt=True)
            prompts.append(prompt)
        return self.complete(prompts, max_tokens)

    def log_likelihood(self, texts: list[str]) -> tuple[float, int]:
        """Return the sum of log probabilities and the number of tokens, for `perplexity`."""
        total = 0.0
        tokens = 0
        for text in texts:
            encoded = self.tokenizer(text + "<|endoftext|>", return_tensors="pt")
            ids = encoded["input_ids"].to(self.device)
            with self.torch.no_grad():
                logits = self.model(ids).logits[0, :-1]
            log_probs = logits.float().log_softmax(-1)
            further = ids[0, 1:]
            total += log_probs.gather(1, further[:, None]).sum().item()
            tokens += len(further)
        return total, tokens


def main() -> None:
    """Measure a model directory with transformers and print wrong answers, samples and the table."""
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
        of_task = [(case, text) for case, text in wrong if case.task == task]
        for case, text in of_task[: args.show]:
            print(f"wrong {task}: {case.messages[-1]['content'][-160:]!r} -> {text!r}, not {case.answer[:160]!r}")
    for prompt in ("Tell me a story about a fox and a lantern.", "Hello!", "Tell me a story about a girl named Mia."):
        print(f"\n> {prompt}\n{model.generate([user(prompt)], 320)[0]}")
    print(f"\nOnce upon a time{model.complete(['Once upon a time'], 320)[0]}\n")
    print(table(rows))
    print(f"held-out perplexity {perplexity(model.log_likelihood):.3f}")


if __name__ == "__main__":
    main()
