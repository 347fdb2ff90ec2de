"""The tokenizer of pocket: a byte-level BPE of 2,048 tokens, trained on the small world.

`python -m minivllm.pocket.tokenizer DIR` writes tokenizer.json and tokenizer_config.json (with the chat template).
All 256 bytes are tokens, so that any text can be encoded and decoded without loss.  Each digit is a token.
`Encoder` is a faster tokenizer for training: it encodes each word once and caches the result.
"""

import argparse
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .tasks import draw, plain_story

VOCAB_SIZE = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = [END_OF_TEXT, TURN_START, TURN_END]

SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ASCII_SPLIT = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
"""Splits ASCII text as SPLIT does."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def corpus(documents: int, seed: int = 0) -> Iterator[str]:
    """Yield the texts for training the tokenizer: `documents` of each kind that the model is trained on."""
    rng = Random(f"tokenizer {seed}")
    for _ in range(documents):
        yield plain_story(rng)
        for task in ("copy", "sums", "json", "json", "story"):
            case = draw(task, rng)
            yield case.messages[-1]["content"]
            yield case.answer
        case = draw("needle", rng, pieces=(60, 120))
        yield case.messages[-1]["content"] + " " + case.answer


def train(documents: int = 6000, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Return a tokenizer trained on `documents` documents of each kind."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_byte])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(corpus(documents, seed), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int = 4096) -> None:
    """Write the tokenizer files of a model directory.  `max_length` is the longest context of the model in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": SPECIALS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model directory."""
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


class Encoder:
    """An encoder with a cache of words.  It returns the same token ids as the tokenizer, several times faster."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.cache: dict[str, list[int]] = {}
        self.end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        self.turn_start = tokenizer.token_to_id(TURN_START)
        self.turn_end = tokenizer.token_to_id(TURN_END)
        self.heads = {}
        for role in ("system", "user", "assistant"):
            ids = self.encode(role + "\n")
            self.heads[role] = [self.turn_start, *ids]
        self.tail = self.encode("\n")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        if not text.isascii():
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        cache = self.cache
        words = ASCII_SPLIT.findall(text)
        try:
            return list(chain.from_iterable([cache[word] for word in words]))
        except KeyError:
            for word in words:
                if word not in cache:
                    cache[word] = self.tokenizer.encode(word, add_special_tokens=False).ids
            return list(chain.from_iterable([cache[word] for word in words]))


def main() -> None:
    """Train the tokenizer and write it to a directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=6000)
    args = parser.parse_args()
    save(train(args.documents), args.folder)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
