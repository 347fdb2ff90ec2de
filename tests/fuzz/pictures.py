"""Images of requests: an encoder plug-in that serves every model of the fuzzer, and prompts with pictures.

The prompt of a request in a case has all tokens of its images.  ``prompt_of`` makes the prompt for the engine from it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from minivllm.plugin import ANY, ImageEncoder, ImageFacts, ImageValues, Spec

from .configs import NO_DRAFTS, ROUTED

if TYPE_CHECKING:
    from .cases import Case

TOKEN, BEHIND = 1, 2  # ids that no drawn prompt has: of a part of an image, and of the token behind one with a span
SIDE = 3  # tokens along the longest side of a picture
PICTURES = 6  # so that requests share some
# head_dim / 2 of models whose whole heads rotate, with one rotary table
HALVES = {"qwen3": 64, "llama": 32, "qwen2": 32, "mixtral": 32, "qwen3_moe": 32}
WINDOWED = {"gemma3", "qwen2", "cohere2", "gpt_oss", "gpt_neo"}  # windows are longer than a picture
# parameters that requests with images refuse
REFUSED = {"taps", "beam_width", "guidance_scale"}


class PictureOptions(BaseModel):
    """``kind`` is the way in which images enter: text, axes or span.  ``half`` counts rotary frequencies."""

    model_config = ConfigDict(extra="forbid")
    kind: str = "text"
    half: int = 0


class Pictures(ImageEncoder):
    """A token for each 8 x 8 pixels, whose features are a random projection of these."""

    spec = Spec(
        f"{__name__}:Pictures",
        (1, 0),
        "for the fuzzer",
        f"{__name__}:PictureOptions",
        limits={"device": ANY, "dtype": ANY, "model_type": ANY},
    )

    def facts(self) -> ImageFacts:
        kind, third = self.options.kind, self.options.half // 3
        if kind == "axes":
            return ImageFacts(TOKEN, sections=(self.options.half - 2 * third, third, third), merge=2)
        return ImageFacts(TOKEN, after=(BEHIND,), span=SIDE**2) if kind == "span" else ImageFacts(TOKEN)

    def prepare(self, image: Any) -> ImageValues:
        columns, rows = image.width // 8, image.height // 8
        pixels = np.asarray(image, np.float32) / 127.5 - 1
        patches = pixels.reshape(rows, 8, columns, 8, 3).swapaxes(1, 2).reshape(rows * columns, -1)
        return ImageValues(patches, (1, 2 * rows, 2 * columns), rows * columns)

    def load(self, device: str, dtype: str) -> int:
        import torch

        config = self.ctx.config
        hidden = config.get("hidden_size") or config.get("n_embd") or config["d_model"]
        weight = torch.randn(192, hidden, generator=torch.Generator().manual_seed(0)) / 14
        self.weight = weight.to(device, getattr(torch, dtype))
        return self.weight.nbytes

    def encode(self, values: Any, shape: tuple[int, int, int]) -> Any:
        # no matrix product of a library, which may choose another kernel, with other last bits, beside other streams
        patches = values.view(-1, 192, 1).float()
        features = (patches * self.weight).sum(1)
        return features.to(self.weight.dtype)[None]


def with_pictures(rng: random.Random, options: dict[str, Any], device: str) -> dict[str, Any]:
    """Draw an encoder for some of the engines that may have one."""
    excluded = options["drafter"] not in {*NO_DRAFTS, "ngram", "suffix"} or options["compressor"] != "none"
    drawn, model = rng.random() < 0.85, options["model"]
    if excluded or not drawn or model == "pocket":
        return options
    scheduler = options["scheduler"] if isinstance(options["scheduler"], str) else options["scheduler"]["name"]
    kinds = ["text"]
    if model in HALVES and scheduler != "static":
        kinds += ["axes", "axes"]
    if device == "cpu" and model not in ROUTED:
        kinds += ["span"] * (2 if model in WINDOWED else 1)
    kind = rng.choice(kinds)
    if kind == "span":
        options = {**options, "batch_invariant": False}
    own = {"kind": kind, "half": HALVES.get(model, 0) if kind == "axes" else 0}
    return {**options, "encoder": {"name": f"{__name__}:Pictures", "options": own}}


def size_of(number: int) -> tuple[int, int]:
    """Return the tokens of a picture along its width and height."""
    rng = random.Random(f"picture {number}")
    return rng.randint(1, SIDE), rng.randint(1, SIDE)


def draw(
    rng: random.Random, engine: dict[str, Any], prompt: list[int], params: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """Return a prompt and its parameters with up to four images.  Nothing changes if the engine or the
    parameters exclude images."""
    if "encoder" not in engine or REFUSED & params.keys() or rng.random() < 0.3:
        return prompt, params
    numbers = [rng.randrange(PICTURES) for _ in range(rng.choice([1, 1, 2, 4]))]
    places = sorted(min(rng.choice([0, 3, 15, 16, 33, 60]), len(prompt)) for _ in numbers)
    behind = [BEHIND] if engine["encoder"]["options"]["kind"] == "span" else []
    made, first = [], 0
    for number, place in zip(numbers, places, strict=True):
        columns, rows = size_of(number)
        made += [*prompt[first:place], *[TOKEN] * (columns * rows), *behind]
        first = place
    return [*made, *(prompt[first:] or [5])], {**params, "images": numbers}


def prompt_of(ids: list[int], params: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt for an engine from a prompt with all tokens of its images.

    A prompt that was cut when a case was shrunk has fewer images.  The other tokens of an image become text."""
    if "encoder" not in engine:
        return {"prompt_token_ids": ids}
    behind = [BEHIND] if engine["encoder"]["options"]["kind"] == "span" else []
    numbers, found, made = list(params.get("images", ())), [], []
    at = 0
    while at < len(ids):
        count = 1
        if numbers and ids[at] == TOKEN:
            columns, rows = size_of(numbers[0])
            whole = [*[TOKEN] * (columns * rows), *behind]
            if ids[at : at + len(whole)] == whole:
                found.append(picture(numbers.pop(0)))
                made.append(TOKEN)
                at += len(whole)
                continue
            numbers, count = [], 1
        made.append(3 if ids[at] == TOKEN else ids[at])
        at += count
    more = {"multi_modal_data": {"image": found}} if found else {}
    return {"prompt_token_ids": made, **more}


def picture(number: int) -> np.ndarray:
    """Return the pixels of a picture."""
    columns, rows = size_of(number)
    return np.random.default_rng(number).integers(0, 256, (8 * rows, 8 * columns, 3), np.uint8)


def without(case: Case) -> Case:
    """Return a case without images, for executors and schedulers that do not serve them."""
    engines = [{name: value for name, value in one.items() if name != "encoder"} for one in case.engines]
    asks = [replace(a, params={k: v for k, v in a.params.items() if k != "images"}) for a in case.asks]
    return replace(case, engines=engines, asks=asks)
