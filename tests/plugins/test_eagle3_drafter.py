"""The drafter ``eagle3``: drafts of a head in the published layout compared with a reference, and refused files."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE
from prediction_heads import Eagle3Reference, watch_drafts

from minivllm import LLM, ConfigError, SamplingParams
from minivllm.device.layers.decoder import DecoderBlock
from minivllm.device.layers.heads import EagleHead, VocabularyMap
from minivllm.device.worker import build
from minivllm.device.worker.target_states import Watch
from minivllm.errors import ModelError
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
K, TOKENS = 3, 12
SMALL = {"device": DEVICE, "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 6}


class Case:
    def __init__(self, folder, family):
        # the layers of config.json, or EAGLE-3's for a model of 8 layers
        layers, received = ((1, 2, 3), True) if family != "llama" else ((2, 4, 5), False)
        self.folder, _, self.model = tiny_dir(
            folder / "model", family, eos_token_id=60, num_hidden_layers=4 if received else 8
        )
        self.head = Eagle3Reference(self.model, layers, received)
        self.files = self.head.write(folder / "head")
        g = torch.Generator().manual_seed(4)
        draw = lambda n: torch.randint(3, 60, (n,), generator=g).tolist()  # noqa: E731
        begin = draw(37)
        self.prompts = [draw(1), draw(4), draw(19), begin + draw(9), begin + draw(22), draw(70)]
        with LLM(str(self.folder), drafter="none", **SMALL) as llm:
            self.want = tokens(llm, self.prompts)
        self.known = {}

    def expected(self, history, k):
        key = (*history, -1, k)
        if key not in self.known:
            self.known[key] = self.head.drafts(list(history), k)
        return self.known[key]

    def engine(self, files=None, **options):
        options = {"num_speculative_tokens": K, "speculate": "always", **SMALL, **options}
        drafter = {"name": "eagle3", "options": {"model": str(files or self.files)}}
        return LLM(str(self.folder), drafter=drafter, **options)


def tokens(llm, prompts, **params):
    params = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **params})
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(out.error for out in outs), [out.error for out in outs]
    llm.check()
    return [[o.tokens for o in out.outputs] for out in outs]


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_5"])
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def seen(case, monkeypatch):
    return watch_drafts(monkeypatch, case.prompts, case.want)


WAYS = {
    "whole": {},
    "chunks, rows wait": {"max_num_seqs": 3, "max_num_batched_tokens": 9, "kvcache_block_size": 8},
    "preempted": {"num_kvcache_blocks": 12, "kvcache_block_size": 16},
    "batch invariant": {"batch_invariant": True, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_those_of_the_reference_and_change_no_token(case, way, seen):
    with case.engine(**WAYS[way]) as llm:
        for _ in range(2):  # the second time with prefix hits
            assert tokens(llm, case.prompts) == case.want
        assert llm.stats()["speculation"]["failed"] is None
    assert len(seen) > 40
    wrong = [(row, drafts) for row, drafts in seen if drafts != case.expected(row, len(drafts))]
    assert not wrong, f"{len(wrong)} of {len(seen)}: {wrong[0][1]}, expected {case.expected(wrong[0][0], K)}"


def test_sampled_rows_get_drafts_of_the_reduced_vocabulary_only(case, seen):
    found = {}
    for name in ("none", "eagle3"):
        options = {"batch_invariant": True, **SMALL}
        with LLM(str(case.folder), drafter="none", **options) if name == "none" else case.engine(**options) as llm:
            ways = {"n": 2, "temperature": 0.9, "seed": 5}, {"temperature": 0.7, "top_p": 0.9, "seed": 1}
            found[name] = [tokens(llm, case.prompts, **way) for way in ways]
    assert found["none"] == found["eagle3"]
    marked = case.head.t2d.nonzero()[:, 0].tolist()
    assert {draft for _, drafts in seen for draft in drafts} <= {*marked}


# ---- refused files -------------------------------------------------------------------------------------------------

D2T = torch.arange(40)
IDS = "eagle_aux_hidden_state_layer_ids"
REFUSED = {
    "another vocabulary": ({"vocab_size": 62}, {}, ModelError, "vocab_size=62; expected 61"),
    "another hidden size": ({"hidden_size": 64}, {}, ModelError, "hidden_size=64; expected 32"),
    "another family": ({"model_type": "qwen3"}, {}, ModelError, "model_type='qwen3'"),
    "layers of another model": (
        {"eagle_config": {IDS: [2, 16, 29]}}, {}, ModelError, r"eagle_config\.eagle_aux.*=\[2, 16, 29\]: .* from 0 to ",
    ),
    "no numbers of layers": ({IDS: [[2], 4, 5]}, {}, ModelError, r"layer_ids=\[\[2\], 4, 5\]: expected a list"),
    "no list of layers": ({IDS: "2"}, {}, ModelError, "layer_ids='2': expected a list of different layers from 1 to"),
    "a layer twice": ({"eagle_config": {IDS: [1, 1]}}, {}, ModelError, "expected a list of different layers"),
    "the input of the first layer": ({IDS: [0, 1, 2]}, {}, ModelError, "different layers from 1 to"),
    "two lists": (
        {IDS: [1, 2, 3], "eagle_config": {IDS: [1, 2]}}, {}, ModelError, r"which are outputs: expected \[2, 3\]",
    ),
    "eagle_config is no object": ({"eagle_config": 3}, {}, ModelError, "eagle_config=3: expected an object"),
    "no states of layers": (
        {"eagle_config": {"use_aux_hidden_state": False}}, {}, ModelError, "use_aux_hidden_state=false",
    ),
    "no last norm": ({"use_last_layernorm": False}, {}, ModelError, "use_last_layernorm=false, which is not impl"),
    "no first norm": (
        {"eagle_config": {"use_input_layernorm_in_first_layer": False}}, {}, ModelError, "in_first_layer=false",
    ),
    "no map": ({}, {"d2t": None}, ModelError, "expected a tensor d2t"),
    "no product of the states": ({}, {"fc.weight": None}, ConfigError, "has no tensor fc"),
    "no layer": ({}, {"midlayer.self_attn.k_proj.weight": None}, ConfigError, r"no tensor midlayer\.self_attn\.k"),
    "too many drafted tokens": ({"draft_vocab_size": 90}, {}, ModelError, "draft_vocab_size=90: expected 1 to 61"),
    "a map of another size": ({"draft_vocab_size": 39}, {}, ModelError, r"has shape \[40"),
    "norm_before_residual": ({"norm_before_residual": True}, {}, ModelError, "norm_before_residual"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_files_are_refused_before_weights_are_read(case, what, tmp_path, monkeypatch):
    config, change, error, words = REFUSED[what]
    files = case.head.write(tmp_path / "head", change, **config)
    load = build.load_weights
    monkeypatch.setattr(
        build, "load_weights", lambda folder, *a: pytest.fail("read") if folder == str(files) else load(folder, *a)
    )
    with pytest.raises(error, match=words):
        case.engine(files)


@pytest.mark.parametrize(
    "d2t, words", [(D2T + 30, "maps an output to 6"), (-D2T, "a token id twice"), (D2T * 0, "name different")]
)
def test_a_map_that_leads_elsewhere_is_refused(case, d2t, words, tmp_path):
    files = case.head.write(tmp_path / "head", {"d2t": d2t})
    with pytest.raises(ModelError, match=words):
        case.engine(files)


def test_a_map_of_token_ids_in_place_of_differences_is_refused(case, tmp_path):
    head = Eagle3Reference(case.model, case.head.layers, case.head.received, drafted=20)
    ids = torch.arange(20) + 1
    files = head.write(tmp_path / "head", {"d2t": ids, "t2d": None})
    with pytest.raises(ModelError, match="d2t of the drafter's head holds token ids; expected their differences"):
        case.engine(files)


@pytest.mark.parametrize("layers", [(1, 3, 2), (2,)])
@pytest.mark.parametrize("where", ["outputs", "inputs", "both"])
def test_layers_of_config_json_are_read_by_either_convention(case, layers, where, tmp_path, seen, monkeypatch):
    """One layer has the width of the head's own states, and its states pass ``fc`` too."""
    head = Eagle3Reference(case.model, layers)
    config = {} if where == "outputs" else {IDS: list(layers)}
    if where == "inputs":
        config["eagle_config"] = {IDS: []}
    monkeypatch.setattr(case, "files", head.write(tmp_path / "head", **config))
    with case.engine() as llm:
        assert tokens(llm, case.prompts[1:4]) == case.want[1:4]
        points = ", ".join(f"layers.{i}.input" for i in layers)
        assert f"reads {points}" in str(llm.explain())
    assert seen and all(drafts == head.drafts(row, len(drafts)) for row, drafts in seen)


