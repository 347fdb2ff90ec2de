"""The seam encoder: built-in families under the kit, a class of a user, and an encoder of a package."""

import gc
import json
import shutil
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packages import environment
from wrong.encoders import Colours, Grid

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.encoder import EncoderContext
from minivllm.device.layers import patch_tower
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.worker import encoder_graphs
from minivllm.errors import ConfigError, PluginError, RequestError
from minivllm.plugins.encoder.qwen_vl import Qwen3VL, QwenVL
from minivllm.testing import EncoderConformance
from minivllm.testing.encoder import TOKEN, _close, image_checkpoint, text_checkpoint

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
OPTIONS = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "num_kvcache_blocks": 60}
OPTIONS["max_model_len"] = 96


def picture(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (40, 40, 3), np.uint8)


def prompt(*pictures, token=TOKEN):
    ids = [5, 17, *([token, 9] * len(pictures)), 3]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": list(pictures)}}


def answer(llm, requested):
    (output,) = llm.generate([requested], PARAMS, use_tqdm=False)
    assert output.error is None, output.error
    return output.outputs[0].token_ids, [next(iter(one.values())).logprob for one in output.outputs[0].logprobs]


def scored(logprob):
    """Return the output of a request with one token of this log-probability."""
    branch = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=logprob)}])
    return SimpleNamespace(outputs=[branch])


