"""A head on a model whose rotary embedding changes with the length of a request (LongRoPE): drafts and refusals."""

from __future__ import annotations

import pytest
import torch
from prediction_heads import Eagle3Reference

from minivllm import LLM, ConfigError, SamplingParams
from minivllm.plugins.drafter.eagle3 import Eagle3
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
SWITCH, K = 40, 3
ROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip
SMALL = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longrope")
    changing = {"rope_parameters": ROPE, "original_max_position_embeddings": SWITCH}
    path, _, model = tiny_dir(folder / "model", "phi3", num_hidden_layers=4, eos_token_id=60, **changing)
    head = Eagle3Reference(model, (1, 2, 3))
    return path, head, head.write(folder / "head")


def engine(path, files, **options):
    drafter = {"name": "eagle3", "options": {"model": str(files)}}
    return LLM(str(path), drafter=drafter, speculate="always", num_speculative_tokens=K, **SMALL, **options)


def test_drafts_of_short_and_long_requests_are_those_of_the_reference(made, monkeypatch):
    path, head, files = made
    seen = []

    def propose(self, ask, original=Eagle3.propose):
        drafts, count = original(self, ask)
        rows = [ask.rows.tokens[slot, :n].tolist() for slot, n in zip(ask.slots, ask.known, strict=True)]
        seen.extend(zip(rows, drafts.tolist(), strict=True))
        return drafts, count

    monkeypatch.setattr(Eagle3, "propose", propose)
    prompts = [[(7 * i * i + 3 * i + 5) % 50 + 3 for i in range(n)] for n in (12, 60)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(str(path), drafter="none", **SMALL) as llm:
        want = [out.tokens for out in llm.generate(prompts, params, use_tqdm=False)]
    with engine(path, files) as llm:
        assert [out.tokens for out in llm.generate(prompts, params, use_tqdm=False)] == want
        assert llm.stats()["speculation"]["failed"] is None
    assert {len(row) > SWITCH for row, _ in seen} == {False, True}
    wrong = [(row, drafts) for row, drafts in seen if drafts != head.drafts(row, len(drafts))]
    assert not wrong, f"{len(wrong)} of {len(seen)}, first of {len(wrong[0][0])} tokens"


def test_a_head_that_changes_at_another_length_is_refused(made, tmp_path):
    path, head, _ = made
    other = {**ROPE, "original_max_position_embeddings": 24}
    files = head.write(tmp_path / "head", rope_parameters=other, original_max_position_embeddings=24)
    with pytest.raises(ConfigError, match=r"eagle3: .* longer than 24 tokens, and the model .* longer than 40"):
        engine(path, files)
