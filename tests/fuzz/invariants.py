"""Rules that every answer must satisfy, whatever runs at the same time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from . import functions
from .configs import VOCAB
from .drive import Answer, Output
from .oracle import TIES, scores_kind

EOS = {**dict.fromkeys(VOCAB, (2,)), "pocket": (0, 2)}
DEVICE_WORDS = ("CUDA error", "device-side assert", "illegal memory", "misaligned address", "CUDA_ERROR", "cudaError",
                "CUBLAS_STATUS", "unspecified launch failure")  # fmt: skip
Said = tuple[str, str]  # kind, message


def kind_of(error: str) -> str:
    """Return the kind of fault that an error message shows."""
    if any(word in error for word in DEVICE_WORDS):
        return "device assert"
    if "its matcher refused" in error:
        return "mask"
    if "KV blocks are in use" in error or "released more often than taken" in error:
        return "leak"
    if "nothing can be drawn" in error or "NaN" in error:
        return "nan"
    return "exception"


def may_run_dry(params: dict[str, Any]) -> bool:
    """Return whether a request may leave no token to draw, so that an error is correct."""
    bans = ("allowed_token_ids", "allowed_tokens_fn", "bad_words", "no_repeat_ngram_size", "logits_processors",
            "structured_outputs", "min_tokens", "logit_bias")  # fmt: skip
    few = {"allowed_token_ids", "allowed_tokens_fn", "structured_outputs"} & params.keys()
    return bool(few) and len([name for name in bans if params.get(name)]) > 1


def check(params: dict[str, Any], model: str, prompt: list[int], most: int, mode: str, answer: Answer) -> list[Said]:
    """Return (kind, message) for each broken rule.  ``most`` is the engine's ``max_model_len``."""
    found = list(_streamed(params, answer))
    if answer.left or answer.error is not None:
        for index, tokens in answer.pieces.items():
            found += [(k, f"output {index}: {m}") for k, m in _masks(params, model, prompt, tokens)]
        return found
    want = params.get("n", 1)
    if not (1 <= len(answer.outputs) <= want if "beam_width" in params else len(answer.outputs) == want):
        found.append(("count", f"{len(answer.outputs)} outputs, expected {want}"))
    for out in answer.outputs:
        rules = [
            *_length(params, model, prompt, most, out),
            *_masks(params, model, prompt, out.tokens),
            *_form(params, out),
            *_numbers(params, mode, out),
            *_read(params, prompt, out),
            *_versions(out),
        ]
        found += [(kind, f"output {out.index}: {message}") for kind, message in rules]
    found += _prompt_scores(params, prompt, answer)
    return found


def _streamed(params: dict[str, Any], answer: Answer) -> Iterator[Said]:
    """Check that the joined pieces of a stream equal the answer."""
    if not (answer.streamed and answer.ended) or answer.left:
        return
    for out in answer.outputs:
        tokens, text = answer.pieces.get(out.index, []), answer.texts.get(out.index, "")
        if tokens != out.tokens:
            yield "stream", f"output {out.index}: streamed {tokens[-5:]} ({len(tokens)}), whole {out.tokens[-5:]}"
        elif text != out.text:
            yield "stream", f"output {out.index}: streamed {text[-40:]!r}, whole {out.text[-40:]!r}"


def _stops(params: dict[str, Any], model: str) -> set[int]:
    eos = () if params.get("ignore_eos") and "structured_outputs" not in params else EOS[model]
    return {*eos, *params.get("stop_token_ids", ())}


def _length(params: dict[str, Any], model: str, prompt: list[int], most: int, out: Output) -> Iterator[Said]:
    """Check that numbers of tokens agree with the reasons of ends."""
    room = min(params["max_tokens"], most - len(prompt))
    n, stops = len(out.tokens), _stops(params, model)
    least = 0 if "structured_outputs" in params else params.get("min_tokens", 0)
    if not out.tokens or n > room:
        yield "count", f"{n} tokens, expected 1 to {room}"
        return
    if out.finish not in ("stop", "length"):
        yield "finish", f"finish_reason {out.finish!r}"
    if out.finish == "length" and n != room:
        yield "count", f"ended by length after {n} tokens, expected {room}"
    if "structured_outputs" not in params:
        early = [i for i, t in enumerate(out.tokens) if t in stops and i >= least]
        if early and early[0] != n - 1:
            yield "finish", f"token {early[0]} is a stop id, and {n - 1 - early[0]} tokens follow it"
        elif early and out.finish != "stop":
            yield "finish", f"its last token is a stop id, and finish_reason is {out.finish!r}"
    if out.finish == "stop" and not isinstance(out.stop, str):
        if out.tokens[-1] not in stops:
            yield "finish", f"stopped by token {out.tokens[-1]}, which is no stop id"
        if out.stop is not None and out.stop != out.tokens[-1]:
            yield "finish", f"stop_reason {out.stop}, and the last token is {out.tokens[-1]}"
    if isinstance(out.stop, str) and out.stop not in params.get("stop", ()):
        yield "finish", f"stop_reason {out.stop!r} was not asked for"


def _versions(out: Output) -> Iterator[Said]:
    """Check the versions of the weights that drew the tokens."""
    if len(out.versions) != len(out.tokens):
        yield "weights", f"{len(out.versions)} versions of weights for {len(out.tokens)} tokens"
    elif out.versions != sorted(out.versions) or out.versions[-1] != out.version:
        yield "weights", f"versions of weights {out.versions[:3]} to {out.versions[-3:]}, the last one is {out.version}"