@pytest.mark.parametrize(("logprob", "close"), [(-1.00001, True), (-1.1, False), (float("nan"), False)])
def test_the_kit_takes_answers_as_close_only_if_their_log_probabilities_are(logprob, close):
    assert _close([scored(-1.0)], [scored(logprob)]) == close


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_further_model_types_serve_an_engine_and_keep_their_features(family):
    suite = EncoderConformance()
    suite.plugin = "qwen_vl" if family == "qwen2_vl" else "qwen3_vl"
    suite.checkpoint = image_checkpoint(family)
    suite.test_facts_are_plain_data_of_the_checkpoint()
    suite.test_values_are_numbers_and_tokens_are_those_of_the_shape()
    suite.test_features_are_those_of_the_image_and_stay_so()
    suite.test_the_engine_serves_it()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_patches_that_the_device_makes_of_pixels_are_those_of_the_processor(family, tmp_path):
    image = pytest.importorskip("PIL.Image")
    shutil.copytree(image_checkpoint(family), tmp_path / "made")
    file = tmp_path / "made" / "preprocessor_config.json"
    fields = json.loads(file.read_text())
    for more in ({}, {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.5]}, {"do_normalize": False}):
        file.write_text(json.dumps({**fields, **more}))
        made = (Qwen3VL if family == "qwen3_vl" else QwenVL)(
            None, EncoderContext(str(tmp_path / "made"), open_checkpoint(tmp_path / "made").raw)
        )
        made.load("cpu", "float32")
        for number, (width, height) in enumerate(((4 * made._patch,) * 2, (90, 31), (33, 170), (300, 200))):
            pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
            right = made.processed(image.fromarray(pixels))
            values, shape, tokens = made.prepare(image.fromarray(pixels))
            direct = made.prepare_pixels(pixels)
            kept = (height, width) == (shape[1] * made._patch, shape[2] * made._patch)
            assert (direct is not None) == (kept and "do_normalize" not in more) and kept >= (number == 0)
            assert direct is None or (np.array_equal(direct.values, values) and direct[1:] == (shape, tokens))
            patches = made._patches(torch.from_numpy(np.asarray(values).reshape(-1)), shape).numpy()
            assert list(shape) == right["image_grid_thw"][0].tolist() and tokens == np.prod(shape) // 4
            assert np.array_equal(patches, right["pixel_values"])
            assert (np.size(values) < patches.size) == ("do_normalize" not in more)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_the_own_tower_gives_the_features_of_transformers_for_one_and_several_images(family):
    folder = image_checkpoint(family)
    made = Qwen3VL(None, EncoderContext(str(folder), open_checkpoint(folder).raw))
    made.load("cpu", "float32")
    for grid in ((1, 4, 4), (1, 6, 10), (1, 2, 14), (1, 16, 2), (2, 4, 6)):
        patches = torch.randn(2 * int(np.prod(grid)), 3 * 2 * 16**2, generator=torch.Generator().manual_seed(grid[1]))
        one, other = patches.chunk(2)
        with torch.inference_mode():
            found = made.model.get_image_features(one, image_grid_thw=torch.tensor([grid]))
            right = [found.pooler_output[0], *_levels(found)]
            own, both = made.tower(one, grid), made.tower(torch.cat([one, other]), grid)
        assert len(own) == len(right) == made.facts().levels
        for a, b, two in zip(own, right, both, strict=True):
            assert (a - b).abs().max() < 2e-6 * b.abs().max() + 1e-6 and torch.allclose(two[: len(a)], a, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_parts_of_images_that_are_encoded_in_turns_have_the_features_of_whole_images(family):
    folder = image_checkpoint(family)
    made = Qwen3VL(None, EncoderContext(str(folder), open_checkpoint(folder).raw))
    made.load("cpu", "float32")
    layers = len(made.model.visual.blocks)
    grids = ((1, 4, 4), (1, 6, 10), (1, 4, 4))
    draw = torch.Generator().manual_seed(0)
    values = [torch.rand(int(np.prod(grid)) * 3 * 2 * 16**2, generator=draw) for grid in grids]
    with torch.inference_mode():
        right = [made.encode(one, grid) for one, grid in zip(values, grids, strict=True)]
        running = [made.encode_parts(one, grid) for one, grid in zip(values, grids, strict=True)]
        next(made.encode_parts(values[1], grids[1]))  # it is abandoned
        for number in range(layers):
            assert [next(one) for one in running] == [(number + 1) / (layers + 1)] * len(grids)
        for one, whole in zip(running, right, strict=True):
            assert torch.equal(next(one), whole) and next(one, None) is None


def test_both_calls_of_a_capture_have_the_same_attention_whatever_sizes_come_between():
    folder = image_checkpoint("qwen3_vl")
    made = Qwen3VL(None, EncoderContext(str(folder), open_checkpoint(folder).raw))
    made.load("cpu", "float32")
    tower, merge = made.tower, made.tower.merge
    grid = (1, 2 * merge, 2 * merge)
    calls = []
    for _ in range(encoder_graphs.SIGHTS + 2):  # the last two are those of the capture
        calls.append(tower.frequent(grid))
        tower.tables(grid)
        for columns in range(3, 4 + patch_tower.GRIDS):
            tower.tables((1, merge, columns * merge))
        assert grid not in tower._tables
    assert calls == [False, True, True, True]


def test_a_divided_image_keeps_its_residual_stream_and_the_output_of_one_layer_between_parts():
    folder = image_checkpoint("qwen3_vl")
    made = Qwen3VL(None, EncoderContext(str(folder), open_checkpoint(folder).raw))
    made.load("cpu", "float32")
    grid = (1, 4, 6)
    patches = torch.randn(2 * int(np.prod(grid)), 3 * 2 * 16**2)
    given = weakref.ref(patches)
    wide = len(patches), made.tower.embed[0].shape[0]
    with torch.inference_mode():
        running = made.tower.parts(patches, grid)
        del patches
        for _ in made.model.visual.blocks:
            next(running)
            kept = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == wide]
            assert given() is None and len(kept) == 2
            del kept


def test_cached_position_tables_have_a_bounded_sum_of_patches_and_the_newest_grid_stays(monkeypatch):
    folder = image_checkpoint("qwen3_vl")
    made = Qwen3VL(None, EncoderContext(str(folder), open_checkpoint(folder).raw))
    made.load("cpu", "float32")
    monkeypatch.setattr(patch_tower, "TABLE_PATCHES", 24)
    side = made.tower.merge
    grids = [(1, side, side * columns) for columns in (1, 2, 3, 4, 20, 1)]
    for grid in grids:
        assert made.tower.tables(grid) is made.tower.tables(grid)
        kept = list(made.tower._tables)
        assert kept[-1] == grid
        assert sum(int(np.prod(one)) for one in kept) <= 24 or kept == [grid]
    assert list(made.tower._tables) == [grids[-1]]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_the_own_tower_on_a_gpu_gives_the_features_of_transformers_at_each_call(dtype, bound):
    folder = image_checkpoint("qwen3_vl")
    reference = Qwen3VL(None, EncoderContext(str(folder), open_checkpoint(folder).raw))
    reference.load("cpu", "float32")
    grid = (1, 16, 24)
    patches = torch.randn(int(np.prod(grid)), 3 * 2 * 16**2, generator=torch.Generator().manual_seed(1))
    for repeatable in (False, True):
        made = Qwen3VL(None, EncoderContext(str(folder), open_checkpoint(folder).raw, repeatable))
        made.load("cuda", dtype)
        given = patches.to("cuda", getattr(torch, dtype))
        with torch.inference_mode():
            right = reference.tower(given.float().cpu(), grid)
            calls = [[level.float().cpu() for level in made.tower(given, grid)] for _ in range(3)]
        for call in calls:
            for own, want in zip(call, right, strict=True):
                assert (own - want).abs().max() < bound * want.abs().max()
        assert all(map(torch.equal, calls[1], calls[2]))
        if repeatable:
            assert all(map(torch.equal, calls[0], calls[1]))


