"""Requests with images give the tokens of transformers' model, in each way of running."""

import json
import shutil

import numpy as np
import pytest
from devices import DEVICE
from image_cases import PARAMS, Case, engine, generate, model
from image_models import CLOSE, Reference, picture, prompt_of

from minivllm import LLM, SamplingParams
from minivllm.core.engine import plan_columns
from minivllm.core.engine.images import Images
from minivllm.core.interfaces.encoder import EncoderContext
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.device.worker.images import ImageState
from minivllm.errors import ModelError, RequestError
from minivllm.plugins.encoder.pixtral import Pixtral
from minivllm.runtime.images import reader

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3_5", "mistral3", "ministral3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_chunked_prompts_with_one_to_five_images(family, folder):
    cases = [Case(family, folder, images, seed=images) for images in range(6)]
    with engine(family, folder, max_num_batched_tokens=24) as llm:
        for case, output in zip(cases, generate(llm, *cases), strict=True):
            case.check(output)
        assert llm.stats()["images"]["encoded"] == 15
        llm.check()


def test_quantized_text_weights_read_images_in_every_batch(folder):
    cases = [Case("llava", folder, images, seed=images) for images in range(3)]

    def tokens(llm, *some):
        return [output.outputs[0].token_ids for output in generate(llm, *some)]

    with engine("llava", folder, quantizer="int8", enable_prefix_caching=False) as llm:
        alone = [tokens(llm, case)[0] for case in cases]
        assert llm.stats()["images"]["encoded"] == 3
    with engine("llava", folder, quantizer="int8", max_num_batched_tokens=24) as llm:
        assert tokens(llm, *cases) == alone


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "mistral3"])
def test_dummy_weights_read_images_without_the_files_of_weights(family, folder, tmp_path):
    path, _ = model(family, folder)
    shutil.copytree(path, tmp_path / "dummy", ignore=shutil.ignore_patterns("*.safetensors"))
    case, found = Case(family, folder, 2), []
    options = {"skip_tokenizer_init": True, "dtype": "float32", "device": DEVICE, "max_model_len": 400}
    for seed in (1, 1, 2):
        with LLM(str(tmp_path / "dummy"), load_format="dummy", seed=seed, num_kvcache_blocks=160, **options) as llm:
            output = generate(llm, case)[0]
            assert output.error is None and llm.stats()["images"]["encoded"] == 2
            found.append([next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe"])
def test_further_families(family, folder):
    case = Case(family, folder, 2)
    with engine(family, folder) as llm:
        case.check(generate(llm, case)[0])
        explained = llm.explain()
        assert "up to 16 in a request" in explained and "are not loaded" not in explained


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_image_shares_a_prefix_and_another_does_not(family, folder):
    sizes = ((90, 90),)
    first = Case(family, folder, 2, seed=1, sizes=sizes)
    other = Case(family, folder, 2, seed=1, sizes=sizes)
    other.pictures = [first.pictures[0], picture(77, 90, 90)]
    other.reference = Reference(model(family, folder)[1], model(family, folder)[0], other.ids, other.pictures)
    with engine(family, folder, kvcache_block_size=4) as llm:
        first.check(generate(llm, first)[0])
        for case, encoded in ((first, 2), (other, 3), (first, 3), (other, 3)):
            output = generate(llm, case)[0]
            case.check(output)
            assert output.metrics.cached_tokens > 0
            assert llm.stats()["images"]["encoded"] == encoded
        assert first.checked[0] != other.checked[0]
        # the second image begins behind the placeholders of the first one
        end = first.reference.ids.index(319) + (first.reference.ids.count(319) // 2)
        assert output.metrics.cached_tokens > end


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_and_preempted_rows(family, folder):
    cases = [Case(family, folder, 3, seed=seed) for seed in range(4)]
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True, n=2)
    longest = max(len(case.reference.ids) for case in cases)
    blocks = 2 * (longest + 24) // 4 + 10
    with engine(family, folder, kvcache_block_size=4, num_kvcache_blocks=blocks, max_num_batched_tokens=16) as llm:
        for case, output in zip(cases, generate(llm, *cases, params=params), strict=True):
            assert len(output.outputs) == 2
            case.check(output)
        assert llm.stats()["preemptions"] > 0
        llm.check()


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "mistral3"])
def test_functions_of_requests_get_the_ids_of_placeholders(family, folder):
    case = Case(family, folder, 2)
    seen = {"choose_fn": [], "logits_processors": []}

    def choose(logits, ids):
        seen["choose_fn"].append(list(ids))
        return int(logits.argmax())

    def process(prompt, output, logits):
        seen["logits_processors"].append([*prompt, *output])
        return logits

    with engine(family, folder) as llm:
        plain = generate(llm, case)[0].outputs[0].token_ids
        for params in (
            SamplingParams(max_tokens=24, choose_fn=choose, ignore_eos=True),
            SamplingParams(max_tokens=24, temperature=0.0, logits_processors=[process], ignore_eos=True),
        ):
            output = generate(llm, case, params=params)[0]
            assert output.error is None and output.outputs[0].token_ids == plain
    expected = [[*case.reference.placeholders, *plain[:n]] for n in range(24)]
    assert seen == {"choose_fn": expected, "logits_processors": expected}


