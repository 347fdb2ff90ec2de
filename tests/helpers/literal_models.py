"""Small tokenizers of every kind with chat templates like those of published models, for tests of special tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

NOBODY = ("", "")  # a salt

# ---- tokenizers --------------------------------------------------------------------------------------------------


def byte_level(specials, **flags):
    """Return byte-level BPE as in GPT-2 and its successors, whose vocabulary includes the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*specials, *alphabet, "he", "us", "er", "user", "|>", "<|"])}
    merges = [("h", "e"), ("u", "s"), ("e", "r"), ("us", "er"), ("|", ">"), ("<", "|")]
    backend = Backend(models.BPE(vocab, merges))
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, **{"special": True, "normalized": False, **flags}) for s in specials])
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])  # added but not special, as in Qwen
    return backend


def sentencepiece(specials):
    """Return BPE with byte fallback and a space before the text, as in Llama 2."""
    words = ["<unk>", *specials, *(f"<0x{b:02X}>" for b in range(256)), *map(chr, range(33, 127)), "▁", "▁t", "he"]
    vocab = {w: i for i, w in enumerate(dict.fromkeys(words))}
    backend = Backend(models.BPE(vocab, [("▁", "t"), ("h", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", *specials])
    return backend


def unigram(specials):
    """Return a unigram tokenizer as in T5, in which the spellings of special tokens have the best score, and a first
    word has a space.
    """
    chars = [(c, -9.0) for c in [*map(chr, range(32, 127)), "▁", "\n"]]
    backend = Backend(models.Unigram([("<unk>", 0.0), *((s, 0.0) for s in specials), *chars], 0, True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<unk>", *specials])
    return backend


def normalizing(specials):
    """Return a tokenizer that searches special tokens in the normalized text, so other characters spell them too."""
    backend = byte_level(specials, normalized=True)
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_special_tokens([AddedToken(s, special=True, normalized=True) for s in specials])
    return backend


def wordpiece(specials):
    vocab = ["[UNK]", *specials, *map(chr, range(33, 127)), *(f"##{chr(c)}" for c in range(33, 127))]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(vocab)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", *specials])
    return backend


# ---- templates -----------------------------------------------------------------------------------------------------

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + ('=' + m.name if m.name else '') + '\\n' + "
    "(m['content'] or '') + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{% for t in tools %}{{- t | tojson(indent=4) }}
{{- '\n\n' }}{% endfor %}{{- '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + (m['content'] or '') | trim }}
    {%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{% endfor %}{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
QWEN = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}{{- '# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}{{- '\n</tools>{"name": <name>}<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{%- set content = m.content or '' %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
    {{- '<|im_start|>assistant\n' + content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
    {%- if m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>') %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{% endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
WITH_CASE = """{%- for m in messages %}{{- '<|im_start|>' + m.role | upper + '\n' }}
{{- m.content | upper }} {{ m.content | lower }} {{ m.content | title }} {{ m.content[:7] }}{{ m.content[3:] }}
{{- m.content | reverse }} {{ m.content | replace('.', '') }} {{ m.content | replace('(', '<') }}
{{- m.content.split() | join }} {{ m.content | length }} {{ m.content | tojson(ensure_ascii=True) }} {{ [m.content] }}
{{- m.content | e }} {{ m.content | urlencode }}{{- m.content.strip('.!') }}<|im_end|>\n{% endfor %}
{%- for name, p in (tools[0].function.parameters.properties if tools else {}).items() %}{{ name }}: {{ p.type | upper }}
{% for e in p.enum or [] %}{{ e }}, {% endfor %}{% endfor %}{{- greeting | default('') }}<|im_start|>"""
PHI = """{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""
LLAMA2 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]
{%- elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>
{%- else %} {{ m.content.split('</think>')[-1] }} {{ eos_token }}{% endif %}{% endfor %}"""

BERT = "[CLS]{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m | tojson }}[SEP]{% endfor %}{{ tools | tojson }}"

IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
PHIS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
FULLWIDTH = ["<｜begin▁of▁sentence｜>", "<|im_start|>", "<|im_end|>"]
MODELS = {  # name -> tokenizer, special tokens, template, further fields of tokenizer_config.json
    "chatml": (byte_level(IM), IM, CHATML, {}),
    "llama 3": (byte_level(HEADERS), HEADERS, LLAMA3, {"bos_token": "<|begin_of_text|>"}),
    "qwen": (byte_level(IM), IM, QWEN, {}),
    "cases": (byte_level(IM), IM, WITH_CASE, {}),
    "phi": (byte_level(PHIS), PHIS, PHI, {}),
    "fullwidth": (byte_level(FULLWIDTH), FULLWIDTH, CHATML, {"bos_token": FULLWIDTH[0]}),
    "llama 2": (sentencepiece(["<s>", "</s>"]), ["<s>", "</s>"], LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}),
    "unigram": (unigram(["<s>", "</s>"]), ["<s>", "</s>"], LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}),
    "chatml of unigram": (unigram(IM), IM, CHATML, {}),
    "normalizing": (normalizing(IM), IM, CHATML, {}),
    "wordpiece": (wordpiece(["[CLS]", "[SEP]"]), ["[CLS]", "[SEP]"], BERT, {"unk_token": "[UNK]"}),
    "strips beside": (byte_level(IM, lstrip=True, rstrip=True), IM, CHATML, {}),
    "only whole words": (byte_level(IM, single_word=True), IM, CHATML, {}),
}