def _levels(found):
    """Return the features of each level.  Transformers 5.17 gives one tensor for all images, 5.24 one for each."""
    levels = getattr(found, "deepstack_features", None) or []
    return [level[0] if isinstance(level, list | tuple) else level for level in levels]


@pytest.mark.parametrize("cls", [Colours, Grid])
def test_a_class_of_the_user_works_with_one_option_over_a_text_model(cls):
    with LLM(str(text_checkpoint()), encoder=cls, **OPTIONS) as llm:
        assert "up to 16 in a request" in llm.explain()
        one, other, both = (answer(llm, prompt(*some)) for some in ([picture(1)], [picture(2)], [picture(1)] * 2))
        assert one[1] != other[1] != both[1]
        again = answer(llm, prompt(picture(1)))
        assert again[0] == one[0] and np.allclose(again[1], one[1], atol=1e-5)
        assert llm.stats()["images"]["encoded"] == 2


def test_the_same_model_without_the_option_reads_text_only():
    refused = pytest.raises(RequestError, match="the model has no image encoder")
    with LLM(str(text_checkpoint()), **OPTIONS) as llm, refused:
        llm.generate(prompt(picture()), PARAMS, use_tqdm=False)


PACKAGE = {
    "pyproject.toml": """[project]
name = "acme-vision"
version = "1.0"
[project.entry-points."minivllm.encoder"]
colours = "acme_vision.spec:COLOURS"
""",
    "acme_vision/__init__.py": "",
    "acme_vision/spec.py": """from minivllm.plugin import ANY, Spec
COLOURS = Spec("acme_vision.colours:Mean", (1, 0), "mean colours", priority=50,
    limits={"device": ANY, "dtype": ANY, "model_type": {"llama"}})
""",
    "acme_vision/colours.py": """import numpy as np
from minivllm.plugin import ImageEncoder, ImageFacts, ImageValues

class Mean(ImageEncoder):
    def facts(self):
        return ImageFacts(self.ctx.config["image_token_id"])
    def prepare(self, image):
        return ImageValues(np.asarray(image.resize((2, 2)), np.float32).reshape(4, 3), (3, 2, 2), 4)
    def load(self, device, dtype):
        import torch
        draw = torch.Generator().manual_seed(0)
        self.weight = torch.randn(3, self.ctx.config["hidden_size"], generator=draw).to(device, getattr(torch, dtype))
        return self.weight.nbytes
    def encode(self, values, shape):
        return (values.view(1, 4, 3) / 255).to(self.weight.dtype) @ self.weight
""",
    "use.py": """import json, sys
import numpy as np
from minivllm import LLM, SamplingParams
folder, options, executor = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
if __name__ == "__main__":
    with LLM(folder, executor=executor, **options) as llm:
        picture = np.full((9, 9, 3), 200, np.uint8)
        asked = {"prompt_token_ids": [5, 60, 9], "multi_modal_data": {"image": picture}}
        (output,) = llm.generate([asked], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
        print(json.dumps([output.error, output.prompt_token_ids, output.outputs[0].token_ids]))
        print(llm.explain("encoder"))
""",
}


