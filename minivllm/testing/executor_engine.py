"""What an executor must do under the real engine: requests, and what comes of them."""

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
SEED = 1 << 40  # one that 32 bits do not hold
EOS = 2  # of the tiny model


def check_greedy(llm: LLM, what: str) -> None:
    """transformers' tokens: branches, rows whose token the host chooses, rows whose mask comes late, and faults."""
    want = [greedy(p, 20) for p in ITEMS]
    params = lambda **more: SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, **more)  # noqa: E731
    late = {"allowed_tokens_fn": lambda ids: range(61)}
    host = {"choose_fn": lambda logits, ids: int(np.argmax(logits))}
    for kinds in ([{}] * 6, [{}, late, host, {"n": 3}, {}, {}]):
        outs = llm.generate(ITEMS, [params(**more) for more in kinds], False)
        for i, out in enumerate(outs):
            got = [list(o.token_ids) for o in out.outputs]
            assert got == [want[i]] * len(got), f"{what}, request {i} ({kinds[i]}): {got}"
    outs = llm.generate(ITEMS[:3], [params(extra={"fault": "apply"}), params(), params()], False)
    assert outs[0].finish_reason == "error" and "boom in apply" in outs[0].error, outs[0]
    assert [o.tokens for o in outs[1:]] == want[1:3], "beside a row that fails"
    out = llm.generate(prompts(FATAL_CHUNK)[0], params(), False)[0]
    assert out.finish_reason == "error" and "boom in plan" in out.error, out
    assert llm.generate(ITEMS[0], params(), False)[0].tokens == want[0], "after a step that failed"


def check_made_up(llm: LLM, what: str, greedy: Callable[[list[int], int], list[int]]) -> None:
    """The tokens of ``greedy``, which computes no model: also of rows whose token the host chooses or whose mask comes
    late.  A row that binds a processor ends with an error that names it."""
    want = [greedy(p, 20) for p in ITEMS]
    params = lambda **more: SamplingParams(ignore_eos=True, max_tokens=20, **more)  # noqa: E731
    late = {"allowed_tokens_fn": lambda ids: range(61)}
    host = {"choose_fn": lambda logits, ids: int(np.argmax(logits))}
    for kinds in ([{}] * 6, [{}, late, host, {}, {"temperature": 0}, {}]):
        outs = llm.generate(ITEMS, [params(**more) for more in kinds], False)
        for i, out in enumerate(outs):
            assert out.tokens == want[i], f"{what}, request {i} ({kinds[i]}): {out.tokens}; want {want[i]}"
    outs = llm.generate(ITEMS[:3], [params(extra={"tally": True}), params(), params()], False)
    assert outs[0].finish_reason == "error" and "CountingProcessor" in outs[0].error, outs[0]
    assert [o.tokens for o in outs[1:]] == want[1:3], "beside a row that fails"


def random_requests() -> list[SamplingParams]:
    """Draws that depend on the seed and the branch, ends by a token that may come too early, log-probabilities."""
    some = dict(temperature=2.0, max_tokens=24)
    stop = lambda at: dict(min_tokens=9, stop_token_ids=list(range(at, 61, 7)))  # noqa: E731
    return [
        SamplingParams(seed=SEED + 1, n=3, temperature=1.9, min_tokens=4, max_tokens=46),
        SamplingParams(seed=SEED + 2, n=3, ignore_eos=True, **some),
        SamplingParams(seed=SEED + 3, ignore_eos=True, logprobs=3, **some),
        SamplingParams(seed=SEED + 4, n=3, **some, **stop(3)),
        SamplingParams(seed=SEED + 5, n=2, **some, **stop(4)),
        SamplingParams(seed=2, ignore_eos=True, **some),
    ]


def random_outputs(llm: LLM) -> list[list[Any]]:
    """For each request its branches."""
    return [list(out.outputs) for out in llm.generate(ITEMS, random_requests(), False)]


def reference(options: Mapping[str, Any]) -> list[list[Any]]:
    """The same by the executor of this package that runs in the engine's process."""
    with LLM(**{**options, "executor": "minivllm/local", "tensor_parallel_size": 1}) as llm:
        outs = random_outputs(llm)
    seen = Seen()
    for params, branches in zip(random_requests(), outs, strict=True):
        seen["other branches"] += len({tuple(o.token_ids) for o in branches}) > 1
        seen["min_tokens"] += params.min_tokens > 0 and all(len(o.token_ids) >= params.min_tokens for o in branches)
        for o in branches:
            seen["end of sequence"] += o.finish_reason == "stop" and o.token_ids[-1] == EOS
            seen["stop id"] += o.finish_reason == "stop" and o.token_ids[-1] != EOS
            seen["length"] += o.finish_reason == "length"
    seen.require(**{"other branches": 4, "min_tokens": 3, "end of sequence": 1, "stop id": 2, "length": 5})
    return outs


def check_random(llm: LLM, want: Sequence[Sequence[Any]], what: str) -> None:
    """Tokens, log-probabilities and ends are those of the reference."""
    for i, (params, ours, theirs) in enumerate(zip(random_requests(), random_outputs(llm), want, strict=True)):
        for j, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            where = f"{what}, branch {j} of request {i} ({params})"
            got, due = list(a.token_ids), list(b.token_ids)
            assert got == due, f"{where}: tokens {got}; executor 'local' gives {due}"
            ends = [(o.finish_reason, o.stop_reason) for o in (a, b)]
            assert ends[0] == ends[1], f"{where}: ends with {ends[0]}; want {ends[1]}"
            _check_logprobs(a.logprobs, b.logprobs, where)


def _check_logprobs(got: Any, want: Any, where: str) -> None:
    assert (got is None) == (want is None), f"{where}: logprobs {got}; want {want}"
    for at, (a, b) in enumerate(zip(got or (), want or (), strict=True)):
        same = {t: lp.rank for t, lp in a.items()} == {t: lp.rank for t, lp in b.items()}
        same = same and all(abs(a[t].logprob - b[t].logprob) < NEAR for t in b)
        assert same, f"{where}, token {at}: log-probabilities {a}; want {b}"
