"""Checks of an executor in an engine: the tokens, finish reasons and errors of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.core.interfaces.params import SamplingParams
from minivllm.frontend.llm import LLM

from .base import Seen
from .driver import NEAR, greedy, prompts
from .faulty import FATAL_CHUNK

ITEMS = prompts(1, 4, 17, 23, 30, 41)
SEED = 1 << 40  # a seed that needs more than 32 bits
EOS = 2  # end-of-sequence token of the tiny model
LENGTH = 20  # number of tokens of a greedy request
Request = Mapping[str, Any]  # fields of the SamplingParams of a request
PLAIN: Request = {}


def _every_token(ids: Sequence[int]) -> Sequence[int]:
    """Allow all tokens of the tiny model."""
    return range(61)


def _likeliest(logits: np.ndarray, ids: Sequence[int]) -> int:
    """Choose the token of the largest logit."""
    return int(np.argmax(logits))


LATE: Request = {"allowed_tokens_fn": _every_token}  # a row whose token mask is supplied after its step was submitted
HOST: Request = {"choose_fn": _likeliest}  # a row whose token the host chooses


def _plain_and_mixed(unlike: Request) -> tuple[list[Request], list[Request]]:
    """Return the requests of two rounds, one for each of ``ITEMS``.

    All of the first round are plain.  The second round has a late mask, a token that the host chooses, ``unlike`` and a
    greedy request.
    """
    mixed = [PLAIN, LATE, HOST, unlike, {"temperature": 0}, PLAIN]
    return [PLAIN] * len(ITEMS), mixed


def _serve(llm: LLM, requests: Sequence[Request], **common: Any) -> list[Any]:
    """Return the results of requests for the first prompts of ``ITEMS``, each with its own and the common fields."""
    params = []
    for fields in requests:
        params.append(SamplingParams(ignore_eos=True, max_tokens=LENGTH, **{**common, **fields}))
    return llm.generate(ITEMS[: len(params)], params, False)


def check_greedy(llm: LLM, case: str) -> None:
    """Fail unless an engine gives the greedy tokens of transformers.

    The requests have branches, tokens that the host chooses, masks that come late, and rows and steps that fail.
    ``case`` describes the engine in messages.
    """
    expected = [greedy(prompt, LENGTH) for prompt in ITEMS]
    branching = {"n": 3}
    for requests in _plain_and_mixed(branching):
        results = _serve(llm, requests, temperature=0)
        for i, (result, tokens) in enumerate(zip(results, expected, strict=True)):
            branches = [list(output.token_ids) for output in result.outputs]
            right = all(branch == tokens for branch in branches)
            assert right, f"{case}, request {i} ({requests[i]}): {branches}"
    failing = {"extra": {"fault": "apply"}}
    results = _serve(llm, [failing, PLAIN, PLAIN], temperature=0)
    _check_failed_row(results, "boom in apply", expected)
    (fatal,) = prompts(FATAL_CHUNK)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=LENGTH)
    (failed,) = llm.generate(fatal, params, False)
    assert failed.finish_reason == "error", failed
    assert "boom in plan" in failed.error, failed
    (after,) = _serve(llm, [PLAIN], temperature=0)
    assert after.tokens == expected[0], "tokens after a step that failed"


def check_made_up(llm: LLM, case: str, greedy: Callable[[list[int], int], list[int]]) -> None:
    """Fail unless an engine whose executor has no model gives the tokens of the function ``greedy``.

    The host chooses some tokens, and some masks come late.  A row whose processor raises ends with an error that names
    the processor.
    """
    expected = [greedy(prompt, LENGTH) for prompt in ITEMS]
    for requests in _plain_and_mixed(PLAIN):
        results = _serve(llm, requests)
        for i, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            tokens = result.tokens
            assert tokens == wanted, f"{case}, request {i} ({requests[i]}): {tokens}; expected {wanted}"
    failing = {"extra": {"tally": True}}
    results = _serve(llm, [failing, PLAIN, PLAIN])
    _check_failed_row(results, "CountingProcessor", expected)


def _check_failed_row(results: Sequence[Any], words: str, expected: Sequence[list[int]]) -> None:
    """Fail unless the first of three requests ended with an error that contains ``words``.

    The other two must have the ``expected`` tokens.
    """
    failed, *others = results
    assert failed.finish_reason == "error", failed
    assert words in failed.error, failed
    found = [result.tokens for result in others]
    assert found == expected[1:3], "tokens of the rows next to a failed row"


def random_requests() -> list[SamplingParams]:
    """Return requests that sample with fixed seeds.

    Some have stop tokens that may be drawn before ``min_tokens``, some have branches, and one has log-probabilities.
    """

    def sampled(seed: int, **fields: Any) -> SamplingParams:
        return SamplingParams(seed=seed, temperature=2.0, max_tokens=24, **fields)

    def stopping(seed: int, n: int, first: int) -> SamplingParams:
        stop_ids = list(range(first, 61, 7))
        return sampled(seed, n=n, min_tokens=9, stop_token_ids=stop_ids)

    requests = [SamplingParams(seed=SEED + 1, n=3, temperature=1.9, min_tokens=4, max_tokens=46)]
    requests.append(sampled(SEED + 2, n=3, ignore_eos=True))
    requests.append(sampled(SEED + 3, ignore_eos=True, logprobs=3))
    requests.append(stopping(SEED + 4, 3, 3))
    requests.append(stopping(SEED + 5, 2, 4))
    requests.append(sampled(2, ignore_eos=True))
    return requests


def random_outputs(llm: LLM) -> list[list[Any]]:
    """Serve the requests of ``random_requests``, and return the outputs of each request."""
    results = llm.generate(ITEMS, random_requests(), False)
    return [list(result.outputs) for result in results]


def reference(options: Mapping[str, Any]) -> list[list[Any]]:
    """Return the outputs of ``random_requests`` with the executor "local", which runs in the engine's process."""
    local = {"executor": "minivllm/local", "tensor_parallel_size": 1}
    with LLM(**{**options, **local}) as llm:
        requests = random_outputs(llm)
    seen = Seen()
    for params, branches in zip(random_requests(), requests, strict=True):
        different = {tuple(branch.token_ids) for branch in branches}
        seen["other branches"] += len(different) > 1
        shortest = min(len(branch.token_ids) for branch in branches)
        seen["min_tokens"] += 0 < params.min_tokens <= shortest
        for branch in branches:
            reason = branch.finish_reason
            if reason == "stop":
                ended = branch.token_ids[-1] == EOS
                reason = "end of sequence" if ended else "stop id"
            seen[reason] += 1
    seen.require(**{"other branches": 4, "min_tokens": 3, "end of sequence": 1, "stop id": 2, "length": 5})
    return requests


