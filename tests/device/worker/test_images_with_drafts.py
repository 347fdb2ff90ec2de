"""Drafts of drafters that read token ids alone change no token of requests with images."""

import numpy as np
import pytest
import torch
from adapted_images import cases_of, serve, write_two
from devices import DEVICE
from image_cases import Case, engine, generate, model
from image_models import Reference, prompt_of

from minivllm import LLM, SamplingParams
from minivllm.device.worker.images import ImageState
from minivllm.errors import RequestError
from minivllm.plugins.drafter.ngram import NGram

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3_5", "mistral3")
DRAFTERS = ("known", "ngram", "suffix")  # ``known`` is ``Known``
SIZES = ((90, 90), (120, 60), (60, 90))  # with fewer positions than tokens
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


class Known:
    """Drafts in place of those of ``ngram``: the answers of an engine without drafts, in which each fourth is wrong.

    They read the tokens on the host, so their calls are not captured."""

    def __init__(self, monkeypatch, outputs):
        self.texts = [[*one.prompt_token_ids, *out.token_ids] for one in outputs for out in one.outputs]
        monkeypatch.setattr(NGram, "propose", lambda drafter, ask: self.propose(ask))

    def propose(self, ask):
        histories = ask.rows.tokens[ask.rows.slots].tolist()
        tokens = torch.zeros(len(histories), ask.k, dtype=torch.int64)
        count = torch.zeros(len(histories), dtype=torch.int64)
        for i, (history, known) in enumerate(zip(histories, ask.rows.position.tolist(), strict=True)):
            for text in self.texts:
                if text[:known] != history[:known]:
                    continue
                drafts = [one + (at % 4 == 0) for at, one in enumerate(text[known : known + ask.k], known)]
                tokens[i, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
                count[i] = len(drafts)
                break
        device = ask.rows.tokens.device
        return tokens.to(device), count.to(device)


def plain(monkeypatch, family, folder, cases, params):
    """Let ``ngram`` propose the answers that an engine without drafts gives."""
    with engine(family, folder) as llm:
        Known(monkeypatch, generate(llm, *cases, params=params))


def drafting(family, folder, drafter, **options):
    options = {"num_speculative_tokens": 3, "speculate": "always", "max_num_batched_tokens": 40, **options}
    if drafter == "known":
        drafter = "ngram"
        options["captured_drafts"] = False
    return engine(family, folder, drafter=drafter, **options)


def accepted(llm):
    return sum(llm.engine.speculation.accepted)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_behind_images_are_verified_at_their_positions(family, drafter, folder, monkeypatch):
    cases = [Case(family, folder, images, seed=images, sizes=SIZES) for images in (2, 0, 1, 3)]
    if drafter == "known":
        plain(monkeypatch, family, folder, cases, PARAMS)
    with drafting(family, folder, drafter) as llm:
        for _ in range(2):
            for case, output in zip(cases, generate(llm, *cases, params=PARAMS), strict=True):
                case.check(output)
        assert drafter != "known" or accepted(llm) > 60
        llm.check()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_preempted_and_branching_rows_with_images_keep_their_drafts_right(family, drafter, folder, monkeypatch):
    cases = [Case(family, folder, 3, seed=seed, sizes=SIZES) for seed in range(4)]
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True, n=2)
    if drafter == "known":
        plain(monkeypatch, family, folder, cases, params)
    longest = max(len(case.reference.ids) for case in cases)
    blocks = 2 * (longest + 24) // 4 + 6
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": blocks, "max_num_batched_tokens": 20}
    with drafting(family, folder, drafter, **options) as llm:
        for case, output in zip(cases, generate(llm, *cases, params=params), strict=True):
            case.check(output)
        assert llm.stats()["preemptions"] > 0 and (drafter != "known" or accepted(llm) > 20)
        llm.check()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_prompt_that_ends_with_an_image_is_computed_beside_drafts(family, folder, monkeypatch):
    path, hf = model(family, folder)
    first = Case(family, folder, 1, seed=3, sizes=SIZES)
    last = Case(family, folder, 1, sizes=SIZES)
    mark = prompt_of(family, 1, 0, 0)
    last.ids = [*last.ids[:5], *mark[: mark.index(319) + 1]]
    last.reference = Reference(hf, path, last.ids, last.pictures)
    plain(monkeypatch, family, folder, [first, last], PARAMS)
    with drafting(family, folder, "known", max_num_batched_tokens=17) as llm:
        for case, output in zip((first, last), generate(llm, first, last, params=PARAMS), strict=True):
            case.check(output)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_drafts_tiers_and_adapters_work_together_with_images(family, folder, tmp_path, monkeypatch):
    one, two = write_two(family, folder, tmp_path)
    cases = cases_of(family, folder, [one, None, two, None], sizes=SIZES)
    with engine(family, folder, enable_lora=True) as llm:
        Known(monkeypatch, serve(llm, cases, PARAMS))
    disk = {"name": "disk", "options": {"path": str(tmp_path / "kv"), "bytes": 1 << 28, "load": "always"}}
    for _ in range(2):
        with drafting(family, folder, "known", enable_lora=True, kvcache_block_size=4, kvstore=disk) as llm:
            serve(llm, cases, PARAMS)
            assert accepted(llm) > 20
            llm.check()
            loads = sum(tier["loads"] for tier in llm.stats()["tiers"])
    assert loads > 0


def test_drafters_with_a_model_are_refused_by_name(folder):
    path = str(model("llava", folder)[0])
    options = {"skip_tokenizer_init": True, "dtype": "float32", "device": DEVICE, "num_kvcache_blocks": 40}
    drafter = {"name": "model", "options": {"model": path}}
    with LLM(model=path, drafter=drafter, **options) as llm, pytest.raises(RequestError, match="drafter=model"):
        generate(llm, Case("llava", folder, 1))


# ---- planted faults --------------------------------------------------------------------------------------------------


def fails(family, folder, monkeypatch):
    cases = [Case(family, folder, images, seed=images, sizes=SIZES) for images in (2, 0, 1, 3)]
    plain(monkeypatch, family, folder, cases, PARAMS)
    with drafting(family, folder, "known") as llm, pytest.raises(AssertionError):
        for _ in range(2):
            for case, output in zip(cases, generate(llm, *cases, params=PARAMS), strict=True):
                case.check(output)


def test_drafts_at_the_positions_of_text_are_caught(folder, monkeypatch):
    from minivllm.device.worker.state import DeviceState

    real = DeviceState.rope_position

    def rope_position(self, slots, position):
        _, where, counts = np.unique(slots.cpu().numpy(), return_inverse=True, return_counts=True)
        drafted = counts[where] > 1
        found = real(self, slots, position)
        drafted = torch.from_numpy(drafted).to(position.device)
        found[drafted] = position[drafted]
        return found

    monkeypatch.setattr(DeviceState, "rope_position", rope_position)
    monkeypatch.setattr("minivllm.device.worker.runner.Runner._runs_natively", lambda self, native, plan: False)
    fails("qwen2_5_vl", folder, monkeypatch)


def test_features_of_steps_with_drafts_that_are_left_out_are_caught(folder, monkeypatch):
    real = ImageState.enter

    def enter(self, plan, meta):
        features, lost = real(self, plan, meta)
        return (None if len(plan.draft) else features), lost

    monkeypatch.setattr(ImageState, "enter", enter)
    fails("qwen3_vl", folder, monkeypatch)
