"""Images whose features several steps compute: shares, interruptions, failures, and the answers of an engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from devices import DEVICE
from image_models import make, picture, prompt_of

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.encoder import ImageFacts
from minivllm.core.interfaces.plan import NO_CHANGE, Delta
from minivllm.device.worker.encoder import LoadedEncoder
from minivllm.device.worker.images import ImageState, Span
from minivllm.errors import PluginError

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LAYERS = 4  # parts of the encoder of ``state_of``


class Encoder:
    """An encoder of LAYERS parts, which it counts.  Features are the values times the first number of the shape."""

    def __init__(self):
        self.parts_run = 0
        self.fails_at = -1

    def __call__(self, values, shape):
        return values.float().view(1, -1, 1) * shape[0]

    def parts(self, values, shape):
        for layer in range(LAYERS):
            self.parts_run += 1
            if self.parts_run == self.fails_at:
                raise RuntimeError("no room")
            yield (layer + 1) / (LAYERS + 1)
        yield self(values, shape)

    def describe(self, exc):
        return f"the image encoder failed: {exc}"


def state_of():
    columns = SimpleNamespace(known=np.zeros(4), device=torch.device("cpu"), to=torch.from_numpy)
    return ImageState(ImageFacts(3), Encoder(), columns, (), 0)


def begin(number, factor, steps):
    """Return a delta that computes the features 1, 2, 3 times ``factor`` of an image in some steps."""
    row = (number, 3, 1, factor, 1, 3, steps)
    return Delta(image=np.array([row], np.int32), pixels=np.array([1, 2, 3], np.uint8))


def free(number):
    return Delta(image=np.array([(number, 0, 0, 0, 0, 0, 0)], np.int32))


def why(state, number):
    return state.why_lost(Span(number, 0, 3, (1, 1, 3)))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
def test_each_step_computes_a_share_and_the_last_step_completes_the_features(steps):
    state, run = state_of(), []
    state.apply(begin(7, 2, steps))
    run.append(state.encoder.parts_run)
    for _ in range(steps - 1):
        assert 7 not in state.features or steps > LAYERS + 1
        state.apply(NO_CHANGE)
        run.append(state.encoder.parts_run)
    assert state.features[7].flatten().tolist() == [2, 4, 6] and not state.divided and not why(state, 7)
    shares = np.diff([0, *run])
    assert steps == 1 or (sum(shares) == LAYERS and max(shares) <= -(-(LAYERS + 1) // steps))


def test_a_step_that_reads_the_features_computes_the_rest():
    state = state_of()
    state.apply(begin(7, 2, 5))
    state.apply(begin(8, 3, 5))
    assert not why(state, 7) and state.features[7].flatten().tolist() == [2, 4, 6]
    assert list(state.divided) == [8]
    for _ in range(4):
        state.apply(NO_CHANGE)
    assert state.features[8].flatten().tolist() == [3, 6, 9] and not state.divided


def test_features_that_are_freed_or_begun_again_are_not_continued():
    state = state_of()
    state.apply(begin(7, 2, 5))
    state.apply(free(7))
    run = state.encoder.parts_run
    for _ in range(6):
        state.apply(NO_CHANGE)
    assert state.encoder.parts_run == run and not state.features and "missing" in why(state, 7)
    state.apply(begin(7, 2, 5))
    state.apply(begin(7, 3, 2))
    state.apply(NO_CHANGE)
    assert state.features[7].flatten().tolist() == [3, 6, 9] and not state.divided


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("early", [False, True])
def test_a_failed_part_leaves_other_images_alone(at, early):
    state = state_of()
    state.encoder.fails_at = at
    state.apply(begin(7, 2, LAYERS))
    if early:
        assert why(state, 7) == "the image encoder failed: no room"
    for _ in range(LAYERS):
        state.apply(NO_CHANGE)
    assert why(state, 7) == "the image encoder failed: no room" and not state.divided and not state.features
    state.apply(begin(8, 3, 2))
    state.apply(NO_CHANGE)
    assert not why(state, 8)
    state.apply(begin(7, 2, 1))
    assert not why(state, 7)


class Plugin:
    """An encoder plug-in whose ``encode_parts`` yields given values."""

    def __init__(self, *found):
        self.found = found

    def encode_parts(self, values, shape):
        yield from self.found


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((0.5, 0.4), "gave 0.4; expected a share of at least 0.5"),
        ((1.0,), "gave 1.0; expected a share"),
        ((0.5,), "gave a NoneType; expected a tensor"),
        ((0.5, torch.zeros(1, 3, 2, dtype=torch.float64)), "torch.float64"),
        ((1,), "gave a int; expected a tensor"),
    ],
)
def test_parts_of_another_form_are_refused(found, reason):
    loaded = LoadedEncoder.__new__(LoadedEncoder)
    loaded.plugin, loaded.levels, loaded.hidden, loaded.dtype = Plugin(*found), 1, 2, torch.float32
    with pytest.raises(PluginError, match=reason):
        list(loaded.parts(torch.zeros(3), (1, 1, 3)))


# ---- an engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("divided") / "qwen3_vl"
    path.mkdir()
    make(path, "qwen3_vl")
    return path


def prompts(count):
    """Return a prompt of text, and prompts with an image each."""
    asked = [{"prompt_token_ids": [5, 6, 7]}]
    for seed in range(count):
        ids = prompt_of("qwen3_vl", 1, seed, 20)
        asked.append({"prompt_token_ids": ids, "multi_modal_data": {"image": picture(seed, 90, 90)}})
    return asked


def answers(path, asked, steps, **options):
    """Return the outputs of an engine that encodes an image in so many steps, and the figures of its device."""
    plain = {"kvcache_block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 3, "max_model_len": 400}
    plain["device"] = DEVICE
    with LLM(str(path), skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=200, **plain, **options) as llm:
        llm.engine.planner._steps_of = lambda rows, tokens: steps
        begun = []
        runner = getattr(llm.engine.executor, "runner", None)
        if runner is not None:
            plain_encode = runner.images._encode
            runner.images._encode = lambda *args: begun.append(args[-1]) or plain_encode(*args)
        found = llm.generate(asked, PARAMS, use_tqdm=False)
        llm.check()
        assert runner is None or not runner.images.divided
        assert not llm.engine.images.held
        return [(output.error, output.outputs[0].token_ids if output.outputs else []) for output in found], begun


@pytest.mark.parametrize("options", [{}, {"executor": "process"}], ids=["local", "process"])
def test_answers_are_those_of_images_that_one_step_encodes(checkpoint, options):
    asked = prompts(4)
    right, _ = answers(checkpoint, asked, 1)
    found, begun = answers(checkpoint, asked, 3, **options)
    assert found == right and all(error is None and len(tokens) == 24 for error, tokens in found)
    assert options or begun.count(3) >= 3


def test_an_image_whose_part_fails_ends_its_request_alone(checkpoint, monkeypatch):
    asked = prompts(3)
    right, _ = answers(checkpoint, asked, 1)
    plain, calls = LoadedEncoder.parts, []

    def parts(self, values, shape):
        calls.append(shape)
        fails = len(calls) == 1
        for number, found in enumerate(plain(self, values, shape)):
            if fails and number == 1:
                raise torch.OutOfMemoryError("no room")
            yield found

    monkeypatch.setattr(LoadedEncoder, "parts", parts)
    found, _ = answers(checkpoint, asked, 2)
    failed = [index for index, (error, _) in enumerate(found) if error]
    assert len(failed) == 1 and "no room" in found[failed[0]][0] and len(calls) > 1
    assert all(one == other for index, (one, other) in enumerate(zip(found, right, strict=True)) if index not in failed)
