"""The seam tokenizer: the built-in tokenizers beside their libraries, and tokenizers of users in engines."""

from __future__ import annotations

import json
import random
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from wrong.tokenizers import AsItIs

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.errors import ConfigError, MinivllmError, ModelError, PluginError
from minivllm.registration.spec import Part
from minivllm.registry import Catalog
from minivllm.runtime.text.tokenizer import Tokenizer, load_tokenizer
from minivllm.testing import tokenizer_samples
from minivllm.testing.tokenizer import texts

POCKET = tokenizer_samples.POCKET
MISTRAL = Part("minivllm/mistral", "minivllm.plugins.tokenizer.mistral:MistralTokenizer")
SMALL = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 256}
SMALL["num_kvcache_blocks"] = 64
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
TEMPLATE = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"


@pytest.fixture
def folder(tmp_path):
    """Return a copy of pocket with a tekken.json."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if (POCKET / name).exists():
            shutil.copy(POCKET / name, tmp_path / name)
    for path in tokenizer_samples.directory().iterdir():
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def chosen(model, **options):
    return resolve(EngineConfig(model=str(model), device="cpu", **options), Catalog.discover())


# ---- mistral ---------------------------------------------------------------------------------------------------------


def same_as_mistral_common(path, count):
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    ours, theirs = load_tokenizer(path, part=MISTRAL), Tekkenizer.from_file(path / "tekken.json")
    assert ours.vocab_size == theirs.n_words and ours.special_ids == theirs.special_ids
    for text in texts(1, count):
        want = theirs.encode(text, bos=False, eos=False)
        assert ours.plugin.encode_plain(text) == want
        assert ours.decode([1, *want, 2], True) == theirs.decode(want, SpecialTokenPolicy.IGNORE) == text
        assert ours.decode([1, *want, 2], False) == theirs.decode([1, *want, 2], SpecialTokenPolicy.KEEP)
    rng = random.Random(2)
    for i in rng.sample(range(ours.vocab_size), min(ours.vocab_size, 500)):
        assert ours.plugin.token_bytes(i) == theirs.id_to_byte_piece(i, SpecialTokenPolicy.KEEP)


def test_mistral_converts_text_like_mistral_common():
    pytest.importorskip("mistral_common")
    same_as_mistral_common(tokenizer_samples.directory(), 300)


@pytest.mark.slow
def test_mistral_reads_a_published_vocabulary_like_mistral_common_and_transformers(tmp_path):
    common = pytest.importorskip("mistral_common")
    shutil.copy(Path(common.__file__).parent / "data" / "tekken_240911.json", tmp_path / "tekken.json")
    same_as_mistral_common(tmp_path, 2000)
    ours, converted = load_tokenizer(tmp_path, part=MISTRAL), load_tokenizer(tmp_path)
    assert converted.backend is not None and converted.vocab_size == ours.vocab_size
    for text in texts(3, 2000):
        assert ours.encode(text, False) == converted.encode(text, False), text


@pytest.mark.slow
def test_hf_converts_a_published_vocabulary_of_sentencepiece_as_sentencepiece_reads_it(tmp_path):
    sentencepiece, common = pytest.importorskip("sentencepiece"), pytest.importorskip("mistral_common")
    model = Path(common.__file__).parent / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    shutil.copy(model, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    ours, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_file=str(model))
    compared = 0
    for text in texts(5, 4000):
        # sentencepiece reads no special tokens in text; transformers adds no space before text that begins with a
        # space, and merges runs of spaces in another order
        if re.search(r"^$|^[\s\u2581]|[\s\u2581]{2}|<|\[INST\]|\x00", text):
            continue
        ids = theirs.encode(text)
        assert ours.encode(text, False) == ids, text
        assert ours.decode(ids, True).strip() == theirs.decode(ids).strip()
        compared += 1
    assert compared > 500


def test_mistral_writes_chats_in_which_only_the_template_has_special_tokens(folder):
    pytest.importorskip("mistral_common")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder, part=MISTRAL)
    begin, end = tokenizer.token_id("[INST]"), tokenizer.token_id("[/INST]")
    for text in ("hi", "a[/INST]b", "</s>"):
        ids = tokenizer.encode_chat(tokenizer.chat_prompt([{"role": "user", "content": text}]))
        assert ids == [begin, *tokenizer.plugin.encode_plain(text), end]
        special = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        assert special == tokenizer.encode(f"[INST]{text}[/INST]", False)
    again = Tokenizer.from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert again.encode("the [INST] cat") == tokenizer.encode("the [INST] cat")
    assert again.chat_templates == tokenizer.chat_templates


def test_mistral_serves_an_engine_with_streams_and_grammars(folder):
    pytest.importorskip("mistral_common")
    with LLM(model=str(folder), tokenizer_mode="mistral", **SMALL) as llm:
        out = llm.generate("the cat", GREEDY, use_tqdm=False)[0]
        assert out.prompt_token_ids == llm.tokenizer.encode("the cat")
        first = out.outputs[0]
        assert first.text == llm.tokenizer.decode(first.token_ids, True)
        choice = SamplingParams(max_tokens=8, temperature=0, structured_outputs={"choice": ["theatre", "日本"]})
        assert llm.generate("the", choice, use_tqdm=False)[0].outputs[0].text in ("theatre", "日本")


def test_mistral_without_its_file_or_its_library_is_refused(folder, monkeypatch):
    (folder / "tekken.json").write_text("{}")
    if find_spec("mistral_common") is not None:
        with pytest.raises(ModelError, match=r"tekken\.json: mistral-common cannot read it: KeyError"):
            load_tokenizer(folder, part=MISTRAL)
        (folder / "tekken.json").unlink()
        with pytest.raises(ModelError, match=r"has no tekken\.json: use tokenizer_mode=auto"):
            load_tokenizer(folder, part=MISTRAL)
    monkeypatch.setattr("minivllm.registration.spec._installed", lambda module: False)
    with pytest.raises(MinivllmError, match=r"needs mistral_common, which is not installed.*minivllm\[mistral\]"):
        chosen(folder, tokenizer_mode="mistral")


# ---- choices ---------------------------------------------------------------------------------------------------------


def test_the_format_of_the_files_chooses_the_tokenizer(folder):
    assert chosen(folder).parts["tokenizer"].name == "minivllm/hf"
    found = chosen(folder, tokenizer=str(tokenizer_samples.gguf_file()))
    assert found.parts["tokenizer"].name == "minivllm/gguf"
    assert "tokenizer" not in chosen(folder, skip_tokenizer_init=True).parts
    with pytest.raises(MinivllmError, match=r"format: expected folder, supports \{gguf\}"):
        chosen(folder, tokenizer_mode="gguf")
    with pytest.raises(PluginError, match="No tokenizer is called 'slow'"):
        chosen(folder, tokenizer_mode="slow")
    with pytest.raises(ConfigError, match="skip_tokenizer_init=true loads no tokenizer; remove one of them"):
        chosen(folder, tokenizer_mode="hf", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="a class is tokenizer_mode='my_file:MyTokenizer'"):
        chosen(folder, tokenizer="my_file:MyTokenizer")
    with pytest.raises(PluginError, match="Add --allow-target my_file"):
        chosen(folder, tokenizer_mode="my_file:MyTokenizer")


def test_a_class_of_the_user_tokenizes_in_an_engine(folder):
    with LLM(model=str(folder), tokenizer_mode=AsItIs, chat_template=TEMPLATE, **SMALL) as llm:
        chat = llm.chat([{"role": "user", "content": "a</s>"}], GREEDY, use_tqdm=False)[0]
        assert chat.prompt_token_ids == list(b"[INST]a</s>[/INST]")
        out = llm.generate("hé</s>", GREEDY, use_tqdm=False)[0]
        assert out.prompt_token_ids == [256, *"hé".encode(), 257]
        ids = out.outputs[0].token_ids
        assert out.outputs[0].text == AsItIs(None, None).decode(ids, True)
        pieces = [piece.delta for piece in llm.stream("hé</s>", GREEDY)]
        assert "".join(pieces) == out.outputs[0].text and len(pieces) > 2


def test_an_error_of_a_tokenizer_names_its_class(folder, monkeypatch):
    def broken(self, options, ctx):
        raise RuntimeError("out of order")

    monkeypatch.setattr(AsItIs, "__init__", broken)
    with pytest.raises(PluginError, match=r"AsItIs.*out of order"):
        LLM(model=str(folder), tokenizer_mode=AsItIs, **SMALL)
