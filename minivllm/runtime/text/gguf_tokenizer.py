"""The tokenizer in a GGUF file, read from the keys ``tokenizer.ggml.*`` as llama.cpp (src/llama-vocab.cpp) does.

Two kinds of vocabulary are supported.  ``gpt2`` is byte-level BPE with merges in the file.  ``llama`` is BPE of
sentencepiece, whose merges are computed from the scores of its pieces.  An absent key has llama.cpp's default.  Unicode
normalization, which the file does not store, follows from the name of the pre-tokenizer.

For ``llama``, llama.cpp and sentencepiece differ.  llama.cpp adds a space before the word after a special or
user-defined token of the file, and so does this module; sentencepiece does not after user-defined tokens.  Scores that
are logarithms of probabilities belong to a unigram model, and this module divides text as that model does; llama.cpp
treats them as ranks of BPE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from minivllm.device.loading.gguf_file import END_TEXTS, GgufFile
from minivllm.errors import shown

from .gguf_splits import Split, split_named

SPACE = "\u2581"  # the character with which sentencepiece represents a space
# largest sum of squared token lengths, because ``merges_of`` divides each token at each position; a usual vocabulary of
# 262,144 tokens has 2 * 10**7
MOST_WORK = 10**9
NO_TOKENIZER = "choose one with the option tokenizer, or set skip_tokenizer_init=True"
OTHERS = {  # value of tokenizer.ggml.model -> name of an unsupported kind of vocabulary
    "bert": "WordPiece (WPM)", "t5": "unigram of sentencepiece (UGM)", "rwkv": "RWKV", "plamo2": "PLaMo 2",
    "gemma4": "Gemma 4", "hybriddna": "HybridDNA", "whitespace": "words between spaces", "no_vocab": "no vocabulary",
    "none": "no vocabulary",
}  # fmt: skip
ROLES = {  # name of a special token in transformers -> key of its id
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip


class TokenKind(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


PIECES = (TokenKind.NORMAL, TokenKind.UNUSED)  # the kinds that sentencepiece finds in text
SPECIAL = (TokenKind.CONTROL, TokenKind.UNKNOWN)


class Vocabulary(NamedTuple):
    """The checked keys of a GGUF file that describe its tokenizer."""

    file: GgufFile
    model: str  # "gpt2" or "llama"
    tokens: Sequence[str]
    kinds: Sequence[int]  # ``TokenKind`` of each token
    ids: Mapping[str, int]  # role such as "bos" -> token id

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the tokens with a role, by transformers' names such as "eos_token"."""
        return {name: self.tokens[self.ids[role]] for name, role in ROLES.items() if role in self.ids}

    def flag(self, key: str, default: bool) -> bool:
        """Return the truth value ``tokenizer.ggml.`` + ``key`` of the file, or the default if it is absent.

        ModelError for a value of another type."""
        value = self.file.values.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.file.refuse(f"tokenizer.ggml.{key}={shown(value)}: expected a truth value")
        return value


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Return the checked vocabulary of a file.  ModelError for a kind of vocabulary that is not supported."""
    model = file.values.get("tokenizer.ggml.model")
    if model is None:
        raise file.refuse(f"holds no tokenizer (no tokenizer.ggml.model); {NO_TOKENIZER}")
    if not isinstance(model, str) or model not in ("gpt2", "llama"):
        kind = OTHERS.get(model, "not known") if isinstance(model, str) else "not known"
        text = f"tokenizer.ggml.model={shown(model)} is {kind}: expected gpt2 (byte-level BPE) or llama (sentencepiece)"
        raise file.refuse(f"{text}; {NO_TOKENIZER}")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_texts(file, "tokens"))]
    if sum(len(token) ** 2 for token in tokens) > MOST_WORK:
        raise file.refuse(f"the tokens have {sum(map(len, tokens))} characters in all; expected shorter tokens")
    if len(set(tokens)) < len(tokens):
        first = {token: i for i, token in reversed(list(enumerate(tokens)))}
        second, twice = next((i, token) for i, token in enumerate(tokens) if first[token] != i)
        raise file.refuse(f"token {shown(twice)} has the ids {first[twice]} and {second}; expected one id")
    kinds = _numbers(file, "token_type", len(tokens), int) or [int(TokenKind.NORMAL)] * len(tokens)
    kinds = [int(TokenKind.CONTROL) if token in END_TEXTS else kind for token, kind in zip(tokens, kinds, strict=True)]
    return Vocabulary(file, model, tokens, kinds, _ids(file, model, len(tokens)))


def _texts(file: GgufFile, name: str) -> list[str]:
    """Return a list of strings in the file.  ModelError if it is missing."""
    found = file.values.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise file.refuse(f"lacks tokenizer.ggml.{name}, a list of strings; {NO_TOKENIZER}")
    return found


def _numbers(file: GgufFile, name: str, count: int, kind: type) -> Sequence[Any]:
    """Return the numbers of ``count`` tokens, or () if the file has none.  ModelError for a wrong type or length."""
    found = file.values.get(f"tokenizer.ggml.{name}")
    if found is None:
        return ()
    numbers = found.tolist() if hasattr(found, "tolist") else found
    valid = isinstance(numbers, list) and len(numbers) >= count
    if not valid or not all(type(value) in (kind, int) for value in numbers):
        raise file.refuse(f"tokenizer.ggml.{name}: expected a number for each of the {count} tokens")
    return numbers[:count]


def _ids(file: GgufFile, model: str, count: int) -> dict[str, int]:
    """Return the token id of each role, such as "bos" and "eos", that the file gives.  A ``llama`` file without them
    has sentencepiece's default ids.  ModelError if the id of BOS or EOS is wrong."""
    found = {"bos": 1, "eos": 2, "unknown": 0} if model == "llama" else {}
    found = {role: i for role, i in found.items() if i < count}
    for role in ROLES.values():
        key = f"tokenizer.ggml.{role}_token_id"
        i = file.values.get(key)
        if i is None:
            continue
        if type(i) is int and 0 <= i < count:
            found[role] = i
        elif role in ("bos", "eos"):  # other special tokens do not change prompts, and files use -1 for a missing one
            raise file.refuse(f"{key}={shown(i)}: expected an id below {count}")
    return found


