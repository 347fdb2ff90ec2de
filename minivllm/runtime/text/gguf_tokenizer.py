"""The tokenizer in a GGUF file, as llama.cpp (src/llama-vocab.cpp) understands its keys ``tokenizer.ggml.*``.

Two kinds of vocabulary are read.  ``gpt2`` is byte-level BPE with merges in the file.  ``llama`` is BPE of
sentencepiece, whose merges follow from the scores of its pieces.  Where a key is absent, llama.cpp's default counts.
What the file cannot say, Unicode normalisation, follows from the name of the pre-tokenizer.

Two readings differ for ``llama``.  After a token of the file's own that text spells, llama.cpp puts a space before the
next word, as it is done here; sentencepiece does so for no user-defined token.  Scores that are logarithms of
probabilities are those of a unigram model, and text is cut as that model does; llama.cpp takes them for ranks of BPE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from minivllm.device.loading.gguf_file import END_TEXTS, GgufFile
from minivllm.errors import shown

from .gguf_splits import Split, split_named

SPACE = "\u2581"  # how sentencepiece spells a space
MOST_WORK = 10**9  # sum of squares of the lengths of tokens, which are cut everywhere; 262,144 tokens have 2 * 10**7
NO_TOKENIZER = "want one named by tokenizer, or skip_tokenizer_init=True"
OTHERS = {  # tokenizer.ggml.model -> what it is
    "bert": "WordPiece (WPM)", "t5": "unigram of sentencepiece (UGM)", "rwkv": "RWKV", "plamo2": "PLaMo 2",
    "gemma4": "Gemma 4", "hybriddna": "HybridDNA", "whitespace": "words between spaces", "no_vocab": "no vocabulary",
    "none": "no vocabulary",
}  # fmt: skip
ROLES = {  # name in transformers -> key of its id
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip


class TokenKind(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


PIECES = (TokenKind.NORMAL, TokenKind.UNUSED)  # of which sentencepiece makes text
SPECIAL = (TokenKind.CONTROL, TokenKind.UNKNOWN)


class Vocabulary(NamedTuple):
    """The checked keys of a file.  ``ids``: "bos" -> id."""

    file: GgufFile
    model: str  # "gpt2" or "llama"
    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the tokens with a role by transformers' names: "eos_token" -> "<|im_end|>"."""
        return {name: self.tokens[self.ids[role]] for name, role in ROLES.items() if role in self.ids}

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value of the file."""
        value = self.file.values.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.file.refuse(f"tokenizer.ggml.{key}={shown(value)}: want a truth value")
        return value


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Read and check the tokens of a file.  ModelError for a kind of vocabulary that is not read here."""
    model = file.values.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in ("gpt2", "llama"):
        what = "holds no tokenizer (no tokenizer.ggml.model)"
        if model is not None:
            known = OTHERS.get(model, "not known") if isinstance(model, str) else "not known"
            what = (
                f"tokenizer.ggml.model={shown(model)} is {known}: want gpt2 (byte-level BPE) or llama (sentencepiece)"
            )
        raise file.refuse(f"{what}; {NO_TOKENIZER}")
    tokens = _texts(file, "tokens")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if sum(len(token) ** 2 for token in tokens) > MOST_WORK:
        raise file.refuse(f"its tokens are {sum(map(len, tokens))} characters long; want shorter ones")
    if len(set(tokens)) < len(tokens):
        first = {token: i for i, token in reversed(list(enumerate(tokens)))}
        twice = next(i for i, token in enumerate(tokens) if first[token] != i)
        raise file.refuse(f"token {shown(tokens[twice])} has the ids {first[tokens[twice]]} and {twice}; want one")
    kinds = _numbers(file, "token_type", len(tokens), int) or [int(TokenKind.NORMAL)] * len(tokens)
    kinds = [int(TokenKind.CONTROL) if token in END_TEXTS else kind for token, kind in zip(tokens, kinds, strict=True)]
    return Vocabulary(file, model, tokens, kinds, _ids(file, model, len(tokens)))


def _texts(file: GgufFile, name: str) -> list[str]:
    found = file.values.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise file.refuse(f"lacks tokenizer.ggml.{name}, a list of strings; {NO_TOKENIZER}")
    return found


def _numbers(file: GgufFile, name: str, count: int, kind: type) -> Sequence[Any]:
    """Return the numbers of tokens, () where the file has none."""
    found = file.values.get(f"tokenizer.ggml.{name}")
    if found is None:
        return ()
    found = found if isinstance(found, list) else found.tolist() if hasattr(found, "tolist") else None
    if found is None or len(found) < count or not all(type(value) in (kind, int) for value in found):
        raise file.refuse(f"tokenizer.ggml.{name}: want a number for each of the {count} tokens")
    return found[:count]


def _ids(file: GgufFile, model: str, count: int) -> dict[str, int]:
    """Return the ids that have a role; those of a ``llama`` file that names none are sentencepiece's."""
    found = {"bos": 1, "eos": 2, "unknown": 0} if model == "llama" else {}
    found = {role: i for role, i in found.items() if i < count}
    for role in ROLES.values():
        key = f"tokenizer.ggml.{role}_token_id"
        if (i := file.values.get(key)) is None:
            continue
        if type(i) is int and 0 <= i < count:
            found[role] = i
        elif role in ("bos", "eos"):  # others change no prompt, and files have -1 for "none"
            raise file.refuse(f"{key}={shown(i)}: want an id below {count}")
    return found


