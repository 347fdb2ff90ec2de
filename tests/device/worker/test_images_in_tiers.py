"""Prompts with images whose blocks come from a tier give the tokens of transformers' model, without their encoder."""

import numpy as np
import pytest
from image_cases import Case, engine, generate, model
from image_models import Reference, picture

from minivllm import SamplingParams
from minivllm.core.engine import tiers
from minivllm.core.engine.image_content import without_numbers
from minivllm.device.worker.pages import identity_of

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3_5", "mistral3")
SIZES = ((90, 90), (60, 90))
PATIENCE = 600.0  # seconds, so that no load is late on a loaded machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


def disk(path, eager=True):
    options = {"path": str(path), "bytes": 1 << 28, "load": "always", "patience": PATIENCE, "eager": eager}
    return {"name": "disk", "options": options}


def cpu():
    return {"name": "cpu", "options": {"bytes": 1 << 26, "load": "always", "patience": PATIENCE}}


def twin(case, family, folder, *changed):
    """Return a case with the text and the sizes of another one, and different pictures at some indices."""
    other = Case(family, folder, 2, seed=2, sizes=SIZES)
    other.pictures = list(case.pictures)
    for i in changed:
        other.pictures[i] = picture(500 + i, *SIZES[i])
    path, hf = model(family, folder)
    other.reference = Reference(hf, path, other.ids, other.pictures)
    return other


def loads(llm):
    return sum(tier["loads"] for tier in llm.stats()["tiers"])


def images_end(case):
    """Return the number of tokens up to the end of the last image, with the token behind it."""
    ids = case.reference.placeholders
    return max(i for i, one in enumerate(ids) if one == 319) + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_another_engine_loads_the_blocks_of_images_from_a_disk_by_their_content(family, folder, tmp_path):
    case = Case(family, folder, 2, seed=2, sizes=SIZES, text=24)
    first = Case(family, folder, 2, seed=2, sizes=SIZES, text=24)
    first.pictures = [picture(700 + i, *SIZES[i]) for i in range(2)]
    path, hf = model(family, folder)
    first.reference = Reference(hf, path, first.ids, first.pictures)
    options = {"kvcache_block_size": 4, "kvstore": disk(tmp_path / "kv"), "max_num_batched_tokens": 32}
    with engine(family, folder, **options) as llm:
        case.check(generate(llm, case)[0])
        assert loads(llm) == 0
    with engine(family, folder, **options) as llm:
        # the images of this prompt have the numbers that those of the stored prompt had
        first.check(generate(llm, first)[0])
        output = generate(llm, case)[0]
        case.check(output)
        assert output.metrics.cached_tokens >= images_end(case)
        assert loads(llm) > 0
        assert llm.stats()["images"]["encoded"] == 2  # those of ``first``
        llm.check()
    assert case.checked[0] == case.checked[1] != first.checked[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_in_a_tier_ends_before_an_image_that_differs(family, folder, tmp_path):
    case = Case(family, folder, 2, seed=2, sizes=SIZES)
    other = twin(case, family, folder, 1)
    none = twin(case, family, folder, 0)
    options = {"kvcache_block_size": 4, "kvstore": disk(tmp_path / "kv"), "max_num_batched_tokens": 24}
    with engine(family, folder, **options) as llm:
        case.check(generate(llm, case)[0])
    start = case.reference.placeholders.index(319)
    with engine(family, folder, **options) as llm:
        output = generate(llm, none)[0]
        none.check(output)
        assert output.metrics.cached_tokens <= start
        output = generate(llm, other)[0]
        other.check(output)
        encoded = llm.stats()["images"]["encoded"]
        if family != "qwen3_5":  # a hit of a recurrent model ends at a copy of its states
            assert start < output.metrics.cached_tokens < images_end(case) and encoded == 3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_tenants_and_salts_separate_images_in_tiers(family, folder, tmp_path):
    options = {"kvcache_block_size": 4, "kvstore": disk(tmp_path / "kv")}
    params = [
        SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True, tenant=tenant, cache_salt=salt)
        for tenant, salt in (("", None), ("a", None), ("", "x"))
    ]
    case = Case(family, folder, 2, seed=2, sizes=SIZES)
    with engine(family, folder, **options) as llm:
        case.check(generate(llm, case, params=params[0])[0])
    for one in params[1:]:
        with engine(family, folder, **options) as llm:
            output = generate(llm, case, params=one)[0]
            case.check(output)
            assert output.metrics.cached_tokens == 0 and loads(llm) == 0
            assert llm.stats()["images"]["encoded"] == 2
    with engine(family, folder, **options) as llm:
        case.check(generate(llm, case, params=params[0])[0])
        assert loads(llm) > 0 and llm.stats()["images"]["encoded"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_and_branching_rows_load_images_from_host_memory(family, folder):
    cases = [Case(family, folder, 3, seed=seed) for seed in range(4)]
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True, n=2)
    longest = max(len(case.reference.ids) for case in cases)
    blocks = 2 * (longest + 24) // 4 + 10
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": blocks, "max_num_batched_tokens": 16, "kvstore": cpu()}
    with engine(family, folder, **options) as llm:
        for _ in range(2):
            for case, output in zip(cases, generate(llm, *cases, params=params), strict=True):
                case.check(output)
        assert llm.stats()["preemptions"] > 0 and loads(llm) > 0
        llm.check()


