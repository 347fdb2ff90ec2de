"""The splitting of text into words by byte-level vocabularies of GGUF files, by the key ``tokenizer.ggml.pre``.

The names and their further settings are llama.cpp's (src/llama-vocab.cpp).  The patterns are those of the
tokenizer.json files that the names stand for.  llama.cpp spells some patterns differently, because its engine has no
classes of upper and lower case.

GGUF files do not store the normalization, and llama.cpp does not normalize.  The tokenizers of some names do: Qwen,
Cohere and GPT-NeoX compose characters (NFC).
"""

from __future__ import annotations

from typing import NamedTuple

from minivllm.errors import shown


class Split(NamedTuple):
    """The splitting rule of a ``pre`` name.

    The patterns are applied one after another.  Text between matches also forms a word."""

    patterns: tuple[str, ...]
    bos: bool = False  # whether a prompt begins with BOS if the file has no add_bos_token
    whole: bool = False  # whether a word that is a token stays undivided, even if the merges would not produce it
    nfc: bool = False  # whether characters are composed first (Unicode normal form C)


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
CASED = rf"{LEAD}{UPPER}*{LOWER}+"
CAPITAL = rf"{LEAD}{UPPER}+{LOWER}*"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{REST}"
QWEN35 = (
    rf"{CONTRACTIONS}|{LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = rf"{CASED}|{CAPITAL}|\p{{N}}{PUNCTUATED}"
GPT4O = rf"{CASED}{CONTRACTIONS}?|{CAPITAL}{CONTRACTIONS}?|\p{{N}}{{1,3}}{PUNCTUATED}"
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
DEEPSEEK = (
    rf"{ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# letters with case, in the list of DeepSeek LLM
LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DIGITS = (r"\p{N}", GPT2)

NAMES: dict[str, Split] = {}


def _name(names: str, *patterns: str, bos: bool = False, whole: bool = False, nfc: bool = False) -> None:
    """Add a rule to ``NAMES`` under each of some names."""
    NAMES.update(dict.fromkeys(names.split(), Split(patterns, bos, whole, nfc)))


_name("default", r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_name("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", LLAMA3, bos=True, whole=True)
_name("dbrx smaug-bpe chatglm-bpe glm4", LLAMA3)
_name("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2", QWEN2, nfc=True)
_name("hunyuan solar-open grok-2", QWEN2)
_name("qwen35", QWEN35, nfc=True)
_name("gpt-2 phi-2 gigachat a.x-4.0 mellum jais exaone4 trillion granite-docling", GPT2)
_name("mpt olmo", GPT2, nfc=True)
_name("starcoder refact smollm codeshell exaone minerva-7b mellum2", *DIGITS)
_name("command-r", *DIGITS, nfc=True)
_name("falcon", *FALCON)
_name("tekken", TEKKEN, bos=True, whole=True)
_name("gpt-4o llama4 kanana2 talkie minimax-m2", GPT4O)
_name(
    "deepseek-llm",
    "[\r\n]",
    rf"\s?[{LETTERS}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    IDEOGRAPHS,
    r"\p{N}+",
)
_name("deepseek-coder", "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}")
_name("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", CJK, DEEPSEEK)
_name("poro-chat bloom gpt3-finnish", BLOOM)
_name("viking", BLOOM, r"\p{N}")
_name(
    "chameleon",
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "([\\t\\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
    bos=True,
)
_name("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O, nfc=True)
_name("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))")
_name(
    "bailingmoe bailingmoe2 llada-moe",
    rf"'(?i:[sdmt]|ll|ve|re)|{LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_name("seed-coder", rf"{CONTRACTIONS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+")
_name("ufakzeka", rf"{WORD}|\p{{N}}{REST}")
_name("laguna", r"[^\n]+|[\n]+", QWEN2)
_name("minicpm5", r"\p{N}{1,3}", rf"{CONTRACTIONS}|{WORD}|\p{{N}}+{REST}", whole=True)
_name(
    "exaone-moe",
    rf"{CONTRACTIONS}|{LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)


def split_named(name: str) -> Split | str:
    """Return the rule of a ``pre`` name, or the error message for an unknown name."""
    if name in NAMES:
        return NAMES[name]
    return f"tokenizer.ggml.pre={shown(name)}: expected one of {', '.join(sorted(NAMES))}"
