"""Encoding, decoding and chat prompts equal transformers'.  Broken or missing files are refused in one line."""

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from minivllm.errors import ModelError, RequestError
from minivllm.runtime.text.tokenizer import load_tokenizer

LINES = [
    "the quick brown fox jumps over the lazy dog",
    'l\'été 日本語 🙂 {"a": 1}\n',
    "user assistant system hello",
] * 3
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["hello world", " the  fox\n\n日本 🙂 é", "<|im_start|>user<|im_end|>", "", "x <s> y", "<extra> a", "<tool> b"]


def byte_level(bos=False, plain=None):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, show_progress=False, initial_alphabet=alphabet
    )
    backend.train_from_iterator(LINES, trainer)
    if plain:
        backend.add_tokens([plain])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentencepiece_like():
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghijklmnopqrstuvwxyz", "▁t", "he"]
    vocab = {w: i for i, w in enumerate(words)}
    backend = Backend(models.BPE(vocab, [("▁", "t"), ("h", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
BRACKETS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {% set start = 1 %}<<{{ messages[0]['content'] | trim }}>>
{% else %}
    {% set start = 0 %}
{% endif %}
{% for m in messages[start:] %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if loop.index > 4 %}{% break %}{% endif %}
    {% if m.role == 'user' %}[{{ m.content }}]{% else %}
        {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
    {% endif %}

{% endfor %}"""
TOOLS = """{%- set ns = namespace(seen=0) %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for m in messages %}{% set ns.seen = ns.seen + 1 %}{{ m | tojson }}{% endfor %}
{{- ns.seen }} {{ pad_token is defined }} {{ strftime_now('%Y') }} {{ enable_thinking | default('unset') }}
{{- documents }}"""

CHATS = [
    [{"role": "user", "content": 'hello <b>&"é" 日本'}],
    [{"role": "system", "content": " be brief\n"}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


def write(folder, backend, template=None, files=None, **config):
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (folder / name).write_text(text if isinstance(text, str) else json.dumps(text))
    return folder


def both(folder):
    from transformers import AutoTokenizer

    return load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))


def flag(content, **flags):
    return {"content": content, **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False), **flags}


CONFIGS = {
    "plain": (byte_level(), {}),
    "bos": (byte_level(bos=True), {}),
    "told_to_add_bos": (byte_level(), {"add_bos_token": True}),
    "told_to_add_none": (byte_level(bos=True), {"add_bos_token": False, "add_eos_token": False}),
    "told_to_add_eos": (byte_level(bos=True), {"add_eos_token": True}),
    "extra_special": (byte_level(), {"extra_special_tokens": ["<extra>"]}),
    "eos_unknown_to_the_file": (byte_level(), {"eos_token": "<eot>"}),
    "added_by_config": (
        byte_level(),
        {"added_tokens_decoder": {"400": flag("<tool>", special=True), "1": flag("</s>", special=True, lstrip=True)}},
    ),
    "eos_is_an_ordinary_added_token": (byte_level(plain="<extra>"), {"eos_token": "<extra>"}),
    "eos_is_an_ordinary_word": (byte_level(), {"eos_token": "Ġfox"}),
    "sentencepiece": (sentencepiece_like(), {"unk_token": "<unk>"}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_encode_and_decode_are_those_of_transformers(name, tmp_path):
    backend, config = CONFIGS[name]
    ours, theirs = both(write(tmp_path, backend, **config))
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip, clean_up_tokenization_spaces=False)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.special_ids == set(theirs.all_special_ids) | {
        i for i, t in theirs.added_tokens_decoder.items() if t.special
    }


def test_a_saved_length_limit_or_padding_does_not_cut_prompts(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    ours = load_tokenizer(write(tmp_path, backend))
    assert len(ours.encode("the quick brown fox jumps")) == 5


@pytest.mark.parametrize("template", [CHATML, BRACKETS, TOOLS], ids=["chatml", "brackets", "tools"])
@pytest.mark.parametrize("bos", [True, False])
def test_chat_prompts_are_those_of_transformers(template, bos, tmp_path):
    ours, theirs = both(write(tmp_path, byte_level(bos=True), template, **({} if bos else {"bos_token": None})))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": ["<é>"]}}}
    for chat in CHATS:
        for prompt in (True, False):
            tools = [{"tools": [tool]}] if template == TOOLS else []  # with other templates a message contains them
            for extra in ({}, *tools, {"variables": {"enable_thinking": False}}):
                passed = {**extra.get("variables", {}), **{k: v for k, v in extra.items() if k == "tools"}}
                text = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False, **passed)
                assert ours.apply_chat_template(chat, prompt, tokenize=False, **extra) == text
                ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False, **passed)
                assert ours.apply_chat_template(chat, prompt, **extra) == ids


def test_template_file_beats_the_config_and_a_named_list_has_its_default(tmp_path):
    hello = [{"role": "user", "content": "x"}]
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "from the list"}]
    ours, theirs = both(write(tmp_path / "a", byte_level(), named))
    assert ours.apply_chat_template(hello, tokenize=False) == "from the list"
    assert theirs.apply_chat_template(hello, tokenize=False) == "from the list"
    files = {"chat_template.jinja": "from the file"}
    ours, theirs = both(write(tmp_path / "b", byte_level(), "from the config", files))
    assert ours.apply_chat_template(hello, tokenize=False) == theirs.apply_chat_template(hello, tokenize=False)
    assert ours.chat_template == "from the file"


def test_eos_ids_are_those_of_the_generation_config_and_the_tokenizer(tmp_path):
    several = {"generation_config.json": {"eos_token_id": [3, 7]}, "config.json": {"eos_token_id": 5}}
    assert load_tokenizer(write(tmp_path / "a", byte_level(), files=several)).eos_ids == (3, 7, 1)
    one = {"generation_config.json": {"temperature": 1}, "config.json": {"eos_token_id": 5}}
    assert load_tokenizer(write(tmp_path / "b", byte_level(), files=one)).eos_ids == (5, 1)
    assert load_tokenizer(write(tmp_path / "c", byte_level(), eos_token=None)).eos_ids == ()


@pytest.mark.parametrize(
    ("messages", "want"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (None, "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (["hello"], r"messages\[0\]: expected a mapping"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "us er\n", "content": "x"}], r"messages\[0\].role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            r"messages\[0\].content\[0\].type=.image_url.: it is not read here",
        ),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "roles must alternate"),
    ],
)
def test_bad_messages_are_refused(messages, want, tmp_path):
    ours = load_tokenizer(write(tmp_path, byte_level(), BRACKETS))
    with pytest.raises(RequestError, match=want) as e:
        ours.apply_chat_template(messages)
    assert e.value.param.startswith("messages") and (e.value.param in str(e.value) or "refuses" in str(e.value))


def test_text_parts_are_joined_and_messages_are_not_changed(tmp_path):
    ours = load_tokenizer(write(tmp_path, byte_level(), CHATML))
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ours.apply_chat_template(chat, False, tokenize=False) == "<|im_start|>user\na\nb<|im_end|>\n"
    assert isinstance(chat[0]["content"], list)


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (None, "no chat template"),
        ("{% for", "broken"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses"),
    ],
)
def test_template_errors_are_request_errors_and_the_sandbox_holds(template, want, tmp_path):
    ours = load_tokenizer(write(tmp_path, byte_level(), template))
    for _ in range(2):
        with pytest.raises(RequestError, match=want):
            ours.apply_chat_template(CHATS[0])


def test_a_request_cannot_replace_what_the_engine_gives_the_template(tmp_path):
    ours = load_tokenizer(write(tmp_path, byte_level(), CHATML))
    with pytest.raises(RequestError, match="messages"):
        ours.apply_chat_template(CHATS[0], variables={"messages": []})


@pytest.mark.parametrize("prompt", [None, 3, b"x", ["x"], "\ud800"])
def test_prompts_that_are_no_text_are_refused(prompt, tmp_path):
    with pytest.raises(RequestError, match="prompt"):
        load_tokenizer(write(tmp_path, byte_level())).encode(prompt)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "{"},
        {"tokenizer.json": "{}"},
        {"tokenizer_config.json": "{'a'"},
        {"tokenizer_config.json": "[]"},
        {"generation_config.json": "nope"},
        {"generation_config.json": {"eos_token_id": "x"}},
        {"chat_template.json": {"chat_template": 5}},
    ],
)
def test_broken_files_are_model_errors_that_name_the_place(files, tmp_path):
    write(tmp_path, byte_level(), files=files)
    with pytest.raises(ModelError, match=tmp_path.name):
        load_tokenizer(tmp_path)


def test_a_message_about_a_tokenizer_is_short_whatever_its_file_has(tmp_path):
    write(tmp_path, byte_level())
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    word = next(iter(content["model"]["vocab"]))
    content["model"]["vocab"][word] = "x" * 100_000
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="not a tokenizer that the tokenizers library reads") as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value)) < 1000


def test_no_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"expected tokenizer\.json"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ModelError, match=r"expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(ModelError, match="transformers cannot load"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_without_tokenizer_json_goes_through_transformers(tmp_path):
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"])
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}')
    ours, theirs = both(tmp_path)
    assert ours.encode("hello worlds") == theirs.encode("hello worlds") == [2, 5, 6, 7, 3]
    assert ours.decode([2, 5, 6, 7, 3]) == "hello worlds" and ours.eos_ids == (3,)


def test_loading_needs_neither_torch_nor_transformers(tmp_path):
    write(tmp_path, byte_level(), CHATML)
    code = (
        "import sys; from minivllm.runtime.text.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]);"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]);"
        "import minivllm.runtime.text.detokenize, minivllm.runtime.text.outputs;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_added_token_spellings_survive_as_ids(tmp_path):
    backend = byte_level()
    backend.add_tokens([AddedToken("<plain>", special=False)])
    ours = load_tokenizer(write(tmp_path, backend))
    token_id = ours.token_id("<plain>")
    assert ours.token(token_id) == "<plain>" and token_id not in ours.special_ids
    assert ours.encode("<plain>") == [token_id] and ours.decode([token_id]) == "<plain>"
    assert ours.token(10**6) is None and ours.decode([10**6]) == ""


@pytest.mark.parametrize("name", ["eos_token", "bos_token", "additional_special_tokens"])
@pytest.mark.parametrize("value", [5, ["a"], {"content": 5}, True], ids=str)
def test_a_special_token_that_is_no_text_is_a_model_error(name, value, tmp_path):
    byte_level(("</s>",)).save(str(tmp_path / "tokenizer.json"))
    given = [value] if name == "additional_special_tokens" else value
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: given}))
    with pytest.raises(ModelError, match=r"tokenizer_config.json: malformed added or special tokens"):
        load_tokenizer(tmp_path)


def test_the_attributes_of_transformers_tokenizers_have_their_values(tmp_path):
    own, hf = both(write(tmp_path, byte_level(bos=True)))
    assert (own.eos_token_id, own.bos_token_id, own.pad_token_id) == (hf.eos_token_id, hf.bos_token_id, hf.pad_token_id)
    assert len(own) == len(hf) and own
    texts = [text for text in TEXTS if text]
    assert own(texts)["input_ids"] == hf(texts)["input_ids"]
    assert own(texts[0]) == {key: hf(texts[0])[key] for key in ("input_ids", "attention_mask")}
    ids = hf(texts)["input_ids"]
    assert own.batch_decode(ids) == hf.batch_decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=True)
