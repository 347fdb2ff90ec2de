"""Prompts of conversations in which only the chat template's own special tokens are special.

A template is a program: it may print a caller's text anywhere, cut it, join it, change its case or escape it.  So the
protection does not depend on fields.  Every special token contains at least one of a few key characters.  In every
string of the caller (including keys of mappings), each key character is replaced by a *mark*, a private-use character
that occurs nowhere else.  The template is filled with these strings.  Special tokens in its output can then only come
from the template itself.  Afterwards each mark is replaced by its character again.

A mark is a single character without case, and ``tojson`` does not change it.  So slices, lengths, filters and nearly
all comparisons of a template work as with the original text.  A mark may only change a search for one of the template's
own words (``'</think>' in content``).  If a caller's text contains such a word, the template is filled a second time:
the word is kept, and around it all characters that occur in any special token are marked.  If both prompts have the
same special tokens, the second prompt is used.  If the template changes case or escapes text, it is also filled with
marks only on whole special tokens.  That prompt is used if it differs from the other only in case and escapes.
"""

from __future__ import annotations

import html
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from minivllm.errors import ModelError, RequestError, shown

FIRST, LAST = 0xE000, 0xF8FF  # the private-use area, which provides the marks
MARKED = re.compile("(\\\\+)u([e-f][0-9a-f]{3})|[\ue000-\uf8ff]", re.I)  # a mark, plain or escaped by JSON
NOT_IN_JSON = frozenset('"\\')  # characters that JSON escapes; a mark that replaces one would not be escaped
CHANGING = frozenset(  # filters and methods that change characters, but not marks
    {"upper", "lower", "title", "capitalize", "swapcase", "casefold", "e", "escape", "forceescape", "urlencode"}
)
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "model"})


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as text.

    ``pieces`` alternates plain text and the template's special tokens, and begins and ends with plain text.  ``plain``
    means that the text of the caller does not spell any special token."""

    pieces: tuple[str, ...]
    plain: bool = True

    @property
    def text(self) -> str:
        """Return the text of the whole prompt."""
        return "".join(self.pieces)

    @property
    def special(self) -> tuple[str, ...]:
        """Return the special tokens of the prompt in their order."""
        return self.pieces[1::2]


class Spellings:
    """The special tokens of a tokenizer, and the search for them in text.

    The leftmost match counts, and the longest of several tokens at the same position."""

    def __init__(self, tokens: Iterable[str], words: Iterable[str] = ()) -> None:
        """Compile the search.  ``words`` are tokens that count only without an adjacent letter or digit."""
        self.tokens = frozenset(filter(None, tokens))
        alone = frozenset(words)
        # grouped by their first two characters, so that most positions need few comparisons
        groups: dict[str, list[str]] = {}
        for token in sorted(self.tokens, key=lambda t: (-len(t), t)):
            rest = re.escape(token[2:])
            if token in alone:
                rest += rf"(?<!\w{re.escape(token)})(?!\w)"
            groups.setdefault(token[:2], []).append(rest)
        longest_first = sorted(groups.items(), key=lambda group: -len(group[0]))
        choices = "|".join(f"{re.escape(begin)}(?:{'|'.join(rests)})" for begin, rests in longest_first)
        self._any = re.compile(choices) if choices else None

    def split(self, text: str) -> list[str]:
        """Return plain text and special tokens in turn, beginning and ending with plain text."""
        if self._any is None:
            return [text]
        pieces: list[str] = []
        at = 0
        for match in self._any.finditer(text):
            pieces += [text[at : match.start()], match[0]]
            at = match.end()
        return [*pieces, text[at:]]


class ChatFiller:
    """Fills one chat template for one tokenizer.

    ``written`` has the strings that the template may print, ``names`` the words that it looks up or compares with, and
    ``filters`` the names of its filters.
    """

    def __init__(
        self, spellings: Spellings, written: Sequence[str], names: Iterable[str], filters: Iterable[str] = ()
    ) -> None:
        self.spellings = spellings
        self._names = ROLES | frozenset(names)
        plain = [piece for text in written for piece in spellings.split(text)[::2]]
        self._keys = _hitting(spellings.tokens, set().union(*plain))
        # the template prints parts of special tokens that a caller's words could complete, such as "<|" + role + "|>"
        self._joins = _joins(spellings.tokens, written, self._keys)
        letters = {char for token in spellings.tokens for char in token if not char.isspace()} - NOT_IN_JSON
        self._every = _both_cases(self._keys | letters)
        self._marked = self._every if self._joins else _both_cases(self._keys)
        self._search: re.Pattern[str] | None = None
        if self._marked:
            self._search = re.compile("[" + re.escape("".join(sorted(self._marked))) + "]")
        self._looked_for = self._searched_words(self._names.intersection(written))
        self._changes = not CHANGING.isdisjoint(self._names.union(filters))
        self._firsts = frozenset(token[0] for token in spellings.tokens)
        self._taken = set(_private("".join(written)))

    def _searched_words(self, words: Iterable[str]) -> re.Pattern[str] | None:
        """Return a pattern for words of the template that marks would hide and that are safe without marks, or None.

        A word is safe if it cannot be a part of a special token."""
        hidden = [word for word in words if not self._marked.isdisjoint(word)]
        every = frozenset("".join(self.spellings.tokens).lower())
        safe = [word for word in hidden if len(self.spellings.split(word)) == 1]
        safe = [word for word in safe if not _joins(self.spellings.tokens, [word], every)]
        if not safe:
            return None
        longest_first = sorted(safe, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def fill(self, render: Callable[[Any], str], values: Any) -> ChatPrompt:
        """Return the prompt of ``render(values)``, in which no text of the values is a special token.

        RequestError if the values are not text, numbers, booleans, null, lists and mappings, or if the template refuses
        them."""
        strings = list(_strings(values))
        touched = [s for s in strings if self._touched(s)]
        if not touched:
            return ChatPrompt(tuple(self.spellings.split(render(values))))
        twice = self._looked_for is not None and any(map(self._looked_for.search, touched))
        alphabet = self._every if twice else self._marked
        if self._changes:
            alphabet |= self._firsts
        marks = self._marks(strings, alphabet)
        back = {mark: char for char, mark in marks.items()}

        def filled(mark: Callable[[str], str]) -> tuple[str, ...]:
            try:
                text = render(_mapped(values, mark))
            except RequestError as e:
                raise type(e)(_restored(str(e), back), e.param) from e
            return tuple(_restored(piece, back) for piece in self.spellings.split(text))

        table = {ord(char): marks[char] for char in self._marked}
        pieces = filled(lambda text: text.translate(table) if self._touched(text) else text)
        if twice:
            second = filled(lambda text: self._mark_around(text, marks))
            pieces = second if second[1::2] == pieces[1::2] else pieces
        if self._changes:
            third = filled(lambda text: self._mark_spelled(text, marks))
            same = [_bare(piece, back) for piece in third] == [_bare(piece, back) for piece in pieces]
            pieces = third if same else pieces
        return ChatPrompt(pieces, self.spellings.split("".join(pieces)) == list(pieces))

    def _mark_around(self, text: str, marks: Mapping[str, str]) -> str:
        """Return a text in which all characters that have marks are replaced by them, except in words that the template
        may search for."""
        if not self._touched(text):
            return text
        assert self._looked_for is not None
        table = {ord(char): mark for char, mark in marks.items()}
        parts: list[str] = []
        at = 0
        for match in self._looked_for.finditer(text):
            parts += [text[at : match.start()].translate(table), match[0]]
            at = match.end()
        return "".join([*parts, text[at:].translate(table)])

    def _touched(self, text: str) -> bool:
        """Return whether a text needs marks.

        A word that the template only compares with others needs none, if it has no key character.
        """
        assert self._search is not None
        if self._search.search(text) is None:
            return False
        return not (self._joins and text in self._names and self._keys.isdisjoint(text))

    def _mark_spelled(self, text: str, marks: Mapping[str, str]) -> str:
        """Return a text in which only the first character of each special token is replaced by its mark."""
        pieces = self.spellings.split(text)
        for at in range(1, len(pieces), 2):
            token = pieces[at]
            pieces[at] = marks[token[0]] + token[1:]
        return "".join(pieces)

    def _marks(self, strings: Sequence[str], alphabet: Iterable[str]) -> dict[str, str]:
        """Return a mark for each character of an alphabet, a private-use character that occurs in none of the texts.
        RequestError if too few such characters are left."""
        taken = self._taken.union(*map(_private, strings))
        free = (chr(code) for code in range(FIRST, LAST + 1) if chr(code) not in taken)
        wanted = sorted(alphabet)
        marks = dict(zip(wanted, free, strict=False))
        if len(marks) < len(wanted):
            raise RequestError("messages: they use all private-use characters; use fewer of them", "messages")
        return marks


def _private(text: str) -> Iterator[str]:
    """Yield the private-use characters of a text, including those that JSON has escaped."""
    for match in MARKED.finditer(text):
        yield chr(int(match[2], 16)) if match[2] else match[0]


def _restored(text: str, back: Mapping[str, str]) -> str:
    """Return a text in which each mark is replaced by its character, escaped as often as the mark is."""

    def original(match: re.Match[str]) -> str:
        char = back.get(chr(int(match[2], 16)) if match[2] else match[0])
        if char is None:
            return match[0]
        if not match[2]:
            return char
        # JSON inside JSON doubles backslashes: the last 1, 2, 4 ... belong to the mark, the others to the text before
        # it
        slashes = len(match[1])
        own = slashes & -slashes
        escaped = char if char.isascii() else json.dumps(char)[1:-1].replace("\\", "\\" * own)
        return "\\" * (slashes - own) + escaped

    return MARKED.sub(original, text)


def _bare(text: str, back: Mapping[str, str]) -> str:
    """Return a text without marks, case and escapes."""
    return _restored(html.unescape(unquote(text)), back).casefold()


def _strings(values: Any) -> Iterator[str]:
    """Yield every string in nested values, including keys.  RequestError for values of other types."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _strings(key)
            yield from _strings(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _strings(value)
    elif values is not None and not isinstance(values, (bool, int, float)):
        expected = "expected text, numbers, booleans, null, lists and mappings"
        raise RequestError(f"messages: a value of type {type(values).__name__}: {expected}", "messages")


def check_values(values: Any) -> None:
    """Raise RequestError for nested values that are not text, numbers, booleans, null, lists or mappings."""
    for _ in _strings(values):
        pass


class _Keyed(dict[Any, Any]):
    """A mapping whose keys have marks when a template prints them.  A template looks keys up without marks."""

    _by_name: Mapping[Any, Any] = {}

    def __missing__(self, key: Any) -> Any:
        return super().__getitem__(self._by_name[key])

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or key in self._by_name

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._by_name.get(key, key), default)


