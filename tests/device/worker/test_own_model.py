"""A processor with a model of its own: the logits that it is given are those of that model behind the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.core.interfaces.sampling import Processor, Row
from minivllm.core.wiring import wiring_from_json, wiring_to_json
from minivllm.device.worker.own_model import OwnModel
from minivllm.errors import ConfigError, PluginError
from minivllm.plugins.executor.local import Local
from minivllm.registration.spec import ANY, Spec
from minivllm.registry import Catalog
from minivllm.testing.tiny import tiny_dir

OPTIONS = "minivllm.plugins.drafter.options:ModelOptions"


def spec(name, *more, options=OPTIONS):
    return Spec(
        f"{__name__}:{name}",
        (1, 4),
        "for a test",
        limits={"device": ANY},
        features=frozenset({"own_model", *more}),
        options=options,
    )


class Instead(Processor):
    """Draws from its own model where a request says so."""

    spec = spec("Instead")
    reads = frozenset({"instead"})

    def bind(self, params, prompt_len):
        return Row() if params.extra.get("instead") else None

    def apply(self, logits, rows, state):
        logits.copy_(rows.own_logits)


class Captured(Instead):
    spec = spec("Captured", "graph_safe")


class Several(Instead):
    spec = spec("Several", "multi_position")


class Nameless(Instead):
    spec = spec("Nameless", options="")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Create a model and a smaller one with other weights."""
    return [
        tiny_dir(tmp_path_factory.mktemp(name), num_hidden_layers=layers, seed=seed, eos_token_id=60)[0]
        for name, layers, seed in (("large", 2, 1), ("small", 1, 5))
    ]


def options(pair, name="Instead", **more):
    own = {"name": f"{__name__}:{name}", "options": {"model": str(pair[1])} if name != "Nameless" else {}}
    base = {
        "model": str(pair[0]),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 6,
        "max_model_len": 128,
        "kvcache_block_size": 4,
        "num_kvcache_blocks": 120,
        "max_num_batched_tokens": 24,
        "processors": [own, "penalties"],
        "allow_targets": [__name__],
    }
    return {**base, **more}


PROMPTS = [[(7 * j) % 60 for j in range(18)] + [(i * i + 5 * j) % 60 for j in range(3 * i + 1)] for i in range(6)]


def params(**more):
    base = {"max_tokens": 24, "ignore_eos": True, "seed": 4}
    return [SamplingParams(**base, temperature=i % 2 * 0.8, n=1 + i % 3, **more) for i in range(len(PROMPTS))]


def tokens(engine, requested, prompts=PROMPTS):
    return [[c.token_ids for c in out.outputs] for out in engine.generate(prompts, requested, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(pair):
    """Return the tokens of each model in an engine without the other."""
    found = []
    for folder in pair:
        with LLM(**options(pair, model=str(folder), processors=["penalties"], batch_invariant=True)) as engine:
            found.append(tokens(engine, params()))
    return found


@pytest.mark.parametrize(
    "more",
    [{}, {"num_kvcache_blocks": 30}, {"enable_prefix_caching": False}, {"executor": "process"}],
    ids=lambda more: "".join(more) or "plain",
)
def test_tokens_of_rows_that_ask_are_those_of_the_second_model_alone(pair, alone, more):
    """Beside rows that do not, in chunks, preempted, after prefix hits and as branches: bit for bit."""
    mixed = [b if i % 2 else a for i, (a, b) in enumerate(zip(params(), params(extra={"instead": True}), strict=True))]
    with LLM(**options(pair, batch_invariant=True, **more)) as engine:
        assert tokens(engine, params(extra={"instead": True})) == alone[1] != alone[0]
        assert tokens(engine, params()) == alone[0]
        assert tokens(engine, mixed) == [alone[i % 2][i] for i in range(len(PROMPTS))]
        stats = engine.stats()
    assert stats["preemptions"] > 0 or "num_kvcache_blocks" not in more


def test_a_row_that_gets_a_twin_of_its_block_has_the_second_model_read_it_again(pair):
    """Two rows compute the same prompt in one step.  The one that asks then shares the other's blocks, of which the
    second model has read nothing."""
    prompt, requested = PROMPTS[0][:11], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(**options(pair, model=str(pair[1]), processors=["penalties"], batch_invariant=True)) as engine:
        want = tokens(engine, requested, [prompt])
    with LLM(**options(pair, batch_invariant=True)) as engine:
        both = tokens(engine, [requested, replace(requested, extra={"instead": True})], [prompt] * 2)
        assert engine.stats()["steps"] == 24
    assert both[1:] == want != both[:1]


def test_a_second_model_that_raises_ends_the_rows_that_ask(pair, alone, monkeypatch):
    def fails(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(OwnModel, "logits_behind", fails)
    mixed = [params(extra={"instead": True})[0], params()[1]]
    with LLM(**options(pair, batch_invariant=True)) as engine:
        requested, plain = engine.generate(PROMPTS[:2], mixed, use_tqdm=False)
    assert "out of luck" in requested.error and plain.error is None
    assert [c.token_ids for c in plain.outputs] == alone[0][1]


def test_the_second_model_takes_its_share_of_the_cache_and_of_the_weights(pair):
    sizes = []
    for processors in (["penalties"], options(pair)["processors"]):
        with LLM(**options(pair, processors=processors)) as engine:
            sizes.append((engine.engine.capacity.block_bytes[0], engine.engine.capacity.weight_bytes))
    assert sizes[1][0] == 1.5 * sizes[0][0], "three layers where there were two"
    assert sizes[1][1] > sizes[0][1]


def wire(pair, name="Instead", **more):
    return resolve(EngineConfig(**options(pair, name, **more)), Catalog.discover(environ={})).wiring


def test_a_wiring_with_a_second_model_survives_json(pair):
    wiring = wire(pair)
    assert [m.model_dir for m in wiring.own_models.values()] == [str(pair[1])]
    assert wiring_from_json(wiring_to_json(wiring)) == wiring


@pytest.mark.parametrize(
    "name, message", [("Captured", "own_model and graph_safe"), ("Several", "own_model and multi_po")]
)
def test_a_spec_that_claims_what_a_second_model_cannot_is_refused(pair, name, message):
    with pytest.raises(PluginError, match=message):
        wire(pair, name)


def test_a_spec_without_an_option_that_names_the_model_is_refused(pair):
    with pytest.raises(PluginError, match=r"claims own_model, and its option 'model' is None; expected a path"):
        wire(pair, "Nameless")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"vocab_size": 77}, r"the model of .*:Instead, .*other has vocab_size=77; expected 61"),
        ({"max_position_embeddings": 64}, r"other has max_position_embeddings=64; expected at least max_model_len=128"),
    ],
)
def test_a_second_model_that_does_not_fit_is_refused_by_name(pair, tmp_path, values, message):
    other, _, _ = tiny_dir(tmp_path / "other", **values)
    with pytest.raises(ConfigError, match=message):
        wire([pair[0], other])


def test_an_executor_that_runs_no_second_model_is_refused_at_the_start(pair, monkeypatch):
    start = Local.start
    monkeypatch.setattr(Local, "start", lambda self, wiring: replace(start(self, wiring), own_models=False))
    with pytest.raises(ConfigError, match="a model of its own, which the executor minivllm/local does not run"):
        LLM(**options(pair))