def test_prompts_that_end_with_an_image_and_branch(folder):
    case = Case("llava", folder, 1)
    case.ids = case.ids[:6]
    case.reference = Reference(model("llava", folder)[1], model("llava", folder)[0], case.ids, case.pictures)
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True, n=3)
    with engine("llava", folder) as llm:
        case.check(generate(llm, case, params=params)[0])


def test_scores_of_a_prompt_with_images(folder):
    case = Case("qwen2_5_vl", folder, 2)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    expected = case.reference.logprobs(case.reference.ids)
    with engine("qwen2_5_vl", folder, max_num_batched_tokens=9) as llm:
        output = generate(llm, case, params=params)[0]
    for i, token in enumerate(case.reference.ids[1:]):
        assert abs(output.prompt_logprobs[i + 1][token].logprob - float(expected[i, token])) < CLOSE


def test_features_are_evicted_and_computed_again(folder, monkeypatch):
    cases = [Case("llava", folder, 2, seed=seed) for seed in range(5)]
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    with engine("llava", folder, enable_prefix_caching=False) as llm:
        llm.engine.images.limit = 4 * 4096  # of four images
        for _ in range(2):
            for case, output in zip(cases, generate(llm, *cases, params=params), strict=True):
                case.check(output)
        figures = llm.stats()["images"]
        assert figures["evicted"] >= 6 and figures["feature_bytes"] <= 4 * 4096
        assert not llm.engine.images.held
        features = llm.engine.executor.runner.images.features
        assert len(features) * 4096 == figures["feature_bytes"]
        llm.engine.images.limit = 4096
        with pytest.raises(RequestError, match="need 8192 bytes"):
            generate(llm, cases[0])


def test_a_worker_process_reads_images(folder):
    case = Case("qwen3_vl", folder, 2)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    with engine("qwen3_vl", folder, executor="process") as llm:
        case.check(generate(llm, case, params=params)[0])


# ---- planted faults --------------------------------------------------------------------------------------------------


def differs(llm, *cases):
    """Return whether an answer differs from transformers', or a request fails."""
    for case, output in zip(cases, generate(llm, *cases), strict=True):
        try:
            case.check(output)
        except AssertionError:
            return True
    return False


def two_images(family, folder):
    sizes = ((90, 90),)
    return [Case(family, folder, 1, seed=1, sizes=sizes), Case(family, folder, 1, seed=2, sizes=sizes)]


def test_a_digest_of_less_than_the_bytes_is_caught(folder, monkeypatch):
    cases = two_images("llava", folder)
    monkeypatch.setattr(reader, "digest_of", lambda values, shape: repr(shape).encode())
    with engine("llava", folder) as llm:
        assert differs(llm, *cases)


def test_features_of_another_image_are_caught(folder, monkeypatch):
    cases = two_images("llava", folder)
    enter = ImageState.enter

    def swapped(self, plan, meta):
        """Use the features of the first image for all."""
        self.features = dict.fromkeys(self.features, next(iter(self.features.values()), None))
        return enter(self, plan, meta)

    monkeypatch.setattr(ImageState, "enter", swapped)
    with engine("llava", folder) as llm:
        assert differs(llm, *cases)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_wrong_positions_behind_an_image_are_caught(family, folder, monkeypatch):
    case = two_images(family, folder)[0]
    with engine(family, folder) as llm:
        state = llm.engine.executor.runner.images
        write = state._set
        monkeypatch.setattr(state, "_set", lambda slot, spans: (write(slot, spans), state.offset.fill(0)))
        assert differs(llm, case)


