"""Captured steps with images on a CPU, compared with transformers; run by device/worker/test_graphs.py."""

from __future__ import annotations

import pytest
import torch
from adapters import lora, write_adapter
from cpu_captures import cpu_captures
from image_models import SIZES, Reference, make, picture, prompt_of

from minivllm import LLM, SamplingParams
from minivllm.device.worker import graphs
from minivllm.device.worker.drafted_steps import DraftedKey
from minivllm.device.worker.graph_keys import AdaptedKey, ImagedKey
from minivllm.device.worker.image_steps import FixedFeatures, ImageSteps
from minivllm.plugins.adapter import lora_memory

torch.set_num_threads(1)
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
OPTIONS = {
    "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "attention": "cpu_captures:OnDevice",
    "max_num_seqs": 5, "num_kvcache_blocks": 60, "kvcache_block_size": 16, "max_num_batched_tokens": 64,
    "max_model_len": 256, "graph_captures": "start", "allow_targets": ["cpu_captures"],
}  # fmt: skip

DRAFTS = {"drafter": "ngram", "num_speculative_tokens": 2, "speculate": "always", "captured_drafts": True}
LARGE = ((90, 90), (120, 60))  # with fewer positions than tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {}

    def of(family):
        if family not in found:
            path = tmp_path_factory.mktemp(family)
            found[family] = path, make(path, family)
        return found[family]

    return of


def answers(model, family, monkeypatch, counts=(1, 0, 2), sizes=LARGE, **options):
    """Generate for prompts with some images twice, check each answer, and return the captures and the forms.  The
    captures of steps with drafts are last."""
    path, hf = model
    monkeypatch.setattr(graphs, "SIGHTS", 0.01)  # each shape is captured at once
    cases = []
    for seed, count in enumerate(counts):
        pictures = [picture(10 * seed + i, *sizes[i]) for i in range(count)]
        ids = prompt_of(family, count, seed, 9)
        asked = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}
        cases.append((asked, Reference(hf, path, ids, pictures)))
    with cpu_captures(), LLM(str(path), **{**OPTIONS, **options}) as llm:
        for _ in range(2):
            outputs = llm.generate([asked for asked, _ in cases], PARAMS, use_tqdm=False)
            for (_, reference), output in zip(cases, outputs, strict=True):
                assert output.error is None, output.error
                (out,) = output.outputs
                reference.check(out.token_ids, [next(iter(one.values())).logprob for one in out.logprobs])
        llm.check()
        made = llm.engine.executor.runner.graphs
        assert made.notes == []
        drafted = llm.engine.executor.runner.drafted
        return [*made.forwards, *(drafted.forwards if drafted else ())], llm.stats()["forms"]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_prompts_with_images_run_in_captured_steps_and_equal_transformers(models, family, monkeypatch):
    keys, forms = answers(models(family), family, monkeypatch)
    assert any(isinstance(key, ImagedKey) for key in keys) and "separate" not in forms


def test_a_step_with_images_runs_in_a_capture_of_the_start(models):
    """Before any step with an image there are captures for all lengths of such steps, so none is captured while other
    rows decode."""
    path, _ = models("qwen3_vl")
    options = {**OPTIONS, "max_num_seqs": 160, "max_num_batched_tokens": 512, "num_kvcache_blocks": 200}
    with cpu_captures(), LLM(str(path), **options) as llm:
        made = llm.engine.executor.runner.graphs
        before = [key for key in made.forwards if isinstance(key, ImagedKey)]
        assert {key.rows for key in before} == {16, 128, 160} and max(key.tokens for key in before) == 512
        asked = {
            "prompt_token_ids": prompt_of("qwen3_vl", 1, 0, 9),
            "multi_modal_data": {"image": [picture(1, *LARGE[0])]},
        }
        (output,) = llm.generate([asked], PARAMS, use_tqdm=False)
        assert output.error is None and "separate" not in llm.stats()["forms"]
        assert [key for key in made.forwards if isinstance(key, ImagedKey)] == before


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_drafts_behind_images_are_replayed_at_their_positions(models, monkeypatch, run_ahead):
    options = {**DRAFTS, "run_ahead": run_ahead}
    keys, _ = answers(models("qwen2_5_vl"), "qwen2_5_vl", monkeypatch, **options)
    assert {type(key) for key in keys} >= {DraftedKey, ImagedKey}