def build(vocabulary: Vocabulary, warn: Any) -> Any:
    """Make a ``tokenizers.Tokenizer``.  ``warn`` is called with a text about what is only assumed."""
    from tokenizers import AddedToken

    split = _split(vocabulary, warn) if vocabulary.model == "gpt2" else Split((), bos=True)
    made = _byte_level(vocabulary, split) if vocabulary.model == "gpt2" else _sentencepiece(vocabulary)
    named = [(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind in ADDED]
    made.add_tokens([AddedToken(t, normalized=False, special=kind in SPECIAL) for t, kind in named])
    made.post_processor = _around(vocabulary, split.bos)
    return made


ADDED = (*SPECIAL, TokenKind.USER)


def _around(vocabulary: Vocabulary, bos: bool) -> Any:
    """Return what puts BOS and EOS around a prompt.  ``bos``: whether BOS is put where the file does not say."""
    from tokenizers import processors

    roles = [role for role, default in (("bos", bos), ("eos", False)) if vocabulary.flag(f"add_{role}_token", default)]
    for role in roles:
        if role not in vocabulary.ids:
            key = f"tokenizer.ggml.{role}_token_id"
            raise vocabulary.file.refuse(f"prompts get a {role.upper()} token, but {key} is absent; want the id")
    ids = {role: vocabulary.ids[role] for role in roles}
    special = [{"id": role, "ids": [i], "tokens": [vocabulary.tokens[i]]} for role, i in ids.items()]
    single = [*(role for role in roles if role == "bos"), "$A", *(role for role in roles if role == "eos")]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=special)


def _split(vocabulary: Vocabulary, warn: Any) -> Split:
    name = vocabulary.file.values.get("tokenizer.ggml.pre")
    if name is None or (isinstance(name, str) and not name):
        warn(
            f"{vocabulary.file.path}: names no pre-tokenizer (tokenizer.ggml.pre), so text is cut as llama.cpp's "
            "'default' does, which may not be how the model was trained; convert the model again"
        )
        name = "default"
    found = split_named(name if isinstance(name, str) else repr(name))
    if isinstance(found, str):
        raise vocabulary.file.refuse(f"{found}; {NO_TOKENIZER}")
    return found


def _byte_level(vocabulary: Vocabulary, split: Split) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    known = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = []
    for n, merge in enumerate(_texts(vocabulary.file, "merges")):
        left, right = merge[: (cut := merge.find(" ", 1))], merge[cut + 1 :]
        if left not in known or right not in known or left + right not in known:
            raise vocabulary.file.refuse(
                f"tokenizer.ggml.merges[{n}]={shown(merge)}: want two tokens that make a token"
            )
        merges.append((left, right))
    made = Tokenizer(models.BPE(known, merges, ignore_merges=split.whole))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])
    made.decoder = decoders.ByteLevel()
    if split.nfc:
        made.normalizer = normalizers.NFC()
    return made


def _sentencepiece(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = vocabulary.tokens
    known = {token: i for i, token in enumerate(tokens)}
    of_bytes = all(f"<0x{byte:02X}>" in known for byte in range(256))
    unknown = tokens[vocabulary.ids["unknown"]] if "unknown" in vocabulary.ids else None
    scores = _scores(vocabulary)
    if _is_unigram(vocabulary, scores):
        least = min(scores) - 1e6  # of tokens that sentencepiece finds in no text
        kinds = vocabulary.kinds
        listed = [(t, s if kind in PIECES else least) for t, kind, s in zip(tokens, kinds, scores, strict=True)]
        made = Tokenizer(models.Unigram(listed, vocabulary.ids.get("unknown"), of_bytes))
        if of_bytes:  # text that is spelled like a byte token is cut, or the library would take it for one
            made.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")
    else:
        merges = merges_of(vocabulary, scores)
        made = Tokenizer(models.BPE(known, merges, unk_token=unknown, fuse_unk=True, byte_fallback=of_bytes))
    steps: list[Any] = []
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = vocabulary.flag("add_space_prefix", True)
    if prefix:
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return made


def _scores(vocabulary: Vocabulary) -> Sequence[float]:
    scores = _numbers(vocabulary.file, "scores", len(vocabulary.tokens), float)
    if not scores or not all(map(math.isfinite, scores)):
        raise vocabulary.file.refuse("lacks tokenizer.ggml.scores, a finite number for each token; " + NO_TOKENIZER)
    return scores


def _is_unigram(vocabulary: Vocabulary, scores: Sequence[float]) -> bool:
    """Return whether scores are logarithms of probabilities.  Those of BPE are ranks, which are whole numbers."""
    return any(score != int(score) for score, kind in zip(scores, vocabulary.kinds, strict=True) if kind in PIECES)


def merges_of(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make a piece, the best score first, as sentencepiece joins them."""
    kinds = vocabulary.kinds
    pieces = {t: i for i, (t, kind) in enumerate(zip(vocabulary.tokens, kinds, strict=True)) if kind in PIECES}
    found = []
    for piece, i in pieces.items():
        score = -float(scores[i])
        for cut in range(1, len(piece)):
            if piece[:cut] in pieces and piece[cut:] in pieces:
                found.append((score, i, cut, piece))
    found.sort()
    return [(piece[:cut], piece[cut:]) for _, _, cut, piece in found]
