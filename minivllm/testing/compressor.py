"""The conformance suite of compressors, which score the tokens in the KV cache so that the lowest can be dropped.

Scores are checked for random keys, values and queries of many sizes.  Then an engine serves requests with the
compressor.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.compressor import Compressor, CompressorContext, StoredTokens

from .base import since
from .kept import Lasting
from .spec import SpecConformance
from .tiny import tiny_dir

HEADS = ((4, 4), (4, 2), (8, 1))  # (query heads, KV heads)
SIZES = (1, 2, 5, 17, 64, 200)  # stored tokens
DIM = 16
PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8, 11, 22, 34, 45, 31, 10, 4, 18, 15]
OUTPUT = 12  # tokens


def stored_tokens(
    n: int, heads: int, kv_heads: int, window: int, seed: int = 0, sums: bool = False, **changes: Any
) -> StoredTokens:
    """Return random keys, values and queries of ``n`` cached tokens, in the form that a compressor scores.

    ``window`` is the number of last queries, 0 for none.  ``sums`` adds sums of attention, which are 0 for generated
    tokens.  ``changes`` replace other fields.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    queries = normal(min(window, n), heads, DIM) if window else None
    keys = normal(n, kv_heads, DIM)
    values = normal(n, kv_heads, DIM)
    scale = DIM**-0.5
    half = max(1, n // 2)
    fields: dict[str, Any] = {
        "layer": 0,
        "keys": keys,
        "values": values,
        "queries": queries,
        "scale": scale,
        "keep": half,
        "computed": n,
        "seed": 3,
    }
    if sums:
        prompt = n - n // 4
        later = (prompt - torch.arange(n)).clamp(min=0)
        attending = later.float().expand(kv_heads, n).clone()
        fields["attention_sums"] = normal(kv_heads, n).abs() * attending
        fields["sum_queries"] = attending
    return StoredTokens(**{**fields, **changes})


def joined(layers: list[StoredTokens]) -> StoredTokens:
    """Join the stored tokens of several layers, for a compressor that scores all layers in one call."""
    first = layers[0]
    dims = dict.fromkeys(("keys", "values", "queries"), 1)
    dims |= dict.fromkeys(("attention_sums", "sum_queries"), 0)
    tensors: dict[str, Any] = {}
    for name, dim in dims.items():
        if getattr(first, name) is not None:
            parts = [getattr(layer, name) for layer in layers]
            tensors[name] = torch.cat(parts, dim=dim)
    return replace(first, layers=len(layers), **tensors)


class CompressorConformance(Lasting, SpecConformance):
    """The conformance suite of compressors.  Its test with an engine uses a small Llama with random weights."""

    kind = "compressor"

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        return (CompressorContext("cpu", "float32", 256),)

    def exercise(self, instance: Compressor) -> Any:
        """Return the scores of 40 random tokens, as lists."""
        stored = stored_tokens(40, 4, 2, instance.window, sums=instance.attention_sums)
        return instance.score(stored).tolist()

    def once_more(self, instance: Compressor, number: int) -> None:
        """Score other tokens."""
        stored = stored_tokens(20 + number % 30, 4, 2, instance.window, number, instance.attention_sums)
        instance.score(stored)

    def cases(self, instance: Compressor) -> list[StoredTokens]:
        """Return random stored tokens of many sizes, with the inputs that the compressor declares."""
        sizes = itertools.product(SIZES, HEADS)
        window = instance.window
        sums = instance.attention_sums
        found = []
        for n, (heads, kv_heads) in sizes:
            found.append(stored_tokens(n, heads, kv_heads, window, sums=sums))
        return found

    @since(1, 0)
    def test_each_stored_token_gets_a_score(self) -> None:
        """Check the scores of any number of tokens, heads and queries: no NaN, and shape [kv_heads, n] or [n]."""
        made = self.build(*self.context())
        for stored in self.cases(made):
            n, kv_heads = stored.keys.shape[:2]
            scores = made.score(stored)
            assert isinstance(scores, Tensor), f"score returned {type(scores).__name__}: expected a tensor"
            shape = tuple(scores.shape)
            assert shape in ((n,), (kv_heads, n)), f"scores are {shape}: expected ({kv_heads}, {n}) or ({n},)"
            assert not scores.isnan().any(), f"a score of {n} tokens is NaN"

    @since(1, 1)
    def test_declared_inputs_are_fixed(self) -> None:
        """Check that `window`, `loads`, `attention_sums`, `joins_layers` and `rerotates` depend on the options alone.

        Another instance has the same values, and calls of ``score`` do not change them.
        """

        def declared(instance: Compressor) -> tuple[Any, ...]:
            flags = instance.attention_sums, instance.joins_layers, instance.rerotates
            return instance.window, instance.loads, *flags

        made = self.build(*self.context())
        before = declared(made)
        window, loads, *flags = before
        assert type(window) is int and window >= 0, f"window is {window!r}: expected a number from 0"
        right = type(loads) is tuple and set(loads) <= {"keys", "values"}
        assert right, f"loads is {loads!r}: expected a tuple of 'keys' and 'values'"
        assert all(type(flag) is bool for flag in flags), "attention_sums, joins_layers and rerotates are True or False"
        made.score(self.cases(made)[-1])
        assert declared(made) == before, "score changed what the compressor declares; the engine reads it at the start"
        found = declared(self.build(*self.context()))
        assert found == before, "another instance declares other inputs"

    @since(1, 0)
    def test_one_query_is_enough(self) -> None:
        """Check that a compressor that reads queries also scores tokens with a single query, as after a prompt."""
        made = self.build(*self.context())
        if not made.window:
            pytest.skip("the compressor reads no queries")
        stored = stored_tokens(30, 4, 2, 1, sums=made.attention_sums)
        scores = made.score(stored)
        assert not scores.isnan().any(), "a score is NaN"

    @since(1, 2)
    def test_inputs_that_are_not_declared_are_not_read(self) -> None:
        """Check that scores do not depend on keys or values that `loads` omits, which the engine sets to 0."""
        made = self.build(*self.context())
        for stored in self.cases(made):
            unread = {name for name in ("keys", "values") if name not in made.loads}
            zeros: dict[str, Any] = {}
            for name in unread:
                shape = getattr(stored, name).shape
                zeros[name] = torch.zeros(()).expand(shape)
            without = made.score(replace(stored, **zeros))
            same = torch.equal(made.score(stored), without)
            assert same, f"scores depend on {' and '.join(sorted(unread))}: add them to `loads`"

    @since(1, 2)
    def test_joined_layers_have_the_scores_of_each_layer(self) -> None:
        """Check that a compressor that joins layers keeps the same tokens of a layer with and without others."""
        made = self.build(*self.context())
        if not made.joins_layers:
            pytest.skip("the compressor scores one layer at a time")
        sums = made.attention_sums
        for n, (heads, kv_heads) in itertools.product(SIZES, HEADS):
            layers = []
            for layer in range(3):
                layers.append(stored_tokens(n, heads, kv_heads, made.window, layer, sums, layer=layer))
            scores = made.score(joined(layers))
            every_head = (3 * kv_heads, n)
            shape = tuple(scores.shape)
            assert shape in ((n,), every_head), f"scores are {shape}: expected {every_head} or ({n},)"
            of_layers = scores.expand(every_head).view(3, kv_heads, n)
            for layer, found in zip(layers, of_layers, strict=True):
                alone = made.score(layer).expand(kv_heads, n)
                near = torch.allclose(found.float(), alone.float(), rtol=1e-4, atol=1e-5)
                assert near, f"layer {layer.layer} of three has other scores than alone"

    @since(1, 0)
    def test_scores_depend_on_the_arguments_alone(self) -> None:
        """Check that equal arguments give equal scores, also from another instance and after other calls."""
        made = self.build(*self.context())
        other = self.build(*self.context())
        for stored in self.cases(made):
            first = made.score(stored)
            torch.manual_seed(1)
            made.score(stored_tokens(33, 4, 2, made.window, 9, made.attention_sums))
            again = made.score(stored)
            assert torch.equal(first, again), "another call changed the scores of the same tokens"
            torch.manual_seed(2)
            assert torch.equal(first, other.score(stored)), "another instance scores the same tokens otherwise"

    @since(1, 0)
    def test_arguments_and_the_random_state_do_not_change(self) -> None:
        """Check that ``score`` changes none of its tensors, and draws nothing from torch's generator."""
        made = self.build(*self.context())
        state = torch.get_rng_state()
        for stored in self.cases(made):
            found = vars(stored).values()
            parts = [part for part in found if isinstance(part, Tensor)]
            before = [part.clone() for part in parts]
            made.score(stored)
            same = all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))
            assert same, "score changed its arguments: copy them first"
        assert torch.equal(state, torch.get_rng_state()), "score drew from torch's generator: use one of its own"

    @since(1, 0)
    def test_the_engine_serves_it(self, tmp_path: Path) -> None:
        """Check an engine with the compressor.

        A request has the same tokens alone, beside others and with a cached prefix.  With a budget that holds all of
        its tokens, it has the tokens of an engine without the compressor.
        """
        path, *_ = tiny_dir(tmp_path)
        options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "kvcache_block_size": 4}
        if self.subject.entry.label == "minivllm/none":
            pytest.skip("the engine does not call it")
        options["allow_targets"] = self.own_targets()
        prompts = [PROMPT, PROMPT[:19], [59, *PROMPT]]
        with LLM(str(path), compressor=self.choice(), compress_every=5, **options) as llm:
            alone = []
            for prompt in prompts:
                alone += _generated(llm, [prompt], 0.5)
            assert _generated(llm, prompts, 0.5) == alone, "requests have other tokens when they run together"
            compression = llm.stats()["compression"]
            assert compression["compressions"] > 0
            all_kept = _generated(llm, prompts, 1000)
        with LLM(str(path), **options) as llm:
            assert _generated(llm, prompts, 0) == all_kept, "a budget that holds all tokens changes tokens"


def _generated(llm: LLM, prompts: list[list[int]], budget: float) -> list[list[int]]:
    """Return the greedy tokens of some prompts, whose requests have the parameter ``kv_budget``."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, seed=1, kv_budget=budget)
    tokens = []
    for result in llm.generate(prompts, params, use_tqdm=False):
        assert result.error is None, f"a compressed request ended with an error: {result.error}"
        (output,) = result.outputs
        tokens.append(list(output.token_ids))
    return tokens
