"""Small tokenizers with each decoder of the library ``tokenizers``, and lists of any of their ids."""

from __future__ import annotations

from itertools import chain

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from minivllm.runtime.text.detokenize import ALPHABET
from minivllm.runtime.text.tokenizer import Tokenizer

BYTE_SPELLING = {b: c for c, b in ALPHABET.items()}
WORDS = [
    "▁",
    "▁▁",
    "▁hello",
    "hello",
    "a",
    "日",
    "本語",
    "é",
    "\ufffd",
    "🙂",
    " ",
    ".",
    "##ing",
    "n't",
    "end</w>",
    "</w>",
]


def spell(data: bytes) -> str:
    return "".join(BYTE_SPELLING[b] for b in data)


def finished(backend, special=("<s>", "</s>"), added=("hello there", "<plain>")):
    backend.add_special_tokens([AddedToken(s, special=True) for s in special])
    backend.add_tokens(list(added))
    return Tokenizer(backend, None, {}, None)


def byte_level(steps=()):
    pieces = [bytes([b]) for b in range(256)]
    whole = ["日本", "é", "🙂🙂", " the", "\n\n", "l'été", "\ufffd"]
    pieces += [w.encode() for w in whole]
    # tokens that begin or end inside a character, as in trained vocabularies
    pieces += [
        "日".encode()[:2],
        "日".encode()[1:],
        "🙂".encode()[:3],
        b" " + "🙂".encode()[:2],
        b"\xe2\x80",
        b"\xff\xc3",
    ]
    vocab = {spell(p): i for i, p in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), *steps]) if steps else decoders.ByteLevel()
    return finished(backend, added=("hello there", "日本 x", "Ġx", "<plain>"))


def word_level(decoder, byte_tokens=True):
    words = WORDS + [f"<0x{b:02X}>" for b in range(256)] * byte_tokens + ["<0xZZ>", "<pad>"]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    return finished(backend)


def llama(strip=True):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_level_fused": byte_level([decoders.Fuse()]),
    "llama": word_level(llama()),
    "gemma": word_level(llama(strip=False)),
    "metaspace": word_level(decoders.Metaspace()),
    "metaspace_never": word_level(decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": word_level(decoders.WordPiece(), byte_tokens=False),
    "bpe_suffix": word_level(decoders.BPEDecoder(), byte_tokens=False),
    "none": word_level(None),
    "ctc": word_level(decoders.CTC(), byte_tokens=False),
}


def ids_of(tokenizer):
    """Return random ids: runs of valid and invalid bytes, words, special tokens, and ids without a token."""
    size = tokenizer.vocab_size
    any_id = st.integers(0, size + 3)
    first = tokenizer.token_id("<0x00>" if tokenizer.token_id("<0x00>") is not None else BYTE_SPELLING[0])
    if first is None:
        return st.lists(any_id, max_size=40)
    text = st.text(alphabet="aé日🙂\u0301 \n\ufffd", min_size=1, max_size=4)
    run = text.map(lambda t: [first + b for b in t.encode()])
    junk = st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0x80, 0xED, 0xA0, 0xF0, 0x9F, 0xFF, 0x41]), max_size=6)
    broken = junk.map(lambda bs: [first + b for b in bs])
    return st.lists(st.one_of(run, broken, any_id.map(lambda i: [i])), max_size=25).map(
        lambda x: list(chain.from_iterable(x))
    )