def test_the_identity_of_pages_depends_on_the_image_processor_and_the_encoder(folder, tmp_path, monkeypatch):
    path, _ = model("qwen3_vl", folder)
    with engine("qwen3_vl", folder) as llm:
        wiring = llm.resolved.wiring
    before = identity_of(wiring, [])
    assert identity_of(wiring, []) == before
    from dataclasses import replace

    part = wiring.parts["encoder"]
    other = replace(wiring, parts={**wiring.parts, "encoder": replace(part, options={"changed": 1})})
    assert identity_of(other, []) != before
    file = path / "preprocessor_config.json"
    kept = file.read_text()
    try:
        file.write_text(kept + " ")
        assert identity_of(wiring, []) != before
    finally:
        file.write_text(kept)
    monkeypatch.setattr("minivllm.device.loading.fingerprint.metadata.version", lambda name: "0.0")
    assert identity_of(wiring, []) != before


# ---- planted faults --------------------------------------------------------------------------------------------------


def numbers_enter_the_keys(monkeypatch):
    monkeypatch.setattr(tiers, "without_numbers", lambda tokens, images: np.ascontiguousarray(tokens, np.int32))
    monkeypatch.setattr(tiers, "digests_by_block", lambda images, *blocks: {})


def keys_lack_the_content_of_images(monkeypatch):
    monkeypatch.setattr(tiers, "digests_by_block", lambda images, *blocks: {})


def keys_have_the_first_image_only(monkeypatch):
    real = tiers.digests_by_block
    monkeypatch.setattr(tiers, "digests_by_block", lambda images, *blocks: real(images[:1], *blocks))


@pytest.mark.parametrize(
    "fault", [numbers_enter_the_keys, keys_lack_the_content_of_images, keys_have_the_first_image_only]
)
def test_a_page_of_another_image_is_caught(fault, folder, tmp_path, monkeypatch):
    fault(monkeypatch)
    case = Case("qwen2_5_vl", folder, 2, seed=2, sizes=SIZES)
    other = twin(case, "qwen2_5_vl", folder, 1)
    options = {"kvcache_block_size": 4, "kvstore": disk(tmp_path / "kv")}
    with engine("qwen2_5_vl", folder, **options) as llm:
        case.check(generate(llm, case)[0])
    with engine("qwen2_5_vl", folder, **options) as llm:
        output = generate(llm, other)[0]
        assert loads(llm) > 0
        with pytest.raises(AssertionError):
            other.check(output)


def test_keys_of_text_have_the_tokens_as_they_are():
    tokens = np.array([5, 6, 900], np.int32)
    assert without_numbers(tokens, ()).tolist() == [5, 6, 900]
    assert tiers.digests_by_block((), 4, 0, 9) == {}
