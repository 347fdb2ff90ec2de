"""Requests with images for engines of tiny random checkpoints, each with the answer of transformers' model."""

from __future__ import annotations

import functools
from pathlib import Path

from devices import DEVICE
from image_models import SIZES, Reference, make, picture, prompt_of

from minivllm import LLM, SamplingParams

__all__ = ["PARAMS", "Case", "engine", "generate", "model"]

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True)


@functools.cache
def model(family: str, folder: Path):
    """Return the path and transformers' model of a family."""
    path = folder / family
    path.mkdir()
    return path, make(path, family)


class Case:
    """A prompt with images, and transformers' model."""

    def __init__(self, family, folder, images, seed=0, text=5, sizes=SIZES):
        path, hf = model(family, folder)
        self.pictures = [picture(10 * seed + i, *sizes[i % len(sizes)]) for i in range(images)]
        self.ids = prompt_of(family, images, seed, text)
        self.reference = Reference(hf, path, self.ids, self.pictures)
        self.checked = []  # tokens of answers

    @property
    def prompt(self):
        return {"prompt_token_ids": self.ids, "multi_modal_data": {"image": self.pictures}}

    def check(self, output):
        assert output.error is None, output.error
        assert output.prompt_token_ids == self.reference.placeholders
        for out in output.outputs:
            scores = [next(iter(entry.values())).logprob for entry in out.logprobs]
            self.reference.check(out.token_ids, scores)
            self.checked.append(out.token_ids)


def engine(family, folder, **options):
    options = {"num_kvcache_blocks": 160, "max_model_len": 400, "max_num_seqs": 6, **options}
    path = str(model(family, folder)[0])
    return LLM(model=path, skip_tokenizer_init=True, dtype="float32", device=DEVICE, **options)


def generate(llm, *cases, params=PARAMS):
    return llm.generate([case.prompt for case in cases], params, use_tqdm=False)
