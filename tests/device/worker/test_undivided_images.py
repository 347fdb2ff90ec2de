"""Images whose tokens attend to each other (Gemma 3): chunks, prefix hits inside an image, newlines, and refusals."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from devices import DEVICE
from image_models import Reference, make, picture, prompt_of
from PIL import Image

from minivllm import LLM, SamplingParams
from minivllm.core.engine.images import whole_images
from minivllm.core.interfaces.encoder import ImageFacts
from minivllm.core.interfaces.images import PlacedImage, PreparedImage
from minivllm.device.worker.runner import Runner
from minivllm.errors import ConfigError, RequestError
from minivllm.plugin import EncoderContext, Spec
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA
from minivllm.plugins.encoder.gemma3 import Gemma3Images
from minivllm.runtime.images.placing import place

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True)
SPAN = 16  # tokens of an image


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma3")
    return path, make(path, "gemma3")


def engine(path, **options):
    options = {"num_kvcache_blocks": 160, "max_model_len": 400, "max_num_seqs": 6, **options}
    return LLM(str(path), skip_tokenizer_init=True, dtype="float32", device=DEVICE, **options)


def check(output, reference):
    assert output.error is None, output.error
    assert output.prompt_token_ids == reference.ids
    (out,) = output.outputs
    reference.check(out.token_ids, [next(iter(entry.values())).logprob for entry in out.logprobs])


def case(gemma, images, seed=0, text=5):
    pictures = [picture(10 * seed + i, 50, 40) for i in range(images)]
    ids = prompt_of("gemma3", images, seed, text)
    reference = Reference(gemma[1], gemma[0], ids, pictures)
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}, reference


@pytest.mark.parametrize("budget", [6, 7, 16, 19, 400])
def test_no_chunk_ends_inside_an_image_and_answers_are_those_of_transformers(gemma, budget, monkeypatch):
    cases = [case(gemma, images, images, text=3 + images) for images in range(1, 6)]
    plain, sizes = Runner.forward, []
    with engine(gemma[0], max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:

        def forward(runner, plan):
            for slot, first, n in zip(plan.slots.tolist(), plan.computed.tolist(), plan.q_len.tolist(), strict=True):
                request = llm.engine.planner.slots.at(slot).request
                assert not any(one.position < first + n < one.end for one in request.images)
            sizes.append(int(plan.q_len.sum()))
            return plain(runner, plan)

        monkeypatch.setattr(Runner, "forward", forward)
        outputs = llm.generate([prompt for prompt, _ in cases], PARAMS)
        for (_, reference), output in zip(cases, outputs, strict=True):
            check(output, reference)
        assert max(sizes) < budget + SPAN
        llm.check()


@pytest.mark.parametrize("block", [1, 4, 16])
def test_a_prefix_hit_that_ends_inside_an_image_computes_the_rest_of_it(gemma, block):
    (prompt, reference), (longer, longer_reference) = case(gemma, 2, 1), case(gemma, 3, 1)
    with engine(gemma[0], kvcache_block_size=block, num_kvcache_blocks=900 // block, max_num_batched_tokens=8) as llm:
        check(llm.generate(prompt, PARAMS)[0], reference)
        for item, right in ((longer, longer_reference), (prompt, reference)):
            output = llm.generate(item, PARAMS)[0]
            check(output, right)
            assert output.metrics.cached_tokens > 0
        cut = {**prompt, "prompt_token_ids": prompt["prompt_token_ids"][:-4]}
        short = Reference(gemma[1], gemma[0], cut["prompt_token_ids"], cut["multi_modal_data"]["image"])
        check(llm.generate(cut, PARAMS)[0], short)


def test_many_requests_under_little_memory_are_preempted_and_right(gemma):
    cases = [case(gemma, 1 + seed % 3, seed) for seed in range(8)]
    with engine(gemma[0], kvcache_block_size=4, num_kvcache_blocks=48, max_num_batched_tokens=12) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt for prompt, _ in cases], PARAMS)
            for output, (_, reference) in zip(outputs, cases, strict=True):
                check(output, reference)
        assert llm.stats()["preemptions"] > 0
        llm.check()


# ---- chunks and placeholders -----------------------------------------------------------------------------------------


def request(*spans):
    image = PreparedImage(np.zeros(1, np.float32), (1, 1, 1), 5, b"")
    return SimpleNamespace(images=tuple(PlacedImage(image, at) for at in spans))


def test_a_chunk_ends_before_an_image_or_has_all_of_it():
    item = request(3, 8)  # images [3, 8) and [8, 13)
    for first in range(15):
        for tokens in range(1, 16):
            for extend in (True, False):
                found = whole_images(item, first, tokens, extend)
                end = first + found
                assert not any(start < end < start + 5 for start in (3, 8)) or (found == 0 and not extend)
                assert found <= tokens or (extend and any(start <= first < start + 5 for start in (3, 8)))
                assert found > 0 or not extend


def test_neighbours_that_the_tokenizer_joins_are_joined():
    joined = ((21, 22, 23), (22, 22, 24), (22, 21, 23))
    facts = ImageFacts(9, placeholder=1, before=(22, 1), after=(2, 22), joined=joined)
    image = PreparedImage(np.zeros(1, np.float32), (1, 1, 1), 2, b"")

    def placed(*ids):
        count = ids.count(1)
        found, where = place(np.array(ids, np.int32), [image] * count, facts)
        assert [found[one.position : one.end].tolist() for one in where] == [[9, 9]] * count
        return found.tolist()

    assert placed(5, 1, 6) == [5, 22, 1, 9, 9, 2, 22, 6]
    assert placed(21, 1, 21) == [23, 1, 9, 9, 2, 23]
    assert placed(1, 1) == [22, 1, 9, 9, 2, 24, 1, 9, 9, 2, 22]
    with pytest.raises(RequestError, match="stands for a part of an image"):
        placed(1, 9)


def test_prompts_of_text_become_the_tokens_of_the_processor_of_transformers(gemma):
    """Newlines beside an image are tokenized together with those that are written around it."""
    path, _ = gemma
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), extra_special_tokens=names, model_specific_special_tokens=names
    )
    images = transformers.AutoImageProcessor.from_pretrained(path)
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=SPAN)
    facts = Gemma3Images(None, EncoderContext(str(path), json.loads((path / "config.json").read_text()))).facts()
    mark, pixels = "<start_of_image>", Image.fromarray(picture(0))
    prepared = PreparedImage(np.zeros(1, np.float32), (3, 28, 28), SPAN, b"")
    for text in (f"a{mark}b", f"a\n{mark}\nb", f"\n\n{mark}", f"{mark}\n\nb", f"{mark}{mark}", f"x\n{mark}\n{mark}y"):
        count = text.count(mark)
        right = processor(text=text, images=[pixels] * count)["input_ids"][0]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found, _ = place(np.array(ids, np.int32), [prepared] * count, facts)
        assert found.tolist() == list(right), repr(text)


# ---- refusals --------------------------------------------------------------------------------------------------------


class OldBackEnd(Sdpa):
    """A back end whose spec does not claim ``spans``."""

    features = SDPA.features - {"spans"}
    spec = Spec(f"{__name__}:OldBackEnd", (1, 6), "for a test", limits=SDPA.limits, features=features)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": OldBackEnd}, "attention=.*OldBackEnd does not support; use attention=sdpa"),
        ({"batch_invariant": True}, "batch_invariant=true does not support"),
    ],
)
def test_engines_that_cannot_serve_such_images_name_the_reason_and_read_text(gemma, options, reason):
    prompt, _ = case(gemma, 1)
    with engine(gemma[0], **options) as llm:
        with pytest.raises(RequestError, match=reason):
            llm.generate(prompt, PARAMS)
        assert llm.generate({"prompt_token_ids": [4, 5, 6]}, PARAMS)[0].error is None
    with pytest.raises(ConfigError, match=reason):
        engine(gemma[0], encoder="gemma3", **options)


def changed(gemma, tmp_path, name, change):
    path = shutil.copytree(gemma[0], tmp_path / "changed")
    fields = json.loads((path / name).read_text())
    change(fields)
    (path / name).write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("config.json", lambda c: c["text_config"].update(sliding_window=15), "16 tokens, more than .* window of 15"),
        ("config.json", lambda c: c["vision_config"].update(model_type="clip_vision_model"), "clip_vision_model"),
        ("preprocessor_config.json", lambda c: c.update(do_pan_and_scan=True), "do_pan_and_scan=true"),
        ("tokenizer.json", lambda c: c.update(added_tokens=c["added_tokens"][8:]), "no token of two newlines"),
    ],
)
def test_checkpoints_that_cannot_be_served_name_the_reason(gemma, tmp_path, name, change, reason):
    path = changed(gemma, tmp_path, name, change)
    with pytest.raises(ConfigError, match=reason):
        engine(path, encoder="gemma3")
