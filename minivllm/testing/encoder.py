"""The conformance suite of image encoders.

The suite prepares and encodes images of several sizes, and an engine serves requests with images.  In an engine,
different processes prepare and encode an image, so the suite uses an instance for each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.encoder import EncoderContext, ImageEncoder, ImageFacts, ImageValues
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.core.interfaces.images import digest_of
from minivllm.device.loading.hf_config import Checkpoint, open_checkpoint

from .base import since, token_logprobs
from .kept import Lasting
from .spec import SpecConformance
from .tiny import tiny_dir
from .tiny_images import CLASSES, make

SIZES = ((40, 40), (90, 30), (30, 120), (64, 48), (33, 77))  # width and height
THREADS = 6
OUTPUT = 8  # tokens
TOKEN = 60  # image_token_id in config.json of the text model


@cache
def temporary() -> tempfile.TemporaryDirectory[str]:
    """Return the temporary directory of all test checkpoints, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="minivllm-encoders-")


@cache
def text_checkpoint() -> Path:
    """Return a small random Llama whose config.json has an ``image_token_id``."""
    folder = Path(temporary().name) / "text"
    path, *_ = tiny_dir(folder)
    config = json.loads((path / "config.json").read_text())
    content = json.dumps({**config, "image_token_id": TOKEN})
    (path / "config.json").write_text(content)
    return folder


@cache
def image_checkpoint(family: str) -> Path:
    """Return a small random checkpoint of a model type that has an image encoder."""
    folder = Path(temporary().name) / family
    folder.mkdir()
    make(folder, family)
    return folder