def test_wrong_positions_of_a_cut_image_are_caught(folder, monkeypatch):
    case = two_images("qwen3_vl", folder)[0]
    positions = ImageState._positions
    monkeypatch.setattr(ImageState, "_positions", lambda self, piece: positions(self, piece._replace(first=0)))
    with engine("qwen3_vl", folder, max_num_batched_tokens=9) as llm:
        assert differs(llm, case)


def test_features_that_are_freed_under_a_chunked_prompt_end_the_request(folder, monkeypatch):
    case = two_images("qwen3_vl", folder)[0]
    reach = Images.reach

    def early(self, slots, at, q_len):
        """Free all features with the next delta."""
        self.frees += [one.number for one in self.contents.values() if one.encoded]
        reach(self, slots, at, q_len)

    monkeypatch.setattr(Images, "reach", early)
    with engine("qwen3_vl", folder, max_num_batched_tokens=9) as llm:
        output = generate(llm, case)[0]
        assert "features of an image are missing" in output.error


def test_two_images_in_the_wrong_order_are_caught(folder, monkeypatch):
    case = Case("llava", folder, 2, seed=1)
    plain = plan_columns.join_rows

    def swapped(seqs):
        """Give each image of a row the number of its other image."""
        rows = plain(seqs)
        rows[:, 1] = rows[::-1, 1]
        return rows

    monkeypatch.setattr(plan_columns, "join_rows", swapped)
    with engine("llava", folder) as llm:
        assert differs(llm, case)


def test_tokens_that_see_no_later_ones_of_their_image_are_caught(folder, monkeypatch):
    case = two_images("gemma3", folder)[0]
    monkeypatch.setattr(ImageState, "_seen", lambda self, plan, pieces: None)
    with engine("gemma3", folder) as llm:
        assert differs(llm, case)


def test_a_chunk_that_cuts_an_image_whose_tokens_see_each_other_is_caught(folder, monkeypatch):
    case = two_images("gemma3", folder)[0]
    monkeypatch.setattr(Images, "undivided", False)
    with engine("gemma3", folder, max_num_batched_tokens=9) as llm:
        assert differs(llm, case)


def test_a_failing_encoder_ends_the_requests_of_its_image_alone(folder):
    bad, good = two_images("llava", folder)
    with engine("llava", folder) as llm:
        encoder = llm.engine.executor.runner.images.encoder
        plain, count = type(encoder).__call__, []

        class Failing(type(encoder)):
            def __call__(self, values, shape):
                count.append(1)
                if len(count) == 1:
                    raise RuntimeError("no such kernel")
                return plain(self, values, shape)

        encoder.__class__ = Failing
        outputs = generate(llm, bad, good)
        assert "the image encoder failed: RuntimeError: no such kernel" in outputs[0].error
        good.check(outputs[1])


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_images": 0}, "max_images=0"),
        ({"compressor": "knorm"}, "not implemented with compressor"),
    ],
)
def test_engines_that_read_text_only_refuse_images_by_reason(folder, options, reason):
    path = str(model("llava", folder)[0])
    one = {"prompt_token_ids": [1, 319], "multi_modal_data": {"image": picture(0)}}
    with LLM(
        model=path, skip_tokenizer_init=True, dtype="float32", device=DEVICE, num_kvcache_blocks=40, **options
    ) as llm:
        with pytest.raises(RequestError, match=reason):
            llm.generate(one, use_tqdm=False)
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


def test_requests_with_images_refuse_what_is_not_implemented(folder):
    one = {"prompt_token_ids": [1, 319], "multi_modal_data": {"image": picture(0)}}
    with engine("llava", folder, strategies=["single", "parallel", "beam"]) as llm:
        for params, text in ((SamplingParams(max_tokens=2, beam_width=2), "beam_width with images"),):
            with pytest.raises(RequestError, match=text):
                llm.generate(one, params, use_tqdm=False)
        for prompt, text in (
            ({**one, "prompt_token_ids": [1, 2]}, "0 placeholders of images"),
            ({**one, "prompt_token_ids": [319, 319]}, "2 placeholders of images"),
            ({**one, "multi_modal_data": {"audio": 1}}, "'audio' is not read"),
            ({**one, "multi_modal_data": {"image": [picture(0)] * 17}}, "17 images; expected at most max_images=16"),
            ({**one, "multi_modal_data": {"image": "/etc/passwd"}}, "paths and URLs are not opened"),
            ({**one, "multi_modal_data": {"image": np.zeros((4, 4))}}, "expected uint8"),
        ):
            with pytest.raises(RequestError, match=text):
                llm.generate(prompt, use_tqdm=False)
        with pytest.raises(RequestError, match="reads text only"):
            llm.embed(one, use_tqdm=False)
        with pytest.raises(RequestError, match="does not reach the image encoder"):
            llm.update_weights(str(model("llava", folder)[0]))


