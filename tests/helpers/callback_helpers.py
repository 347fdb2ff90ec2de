"""Functions that raise any exception, the engines that call them, and checks of the state afterwards."""

from __future__ import annotations

import asyncio

import pytest

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy
from minivllm.testing.sim import at_rest
from minivllm.testing.tiny import tiny_dir

NAN = float("nan")
SMALL = dict(
    skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=40, max_num_seqs=8, max_num_batched_tokens=64
)
PROMPTS = [[5, 9, 2], [7] * 20, [1, 2, 3, 4, 5, 6, 7, 8, 9]]


class Mute(BaseException):
    def __str__(self):
        raise SystemExit("not even its text")


RAISED = [
    SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("gone"), GeneratorExit(), pytest.fail.Exception("wrong"),
    StopIteration(5), Mute(), MemoryError("none left"),
]  # fmt: skip
NAMED = [type(e).__name__ for e in RAISED]
FIELDS = {
    "allowed_tokens_fn": lambda act: lambda ids: act() or [1, 2, 3],
    "choose_fn": lambda act: lambda logits, ids: act() or 1,
    "logits_processors": lambda act: [lambda output, x: x + (act() or 0)],
}


def after(calls, act):
    """Return a function that acts in its call number ``calls``, and does nothing in earlier calls."""
    left = iter(range(calls))
    return lambda: None if next(left, None) is not None else act()


def throw(exc):
    raise exc


def plain(**more):
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **more)


def quiet(engine):
    """Check that nothing is left of any step or request."""
    assert engine.dead is None and not engine.within and not engine.executor._running
    at_rest(engine)


class Raising(DecodingStrategy):
    """Raises ``exc`` in the method that ``where`` names, for requests of the tenant "bad"."""

    where, exc = "", None

    def _maybe(self, name, params):
        if self.where == name and params.tenant == "bad":
            raise self.exc

    def takes(self, params):
        self._maybe("takes", params)
        return True

    def topk(self, params):
        self._maybe("topk", params)
        return -1

    def start(self, params):
        self._maybe("start", params)
        return [Branch(i) for i in range(params.n)]

    def result(self, params, ends):
        self._maybe("result", params)
        return [e.sample for e in ends]


def once(true, left):
    def method(self, *args):
        if left:
            raise left.pop()
        return true(self, *args)

    return method


class Odd:
    """An object that cannot be converted to anything."""

    def __len__(self):
        raise RuntimeError("no length")

    def __index__(self):
        raise RuntimeError("no index")

    def __repr__(self):
        raise RuntimeError("no repr")


def tiny_engines():
    """Two fixtures: the folder of a tiny model, and an LLM of it without and with run-ahead."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        folder = tmp_path_factory.mktemp("tiny")
        tiny_dir(folder, "qwen3", vocab_size=131)
        return str(folder)

    @pytest.fixture(scope="module", params=[0, 2])
    def llm(folder, request):
        with LLM(folder, run_ahead=request.param, **SMALL) as llm:
            yield llm

    return folder, llm