def build(vocabulary: Vocabulary, warn: Any) -> Any:
    """Return a ``tokenizers.Tokenizer``.  ``warn`` is called with a text about an assumption."""
    from tokenizers import AddedToken

    if vocabulary.model == "gpt2":
        split = _split(vocabulary, warn)
        backend = _byte_level(vocabulary, split)
    else:
        split = Split((), bos=True)
        backend = _sentencepiece(vocabulary)
    tokens = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    added = [AddedToken(t, normalized=False, special=kind in SPECIAL) for t, kind in tokens if kind in ADDED]
    backend.add_tokens(added)
    backend.post_processor = _around(vocabulary, split.bos)
    return backend


ADDED = (*SPECIAL, TokenKind.USER)


def _around(vocabulary: Vocabulary, bos: bool) -> Any:
    """Return the processor that adds BOS and EOS to a prompt.  ``bos`` is the file's default for adding BOS.
    ModelError if its id is missing."""
    from tokenizers import processors

    defaults = {"bos": bos, "eos": False}
    roles = [role for role, default in defaults.items() if vocabulary.flag(f"add_{role}_token", default)]
    special = []
    for role in roles:
        if role not in vocabulary.ids:
            key = f"tokenizer.ggml.{role}_token_id"
            raise vocabulary.file.refuse(f"prompts get a {role.upper()} token, but {key} is absent; expected the id")
        i = vocabulary.ids[role]
        special.append({"id": role, "ids": [i], "tokens": [vocabulary.tokens[i]]})
    before = ["bos"] if "bos" in roles else []
    after = ["eos"] if "eos" in roles else []
    single = [*before, "$A", *after]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=special)


def _split(vocabulary: Vocabulary, warn: Any) -> Split:
    """Return the splitting rule of a ``gpt2`` file.  If it names none, warn and return llama.cpp's default.  ModelError
    for an unknown name."""
    name = vocabulary.file.values.get("tokenizer.ggml.pre")
    if name is None or (isinstance(name, str) and not name):
        warn(
            f"{vocabulary.file.path}: names no pre-tokenizer (tokenizer.ggml.pre), so text is split by llama.cpp's "
            "'default', which may differ from the model's training; convert the model again"
        )
        name = "default"
    found = split_named(name if isinstance(name, str) else repr(name))
    if isinstance(found, str):
        raise vocabulary.file.refuse(f"{found}; {NO_TOKENIZER}")
    return found


def _byte_level(vocabulary: Vocabulary, split: Split) -> Any:
    """Return the ``tokenizers.Tokenizer`` of a ``gpt2`` file.  ModelError if its merges are missing or wrong."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = []
    for n, merge in enumerate(_texts(vocabulary.file, "merges")):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise vocabulary.file.refuse(
                f"tokenizer.ggml.merges[{n}]={shown(merge)}: expected two tokens that make a token"
            )
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.whole))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, spell])
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Any:
    """Return the ``tokenizers.Tokenizer`` of a ``llama`` file: a unigram or a BPE model, as its scores show."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = vocabulary.tokens
    vocab = {token: i for i, token in enumerate(tokens)}
    of_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    unknown = tokens[vocabulary.ids["unknown"]] if "unknown" in vocabulary.ids else None
    scores = _scores(vocabulary)
    if _is_unigram(vocabulary, scores):
        least = min(scores) - 1e6  # score of tokens that sentencepiece does not find in text
        kinds = vocabulary.kinds
        found = [score if kinds[i] in PIECES else least for i, score in enumerate(scores)]
        pieces = list(zip(tokens, found, strict=True))
        backend = Tokenizer(models.Unigram(pieces, vocabulary.ids.get("unknown"), of_bytes))
        # text that is spelled like a byte token is split, so that the library does not use the token for it
        if of_bytes:
            backend.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")
    else:
        merges = merges_of(vocabulary, scores)
        backend = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=of_bytes))
    steps: list[Any] = []
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = vocabulary.flag("add_space_prefix", True)
    if prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        back.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(back)
    return backend


def _scores(vocabulary: Vocabulary) -> Sequence[float]:
    """Return the scores of all tokens.  ModelError if they are missing."""
    scores = _numbers(vocabulary.file, "scores", len(vocabulary.tokens), float)
    if not scores or not all(map(math.isfinite, scores)):
        raise vocabulary.file.refuse("lacks tokenizer.ggml.scores, a finite number for each token; " + NO_TOKENIZER)
    return scores


def _is_unigram(vocabulary: Vocabulary, scores: Sequence[float]) -> bool:
    """Return whether scores are logarithms of probabilities.  The scores of BPE are ranks, which are whole numbers."""
    return any(score != int(score) for score, kind in zip(scores, vocabulary.kinds, strict=True) if kind in PIECES)


def merges_of(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that form a piece, in sentencepiece's order of merging, the best score first."""
    kinds = vocabulary.kinds
    pieces = {token: i for i, token in enumerate(vocabulary.tokens) if kinds[i] in PIECES}
    found = []
    for piece, i in pieces.items():
        score = -float(scores[i])
        for cut in range(1, len(piece)):
            if piece[:cut] in pieces and piece[cut:] in pieces:
                found.append((score, i, cut, piece))
    found.sort()
    return [(piece[:cut], piece[cut:]) for _, _, cut, piece in found]
