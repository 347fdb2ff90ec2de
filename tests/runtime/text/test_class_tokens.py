"""Special tokens that a tokenizer class has by default are left out of text, as in transformers."""

from __future__ import annotations

import inspect
import json
import random

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer

from minivllm.runtime.text.class_tokens import CLASS_TOKENS
from minivllm.runtime.text.tokenizer import load_tokenizer

NAMES = ("unk_token", "bos_token", "eos_token", "sep_token", "pad_token", "cls_token", "mask_token")
REBUILT = ("LlamaTokenizer", "CodeLlamaTokenizer")  # transformers makes their decoder anew, which these files lack


@pytest.mark.parametrize("name", CLASS_TOKENS)
def test_the_table_has_the_defaults_of_the_classes(name):
    given = inspect.signature(getattr(transformers, name).__init__).parameters
    defaults = {key: given[key].default for key in NAMES if key in given and isinstance(given[key].default, str)}
    assert dict(CLASS_TOKENS[name]) == defaults


def directory(path, cls, rng):
    """Write a tokenizer whose special tokens are plain, added or special tokens in tokenizer.json."""
    tokens = sorted(set(CLASS_TOKENS[cls].values()))
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*tokens, "<x>", *"abcdefg"])}, merges=[]))
    made.decoder = decoders.Fuse()
    for token in [*tokens, "<x>"]:
        if rng.random() < 0.7:
            made.add_tokens([AddedToken(token, special=rng.random() < 0.3, normalized=False)])
    made.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": cls + rng.choice(["", "Fast"])}
    for key, token in CLASS_TOKENS[cls].items():
        if rng.random() < 0.4:
            config[key] = rng.choice([token, "<x>"])
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text("{}")
    return made.get_vocab_size()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cls", [name for name in CLASS_TOKENS if name not in REBUILT])
def test_text_has_the_special_tokens_that_transformers_prints(cls, seed, tmp_path):
    size = directory(tmp_path, cls, random.Random(f"{cls} {seed}"))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    found = {i: ours.decode([i], skip_special_tokens=True) for i in range(size)}
    assert found == {i: theirs.decode([i], skip_special_tokens=True) for i in range(size)}
