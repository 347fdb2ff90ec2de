"""Compressors that rotate kept keys to new positions, compared with transformers models whose cache is reassigned."""

from __future__ import annotations

import pytest
import torch
from compression_reference import preempt_often
from transformers import DynamicCache

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.decoder import Rope
from minivllm.device.layers.rotary import inverse_frequencies, rotary_tables, rotate
from minivllm.device.worker import compaction
from minivllm.device.worker.compaction import Compactor
from minivllm.device.worker.state import DeviceState
from minivllm.errors import ConfigError
from minivllm.plugin import Compressor, Tap
from minivllm.testing.tiny import LLAMA3_ROPE, tiny_dir

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8, 11, 22, 34, 45, 31, 10, 4, 18, 15]
OTHER = [59, *PROMPT[::-1], 3]
STREAMING = {"name": "streaming", "options": {"rerotate": True, "sinks": 2}}
FAMILIES = {"llama": {}, "llama 3": {"rope_parameters": LLAMA3_ROPE}, "qwen3": {}, "phi3": {}, "mixtral": {}}
KEPT = [Tap("compression.kept", read=True)]


class LargeValues(Compressor):
    """Keep the tokens with the largest values, other ones in each layer and head."""

    rerotates = True

    def score(self, stored):
        return stored.values.float().norm(dim=-1).T


class HeavyHitters(Compressor):
    """Keep the tokens with the most attention, at new positions."""

    rerotates = True
    attention_sums = True

    def score(self, stored):
        return stored.attention_sums


SCORERS = {"streaming": STREAMING, "values": LargeValues, "sums": HeavyHitters}


def engine(path, compressor, **options):
    defaults = dict(skip_tokenizer_init=True, dtype="float32", max_num_seqs=8, max_model_len=128, kvcache_block_size=4)
    return LLM(str(path), compressor=compressor, **{**defaults, "compress_every": 5, **options})


def params(**values):
    return SamplingParams(**{**dict(temperature=0, max_tokens=17, ignore_eos=True, seed=7, kv_budget=0.5), **values})


def model_of(tmp_path, family):
    path, cfg, hf = tiny_dir(tmp_path, family.split()[0], **FAMILIES[family])
    return path, cfg, hf