def test_the_option_model_is_needed():
    with pytest.raises(ModelError, match="drafter minivllm/eagle3: its option 'model' is not set"):
        LLM("pocket", device="cpu", drafter="eagle3")


# ---- planted faults ------------------------------------------------------------------------------------------------


def off_by_one(self, part, param, tensor, load=VocabularyMap.load):
    load(self, part, param, tensor)
    self.ids.sub_(1).clamp_(min=0)


def swapped_points(self, point, x, call=Watch.__call__):
    first, second, _ = self.states.first
    call(self, {first: second, second: first}.get(point, point), x)


def normed_states(self, step, call=EagleHead.__call__):
    """Passes states behind the norm to the next draft."""
    return self.norm(call(self, step))[0]


def later_states(self, h, residual, step, call=DecoderBlock.__call__):
    """Hands over the residual stream before the layer."""
    h, new = call(self, h, residual.clone(), step)
    if self.follower == "layers.2.input" and step.watch is not None:
        step.watch("layers.2.input", residual)
        step.watch.points = step.watch.points - {"layers.2.input"}
    return h, new


FAULTS = {
    "vocabulary map off by one": (VocabularyMap, "load", off_by_one),
    "two layers swapped": (Watch, "__call__", swapped_points),
    "states behind the norm": (EagleHead, "__call__", normed_states),
    "states of the layer before": (DecoderBlock, "__call__", later_states),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_drafts_and_no_token(case, fault, seen, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    if fault.startswith("vocabulary"):
        monkeypatch.setattr(VocabularyMap, "finish", lambda self: None)  # which compares it with t2d
    with case.engine() as llm:
        assert tokens(llm, case.prompts) == case.want
    assert any(drafts != case.expected(row, len(drafts)) for row, drafts in seen)
