"""The compressor under the kit and beside the presses: with kvpress where it is installed, else with a stand-in."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import kvpress
import pytest
import torch
from kvpress.presses.scorer_press import ScorerPress
from minivllm_kvpress.compressor import PressCompressor, attention_of, usable_presses
from minivllm_kvpress.options import PressOptions
from minivllm_kvpress.supported import REFUSED

from minivllm import LLM, SamplingParams
from minivllm.plugin import CompressorContext, ConfigError, PluginError, StoredTokens
from minivllm.testing import CompressorConformance

NAME = "minivllm-kvpress/kvpress"
STAND_IN = str(Path(__file__).parent / "stand_in")
INSTALLED = not kvpress.__file__.startswith(STAND_IN)
SHAPES = ((8, 8, 64), (8, 2, 64), (16, 4, 128))  # query heads, KV heads, dimension


@dataclass
class ValuesPress(ScorerPress):
    """A press of a user, that reads values."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return values.norm(dim=-1)


@dataclass
class RotatingPress(ScorerPress):
    """A press of a user, that reads the rotation of the layer."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys.norm(dim=-1) * kwargs["position_embeddings"][0]


@dataclass
class DrawingPress(ScorerPress):
    """A press of a user, that draws random numbers."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.rand(keys.shape[:-1])


@dataclass
class ChoosingPress(ScorerPress):
    """A press of a user with a choice of its own."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[:, :, ::2], values[:, :, ::2]


def built(press, options=None, window=None):
    """Return the compressor of a press."""
    chosen = PressOptions(press=press, options=options or {}, window=window)
    return PressCompressor(chosen, CompressorContext("cpu", "float32", 4096))


def stored_tokens(n, shape, keep, window, seed):
    """Return random stored tokens."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(n, kv_heads, dim, generator=generator) for _ in range(2))
    queries = torch.randn(window, heads, dim, generator=generator) if window else None
    return StoredTokens(0, keys, values, queries, dim**-0.5, keep, n, seed)


class TestKnorm(CompressorConformance):
    plugin = NAME


class TestSnapKV(CompressorConformance):
    plugin = NAME
    options = {"press": "SnapKVPress", "options": {"window_size": 8}}


class TestStreaming(CompressorConformance):
    plugin = NAME
    options = {"press": "StreamingLLMPress", "options": {"n_sink": 2}}


class TestRandom(CompressorConformance):
    plugin = NAME
    options = {"press": "RandomPress", "options": {"seed": 5}}


class TestOwnPress(CompressorConformance):
    plugin = NAME
    options = {"press": f"{__name__}:ValuesPress"}


@pytest.mark.skipif(INSTALLED, reason="kvpress is installed")
def test_the_message_without_kvpress_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != STAND_IN])
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvpress"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"kvpress, which is not installed.*pip install 'kvpress>=0\.5\.5'"):
        LLM("pocket", compressor=NAME)


@pytest.mark.parametrize("press", [name for name in REFUSED if hasattr(kvpress, name)])
def test_a_press_that_needs_more_than_stored_tokens_is_refused_with_the_reason(press):
    with pytest.raises(PluginError) as caught:
        built(press)
    assert press in str(caught.value) and REFUSED[press] in str(caught.value)


def test_every_scorer_that_is_not_refused_scores_stored_tokens():
    assert {"KnormPress", "KeyDiffPress", "SnapKVPress", "StreamingLLMPress"} <= set(usable_presses())
    for press in usable_presses():
        made = built(press, {"seed": 1} if press == "RandomPress" else None)
        scores = made.score(stored_tokens(300, (8, 2, 64), 100, made.window, 3))
        assert scores.shape == (2, 300) and not scores.isnan().any(), press


def test_no_class_of_kvpress_is_forgotten():
    classes = {name for name, value in vars(kvpress).items() if isinstance(value, type) and "Press" in name}
    scorers = {name for name in classes if issubclass(getattr(kvpress, name), kvpress.BasePress)}
    assert scorers - set(REFUSED) == set(usable_presses())


