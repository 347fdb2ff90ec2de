"""Failures of the image encoder and of steps with images: no later request reads what they left."""

import numpy as np
import pytest
import torch
from devices import DEVICE
from image_models import make, picture, prompt_of

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.taps import Tap
from minivllm.device.worker.encoder import LoadedEncoder

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
CHUNKS = {"kvcache_block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 2}


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def family(request, tmp_path_factory):
    """Return the name of a family, its checkpoint, a prompt with an image, and the right tokens."""
    path = tmp_path_factory.mktemp("faults") / request.param
    path.mkdir()
    make(path, request.param)
    prompt = prompt_with(request.param, 5)
    with engine(path) as llm:
        return request.param, path, prompt, tokens_of(generate(llm, prompt)[0])


def prompt_with(family, seed, text=24):
    ids = prompt_of(family, 1, 3, text)
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(seed, 90, 90)}}


def engine(path, **options):
    options = {"num_kvcache_blocks": 160, "max_model_len": 400, **options}
    return LLM(model=str(path), skip_tokenizer_init=True, dtype="float32", device=DEVICE, **options)


def generate(llm, *prompts, params=PARAMS, **options):
    return llm.generate(list(prompts), params, use_tqdm=False, **options)


def tokens_of(output):
    assert output.error is None, output.error
    return output.outputs[0].token_ids


@pytest.fixture
def failing(monkeypatch):
    """Let the first call of the encoder fail, and return the list of its calls."""
    plain, calls = LoadedEncoder.__call__, []

    def call(self, values, shape):
        calls.append(shape)
        if calls == [shape]:
            raise torch.OutOfMemoryError("no room")
        return plain(self, values, shape)

    monkeypatch.setattr(LoadedEncoder, "__call__", call)
    return calls


FAILED = "the image encoder failed: OutOfMemoryError: no room"


@pytest.mark.parametrize("options", [{}, CHUNKS], ids=["whole", "chunked"])
def test_an_image_is_encoded_again_after_its_encoder_failed(family, failing, options):
    _, path, prompt, right = family
    with engine(path, **options) as llm:
        assert generate(llm, prompt)[0].error == FAILED
        assert llm.stats()["images"]["feature_bytes"] == llm.engine.images.used == 0
        for encodings in (2, 2):
            assert tokens_of(generate(llm, prompt)[0]) == right
            assert len(failing) == encodings
        llm.check()


def test_rows_beside_and_behind_a_failure_are_right(family, failing):
    _, path, prompt, right = family
    longer = {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], 7]}
    with engine(path, **CHUNKS) as llm:
        first, *others = generate(llm, prompt, prompt, prompt)
        assert first.error == FAILED
        assert [tokens_of(output) for output in others] == [right, right]
        assert tokens_of(generate(llm, longer)[0]) != right
        assert not any(content.requests for content in llm.engine.images.contents.values())
        assert tokens_of(generate(llm, prompt)[0]) == right


def test_a_worker_process_reports_lost_images_of_rows_that_draw_nothing(family, monkeypatch):
    _, path, prompt, right = family
    with engine(path, executor="process", **CHUNKS) as llm:
        images = llm.engine.images
        monkeypatch.setattr(images, "changes", lambda: (images.encodes.clear(), {})[1])
        assert generate(llm, prompt)[0].error == "the features of an image are missing"
        monkeypatch.undo()
        assert tokens_of(generate(llm, prompt)[0]) == right


@pytest.mark.parametrize("part", ["delta", "model"])
def test_an_image_is_encoded_again_after_a_failed_step(family, monkeypatch, part):
    _, path, prompt, right = family
    with engine(path) as llm:
        runner = llm.engine.executor.runner
        owner, name = (runner.state, "apply") if part == "delta" else (runner, "read")
        plain, calls = getattr(owner, name), []

        def fail(*args):
            calls.append(args)
            if len(calls) == 1:
                raise RuntimeError("no room")
            return plain(*args)

        monkeypatch.setattr(owner, name, fail)
        assert "no room" in generate(llm, prompt)[0].error
        assert tokens_of(generate(llm, prompt)[0]) == right


def test_features_of_another_length_end_their_request_alone(family, monkeypatch):
    name, path, prompt, right = family
    plain, calls = LoadedEncoder.__call__, []

    def cut(self, values, shape):
        calls.append(shape)
        return plain(self, values, shape)[:, len(calls) == 1 :]

    monkeypatch.setattr(LoadedEncoder, "__call__", cut)
    with engine(path) as llm:
        wrong, good, text = generate(llm, prompt_with(name, 6), prompt, {"prompt_token_ids": [1, 2, 3]})
        assert "features; expected" in wrong.error
        assert tokens_of(good) == right and tokens_of(text)


def test_taps_of_text_rows_beside_images_read_and_steer(family):
    _, path, prompt, right = family
    text = {"prompt_token_ids": [*range(1, 31)]}
    strong = np.random.default_rng(0).standard_normal(64).astype(np.float32) * 5
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    taps = [Tap("layers.1.input", read=True), Tap("embedding", read=True), Tap("layers.1.input", add=strong)]
    answers = []
    with engine(path, **CHUNKS) as llm:
        for prompts in ([text], [text, prompt], [text]):
            llm.reset_prefix_cache()
            output, *others = generate(llm, *prompts, params=params, taps=[taps, []][: len(prompts)])
            assert [tokens_of(other) for other in others] == [right[:4]] * len(others)
            values = {point: np.asarray(found) for point, found in output.outputs[0].taps.items()}
            answers.append((tokens_of(output), values))
        assert tokens_of(generate(llm, text, params=params)[0]) != answers[0][0]
    for tokens, values in answers[1:]:
        assert tokens == answers[0][0]
        for point, found in values.items():
            np.testing.assert_allclose(found, answers[0][1][point], atol=1e-4)


def test_steered_blocks_computed_beside_images_are_those_of_the_row_alone(family):
    name, path, _, _ = family
    text, prompt = {"prompt_token_ids": [*range(1, 31)]}, prompt_with(name, 5, text=2)
    strong = np.random.default_rng(0).standard_normal(64).astype(np.float32) * 5
    taps = [Tap("layers.1.input", add=strong)]
    with engine(path, **{**CHUNKS, "max_num_batched_tokens": 24}) as llm:
        right = tokens_of(generate(llm, text, taps=taps)[0])
        llm.reset_prefix_cache()
        generate(llm, text, prompt, taps=[taps, []])
        output = generate(llm, text, taps=taps)[0]
        assert output.metrics.cached_tokens and tokens_of(output) == right


def test_a_function_of_allowed_tokens_reads_the_placeholders_of_images(family):
    _, path, prompt, _ = family
    seen = []
    params = SamplingParams(max_tokens=2, temperature=0.0, allowed_tokens_fn=lambda ids: seen.append(ids) or [4])
    with engine(path) as llm:
        output = generate(llm, prompt, params=params)[0]
    assert tokens_of(output) == [4, 4]
    assert seen == [output.prompt_token_ids, [*output.prompt_token_ids, 4]]


def test_a_failed_image_at_the_start_of_a_prompt_does_not_fail_its_step(family, failing):
    name, path, prompt, right = family
    early = prompt_with(name, 6, text=0)
    with engine(path) as llm:
        first, second = generate(llm, early, prompt)
        assert first.error == FAILED and tokens_of(second) == right