def check_random(llm: LLM, expected: Sequence[Sequence[Any]], case: str) -> None:
    """Fail unless ``random_requests`` have the tokens, finish reasons and log-probabilities of ``expected``."""
    requests = zip(random_requests(), random_outputs(llm), expected, strict=True)
    for i, (params, branches, expected_branches) in enumerate(requests):
        pairs = zip(branches, expected_branches, strict=True)
        for j, (branch, other) in enumerate(pairs):
            place = f"{case}, branch {j} of request {i} ({params})"
            tokens = list(branch.token_ids)
            wanted = list(other.token_ids)
            assert tokens == wanted, f"{place}: tokens {tokens}; executor 'local' gives {wanted}"
            end = _end(branch)
            wanted_end = _end(other)
            assert end == wanted_end, f"{place}: ends with {end}; expected {wanted_end}"
            _check_logprobs(branch.logprobs, other.logprobs, place)


def _end(output: Any) -> tuple[Any, Any]:
    """Return the finish reason of an output, and its stop reason, such as a stop id."""
    return output.finish_reason, output.stop_reason


def _check_logprobs(logprobs: Any, expected: Any, place: str) -> None:
    """Fail unless the log-probabilities of an output have the ranks of ``expected``, and almost its values."""
    missing = logprobs is None
    assert missing == (expected is None), f"{place}: logprobs {logprobs}; expected {expected}"
    if missing:
        return
    for i, (found, wanted) in enumerate(zip(logprobs, expected, strict=True)):
        message = f"{place}, token {i}: log-probabilities {found}; expected {wanted}"
        assert _ranks(found) == _ranks(wanted), message
        for token, logprob in wanted.items():
            difference = abs(found[token].logprob - logprob.logprob)
            assert difference < NEAR, message


def _ranks(logprobs: Mapping[int, Any]) -> dict[int, int]:
    """Return token id -> rank of each log-probability."""
    return {token: logprob.rank for token, logprob in logprobs.items()}
