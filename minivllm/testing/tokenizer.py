"""The conformance suite of tokenizers.

Texts of many scripts are encoded and decoded: as a whole, step by step, and by several threads at once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from minivllm.core.interfaces.tokenizer import TokenizerBackend, TokenizerContext
from minivllm.errors import ModelError, describe_error
from minivllm.runtime.text.detokenize import IncrementalDetokenizer
from minivllm.runtime.text.tokenizer import Tokenizer

from . import tokenizer_samples
from .base import since
from .kept import Lasting
from .spec import SpecConformance

PARTS = (
    "the cat and the dog", " ", "  ", "\n", "\n\n", "\t", "a", "Z", "0", "1234567", "don't", "é", "e\u0301", "naïve",
    "日本語", "Привет", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "\u00a0", "\u2028", "\ufeff", "\x00", "\x7f", "<", ">",
    "</s>", "<s>", "[INST]", "<|im_end|>", "<0x0A>", "▁", "Ġ", "\ufffd", "#include <x.h>", "{'a': [1, 2]}", "...",
    "!!!!!!!!!!!!!!!!",
)  # fmt: skip
PLAIN = ("the", "cat", "and", "a", "dog", "in", "house")
THREADS = 8


def texts(seed: int, count: int) -> Iterator[str]:
    """Yield random texts that are joined from ``PARTS``; the first texts are each part alone."""
    rng = random.Random(seed)
    yield from islice(PARTS, count)
    for _ in range(count - len(PARTS)):
        yield "".join(rng.choices(PARTS, k=rng.randrange(12)))


class TokenizerConformance(Lasting, SpecConformance):
    """The conformance suite of tokenizers.

    ``folder`` is a directory, or a GGUF file, that the tokenizer reads.  By default it is a small sample with the
    files tokenizer.json, tokenizer_config.json and tekken.json.  With the feature ``lossless`` every text must come
    back unchanged.
    """

    kind = "tokenizer"
    folder: str | Path = ""

    def path(self) -> Path:
        """Return the directory or file that the tokenizer reads."""
        if self.folder:
            return Path(self.folder)
        formats = self.spec.listed("format")
        if formats == ["gguf"]:
            return tokenizer_samples.gguf_file()
        return tokenizer_samples.directory()

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        return (TokenizerContext(self.path()),)

    def exercise(self, instance: TokenizerBackend) -> Any:
        """Return the ids of a few texts, and the texts decoded from them."""
        encoded = [instance.encode(text, True) for text in texts(1, 60)]
        return encoded, [instance.decode(ids, False) for ids in encoded]

    def lasting(self) -> TokenizerBackend:
        """Create the instance of the leak test, which converts many texts."""
        return self.build(*self.context())

    def once_more(self, instance: TokenizerBackend, number: int) -> None:
        """Convert new texts."""
        for turn in range(20):
            instance.decode(instance.encode(f"request {number} of turn {turn} costs {number * turn}", True), True)

    def let_go(self, instance: TokenizerBackend) -> None:
        """Release an instance of the leak test; there is nothing to stop."""

    @property
    def count(self) -> int:
        """Return the number of texts that a test converts."""
        return 3000 if self.long else 300

    def made(self) -> TokenizerBackend:
        """Create an instance."""
        return self.build(*self.context())

    @since(1, 0)
    def test_ids_are_whole_numbers_of_the_vocabulary(self) -> None:
        """Check the ids of random texts: each is an int from 0 to ``vocab_size`` - 1."""
        backend = self.made()
        size = backend.vocab_size
        for text in texts(2, self.count):
            for name, ids in (
                ("encode", backend.encode(text, True)),
                ("encode_plain", self.plain(backend, text)),
            ):
                bad = [i for i in ids if type(i) is not int or not 0 <= i < size]
                assert not bad, f"{name}({text!r}) returned {bad[:3]}: expected ints from 0 to {size - 1}"

    def plain(self, backend: TokenizerBackend, text: str) -> list[int]:
        """Return the ids of ``encode_plain``, or an empty list for a text that the tokenizer refuses."""
        try:
            return backend.encode_plain(text)
        except ValueError:
            return []

    @since(1, 0)
    def test_text_comes_back(self) -> None:
        """Check that plain words come back from their ids, and every text if the tokenizer claims ``lossless``.

        A decoded text must come back unchanged, because a normalized text is not changed again.
        """
        backend = self.made()
        rng = random.Random(3)
        for _ in range(self.count // 4):
            parts = rng.choices(PLAIN, k=1 + rng.randrange(9))
            text = " ".join(parts)
            found = backend.decode(backend.encode_plain(text), True)
            assert found.strip() == text, f"{text!r} comes back as {found!r}"
        for text in texts(4, self.count):
            once = backend.decode(self.plain(backend, text), False)
            if self.claims("lossless"):
                assert once == text, f"{text!r} comes back as {once!r}, and the tokenizer claims lossless"
            again = backend.decode(self.plain(backend, once), False)
            assert again.strip() == once.strip(), f"{once!r} comes back as {again!r}"

    @since(1, 0)
    def test_special_tokens_are_kept(self) -> None:
        """Check that a special token in a text becomes a single id, and that ``encode_plain`` makes no special token.

        ``decode`` shows the special token or leaves it out, as its argument says.
        """
        backend = self.made()
        added = backend.added_tokens
        missing = {role: text for role, text in backend.special_tokens.items() if text not in added}
        assert not missing, f"special_tokens has {missing}, and added_tokens lacks them"
        unlisted = backend.special_ids - set(added.values())
        assert not unlisted, f"special_ids has {sorted(unlisted)[:5]}, and added_tokens lacks them"
        unknown = added.get(backend.special_tokens.get("unk_token", ""))
        for text, i in islice(added.items(), 64):
            if i not in backend.special_ids:
                continue
            ids = backend.encode(f"the {text} cat", False)
            assert ids.count(i) == 1, f"encode of text with {text!r} returned {ids}: expected its id {i} once"
            shown = backend.decode(ids, False)
            hidden = backend.decode(ids, True)
            assert text in shown, f"decode of {ids} without skipping returned {shown!r}: expected {text!r} in it"
            assert text not in hidden, f"decode of {ids} with skipping returned {hidden!r}: {text!r} is a special token"
            special = backend.special_ids.intersection(self.plain(backend, text)) - {unknown}
            assert not special, f"encode_plain({text!r}) returned the special tokens {sorted(special)}"

    @since(1, 0)
    def test_prompts_get_special_tokens_around(self) -> None:
        """Check that ``add_special_tokens`` only adds special tokens before and after the ids of a text."""
        backend = self.made()
        for text in texts(5, self.count // 3):
            inner = backend.encode(text, False)
            whole = backend.encode(text, True)
            places = []
            for at in range(len(whole) - len(inner) + 1):
                if whole[at : at + len(inner)] == inner:
                    places.append(at)
            extras = []
            for at in places:
                extras.append([*whole[:at], *whole[at + len(inner) :]])
            valid = any(backend.special_ids.issuperset(extra) for extra in extras)
            assert valid, f"encode({text!r}, True) returned {whole}: expected special tokens around {inner}"

    @since(1, 0)
    def test_text_decoded_step_by_step_equals_the_whole_text(self) -> None:
        """Check that the engine's incremental decoding gives the same text as ``decode`` of all ids.

        The ids are those of texts, and random ids.
        """
        backend = self.made()
        tokenizer = Tokenizer(backend.library, backend, backend.special_tokens, None)
        rng = random.Random(6)
        sequences = [backend.encode(text, True) for text in texts(7, self.count // 2)]
        for _ in range(self.count):
            length = rng.randrange(30)
            sequences.append([rng.randrange(backend.vocab_size) for _ in range(length)])
        for ids in sequences:
            for skip in (True, False):
                steps = IncrementalDetokenizer(tokenizer, skip)
                text = "".join(steps.add([i]) for i in ids) + steps.finish()
                whole = backend.decode(ids, skip)
                assert text == whole, f"{ids} is decoded step by step to {text!r}, and as a whole to {whole!r}"

    @since(1, 0)
    def test_bytes_of_tokens_are_those_of_the_text(self) -> None:
        """Check that the joined ``token_bytes`` of ids are the bytes of the decoded text, if tokens stand for bytes."""
        backend = self.made()
        if backend.token_bytes(0) is None:
            assert not backend.bytewise, "bytewise is True, and token_bytes(0) is None"
            pytest.skip("tokens do not stand for bytes")
        rng = random.Random(8)
        for text in texts(9, self.count):
            ids = self.plain(backend, text)
            if backend.bytewise:
                ids = [*ids, *(rng.randrange(backend.vocab_size) for _ in range(4))]
            pieces = [backend.token_bytes(i) for i in ids]
            wrong = []
            for i, piece in zip(ids, pieces, strict=True):
                if not isinstance(piece, bytes):
                    wrong.append(i)
            assert not wrong, f"token_bytes({wrong[0]}) is not bytes"
            joined = b"".join(filter(None, pieces)).decode("utf-8", "replace")
            whole = backend.decode(ids, False)
            if backend.bytewise:
                same = joined == whole
            else:
                same = joined.strip() == whole.strip()
            assert same, f"the bytes of the tokens {ids} are {joined!r}, and their text is {whole!r}"

    @since(1, 0)
    def test_tokens_and_ids_belong_together(self) -> None:
        """Check that ``token_id`` of an id's ``token`` is an id of the same spelling.

        Unknown ids and spellings give None.
        """
        backend = self.made()
        size = backend.vocab_size
        rng = random.Random(10)
        if size <= 4096:
            ids = range(size)
        else:
            ids = [*backend.special_ids, *rng.sample(range(size), 2000)]
        for i in ids:
            text = backend.token(i)
            if text is None:
                continue
            back = backend.token_id(text)
            assert back is not None, f"token({i}) is {text!r}, and token_id of it is None"
            assert backend.token(back) == text, f"token({i}) is {text!r}, token_id of it {back}, token of that another"
        for text, i in backend.added_tokens.items():
            assert backend.token_id(text) == i, f"added_tokens has {text!r}: {i}, token_id {backend.token_id(text)}"
        assert backend.token_id("no such token, surely") is None
        for i in (size, size + 5, 2**31 - 1):
            assert backend.token(i) is None, f"token({i}) is {backend.token(i)!r}: the vocabulary has {size} tokens"
            found = backend.decode([i], False)
            assert found == "", f"decode([{i}]) returned {found!r}: the vocabulary has {size} tokens"

    @since(1, 0)
    def test_threads_get_the_results_of_one_thread(self) -> None:
        """Check that threads that convert different texts at the same time get the results of one thread."""
        backend = self.made()
        listed = list(texts(11, self.count // 2))
        want = []
        for text in listed:
            ids = backend.encode(text, True)
            want.append((ids, backend.decode(self.plain(backend, text), True)))

        def convert(text: str) -> tuple[list[int], str]:
            return backend.encode(text, True), backend.decode(self.plain(backend, text), True)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                found = list(pool.map(convert, listed))
        finally:
            sys.setswitchinterval(interval)
        results = zip(listed, want, found, strict=True)
        wrong = [text for text, one, other in results if one != other]
        assert not wrong, f"{len(wrong)} texts are converted to something else by {THREADS} threads: {wrong[0]!r}"

    @since(1, 0)
    def test_text_that_is_not_unicode_is_refused(self) -> None:
        """Check that lone surrogates, which no UTF-8 text has, are refused and not replaced."""
        backend = self.made()
        for text in ("\ud800", "a\udfff"):
            for name, call in (
                ("encode", lambda t: backend.encode(t, False)),
                ("encode_plain", backend.encode_plain),
            ):
                try:
                    ids = call(text)
                except (UnicodeEncodeError, TypeError):
                    continue
                pytest.fail(f"{name}({text!r}) returned {ids}: expected UnicodeEncodeError or TypeError")

    @since(1, 0)
    def test_the_library_gives_the_results_of_the_methods(self) -> None:
        """Check that ``library``, an object that the engine calls directly, gives the results of the methods."""
        backend = self.made()
        if backend.library is None:
            pytest.skip("no library")
        for text in texts(12, self.count // 3):
            for add in (True, False):
                ids = backend.library.encode(text, add_special_tokens=add).ids
                want = backend.encode(text, add)
                assert ids == want, f"library encodes {text!r} to {ids}, and the method to {want}"
        assert backend.library.get_vocab_size(with_added_tokens=True) == backend.vocab_size

    @since(1, 0)
    def test_a_missing_directory_raises_an_error_of_minivllm(self) -> None:
        """Check that a missing directory raises a ModelError with a text; a tokenizer that reads no files need not
        raise.
        """
        missing = self.path().parent / "no such directory"
        try:
            self.build(TokenizerContext(missing))
        except ModelError as e:
            assert str(e).strip(), "the error has no text"
        except Exception as e:
            pytest.fail(f"a missing directory raises {describe_error(e)}: expected ModelError")
