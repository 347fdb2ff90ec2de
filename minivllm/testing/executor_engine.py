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
# parameters of a row whose token mask is supplied after its step was submitted
LATE = {"allowed_tokens_fn": lambda ids: range(61)}
HOST = {"choose_fn": lambda logits, ids: int(np.argmax(logits))}  # parameters of a row whose token the host chooses


def check_greedy(llm: LLM, case: str) -> None:
    """Fail unless an engine gives the greedy tokens of transformers.

    The requests have branches, tokens that the host chooses, masks that come late, and rows and steps that fail.
    ``case`` describes the engine in messages.
    """
    expected = [greedy(prompt, 20) for prompt in ITEMS]

    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, **fields)

    for fields in ([{}] * 6, [{}, LATE, HOST, {"n": 3}, {}, {}]):
        results = llm.generate(ITEMS, [params(**of_request) for of_request in fields], False)
        for i, result in enumerate(results):
            branches = [list(output.token_ids) for output in result.outputs]
            assert branches == [expected[i]] * len(branches), f"{case}, request {i} ({fields[i]}): {branches}"
    failing = params(extra={"fault": "apply"})
    results = llm.generate(ITEMS[:3], [failing, params(), params()], False)
    _check_failed_row(results, "boom in apply", expected)
    failed = llm.generate(prompts(FATAL_CHUNK)[0], params(), False)[0]
    assert failed.finish_reason == "error" and "boom in plan" in failed.error, failed
    assert llm.generate(ITEMS[0], params(), False)[0].tokens == expected[0], "tokens after a step that failed"


def check_made_up(llm: LLM, case: str, greedy: Callable[[list[int], int], list[int]]) -> None:
    """Fail unless an engine whose executor has no model gives the tokens of the function ``greedy``.

    The host chooses some tokens, and some masks come late.  A row whose processor raises ends with an error that names
    the processor.
    """
    expected = [greedy(prompt, 20) for prompt in ITEMS]

    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(ignore_eos=True, max_tokens=20, **fields)

    for fields in ([{}] * 6, [{}, LATE, HOST, {}, {"temperature": 0}, {}]):
        results = llm.generate(ITEMS, [params(**of_request) for of_request in fields], False)
        for i, result in enumerate(results):
            tokens = result.tokens
            assert tokens == expected[i], f"{case}, request {i} ({fields[i]}): {tokens}; expected {expected[i]}"
    failing = params(extra={"tally": True})
    results = llm.generate(ITEMS[:3], [failing, params(), params()], False)
    _check_failed_row(results, "CountingProcessor", expected)


def _check_failed_row(results: Sequence[Any], words: str, expected: Sequence[list[int]]) -> None:
    """Fail unless the first of three requests ended with an error that contains ``words``.

    The other two must have the ``expected`` tokens.
    """
    failed = results[0]
    assert failed.finish_reason == "error" and words in failed.error, failed
    found = [result.tokens for result in results[1:]]
    assert found == expected[1:3], "tokens of the rows next to a failed row"


def random_requests() -> list[SamplingParams]:
    """Return requests that sample with fixed seeds.

    Some have stop tokens that may be drawn before ``min_tokens``, some have branches, and one has log-probabilities.
    """
    some = dict(temperature=2.0, max_tokens=24)

    def stop(first: int) -> dict[str, Any]:
        return dict(min_tokens=9, stop_token_ids=list(range(first, 61, 7)))

    return [
        SamplingParams(seed=SEED + 1, n=3, temperature=1.9, min_tokens=4, max_tokens=46),
        SamplingParams(seed=SEED + 2, n=3, ignore_eos=True, **some),
        SamplingParams(seed=SEED + 3, ignore_eos=True, logprobs=3, **some),
        SamplingParams(seed=SEED + 4, n=3, **some, **stop(3)),
        SamplingParams(seed=SEED + 5, n=2, **some, **stop(4)),
        SamplingParams(seed=2, ignore_eos=True, **some),
    ]


def random_outputs(llm: LLM) -> list[list[Any]]:
    """Serve the requests of ``random_requests``, and return the outputs of each request."""
    return [list(result.outputs) for result in llm.generate(ITEMS, random_requests(), False)]


def reference(options: Mapping[str, Any]) -> list[list[Any]]:
    """Return the outputs of ``random_requests`` with the executor "local", which runs in the engine's process."""
    with LLM(**{**options, "executor": "minivllm/local", "tensor_parallel_size": 1}) as llm:
        requests = random_outputs(llm)
    seen = Seen()
    for params, branches in zip(random_requests(), requests, strict=True):
        seen["other branches"] += len({tuple(branch.token_ids) for branch in branches}) > 1
        shortest = min(len(branch.token_ids) for branch in branches)
        seen["min_tokens"] += 0 < params.min_tokens <= shortest
        for branch in branches:
            reason = branch.finish_reason
            if reason == "stop":
                if branch.token_ids[-1] == EOS:
                    reason = "end of sequence"
                else:
                    reason = "stop id"
            seen[reason] += 1
    seen.require(**{"other branches": 4, "min_tokens": 3, "end of sequence": 1, "stop id": 2, "length": 5})
    return requests


def check_random(llm: LLM, expected: Sequence[Sequence[Any]], case: str) -> None:
    """Fail unless ``random_requests`` have the tokens, finish reasons and log-probabilities of ``expected``."""
    requests = zip(random_requests(), random_outputs(llm), expected, strict=True)
    for i, (params, branches, expected_branches) in enumerate(requests):
        for j, (branch, other) in enumerate(zip(branches, expected_branches, strict=True)):
            place = f"{case}, branch {j} of request {i} ({params})"
            tokens = list(branch.token_ids)
            wanted = list(other.token_ids)
            assert tokens == wanted, f"{place}: tokens {tokens}; executor 'local' gives {wanted}"
            end = (branch.finish_reason, branch.stop_reason)
            wanted_end = (other.finish_reason, other.stop_reason)
            assert end == wanted_end, f"{place}: ends with {end}; expected {wanted_end}"
            _check_logprobs(branch.logprobs, other.logprobs, place)


def _check_logprobs(logprobs: Any, expected: Any, place: str) -> None:
    """Fail unless the log-probabilities of an output have the ranks of ``expected``, and almost its values."""
    assert (logprobs is None) == (expected is None), f"{place}: logprobs {logprobs}; expected {expected}"
    for i, (found, wanted) in enumerate(zip(logprobs or (), expected or (), strict=True)):
        message = f"{place}, token {i}: log-probabilities {found}; expected {wanted}"
        assert _ranks(found) == _ranks(wanted), message
        assert all(abs(found[token].logprob - lp.logprob) < NEAR for token, lp in wanted.items()), message


def _ranks(logprobs: Mapping[int, Any]) -> dict[int, int]:
    """Return token id -> rank of each log-probability."""
    return {token: logprob.rank for token, logprob in logprobs.items()}