def test_numbers_of_contents_are_bounded_and_never_used_twice(monkeypatch):
    from minivllm.core.engine import images as book
    from minivllm.core.interfaces.images import PreparedImage

    monkeypatch.setattr(book, "MAX_CONTENTS", 8)
    made = Images(ImageWiring(max_images=4, cache_mb=1), 100, 16)
    seen = set()
    for i in range(50):
        image = PreparedImage(np.zeros(1, np.float32), (1, 1, 1), 1, bytes([i]))
        number = made._content(("", ""), image).number
        assert made._content(("", ""), image).number == number
        assert made._content(("tenant", ""), image).number != number
        assert number not in seen
        seen.add(number)
    assert len(made.contents) <= 9


WRONG = [
    ("llava", "vision_config", {"patch_size": 0}),
    ("llava", "vision_config", {"hidden_act": "nope"}),
    ("qwen2_5_vl", "vision_config", {"num_heads": 0}),
    ("qwen2_5_vl", "text_config", {"mrope_section": ["a", 3, 3]}),
    ("qwen2_5_vl", "text_config", {"mrope_section": [2, 3, 4]}),
]


@pytest.mark.parametrize(("family", "part", "change"), WRONG, ids=[str(one[2]) for one in WRONG])
def test_wrong_facts_of_an_encoder_leave_an_engine_of_text_with_the_reason(family, part, change, folder, tmp_path):
    path = shutil.copytree(model(family, folder)[0], tmp_path / "wrong")
    config = json.loads((path / "config.json").read_text())
    fields = config[part]
    if part == "text_config":
        fields = fields.get("rope_parameters") or fields["rope_scaling"]
    fields.update(change)
    (path / "config.json").write_text(json.dumps(config))
    options = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "max_model_len": 64}
    with LLM(model=str(path), **options) as llm:
        assert llm.generate({"prompt_token_ids": [4, 5, 6]}, PARAMS, use_tqdm=False)[0].error is None
        prompt = {"prompt_token_ids": prompt_of(family, 1, 0), "multi_modal_data": {"image": picture(0)}}
        with pytest.raises(RequestError, match="this engine reads text only"):
            llm.generate(prompt, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen2"}, "text_config.model_type='qwen2': expected mistral or ministral3"),
        ({}, r"tokenizer.json has no token \[IMG_BREAK\]"),
    ],
)
def test_the_encoder_of_mistral3_refuses_other_text_models_and_tokenizers(change, reason, folder, tmp_path):
    path = shutil.copytree(model("mistral3", folder)[0], tmp_path / "other")
    config = json.loads((path / "config.json").read_text())
    config["text_config"].update(change)
    if not change:
        file = path / "tokenizer.json"
        file.write_text(file.read_text().replace("[IMG_BREAK]", "[OTHER]"))
    with pytest.raises(ModelError, match=reason):
        Pixtral(None, EncoderContext(str(path), config)).facts()


def test_a_missing_embedding_of_breaks_in_an_image_is_caught(folder, monkeypatch):
    case = two_images("mistral3", folder)[0]
    keep = Pixtral._end_rows_with
    monkeypatch.setattr(Pixtral, "_end_rows_with", lambda self, row, device: keep(self, 0 * row, device))
    with engine("mistral3", folder) as llm:
        assert differs(llm, case)


def test_a_placeholder_without_an_image_is_refused(folder):
    with engine("llava", folder) as llm:
        with pytest.raises(RequestError, match=r"1 placeholders of images .* and 0 images"):
            llm.generate({"prompt_token_ids": prompt_of("llava", 1, 0)}, PARAMS, use_tqdm=False)
        images = {"image": [picture(1), picture(1)]}
        prompt = {"prompt_token_ids": prompt_of("llava", 2, 0), "multi_modal_data": images}
        assert llm.generate(prompt, PARAMS, use_tqdm=False)[0].error is None