class EncoderConformance(Lasting, SpecConformance):
    """The conformance suite of image encoders.

    ``checkpoint`` is the directory of a checkpoint that the encoder serves.  By default it is a small random
    checkpoint of the first model type in the spec's limits, or a small Llama with ``image_token_id`` in its
    config.json.  An image that is encoded again must have the same features bit for bit, or with ``repeatable`` False
    up to a relative difference of 1e-5.
    """

    kind = "encoder"
    checkpoint: str | Path = ""
    repeatable: bool = True

    def folder(self) -> Path:
        """Return the directory of the checkpoint that the encoder serves in the tests."""
        if self.checkpoint:
            return Path(self.checkpoint)
        known = [family for family in self.spec.listed("model_type") if family in CLASSES]
        if self.spec.listed("model_type") and not known:
            pytest.skip("the kit has no checkpoint of this model type: set ``checkpoint``")
        return image_checkpoint(known[0]) if known else text_checkpoint()

    def files(self) -> Checkpoint:
        """Open the checkpoint as the engine does."""
        return open_checkpoint(str(self.folder()))

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        found = self.files()
        return (EncoderContext(str(found.folder), found.raw, self.repeatable),)

    def made(self) -> ImageEncoder:
        """Create an instance without weights, which can only prepare images."""
        made: ImageEncoder = self.build(*self.context())
        return made

    def loaded(self, dtype: str = "float32") -> ImageEncoder:
        """Create an instance that has loaded its weights in a dtype, and can encode images."""
        made = self.made()
        with torch.inference_mode():
            size = made.load(self.place(), dtype)
        assert type(size) is int and size >= 0, f"load() returned {size!r}: expected the bytes of the weights"
        return made

    def pictures(self) -> list[Any]:
        """Return PIL images in RGB: random pixels of several sizes, a black image and a white one."""
        from PIL import Image

        draw = np.random.default_rng(0)
        found = []
        for w, h in SIZES:
            pixels = draw.integers(0, 256, (h, w, 3), np.uint8)
            found.append(Image.fromarray(pixels))
        black = Image.new("RGB", (50, 50))
        white = Image.new("RGB", (50, 50), "white")
        return [*found, black, white]

    def encoded(self, encoder: ImageEncoder, found: ImageValues) -> Tensor:
        """Encode the prepared values of an image, passed as a flat tensor on the device, and return the features."""
        flat = np.array(found.values).reshape(-1)
        values = torch.from_numpy(flat).to(self.place())
        with torch.inference_mode():
            return encoder.encode(values, tuple(found.shape))

    def exercise(self, instance: ImageEncoder) -> Any:
        """Return the prepared values of two images, as lists."""
        prepared = [instance.prepare(picture) for picture in self.pictures()[:2]]
        return [np.asarray(found.values).tolist() for found in prepared]

    def lasting(self) -> ImageEncoder:
        """Create an instance for the leak test, which prepares many images."""
        return self.made()

    def once_more(self, instance: ImageEncoder, number: int) -> None:
        """Prepare a random image that differs for each ``number``."""
        from PIL import Image

        draw = np.random.default_rng(number)
        pixels = draw.integers(0, 256, (40, 40, 3), np.uint8)
        instance.prepare(Image.fromarray(pixels))

    def let_go(self, instance: ImageEncoder) -> None:
        """Release an instance of the leak test; there is nothing to stop."""

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two encodings of the same image are equal, or close if ``repeatable`` is False."""
        if self.repeatable:
            return torch.equal(a, b)
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)

    # ---- facts ---------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_facts_are_plain_data_of_the_checkpoint(self) -> None:
        """Check that each instance returns the same ``ImageFacts``, whose token ids are in the vocabulary.

        The facts must survive a round trip through JSON.
        """
        facts = self.made().facts()
        assert isinstance(facts, ImageFacts), f"facts() returned a {type(facts).__name__}: expected ImageFacts"
        assert self.made().facts() == facts, "another instance returns other facts"
        sent = json.loads(json.dumps(asdict(ImageWiring(facts=facts))))
        assert ImageWiring.from_json(sent).facts == facts, "the facts change on their way through JSON"
        vocab = self.files().hf_config().vocab_size
        for one in (facts.token, *facts.before, *facts.after, *(c for *_, c in facts.joined)):
            assert 0 <= one < vocab, f"facts name the token id {one}: expected 0 to {vocab - 1}"
        assert facts.levels >= 1 and facts.merge >= 1 and facts.span >= 0, f"{facts}: expected positive numbers"

    # ---- prepare -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_values_are_numbers_and_tokens_are_those_of_the_shape(self) -> None:
        """Check the result of ``prepare``: finite values, a shape of three numbers, and the number of image tokens.

        If tokens have a position for each axis, their number must be that of the grid.
        """
        made = self.made()
        facts = made.facts()
        for picture in self.pictures():
            values, shape, tokens = made.prepare(picture)
            found = np.asarray(values)
            assert np.isfinite(found).all(), "a value is not finite"
            assert found.dtype in (np.float32, np.uint8), f"values are {found.dtype}: expected float32 or uint8"
            assert len(shape) == 3 and all(int(n) == n and n > 0 for n in shape), f"shape={shape}: expected 3 sizes"
            assert int(tokens) == tokens and tokens > 0, f"tokens={tokens}: expected a positive number"
            assert not facts.span or tokens <= facts.span, f"{tokens} tokens, and facts().span is {facts.span}"
            if facts.sections:
                frames, rows, columns = shape
                assert rows % facts.merge == 0 == columns % facts.merge, f"{shape}: no multiple of merge={facts.merge}"
                want = frames * (rows // facts.merge) * (columns // facts.merge)
                assert tokens == want, f"{tokens} tokens of a grid {shape}: expected {want}"

    @since(1, 0)
    def test_pixels_alone_decide_the_values(self) -> None:
        """Check that ``prepare`` depends on the pixels alone, not on the object, the file name or earlier images.

        Other pixels must give other values.  The engine finds features of an earlier image by a hash of the pixels.
        """
        made = self.made()

        def digest(picture: Any) -> bytes:
            return _digest(made.prepare(picture))

        pictures = self.pictures()
        first = [digest(picture) for picture in pictures]
        assert len(set(first)) == len(first), "two different pictures have the same values"
        for number, picture in reversed(list(enumerate(pictures))):
            other = picture.copy()
            other.filename = f"picture{number}.png"
            other.info = {"comment": "another file"}
            assert digest(other) == first[number], "a copy of a picture has other values"
        for picture in pictures:
            picture.filename = "one-name.png"
        renamed = [digest(picture) for picture in pictures]
        assert renamed == first, "the file name of a picture changes its values"

    @since(1, 2)
    def test_pixels_have_the_values_of_their_picture(self) -> None:
        """Check that ``prepare_pixels`` returns None or the same as ``prepare``, and does not change the pixels."""
        made = self.made()
        for picture in self.pictures():
            pixels = np.array(picture)
            found = made.prepare_pixels(pixels)
            assert np.array_equal(pixels, np.array(picture)), "prepare_pixels changed the pixels: copy them first"
            if found is None:
                continue
            values, shape, tokens = made.prepare(picture)
            same = np.array_equal(np.ravel(found.values), np.ravel(values))
            assert same, "the pixels of a picture have other values"
            got = (tuple(found.shape), found.tokens)
            expected = (tuple(shape), tokens)
            assert got == expected, "the pixels have another shape"

    @since(1, 0)
    def test_pictures_do_not_change(self) -> None:
        """Check that ``prepare`` does not change the image object, because the caller may use it again."""
        made = self.made()
        for picture in self.pictures():
            before = picture.tobytes()
            made.prepare(picture)
            assert picture.tobytes() == before, "prepare changed the picture: copy it first"

    @since(1, 0)
    def test_threads_prepare_what_one_thread_prepares(self) -> None:
        """Check that threads may prepare images at the same time, and that no call changes another's result."""
        made = self.made()
        pictures = self.pictures() * 4
        alone = [_digest(made.prepare(picture)) for picture in pictures]
        with ThreadPoolExecutor(THREADS) as pool:
            results = list(pool.map(made.prepare, pictures))
            together = [_digest(found) for found in results]
        assert together == alone, "a thread got other values than one thread alone, or a later call changed them"

    # ---- encode --------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_features_have_the_form_that_facts_and_prepare_promise(self) -> None:
        """Check that features are finite, [levels, tokens, hidden], in each claimed dtype and on the device."""
        made = self.made()
        hidden = self.files().hf_config().hidden_size
        for dtype in self.values("dtype", "float32", "bfloat16"):
            encoder = self.loaded(dtype)
            for picture in self.pictures():
                found = made.prepare(picture)
                features = self.encoded(encoder, found)
                assert isinstance(features, Tensor), f"encode returned a {type(features).__name__}: expected a tensor"
                want = (made.facts().levels, found.tokens, hidden)
                assert tuple(features.shape) == want, f"features are {list(features.shape)}: expected {list(want)}"
                assert features.dtype == getattr(torch, dtype), f"features are {features.dtype}: expected {dtype}"
                assert features.device.type == torch.device(self.place()).type, f"features are on {features.device}"
                assert features.isfinite().all(), "a feature is not finite"

    @since(1, 0)
    def test_features_are_those_of_the_image_and_stay_so(self) -> None:
        """Check that the features of an image depend on the arguments of ``encode`` alone.

        They are the same after other images, in reverse order and from another instance.  They differ between images,
        and later calls do not change them.
        """
        made = self.made()
        encoder = self.loaded()
        prepared = [made.prepare(picture) for picture in self.pictures()]
        first = [self.encoded(encoder, found) for found in prepared]
        copies = [features.clone() for features in first]
        again = [self.encoded(encoder, found) for found in reversed(prepared)]
        again.reverse()
        fresh = [self.encoded(self.loaded(), found) for found in prepared]
        for a, b, c, kept in zip(first, again, fresh, copies, strict=True):
            assert torch.equal(a, kept), "a later call changed features that were returned before"
            assert self.same(kept, b), "an image has other features after other images"
            assert self.same(kept, c), "another instance gives an image other features"
        for i, a in enumerate(copies):
            for b in copies[:i]:
                differs = a.shape != b.shape or (a - b).abs().max() > 1e-6
                assert differs, "two different images have the same features"

    @since(1, 0)
    def test_arguments_and_the_random_state_do_not_change(self) -> None:
        """Check that ``encode`` does not change its argument and draws nothing from torch's global random generator."""
        made = self.made()
        encoder = self.loaded()
        state = torch.get_rng_state()
        for picture in self.pictures():
            found = made.prepare(picture)
            flat = np.array(found.values).reshape(-1)
            values = torch.from_numpy(flat).to(self.place())
            before = values.clone()
            with torch.inference_mode():
                encoder.encode(values, tuple(found.shape))
            assert torch.equal(values, before), "encode changed its values: copy them first"
        assert torch.equal(state, torch.get_rng_state()), "encode drew from torch's generator"

    @since(1, 4)
    def test_parts_end_with_the_features_of_the_whole(self) -> None:
        """Check ``encode_parts``: ascending shares in [0, 1), and at last the features as ``encode`` returns them.

        The parts of several images are computed in turns, and one image is not finished.
        """
        made = self.made()
        encoder = self.loaded()
        prepared = [made.prepare(picture) for picture in self.pictures()[:3]]
        right = [self.encoded(encoder, found).clone() for found in prepared]
        running = [self._parts(encoder, found) for found in prepared]
        abandoned = self._parts(encoder, prepared[0])
        with torch.inference_mode():
            next(abandoned)
            del abandoned
            ends: dict[int, Tensor] = {}
            shares = [0.0] * len(running)
            while len(ends) < len(running):
                for i, one in enumerate(running):
                    if i in ends:
                        continue
                    found = next(one, None)
                    assert isinstance(found, (float, Tensor)), f"a part gave {found!r}: expected a share or features"
                    if isinstance(found, Tensor):
                        ends[i] = found
                        continue
                    assert shares[i] <= found < 1, f"the share {found} follows {shares[i]}: expected no less, below 1"
                    shares[i] = found
        for i, features in enumerate(right):
            assert self.same(features, ends[i]), "an image has other features in parts"

    def _parts(self, encoder: ImageEncoder, found: ImageValues) -> Iterator[float | Tensor]:
        """Return the iterator of ``encode_parts`` for the prepared values of an image."""
        flat = np.array(found.values).reshape(-1)
        values = torch.from_numpy(flat).to(self.place())
        return encoder.encode_parts(values, tuple(found.shape))

    @since(1, 1)
    def test_dummy_weights_depend_on_the_seed_alone(self) -> None:
        """Check features with random weights (``load_dummy``): finite, and a function of the seed."""
        if type(self.made()).load_dummy is ImageEncoder.load_dummy:
            pytest.skip("this encoder has no dummy weights")
        found = self.made().prepare(self.pictures()[0])
        features = []
        for seed in (3, 3, 4):
            torch.manual_seed(len(features))
            encoder = self.made()
            size = encoder.load_dummy(self.place(), "float32", seed)
            assert type(size) is int and size >= 0, f"load_dummy() returned {size!r}: expected the bytes of the weights"
            features.append(self.encoded(encoder, found))
        one, again, other = features
        assert one.isfinite().all(), "a feature is not finite"
        assert self.same(one, again), "the same seed gives other features"
        assert not torch.equal(one, other), "another seed gives the same features"

    # ---- the engine ----------------------------------------------------------------------------------------------

    def prompt(self, facts: ImageFacts, pictures: list[Any]) -> dict[str, Any]:
        """Return a prompt with some images, and text before, between and after them."""
        ids = [5, 17, 3]
        for i in range(len(pictures)):
            ids += [facts.prompt_token, 7 + i, 11, 4]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}

    def reference(self, ids: list[int], prepared: list[ImageValues]) -> Tensor | None:
        """Return log-probabilities [tokens, vocabulary] of an independent model for a prompt, or None.

        ``ids`` has the prompt's tokens, those of the images included, and ``prepared`` the values of the images.  By
        default the features replace the embeddings of the image's tokens in a Llama of transformers.  The result is
        None for other text models, for several positions per token, or for several levels of features.
        """
        facts = self.made().facts()
        if self.files().raw.get("model_type") != "llama" or facts.sections or facts.levels > 1 or facts.span:
            return None
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder(), dtype=torch.float32)
        tokens = torch.tensor([ids])
        encoder = self.loaded()
        parts = [self.encoded(encoder, found)[0] for found in prepared]
        features = torch.cat(parts).cpu()
        with torch.inference_mode():
            embeddings = model.get_input_embeddings()(tokens)
            embeddings[tokens == facts.token] = features
            logits: Tensor = model(inputs_embeds=embeddings).logits[0]
            scores = logits.float().log_softmax(-1)
        return scores

    @since(1, 0)
    def test_the_engine_serves_it(self) -> None:
        """Check the answers of an engine with images in its prompts.

        A prompt has the same tokens alone, together with others, in chunks and with a cached prefix.  The order of
        images matters.  The log-probabilities are those of ``reference``.
        """
        made = self.made()
        pictures = self.pictures()[:3]
        facts = made.facts()
        orders = [pictures[:1], pictures[1:2], pictures, pictures[::-1]]
        prompts = [self.prompt(facts, some) for some in orders]
        tokens = sum(made.prepare(picture).tokens for picture in pictures)
        options: dict[str, Any] = {"max_model_len": tokens + 64, "num_kvcache_blocks": 4 * tokens + 200}
        alone = []
        with self._engine(enable_prefix_caching=False, **options) as llm:
            for prompt in prompts:
                alone += _answers(llm, [prompt])
        with self._engine(max_num_batched_tokens=max(7, facts.span), **options) as llm:
            together = _answers(llm, prompts)
            assert _close(together, alone), "requests together and in chunks have other answers"
            again = _answers(llm, prompts)
            assert _close(again, alone), "requests behind prefix hits have other answers"
        first, second, ascending, descending = alone
        assert not _close([first], [second]), "two pictures have the same answer"
        assert not _close([ascending], [descending]), "pictures in reverse order have the same answer"
        for output, some in zip(alone, orders, strict=True):
            self._compare_with_reference(made, output, some)

    def _engine(self, **options: Any) -> LLM:
        """Start an engine with the text model of the test checkpoint and the plug-in as its encoder."""
        plain: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "kvcache_block_size": 4}
        plain["device"] = self.place()
        plain["allow_targets"] = self.own_targets()
        return LLM(str(self.folder()), encoder=self.choice(), max_num_seqs=4, **plain, **options)

    def _compare_with_reference(self, made: ImageEncoder, output: Any, pictures: list[Any]) -> None:
        """Fail unless the log-probabilities of an answer are those of ``reference``, if it has any."""
        tokens, scores = _scores(output)
        prompt = list(output.prompt_token_ids)
        prepared = [made.prepare(picture) for picture in pictures]
        expected = self.reference([*prompt, *tokens], prepared)
        if expected is None:
            return
        behind = expected[len(prompt) - 1 : -1]
        chosen = behind.gather(1, torch.tensor(tokens)[:, None])
        right = chosen[:, 0].numpy()
        difference = np.abs(right - scores)
        assert difference.max() < 1e-4, "log-probabilities differ from the reference"


def _answers(llm: LLM, prompts: list[dict[str, Any]]) -> list[Any]:
    """Return the outputs of greedy requests, none of which may have failed."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        assert output.error is None, f"a request with images ended with an error: {output.error}"
    return outputs


def _close(some: list[Any], others: list[Any]) -> bool:
    """Return whether outputs have the same tokens as others, and almost the same log-probabilities."""
    for output, other in zip(some, others, strict=True):
        tokens, scores = _scores(output)
        other_tokens, other_scores = _scores(other)
        if tokens != other_tokens:
            return False
        near = np.abs(scores - other_scores) < 1e-4  # False for NaN
        if not near.all():
            return False
    return True


def _digest(found: ImageValues) -> bytes:
    """Return a hash of the prepared values of an image."""
    values = np.ascontiguousarray(found.values, np.float32)
    return digest_of(values.reshape(-1), found.shape)


def _scores(output: Any) -> tuple[list[int], np.ndarray]:
    """Return the generated tokens of an output and their log-probabilities."""
    (out,) = output.outputs
    return list(out.token_ids), np.array(token_logprobs(out))