def test_an_encoder_of_a_package_is_chosen_by_model_type_in_each_executor(tmp_path):
    for name, text in PACKAGE.items():
        path = tmp_path / "acme" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    there = environment([tmp_path / "acme"], tmp_path / "metadata")
    found = []
    for executor in ("local", "process"):
        command = [sys.executable, str(tmp_path / "acme" / "use.py"), str(text_checkpoint()), json.dumps(OPTIONS)]
        done = subprocess.run([*command, executor], env=there, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        line, _, explained = done.stdout.partition("\n")
        assert "acme-vision/colours" in explained
        found.append(json.loads(line))
    error, ids, tokens = found[0]
    assert error is None and ids == [5, 60, 60, 60, 60, 9] and len(tokens) == 4
    assert found[1] == found[0]


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_an_encoder_for_another_model_type_is_refused_by_its_limits():
    with pytest.raises(PluginError, match="model_type"):
        LLM(str(text_checkpoint()), encoder="qwen_vl", **OPTIONS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"compressor": "streaming"}, "compressor"), ({"tensor_parallel_size": 2}, "tensor_parallel_size")],
)
def test_a_named_encoder_beside_something_that_excludes_images_is_an_error(options, reason):
    with pytest.raises(ConfigError, match=f"encoder=.*: images are not implemented with .*{reason}"):
        LLM(str(text_checkpoint()), encoder=Colours, **OPTIONS, **options)


class Raises(Colours):
    def facts(self):
        raise KeyError("no_such_field")


class OutsideTheVocabulary(Colours):
    def facts(self):
        return super().facts().__class__(token=100000)


class OtherFacts(Colours):
    def facts(self):
        return {"token": 3}


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(Raises, "KeyError: 'no_such_field'"), (OutsideTheVocabulary, "token id 100000"), (OtherFacts, "ImageFacts")],
)
def test_wrong_facts_of_a_named_encoder_are_an_error_with_the_reason(cls, reason):
    with pytest.raises(ConfigError, match=reason):
        LLM(str(text_checkpoint()), encoder=cls, **OPTIONS)


class WrongForm(Colours):
    def encode(self, values, shape):
        return super().encode(values, shape)[0]


class WrongDtype(Colours):
    def encode(self, values, shape):
        return super().encode(values, shape).double()


class WrongCount(Colours):
    def encode(self, values, shape):
        return super().encode(values, shape)[:, :-1]


class Exits(Colours):
    def encode(self, values, shape):
        raise SystemExit("goodbye")


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (WrongForm, r"the encoder gave torch.float32 \[16, 32\] on cpu; expected torch.float32 \[1, tokens, 32\]"),
        (WrongDtype, r"the encoder gave torch.float64"),
        (WrongCount, r"gave 15 features; expected 16"),
        (Exits, "goodbye"),
    ],
)
def test_features_of_a_wrong_form_end_the_requests_of_the_image_alone(cls, reason):
    with LLM(str(text_checkpoint()), encoder=cls, **OPTIONS) as llm:
        text = {"prompt_token_ids": [4, 5, 6]}
        failed, fine = llm.generate([prompt(picture()), text], PARAMS, use_tqdm=False)
        with pytest.raises(AssertionError, match=reason):
            assert failed.error is None, failed.error
        assert fine.error is None and len(fine.outputs[0].token_ids) == 6


class CannotLoad(Colours):
    def load(self, device, dtype):
        raise OSError("no such file")


class NoSize(Colours):
    def load(self, device, dtype):
        super().load(device, dtype)


@pytest.mark.parametrize(("cls", "reason"), [(CannotLoad, "OSError: no such file"), (NoSize, r"load\(\) gave None")])
def test_an_encoder_that_cannot_be_loaded_stops_the_start(cls, reason):
    with pytest.raises(PluginError, match=reason):
        LLM(str(text_checkpoint()), encoder=cls, **OPTIONS)


class RefusesPictures(Colours):
    def prepare(self, image):
        raise ValueError("too blue")


class OtherResult(Colours):
    def prepare(self, image):
        return 7


@pytest.mark.parametrize(
    ("cls", "error", "reason"),
    [(RefusesPictures, RequestError, "too blue"), (OtherResult, PluginError, r"prepare\(\) gave 7")],
)
def test_a_picture_that_prepare_refuses_is_refused_with_its_reason(cls, error, reason):
    with LLM(str(text_checkpoint()), encoder=cls, **OPTIONS) as llm, pytest.raises(error, match=reason):
        llm.generate(prompt(picture()), PARAMS, use_tqdm=False)
