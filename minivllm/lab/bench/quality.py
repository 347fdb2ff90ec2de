"""How good a configuration is: perplexity of a text, and how far its distributions are from those of a reference.

Tokens go through the engine one at a time, as a user's do: each next token is chosen on the host from the logits of the
decode step before it, so coarser weights, a coarser KV cache and other kernels all show.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from zipfile import BadZipFile

import numpy as np

from minivllm import files
from minivllm.errors import ConfigError, MinivllmError, RequestError

RELATIVE = ("kl", "top1_agreement", "kl_pieces", "top1_pieces")  # what says nothing without a reference
PIECE = 64  # tokens of a text that are scored with nothing before them but each other
STORIES = 40


class TextScores:
    """Of one text by one configuration.  ``ids`` i32 [pieces of <= PIECE tokens, one after the other, and their
    ``lengths``]; ``logprobs`` float32 [scored tokens, vocabulary], natural logarithms: a piece's first token is not
    scored."""

    def __init__(self, ids: np.ndarray, lengths: np.ndarray, logprobs: np.ndarray) -> None:
        self.ids, self.lengths, self.logprobs = ids, lengths, logprobs

    def losses(self) -> list[float]:
        """Mean negative log-probability of a token, by piece."""
        out, at, row = [], 0, 0
        for n in self.lengths.tolist():
            targets = self.ids[at + 1 : at + n]
            rows = self.logprobs[row : row + n - 1]
            out.append(float(-rows[np.arange(n - 1), targets].astype(np.float64).mean()))
            at, row = at + n, row + n - 1
        return out

    def against(self, reference: TextScores) -> dict[str, Any]:
        """Return how far these distributions are from the reference's, or nothing if the tokens are others.

        ``kl`` is the mean divergence (nats a token, reference first), ``top1_agreement`` the share of positions at
        which both find the same token most likely; ``kl_pieces`` and ``top1_pieces`` have the means of each piece.
        """
        if self.logprobs.shape != reference.logprobs.shape or not np.array_equal(self.ids, reference.ids):
            return {}
        divergence = np.zeros(len(self.logprobs))
        for row, (p, q) in enumerate(zip(reference.logprobs, self.logprobs, strict=True)):  # vocabularies are large
            held = p > -np.inf
            wide = p[held].astype(np.float64)
            divergence[row] = np.sum(np.exp(wide) * (wide - q[held]))
        same = (reference.logprobs.argmax(1) == self.logprobs.argmax(1)).astype(np.float64)
        cuts = np.cumsum(self.lengths - 1)[:-1]
        return {
            "kl": float(divergence.mean()),
            "top1_agreement": float(same.mean()),
            "kl_pieces": [float(own.mean()) for own in np.split(divergence, cuts)],
            "top1_pieces": [float(own.mean()) for own in np.split(same, cuts)],
        }

    def save(self, path: Path) -> None:
        np.savez(path, ids=self.ids, lengths=self.lengths, logprobs=self.logprobs)

    @classmethod
    def load(cls, path: Path) -> TextScores | None:
        """None where there is no such file, or only a part of one."""
        try:
            with np.load(path, allow_pickle=False) as found:
                return cls(found["ids"], found["lengths"], found["logprobs"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None


def text_of(path: str) -> str:
    """What is scored: a file, or, without one, held-out stories of pocket's world.  ConfigError if there is too little
    of it."""
    if path:
        return files.read_text(path, files.LARGE)
    from minivllm.pocket.tasks import plain_story

    rng = Random("minivllm compare")
    return "\n".join(plain_story(rng, held_out=True) for _ in range(STORIES))


def score(llm: Any, text: str, most: int) -> TextScores:
    """The first ``most`` tokens of a text.  ConfigError if there are fewer than two; RequestError if this engine lets
    no host choose tokens."""
    from minivllm.core.interfaces.params import SamplingParams

    if llm.tokenizer is None:
        raise RequestError("a text is scored by its tokens, and there is no tokenizer; drop skip_tokenizer_init")
    ids = llm.tokenizer.encode(text)[:most]
    size = min(PIECE, llm.engine.wiring.max_model_len)
    pieces = [piece for at in range(0, len(ids), size) if len(piece := ids[at : at + size]) > 1]
    if not pieces:
        raise ConfigError(f"the text has {len(ids)} tokens; want at least 2 to score")
    rows: list[list[np.ndarray]] = [[] for _ in pieces]

    def follow(own: list[int], kept: list[np.ndarray]) -> Callable[..., int]:
        def choose(logits: np.ndarray, known: Sequence[int]) -> int:
            wide = logits.astype(np.float64)
            kept.append((wide - np.logaddexp.reduce(wide)).astype(np.float32))
            return own[len(known)]

        return choose

    params = [
        SamplingParams(max_tokens=len(own) - 1, choose_fn=follow(own, kept), ignore_eos=True, detokenize=False)
        for own, kept in zip(pieces, rows, strict=True)
    ]
    outputs = llm.generate([own[:1] for own in pieces], params, use_tqdm=False)
    if failed := [output.error for output in outputs if output.error]:
        raise MinivllmError(f"the text could not be scored: {failed[0]}")
    flat = np.concatenate([np.stack(kept) for kept in rows])
    return TextScores(np.concatenate(pieces).astype(np.int32), np.array([len(p) for p in pieces]), flat)


def summary(own: TextScores, reference: TextScores) -> dict[str, Any]:
    """``perplexity`` a token; ``losses`` by piece, so that two configurations can be compared in pairs if ``tokens``, a
    digest of what was scored, are the same; ``kl`` and ``top1_agreement`` against the reference, if those are."""
    losses = own.losses()
    weights = own.lengths - 1
    mean = float(np.average(losses, weights=weights))
    return {
        "perplexity": math.exp(mean),
        "losses": losses,
        "tokens": hashlib.sha256(own.ids.tobytes() + own.lengths.astype(np.int64).tobytes()).hexdigest(),
        "scored_tokens": int(weights.sum()),
        **own.against(reference),
    }


def tasks(llm: Any, names: Sequence[str], n: int, seed: int) -> dict[str, float]:
    """Shares of ``n`` cases of pocket's tasks that are answered right, as (right + 1/2) / (n + 1): with a few cases
    none right is not never."""
    from minivllm.pocket import evaluate

    engine = evaluate.Minivllm(llm)
    rows = evaluate.evaluate(engine.generate, evaluate.default_cases(n, seed, names))
    return {f"task_{task.replace(' ', '_')}": (share * count + 0.5) / (count + 1) for task, count, share in rows}


def check_tasks(names: Sequence[str]) -> None:
    """ConfigError of a name that is none."""
    from minivllm.errors import shown, suggest
    from minivllm.pocket.tasks import TASKS

    for name in names:
        if name not in TASKS:
            raise ConfigError(
                f"--task {shown(name)}: no such task.{suggest(name, TASKS)} There are: {', '.join(TASKS)}"
            )


def perplexities(found: Mapping[str, Any]) -> list[float]:
    """By piece of the text."""
    return [math.exp(loss) for loss in found["losses"]]
