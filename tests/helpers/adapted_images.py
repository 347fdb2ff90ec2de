"""Requests with images and adapters, and the answers of PEFT over transformers' model."""

from __future__ import annotations

from adapters import lora, write_adapter
from image_cases import Case, model
from image_models import SIZES, Reference

from minivllm import SamplingParams
from minivllm.testing.tiny import quiet

# linear layers of the text model; the towers have layers of the same names
TEXT = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|out_proj|in_proj_qkv)"


class Adapted(Reference):
    """Transformers' model with an adapter of PEFT."""

    adapter = None

    def logprobs(self, ids):
        if self.adapter is None:
            return super().logprobs(ids)
        from peft import PeftModel

        with quiet():
            base, adapted = self.hf, PeftModel.from_pretrained(self.hf, self.adapter)
            try:
                self.hf = adapted
                return super().logprobs(ids)
            finally:
                self.hf = base
                adapted.unload()


def cases_of(family, folder, adapters, images=(2, 0, 1, 2, 0, 1), sizes=SIZES):
    """Return requests with some images, whose adapters take turns."""
    found = []
    for i, count in enumerate(images):
        case = Case(family, folder, count, seed=i % 3, sizes=sizes)
        path, hf = model(family, folder)
        case.reference = Adapted(hf, path, case.ids, case.pictures)
        case.reference.adapter = adapters[i % len(adapters)]
        found.append(case)
    return found


def serve(llm, cases, params=None):
    """Generate for all cases at once, compare each answer with that of PEFT's model, and return the outputs."""
    params = params or SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
    paths = [case.reference.adapter for case in cases]
    used = [None if path is None else lora(path, 2 if path.name == "a2" else 1) for path in paths]
    outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False, lora_request=used)
    for case, output in zip(cases, outputs, strict=True):
        case.check(output)
    return outputs


def write_two(family, folder, tmp_path):
    hf = model(family, folder)[1]
    return [write_adapter(hf, tmp_path / f"a{seed}", seed, target_modules=TEXT) for seed in (1, 2)]