def test_an_image_at_the_end_of_a_prompt_is_not_replayed_as_a_step_with_drafts(models, monkeypatch):
    """The last token of the image is computed in a step whose other rows have drafts."""
    path, hf = models("llava")
    image, asked, references = picture(5, *LARGE[0]), [], []
    for ids in ([7, 9, 7, 9, 7, 9], [4, 5, 319]):
        pictures = [image] * ids.count(319)
        asked.append({"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}})
        references.append(Reference(hf, path, ids, pictures))
    with cpu_captures(), LLM(str(path), **{**OPTIONS, **DRAFTS, "enable_prefix_caching": False}) as llm:
        assert len(references[1].ids) == 18
        runner, reached = llm.engine.executor.runner, []
        real = runner.drafted.key
        runner.drafted.key = lambda plan: reached.append(runner.images.reached(plan)) or real(plan)
        # 17 of 18 tokens in a step, so the last token of the image is alone in the next one
        monkeypatch.setattr(type(llm.engine.planner), "room", one_before_the_end(type(llm.engine.planner).room))
        for output, reference in zip(llm.generate(asked, PARAMS, use_tqdm=False), references, strict=True):
            (out,) = output.outputs
            reference.check(out.token_ids, [next(iter(one.values())).logprob for one in out.logprobs])
    assert any(reached)


def one_before_the_end(room):
    """Return ``Planner.room`` with chunks of 17 tokens at most."""
    return lambda planner, slot, chunk, promised=0: room(planner, slot, min(chunk, 17), promised)


def test_steps_with_images_and_adapters_run_apart_and_equal_those_without_captures(models, tmp_path, monkeypatch):
    path, hf = models("qwen3_vl")
    monkeypatch.setattr(graphs, "SIGHTS", 0.01)
    layers = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|down_proj)"
    adapter = lora(write_adapter(hf, tmp_path / "a1", target_modules=layers))
    asked, used = [], []
    for seed, count in enumerate((1, 1, 0, 0)):
        pictures = [picture(i, *SIZES[i]) for i in range(count)]
        asked.append({"prompt_token_ids": prompt_of("qwen3_vl", count, 0, 9), "multi_modal_data": {"image": pictures}})
        used.append(adapter if seed % 2 else None)

    def tokens(**options):
        with LLM(str(path), **{**OPTIONS, "enable_lora": True, **options}) as llm:
            found = [llm.generate(asked, PARAMS, use_tqdm=False, lora_request=used) for _ in range(2)]
            assert all(output.error is None for outputs in found for output in outputs)
            captures = llm.engine.executor.runner.graphs
            keys = [] if captures is None else list(captures.forwards)
            made = [[output.outputs[0].token_ids for output in outputs] for outputs in found]
            return made, keys, llm.stats()["forms"]

    plain, keys, _ = tokens(graph="off")
    assert not keys and plain[0][0] != plain[0][1] and plain[0][2] != plain[0][3]
    monkeypatch.setattr(lora_memory, "runs_kernels", lambda device: True)
    with cpu_captures():
        found, keys, forms = tokens()
    assert found == plain and forms["separate"]
    assert {type(key) for key in keys} >= {AdaptedKey, ImagedKey} and sum(forms.values()) > 2 * forms["separate"]


def test_a_step_that_is_too_long_for_the_fixed_memory_runs_apart(models, monkeypatch):
    from minivllm.device.worker import image_steps

    monkeypatch.setattr(image_steps, "MOST_TOKENS", 64)
    _, forms = answers(models("qwen3_vl"), "qwen3_vl", monkeypatch, max_num_batched_tokens=128)
    assert forms["separate"]


@pytest.mark.parametrize(
    ("cls", "name", "wrong"),
    [
        (FixedFeatures, "__call__", lambda self, point, x: x),
        (ImageSteps, "fill", lambda self, plan, tokens: None),
    ],
    ids=["without features", "features and rows of another step"],
)
def test_wrong_features_of_a_captured_step_are_found(models, cls, name, wrong, monkeypatch):
    monkeypatch.setattr(cls, name, wrong)
    with pytest.raises(AssertionError):
        answers(models("qwen3_vl"), "qwen3_vl", monkeypatch)