def _masks(params: dict[str, Any], model: str, prompt: list[int], tokens: list[int]) -> Iterator[Said]:
    """Check that every token was allowed, and yield the first fault of each rule."""
    vocab = VOCAB[model]
    if wrong := [t for t in tokens if not 0 <= t < vocab]:
        yield "mask", f"token {wrong[0]} is outside the vocabulary"
        return
    if "allowed_tokens_fn" in params:
        name, number = params["allowed_tokens_fn"]
        function = functions.allowed("residue" if name == "slow" else name, number, vocab)
        for i, t in enumerate(tokens):
            if t not in function([*prompt, *tokens[:i]]):
                yield "mask", f"token {i} is {t}, which allowed_tokens_fn does not allow"
                break
    chosen = params.get("choose_fn")
    if chosen and chosen[0] != "argmax":
        return  # the host's choice may take a token that the processors excluded
    allowed = set(params.get("allowed_token_ids") or range(vocab))
    size, history = params.get("no_repeat_ngram_size", 0), list(prompt)
    came = {tuple(history[j : j + size]) for j in range(len(history) - size + 1)} if size else set()
    words = [tuple(word) for word in params.get("bad_words", ())]
    for i, t in enumerate(tokens):
        history.append(t)
        if t not in allowed:
            yield "mask", f"token {i} is {t}, which is not in allowed_token_ids"
            return
        for word in words:
            if tuple(tokens[max(i + 1 - len(word), 0) : i + 1]) == word:
                yield "mask", f"token {i} completes the bad word {word}"
                return
        if size and len(history) >= size:
            gram = tuple(history[-size:])
            if gram in came:
                yield "mask", f"token {i} repeats the {size}-gram {gram}"
                return
            came.add(gram)


def _form(params: dict[str, Any], out: Output) -> Iterator[Said]:
    requested = params.get("structured_outputs")
    cut = out.stop is not None  # the output ended at a stop string or stop id of the request
    if requested is not None and not cut and not functions.fits(requested, out.text, out.finish == "stop"):
        yield "mask", f"{out.text!r} ({out.finish}) does not fit {requested}"


def _numbers(params: dict[str, Any], mode: str, out: Output) -> Iterator[Said]:
    """Check that each token has log-probabilities that are possible, in order, and add up."""
    k = params.get("logprobs")
    if k is None:
        if out.logprobs is not None:
            yield "logprob", "log-probabilities that nobody asked for"
        return
    if out.logprobs is None or len(out.logprobs) != len(out.tokens):
        yield "logprob", f"{len(out.logprobs or ())} log-probabilities for {len(out.tokens)} tokens"
        return
    total = 0.0
    for i, (token, entry) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        reported = entry_faults(entry, token, k, mode)
        # a guided row has finer logits than a half dtype, so two different logits may have equal log-probabilities
        if reported and not (reported.startswith(TIES) and "guidance_scale" in params):
            yield scores_kind(reported), f"token {i}: {reported}"
            return
        total += entry[0][1]
    if out.cumulative is None or not abs(out.cumulative - total) <= 1e-3 * max(1.0, abs(total)):
        yield "logprob", f"cumulative_logprob {out.cumulative}, the sum of those given is {total}"


def _read(params: dict[str, Any], prompt: list[int], out: Output) -> Iterator[Said]:
    """Check that there is a row of finite numbers for each position."""
    if not params.get("taps", {}).get("read"):
        if out.taps is not None:
            yield "taps", "values that nobody reads"
        return
    if not out.taps:
        yield "taps", "nothing was read"
        return
    for point, x in out.taps.items():
        drawn = point == "logits" and "prompt_logprobs" not in params
        want = len(out.tokens) + (0 if drawn else len(prompt) - 1)
        if len(x) != want:
            yield "taps", f"{point} has {len(x)} rows, expected {want} for {len(prompt)} and {len(out.tokens)} tokens"
        elif not np.isfinite(x).all():
            yield "taps", f"{point} has values that are no numbers"


def entry_faults(entry: list[Any], token: int, k: int, mode: str = "raw_logprobs") -> str:
    """Return the fault of an entry [(id, log-probability, rank)], which begins with the token itself, "" if none."""
    (first, value, rank), others = entry[0], entry[1:]
    if first != token:
        return f"the first is of token {first}, the token is {token}"
    if not math.isfinite(value) or value > 1e-5:
        return f"the log-probability of {token} is {value}"
    if rank is None or rank < 1:
        return f"rank {rank}"
    if any(not math.isfinite(v) or v > 1e-5 for _, v, _ in others):
        return f"the best have {[v for _, v, _ in others]}"
    least = k - 1 if mode == "raw_logprobs" else 0  # excluded tokens have no probability and are not listed
    if not least <= len(others) <= k or len({t for t, *_ in entry}) < len(entry):
        return f"{len(others)} others, expected {k} best"
    for (s, v, _), (t, w, _) in pairwise(others):
        if v < w:
            return f"the best are out of order: {[(t, v) for t, v, _ in others]}"
        if v == w and s > t:
            return f"{TIES}, the lower id does not come first: {[(t, v) for t, v, _ in others]}"
    better = [t for t, v, _ in others if v > value]
    if rank <= len(better):
        return f"rank {rank}, and {len(better)} of the best are likelier"
    return ""


def _prompt_scores(params: dict[str, Any], prompt: list[int], answer: Answer) -> Iterator[Said]:
    k = params.get("prompt_logprobs")
    if k is None:
        return
    given = answer.prompt_logprobs
    if given is None or len(given) != len(prompt) or given[0] is not None:
        yield "logprob", f"{len(given or ())} log-probabilities for a prompt of {len(prompt)} tokens"
        return
    for i, (token, entry) in enumerate(zip(prompt[1:], given[1:], strict=True), 1):
        if entry is None:
            yield "logprob", f"prompt token {i} has none"
            return
        if reported := entry_faults(entry, token, k):
            yield scores_kind(reported), f"prompt token {i}: {reported}"
            return
