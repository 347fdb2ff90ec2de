"""Requests with images and adapters give the tokens of PEFT's model, beside rows without them in the same steps."""

import pytest
import torch

pytest.importorskip("peft")

from adapted_images import TEXT, cases_of, serve, write_two
from adapters import lora, write_adapter, write_ia3, write_steering
from image_cases import Case, engine, model

from minivllm import SamplingParams
from minivllm.device.worker.images import FeatureTaps

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3_5", "mistral3")
TOWERS = {"llava": "vision_tower", "qwen2_5_vl": "visual", "qwen3_vl": "visual", "gemma3": "vision_tower"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_images_and_adapters_beside_plain_rows_equal_peft(family, folder, tmp_path):
    one, two = write_two(family, folder, tmp_path)
    cases = cases_of(family, folder, [one, None, two, None])
    with engine(family, folder, enable_lora=True, max_num_batched_tokens=24) as llm:
        serve(llm, cases)
        serve(llm, cases)
        assert llm.stats()["adapters"]["on_device"] == 2 and llm.stats()["images"]["encoded"] > 0
        llm.check()
    assert cases[0].checked[0] != cases[3].checked[0]  # the same prompt


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_preempted_and_branching_rows_keep_their_images_and_adapters(family, folder, tmp_path):
    one, two = write_two(family, folder, tmp_path)
    cases = cases_of(family, folder, [one, two, None], images=(3, 3, 3, 3))
    longest = max(len(case.reference.ids) for case in cases)
    blocks = 2 * (longest + 24) // 4 + 6
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": blocks, "max_num_batched_tokens": 16, "max_loras": 1}
    with engine(family, folder, enable_lora=True, **options) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True, n=2)
        serve(llm, cases, params)
        llm.check()
    with engine(family, folder, enable_lora=True, **{**options, "max_loras": 4}) as llm:
        serve(llm, cases, params)
        assert llm.stats()["preemptions"] > 0
        llm.check()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_requests_with_another_adapter_share_no_prefix_with_images(family, folder, tmp_path):
    one, two = write_two(family, folder, tmp_path)
    path = str(tmp_path / "kv")
    disk = {"name": "disk", "options": {"path": path, "bytes": 1 << 28, "load": "always", "patience": 600.0}}
    for _ in range(2):  # the second engine has the blocks on its disk
        with engine(family, folder, enable_lora=True, kvcache_block_size=4, kvstore=disk) as llm:
            for adapter in (one, two, None):
                (case,) = cases_of(family, folder, [adapter], images=(2,))
                serve(llm, [case])
            llm.check()
    assert sum(tier["loads"] for tier in llm.stats()["tiers"]) > 0


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3"])
def test_factors_of_outputs_with_images_equal_peft(family, folder, tmp_path):
    scaled = {"target_modules": r".*language_model.*\.(q_proj|k_proj|v_proj|down_proj)"}
    scaled["feedforward_modules"] = r".*language_model.*\.down_proj"
    factors = write_ia3(model(family, folder)[1], tmp_path / "ia3", **scaled)
    cases = cases_of(family, folder, [factors, None], images=(2, 1, 0, 1))
    with engine(family, folder, adapters=["ia3"], max_num_batched_tokens=24) as llm:
        serve(llm, cases)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_vectors_are_added_to_image_tokens_as_a_tap_adds_them(family, folder, tmp_path):
    """A vector at the embedding is added to the features, in chunks and in whole prompts alike."""
    torch.manual_seed(0)
    vectors = {"embedding": torch.randn(64) * 0.3, "layers.1.residual": torch.randn(64)}
    steering = write_steering(tmp_path / "steer", vectors)
    plain = generate_with(family, folder, steering, 512)
    assert plain == generate_with(family, folder, steering, 16) != generate_with(family, folder, None, 512)


def generate_with(family, folder, steering, budget):
    cases = [Case(family, folder, count, seed=count) for count in (2, 0, 1)]
    used = None if steering is None else [lora(steering)] * len(cases)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with engine(family, folder, adapters=["steering"], max_num_batched_tokens=budget) as llm:
        outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False, lora_request=used)
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", TOWERS)
def test_targets_in_the_vision_tower_are_refused_by_name(family, folder, tmp_path):
    hf = model(family, folder)[1]
    tower = TOWERS[family]
    names = [
        name for name, part in hf.named_modules() if tower in name and isinstance(part, torch.nn.Linear) and "0" in name
    ]
    bad = write_adapter(hf, tmp_path / "bad", target_modules=[names[0]])
    good = write_adapter(hf, tmp_path / "good", target_modules=TEXT)
    cases = cases_of(family, folder, [bad, good, None], images=(1, 1, 1))
    with engine(family, folder, enable_lora=True) as llm:
        outputs = llm.generate(
            [case.prompt for case in cases],
            SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True),
            use_tqdm=False,
            lora_request=[lora(bad, 1), lora(good, 2), None],
        )
        assert f"is of {tower}; expected layers of the text model" in outputs[0].error
        for case, output in zip(cases[1:], outputs[1:], strict=True):
            case.check(output)


# ---- planted faults --------------------------------------------------------------------------------------------------


def fails(family, folder, tmp_path, **options):
    one, two = write_two(family, folder, tmp_path)
    cases = cases_of(family, folder, [one, None, two, None])
    options = {"max_num_batched_tokens": 24, **options}
    with engine(family, folder, enable_lora=True, **options) as llm, pytest.raises(AssertionError):
        serve(llm, cases)
        serve(llm, cases)


def test_adapters_that_are_left_out_of_steps_with_images_are_caught(folder, tmp_path, monkeypatch):
    from minivllm.device.worker.runner import Runner

    real = Runner.adapts

    def adapts(self, plan):
        return ((), ()) if self.images.reached(plan) else real(self, plan)

    monkeypatch.setattr(Runner, "adapts", adapts)
    fails("qwen2_5_vl", folder, tmp_path)


def test_features_that_are_left_out_of_rows_with_adapters_are_caught(folder, tmp_path, monkeypatch):
    real = FeatureTaps.__init__

    def init(self, index, values):
        real(self, index[:-1], values[:, :-1])

    monkeypatch.setattr(FeatureTaps, "__init__", init)
    fails("llava", folder, tmp_path)


def test_a_prefix_of_images_that_another_adapter_shares_is_caught(folder, tmp_path, monkeypatch):
    from minivllm.core.engine import engine as module

    monkeypatch.setattr(module, "salt_of", lambda request, wiring: request.params.salt)
    fails("qwen3_vl", folder, tmp_path, kvcache_block_size=4)


def test_numbers_of_images_are_kept_for_each_adapter(folder, tmp_path):
    one, two = write_two("llava", folder, tmp_path)
    with engine("llava", folder, enable_lora=True) as llm:
        serve(llm, cases_of("llava", folder, [one, two, None], images=(1, 1, 1)))
        assert llm.stats()["images"]["encoded"] == 3