class Reassigned:
    """A model of transformers whose cache is compressed, with the kept keys at new positions."""

    def __init__(self, hf, dtype):
        self.hf = hf.to(dtype)
        hf.set_experts_implementation("eager")
        self.rotary = next(m for name, m in hf.named_modules() if name.endswith("rotary_emb"))
        self.cache = DynamicCache(config=hf.config)
        self.stored = 0
        self.alive = None  # logical positions [kv_heads, stored] of each layer

    def forward(self, tokens):
        """Return the logits of new tokens, whose positions follow those of the stored tokens."""
        at = torch.arange(self.stored, self.stored + len(tokens))[None]
        with torch.inference_mode():
            out = self.hf(torch.tensor([tokens]), past_key_values=self.cache, position_ids=at)
        self.stored += len(tokens)
        return out.logits[0]

    def tables(self, positions, like):
        """Return cos and sin of positions, and the factor by which both are scaled."""
        cos, sin = self.rotary(like.double(), positions[None])
        scale = getattr(self.rotary, "attention_scaling", 1.0)
        return cos[0].double() / scale, sin[0].double() / scale

    def turn(self, x, positions, back):
        """Rotate keys [n, dim] in float64 by their positions, or back."""
        cos, sin = self.tables(positions, x)
        dim = cos.shape[-1]
        head, rest = x[:, :dim].double(), x[:, dim:].double()
        half = torch.cat((-head[:, dim // 2 :], head[:, : dim // 2]), dim=-1)
        return torch.cat((head * cos + half * sin * (-1 if back else 1), rest), dim=-1)

    def compress(self, kept):
        """Keep the tokens with the logical positions ``kept`` [kv_heads, k] of each layer."""
        computed = self.stored if self.alive is None else None
        for layer, positions in kept.items():
            store = self.cache.layers[layer]
            chosen = torch.from_numpy(positions)
            alive = torch.arange(computed) if computed else None
            keys, values = [], []
            for head, wanted in enumerate(chosen):
                there = alive if alive is not None else self.alive[layer][head]
                index = torch.searchsorted(there, wanted)
                plain = self.turn(store.keys[0, head, index], index, back=True)
                keys.append(self.turn(plain, torch.arange(len(index)), back=False))
                values.append(store.values[0, head, index])
            store.keys = torch.stack(keys)[None].to(store.keys.dtype)
            store.values = torch.stack(values)[None]
        self.alive = {layer: torch.from_numpy(positions).clone() for layer, positions in kept.items()}
        self.stored = next(iter(kept.values())).shape[1]

    def grow(self, computed, tokens):
        """Note the logical positions of tokens that were stored behind a compression."""
        more = torch.arange(computed, computed + tokens)
        for layer, alive in (self.alive or {}).items():
            self.alive[layer] = torch.cat((alive, more.expand(len(alive), -1)), dim=1)


def replayed(hf, dtype, prompt, tokens, kept):
    """Return the logits [tokens, V] before each token, with the compressions ``kept`` of an output."""
    model, events = Reassigned(hf, dtype), {event.computed: event.positions for event in kept}
    found, computed = [], 0
    for part in (prompt, *([token] for token in tokens[:-1])):
        found.append(model.forward(part)[-1])
        model.grow(computed, len(part))
        computed += len(part)
        if computed in events:
            model.compress(events[computed])
    return torch.stack(found).double()


def compare(hf, dtype, out, prompt=PROMPT):
    tokens = list(out.outputs[0].token_ids)
    logits = replayed(hf, dtype, prompt, tokens, out.taps["compression.kept"])
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    found = torch.tensor([next(iter(p.values())).logprob for p in out.outputs[0].logprobs])
    assert (found - expected).abs().max() < 1e-4


def serve(path, compressor, **options):
    with engine(path, compressor, **options) as llm:
        outs = llm.generate([PROMPT, OTHER], params(logprobs=1), use_tqdm=False, taps=KEPT)
        assert [out.error for out in outs] == [None, None]
        assert llm.stats()["compression"]["compressions"] >= 8
    return outs


@pytest.mark.parametrize("options", [{}, {"graph": "off", "max_num_batched_tokens": 11}])
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_with_reassigned_positions(family, scorer, options, tmp_path):
    path, _, hf = model_of(tmp_path, family)
    own, other = serve(path, SCORERS[scorer], **options)
    for dtype in (torch.float32, torch.float64):
        compare(hf, dtype, own)
        compare(hf, dtype, other, OTHER)


def test_scaled_rotations_and_second_tables_turn_by_the_difference_of_positions():
    numbers = {"short_factor": (1.0,) * 8, "long_factor": (2.0,) * 8, "factor": 4.0}
    numbers |= {"original_max_position_embeddings": 16}
    for rope, scaled in ((Rope(16, 1e4), False), (Rope(16, 1e4, "longrope", tuple(numbers.items()), 16), True)):
        cos, sin = rotary_tables(rope, 65, "cpu", twice=True)
        for first, long in ((0, 0), (65, 64)):
            inv, scale = inverse_frequencies(rope, long)
            assert (scale != 1) == scaled
            made = object.__new__(Compactor)
            made.rotations = {0: (cos, sin)}
            made.state = type("State", (), {"rope_first": torch.tensor([first]), "dropped": torch.zeros(1, 1).long()})
            tokens = torch.tensor([[0, 1, 7, 30], [3, 5, 40, 63]])
            layer = type("Layer", (), {"index": 0, "group": 0})
            row = compaction.CompactedRow(0, tokens, 64, 4, 64)
            x = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(1))
            turned = rotate(x, *made._rotation(layer, row, tokens))
            angle = (torch.arange(4) - tokens)[..., None].double() * inv.double().repeat(2)
            half = torch.cat((-x[..., 8:16], x[..., :8]), dim=-1).double()
            head, rest = x[..., :16].double(), x[..., 16:].double()
            expected = torch.cat((head * angle.cos() + half * angle.sin(), rest), dim=-1)
            assert (turned - expected).abs().max() < 2e-5


def keys_rotated_twice(monkeypatch):
    monkeypatch.setattr(compaction, "rotate", lambda x, cos, sin: rotate(rotate(x, cos, sin), cos, sin))


def keys_not_rotated(monkeypatch):
    monkeypatch.setattr(compaction, "rotate", lambda x, cos, sin: x)


def rotation_of_another_head(monkeypatch):
    monkeypatch.setattr(compaction, "rotate", lambda x, cos, sin: rotate(x, cos.flip(0), sin.flip(0)))


def positions_count_removed_tokens(monkeypatch):
    real = Compactor.apply

    def apply(self, delta):
        before = self.state.rope_first.clone()
        found = real(self, delta)
        self.state.rope_first.copy_(before)
        return found

    monkeypatch.setattr(Compactor, "apply", apply)


def positions_stay_at_reset(monkeypatch):
    real = DeviceState._join

    def join(self, *args):
        before = self.rope_first.clone()
        real(self, *args)
        self.rope_first.copy_(before)

    monkeypatch.setattr(DeviceState, "_join", join)


FAULTS = (
    keys_rotated_twice,
    keys_not_rotated,
    rotation_of_another_head,
    positions_count_removed_tokens,
    positions_stay_at_reset,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_rotation_is_caught(fault, tmp_path, monkeypatch):
    path, _, hf = tiny_dir(tmp_path)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        with engine(path, LargeValues, max_num_seqs=1) as llm:
            for _ in range(2):  # the second request has the slot of the first
                (out,) = llm.generate([PROMPT], params(logprobs=1), use_tqdm=False, taps=KEPT)
        compare(hf, torch.float32, out)


@pytest.mark.parametrize("scorer", SCORERS)
def test_batches_chunks_hits_forks_and_preemptions_change_no_token(scorer, tmp_path, monkeypatch):
    path, *_ = tiny_dir(tmp_path)
    prompts = [PROMPT, PROMPT[:19], [59, *PROMPT], PROMPT]

    def run(llm, requested, **values):
        return [out.outputs[0].token_ids for out in llm.generate(requested, params(**values), use_tqdm=False)]

    with engine(path, SCORERS[scorer], enable_prefix_caching=False) as llm:
        alone = [run(llm, [prompt])[0] for prompt in prompts]
        (out,) = llm.generate([PROMPT], params(n=3), use_tqdm=False)
        assert [one.token_ids for one in out.outputs] == [alone[0]] * 3
    with engine(path, SCORERS[scorer]) as llm:
        assert run(llm, prompts) == run(llm, prompts) == alone
    with engine(path, SCORERS[scorer], max_num_batched_tokens=9) as llm:
        assert run(llm, prompts) == alone, "in chunks"
    preempt_often(monkeypatch)
    with engine(path, SCORERS[scorer], max_num_batched_tokens=21) as llm:
        assert run(llm, prompts) == alone, "preempted"
        assert llm.stats()["preemptions"] > 4


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_budget_that_holds_all_tokens_changes_nothing(scorer, tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, SCORERS[scorer]) as llm, engine(path, "none", compress_every=0) as plain:
        kept = llm.generate([PROMPT], params(kv_budget=100), use_tqdm=False)
        expected = plain.generate([PROMPT], params(kv_budget=0), use_tqdm=False)
    assert kept[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_positions_after_a_compression_stay_below_the_stored_tokens(tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, STREAMING, run_ahead=0) as llm:
        state, seen = llm.engine.executor.runner.state, set()
        step = llm.engine.step

        def watched():
            result = step()
            for slot in llm.engine.slots.running.tolist():
                seen.add((int(state.dropped[0, slot]), int(state.rope_first[slot])))
            return result

        llm.engine.step = watched
        llm.generate([PROMPT], params(), use_tqdm=False)
    assert len(seen) >= 4 and all(first == -dropped for dropped, first in seen)


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.parametrize(
    ("family", "changes", "options", "reported"),
    [
        ("llama", {}, {"kv_format": "int8"}, "kv_format=int8 stores rounded keys"),
        ("llama", {}, {"kv_format": "fp8"}, "kv_format=fp8 stores rounded keys"),
        ("llama", {}, {"drafter": "ngram"}, "drafter=ngram needs all tokens"),
        ("gemma3", WINDOWS, {}, "a sliding window"),
        ("gpt2", {}, {}, "has no rotary embedding"),
        ("llama", {}, {"model_impl": "transformers"}, "does not describe its rotary embedding"),
        ("qwen3_5", {}, {}, "recurrent states"),
    ],
)
@pytest.mark.parametrize("scorer", ["streaming", "values"])
def test_choices_without_new_positions_are_refused_by_name_before_weights_are_read(
    scorer, family, changes, options, reported, tmp_path
):
    path, *_ = tiny_dir(tmp_path, family, **changes)
    for file in path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match=reported):
        LLM(str(path), skip_tokenizer_init=True, compressor=SCORERS[scorer], **options)


def test_keys_keep_their_positions_by_default(tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, "streaming") as llm:
        assert llm.engine.executor.runner.state.rope_first is None
        assert "compressor.positions" not in llm.explain("compressor")
    with engine(path, STREAMING) as llm:
        assert "rotated to the positions 0, 1" in llm.explain("compressor")
