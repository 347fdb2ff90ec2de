"""Measure the quality of a configuration: the perplexity of a text, and the distance of its token distributions from
those of a reference.

The engine computes the text in decode steps, a token per step, as it computes answers.  The results therefore include
the errors of quantized weights, of a quantized KV cache and of the kernels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from zipfile import BadZipFile

import numpy as np

from minivllm import files
from minivllm.errors import ConfigError, MinivllmError, RequestError

from . import Result, Row

# names of results that compare a configuration with a reference configuration
RELATIVE = ("kl", "top1_agreement", "kl_pieces", "top1_pieces")
PIECE = 64  # tokens of a piece of text, if its prompt is one token; a longer prompt is added to them
LONG_PROMPT = 128  # length in tokens of the prompt of each piece if the KV caches of requests are compressed
STORIES = 40  # number of stories in the default text


@dataclass(frozen=True)
class TextScores:
    """The token distributions of a text by a configuration.

    ``ids`` i32 [tokens] are the tokens of all pieces, and ``lengths`` [pieces] the tokens of each.  A piece is scored
    without the text before it.  Its first ``prompt`` tokens are not scored, and at most ``PIECE`` - 1 follow.
    ``logprobs`` f32 [scored tokens, vocabulary] are natural logarithms.
    """

    ids: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    prompt: int = 1

    def losses(self) -> list[float]:
        """Return the mean negative log-probability of a token, by piece."""
        losses = []
        token = 0
        row = 0
        for n in self.lengths.tolist():
            scored = n - self.prompt
            targets = self.ids[token + self.prompt : token + n]
            rows = self.logprobs[row : row + scored]
            chosen = rows[np.arange(scored), targets]
            losses.append(float(-chosen.astype(np.float64).mean()))
            token += n
            row += scored
        return losses

    def against(self, reference: TextScores) -> Result:
        """Return the distance of these distributions from a reference's, or {} if the tokens are different.

        ``kl`` is the mean of the divergence KL(reference, own) in nats per token.  ``top1_agreement`` is the share of
        positions at which both have the same most likely token.  ``kl_pieces`` and ``top1_pieces`` are the means of
        each piece.
        """
        if self.logprobs.shape != reference.logprobs.shape or not np.array_equal(self.ids, reference.ids):
            return {}
        divergence = np.zeros(len(self.logprobs))
        for row, (p, q) in enumerate(
            zip(reference.logprobs, self.logprobs, strict=True)
        ):  # one row of the vocabulary at a time, to limit the memory of float64 copies
            possible = p > -np.inf
            wide = p[possible].astype(np.float64)
            divergence[row] = np.sum(np.exp(wide) * (wide - q[possible]))
        same = (reference.logprobs.argmax(1) == self.logprobs.argmax(1)).astype(np.float64)
        cuts = np.cumsum(self.lengths - self.prompt)[:-1]
        found: Result = {}
        for key, pieces, numbers in (("kl", "kl_pieces", divergence), ("top1_agreement", "top1_pieces", same)):
            found[key] = float(numbers.mean())
            found[pieces] = [float(own.mean()) for own in np.split(numbers, cuts)]
        return found

    def save(self, path: Path) -> None:
        """Write the scores to an .npz file."""
        np.savez(path, ids=self.ids, lengths=self.lengths, logprobs=self.logprobs, prompt=self.prompt)

    @classmethod
    def load(cls, path: Path) -> TextScores | None:
        """Read the scores from a file, None if it does not exist or is incomplete."""
        try:
            with np.load(path, allow_pickle=False) as found:
                return cls(found["ids"], found["lengths"], found["logprobs"], int(found["prompt"]))
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None


def text_of(path: str) -> str:
    """Return the text of a file, or for "" stories that the packaged model was not trained on."""
    if path:
        return files.read_text(path, files.LARGE)
    from minivllm.pocket.tasks import plain_story

    rng = Random("minivllm compare")
    return "\n".join(plain_story(rng, held_out=True) for _ in range(STORIES))


def score(llm: Any, text: str, most: int, prompt: int = 1) -> TextScores:
    """Return the token distributions of the first tokens of a text.

    About ``most`` tokens are passed to the engine one by one.  ``prompt`` is the number of tokens of each piece that
    are its prompt.  Raise ConfigError if no token remains to be scored, RequestError if the engine has no tokenizer or
    does not let the host choose tokens, and MinivllmError if it fails.
    """
    from minivllm.core.interfaces.params import SamplingParams

    if llm.tokenizer is None:
        raise RequestError("a text is scored by its tokens, and there is no tokenizer; drop skip_tokenizer_init")
    longest = llm.engine.wiring.max_model_len
    if prompt >= longest:
        raise ConfigError(f"--quality-prompt {prompt}: expected fewer tokens than max_model_len, {longest}")
    size = min(PIECE + prompt - 1, longest)
    fed = size - prompt + 1  # number of tokens of a piece that the engine receives one by one
    count = most * size // fed
    ids = llm.tokenizer.encode(text)[:count]
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    pieces = [piece for piece in pieces if len(piece) > prompt]
    if not pieces:
        raise ConfigError(f"the text has {len(ids)} tokens; expected at least {prompt + 1} to score")
    rows: list[list[np.ndarray]] = [[] for _ in pieces]

    def follow(piece: list[int], logprobs: list[np.ndarray]) -> Callable[..., int]:
        """Return a function that stores the log-probabilities of a step and chooses the text's next token."""

        def choose(logits: np.ndarray, known: Sequence[int]) -> int:
            wide = logits.astype(np.float64)
            logprobs.append((wide - np.logaddexp.reduce(wide)).astype(np.float32))
            return piece[len(known)]

        return choose

    params = []
    for piece, logprobs in zip(pieces, rows, strict=True):
        choose_fn = follow(piece, logprobs)
        count = len(piece) - prompt
        params.append(SamplingParams(max_tokens=count, choose_fn=choose_fn, ignore_eos=True, detokenize=False))
    for output in llm.generate([piece[:prompt] for piece in pieces], params, use_tqdm=False):
        if output.error:
            raise MinivllmError(f"the text could not be scored: {output.error}")
    flat = np.concatenate([np.stack(logprobs) for logprobs in rows])
    lengths = np.array([len(piece) for piece in pieces])
    return TextScores(np.concatenate(pieces).astype(np.int32), lengths, flat, prompt)