def _mapped(values: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of nested values in which ``change`` has replaced every string."""
    if isinstance(values, str):
        return change(str.__str__(values))
    if isinstance(values, Mapping):
        keys = {key: _mapped(key, change) for key in values}
        copied = _Keyed((keys[key], _mapped(value, change)) for key, value in values.items())
        copied._by_name = keys
        return copied
    if isinstance(values, (list, tuple)):
        return type(values)([_mapped(value, change) for value in values])
    return values


def _both_cases(chars: Iterable[str]) -> frozenset[str]:
    """Return the characters in upper and lower case."""
    both: set[str] = set()
    for char in chars:
        both.update((char, char.lower(), char.upper()))
    return frozenset(char for char in both if len(char) == 1)


def _hitting(tokens: Iterable[str], used: set[str]) -> frozenset[str]:
    """Return a small set of characters such that every token has one of them.

    Preferred characters are not changed by filters for JSON, space and case, are not ``used`` in the template's own
    text, and occur in many tokens."""
    left = list(tokens)
    count: dict[str, int] = {}
    for token in left:
        for char in set(token):
            count[char] = count.get(char, 0) + 1

    def rank(char: str) -> tuple[Any, ...]:
        return char in NOT_IN_JSON, char.isspace(), char.isalnum(), char in used, -count[char], char

    chosen = set()
    for char in sorted(count, key=rank):
        if any(char in token for token in left):
            chosen.add(char)
            left = [token for token in left if char not in token]
    return frozenset(chosen)


def _joins(tokens: Iterable[str], written: Sequence[str], keys: frozenset[str]) -> bool:
    """Return whether text that a template prints contains a part of a special token with one of the ``keys``.

    Text before or after the part could then complete the token.  Case is ignored."""
    tokens = [token.lower() for token in tokens]
    low = {key.lower() for key in keys}
    begins = {token[:cut] for token in tokens for cut in range(1, len(token))}
    ends = {token[cut:] for token in tokens for cut in range(1, len(token))}
    begins = {part for part in begins if not low.isdisjoint(part)}
    ends = {part for part in ends if not low.isdisjoint(part)}
    most = max(map(len, tokens), default=0)
    for text in map(str.lower, written):
        cuts = range(1, min(most, len(text) + 1))
        if any(text[-n:] in begins or text[:n] in ends for n in cuts):
            return True
        inside = len(text) < most and not low.isdisjoint(text)
        if inside and any(text in token and text != token for token in tokens):
            return True
    return False


def without_spellings(backend: Any, tokens: Iterable[str]) -> tuple[Any, dict[str, str]]:
    """Return a ``tokenizers.Tokenizer`` that encodes ``tokens`` as plain text, and the new spellings of the tokens.

    The tokens keep their ids, but have secret spellings.  The option ``encode_special_tokens`` would not be enough,
    because a vocabulary may also have the spelling as an ordinary piece, and because text on both sides of a special
    token must be divided as usual.  ModelError if the ids would change.
    """
    from tokenizers import Tokenizer as Backend

    prefix = f"\ue000{secrets.token_hex(16)}"  # random, so that a caller cannot guess it
    names = {token: f"{prefix}{number}\ue000" for number, token in enumerate(sorted(tokens))}
    data = json.loads(backend.to_str())
    for added in data["added_tokens"]:
        if added["content"] in names:
            added.update(content=names[added["content"]], single_word=False)
    model = data["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # the model Unigram, whose vocabulary is a list of pieces with scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # remove the merges that would make a special token
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    data["post_processor"] = None  # no special tokens are added, because templates print them
    renamed = Backend.from_str(json.dumps(data))
    for token, name in names.items():
        if renamed.token_to_id(name) != backend.token_to_id(token):
            raise ModelError(
                f"tokenizer.json: the special token {shown(token)} cannot be distinguished from text that spells it"
            )
    return renamed, names