@pytest.mark.parametrize("press", sorted(usable_presses()))
def test_the_engine_keeps_the_tokens_that_the_press_keeps(press):
    for seed in range(6):
        for shape in SHAPES:
            for n in (257, 600):
                keep = n // 2
                made = built(press, {"seed": seed} if press == "RandomPress" else None)
                stored = stored_tokens(n, shape, keep, made.window, seed)
                order = made.score(stored).expand(shape[1], -1).sort(dim=-1, descending=True, stable=True).indices
                ours = stored.keys.transpose(0, 1).gather(1, order[:, :keep, None].expand(-1, -1, shape[2]))
                theirs = kept_by_press(made.press, stored)
                assert torch.equal(ours.sum(-1).sort().values, theirs.sum(-1).sort().values), (press, seed, shape, n)


def kept_by_press(press, stored):
    """Return the keys [kv_heads, keep, dim] that the press itself keeps."""
    n, kv_heads, dim = stored.keys.shape
    heads = kv_heads if stored.queries is None else stored.queries.shape[1]
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    module = SimpleNamespace(config=config, head_dim=dim, layer_idx=0)
    keys, values = (x.transpose(0, 1)[None] for x in (stored.keys, stored.values))
    attention = None if stored.queries is None else attention_of(stored)
    press.compression_ratio = 0.5
    return press.compress(module, torch.empty(1, n, 1), keys, values, attention, {})[0][0]


def test_attention_of_the_window_is_causal_and_sums_to_one():
    stored = stored_tokens(50, (8, 2, 64), 25, 6, 1)
    found = attention_of(stored)
    assert found.shape == (1, 8, 6, 50)
    assert torch.allclose(found.sum(-1), torch.ones(1, 8, 6))
    assert not found[..., 44:].triu(1).any()
    keys = stored.keys.repeat_interleave(4, dim=1).double()
    scores = torch.einsum("hd,nhd->hn", stored.queries[2].double(), keys[:47]) * stored.scale
    assert torch.allclose(found[0, :, 2, :47].double(), scores.softmax(-1), atol=1e-6)


@pytest.mark.parametrize(
    ("press", "options", "window", "message"),
    [
        ("NoSuchPress", {}, None, "no such class; expected module:Class, or one of .*KnormPress"),
        ("KnormPress", {"sinks": 3}, None, "KnormPress has no such argument; it has none"),
        ("SnapKVPress", {"windows": 3}, None, "SnapKVPress has no such argument; it has window_size, kernel_size"),
        ("KnormPress", {"compression_ratio": 0.5}, None, "the kv_budget of a request"),
        ("SnapKVPress", {"window_size": 8}, 16, "SnapKVPress reads 8 queries"),
        ("RandomPress", {}, None, "set its option seed"),
        ("CURPress", {"use_random_leverage": True}, None, "set it to false"),
        (f"{__name__}:RotatingPress", {}, None, "reads position_embeddings of the layer's arguments"),
        (f"{__name__}:DrawingPress", {}, None, "draws from torch's generator"),
        (f"{__name__}:ChoosingPress", {}, None, "its own `compress`"),
        (f"{__name__}:PressOptions", {}, None, "it is no ScorerPress"),
    ],
)
def test_a_press_or_option_that_cannot_be_used_is_refused_by_name(press, options, window, message):
    with pytest.raises(PluginError, match=message):
        built(press, options, window)


def test_a_request_of_the_engine_is_compressed_by_the_press():
    choice = {"name": NAME, "options": {"press": "KeyDiffPress"}}
    prompt = [(7 * i) % 200 + 3 for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, kv_budget=0.5)
    found = []
    for compressor in (choice, "keydiff"):
        with LLM("pocket", dtype="float32", compressor=compressor) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert llm.stats()["compression"]["compressions"] == 1
        found.append(list(output.outputs[0].token_ids))
    assert found[0] == found[1]