def summary(own: TextScores, reference: TextScores) -> Result:
    """Return the results of a configuration's scores.

    ``perplexity`` is that of a token.  ``losses`` are means by piece, which two configurations with the same ``tokens``
    (a digest of the text's tokens) can compare in pairs.  Results against the reference are added if it has the same
    tokens.
    """
    losses = own.losses()
    weights = own.lengths - own.prompt
    mean = float(np.average(losses, weights=weights))
    lengths = own.lengths.astype(np.int64)
    tokens = own.ids.tobytes() + lengths.tobytes() + own.prompt.to_bytes(8, "little")
    found = {"perplexity": math.exp(mean), "losses": losses, "tokens": hashlib.sha256(tokens).hexdigest()}
    found["scored_tokens"] = int(weights.sum())
    return found | own.against(reference)


def tasks(llm: Any, names: Sequence[str], n: int, seed: int) -> dict[str, float]:
    """Return the share of right answers to ``n`` cases of each of pocket's tasks, as (right + 1/2) / (n + 1).

    The addition keeps shares above 0, so that ratios exist.
    """
    from minivllm.pocket import evaluate

    engine = evaluate.Minivllm(llm)
    rows = evaluate.evaluate(engine.generate, evaluate.default_cases(n, seed, names))
    found = {}
    for task, count, share in rows:
        found[f"task_{task.replace(' ', '_')}"] = (share * count + 0.5) / (count + 1)
    return found


def check_tasks(names: Sequence[str]) -> None:
    """Raise ConfigError if a name is not that of one of pocket's tasks."""
    from minivllm.errors import shown, suggest
    from minivllm.pocket.tasks import TASKS

    for name in names:
        if name not in TASKS:
            raise ConfigError(
                f"--task {shown(name)}: no such task.{suggest(name, TASKS)} There are: {', '.join(TASKS)}"
            )


def perplexities(found: Row) -> list[float]:
    """Return the perplexity of each piece of the text, from the results of ``summary``."""
    return [math.exp(loss) for loss in found["losses"]]
