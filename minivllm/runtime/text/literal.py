"""A conversation becomes a prompt in which only the chat template's own special tokens are special.

A template is a program: it may print what a caller wrote in any place, cut it, join it, change its case or escape it.
So the defence does not look at fields.  In every string of the caller (keys of mappings too) the characters without
which no special token can be spelled are replaced, one by one, by private-use characters that occur nowhere else.  The
template is filled with that.  What then spells a special token was written by the template alone; afterwards each mark
becomes the character again that it stands for.

Marks are characters of one place, without case, that ``tojson`` leaves alone, so cuts, lengths, filters and nearly all
comparisons of a template go as they would.  What a mark may change is a search for one of the template's own words
(``'</think>' in content``).  Where a caller writes such a word, the template is filled a second time: the word is left
as it is, and around it every character is marked that any special token has.  If both give the same special tokens,
that second prompt is the one that is used.  So is one with marks only on whole special tokens, if it differs in no more
than what filters for case and escapes do to marked characters.
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

FIRST, LAST = 0xE000, 0xF8FF  # the private-use area, of which marks are taken
MARKED = re.compile("(\\\\+)u([e-f][0-9a-f]{3})|[\ue000-\uf8ff]", re.I)  # as it is, or as JSON escapes it
NOT_IN_JSON = frozenset('"\\')  # JSON escapes them: a mark would take that away
CHANGING = frozenset(  # filters and methods that leave a mark as it is and would change the character
    {"upper", "lower", "title", "capitalize", "swapcase", "casefold", "e", "escape", "forceescape", "urlencode"}
)
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "model"})


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as text.  ``pieces``: plain text and the template's special tokens in turns, plain text first and
    last.  ``plain``: the caller wrote nothing that could have been a part of one."""

    pieces: tuple[str, ...]
    plain: bool = True

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def special(self) -> tuple[str, ...]:
        return self.pieces[1::2]


class Spellings:
    """The special tokens of a tokenizer, and where they stand in a text: leftmost first, of those the longest."""

    def __init__(self, tokens: Iterable[str], words: Iterable[str] = ()) -> None:
        """``words``: tokens that count only where no letter or digit is beside them."""
        self.tokens = frozenset(filter(None, tokens))
        alone = frozenset(words)
        # by their first two characters: few alternatives are tried where none of the tokens begins
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
        """Plain text and special tokens in turns."""
        pieces, at = [], 0
        for match in self._any.finditer(text) if self._any is not None else ():
            pieces += [text[at : match.start()], match[0]]
            at = match.end()
        return [*pieces, text[at:]]


class ChatFiller:
    """Fills one chat template of one tokenizer.

    ``written``: the strings that the template itself may print; ``names``: the words that it looks up or compares with;
    ``filters``: the names of filters that it uses.
    """

    def __init__(
        self, spellings: Spellings, written: Sequence[str], names: Iterable[str], filters: Iterable[str] = ()
    ) -> None:
        self.spellings = spellings
        self._names = ROLES | frozenset(names)
        plain = [piece for text in written for piece in spellings.split(text)[::2]]
        self._keys = _hitting(spellings.tokens, set().union(*plain))
        # whether the template prints parts of special tokens, which a caller's words could complete: "<|" + role + "|>"
        self._joins = _joins(spellings.tokens, written, self._keys)
        letters = {char for token in spellings.tokens for char in token if not char.isspace()} - NOT_IN_JSON
        self._every = _both_cases(self._keys | letters)
        self._marked = self._every if self._joins else _both_cases(self._keys)
        self._search = re.compile("[" + re.escape("".join(sorted(self._marked))) + "]") if self._marked else None
        self._looked_for = self._searched_words(self._names.intersection(written))
        self._changes = not CHANGING.isdisjoint(self._names.union(filters))
        self._firsts = frozenset(token[0] for token in spellings.tokens)
        self._taken = set(_private("".join(written)))

    def _searched_words(self, words: Iterable[str]) -> re.Pattern[str] | None:
        """Finds the template's own words that it may search a caller's text for, where a mark would hide one and the
        word, left as it is, can be no part of a special token."""
        hidden = [word for word in words if not self._marked.isdisjoint(word)]
        every = frozenset("".join(self.spellings.tokens).lower())
        safe = [word for word in hidden if len(self.spellings.split(word)) == 1]
        safe = [word for word in safe if not _joins(self.spellings.tokens, [word], every)]
        return re.compile("|".join(map(re.escape, sorted(safe, key=len, reverse=True)))) if safe else None

    def fill(self, render: Callable[[Any], str], values: Any) -> ChatPrompt:
        """``render(values)`` with the caller's strings kept apart.  RequestError if ``values`` hold more than text,
        numbers, booleans, null, lists and mappings, or if the template refuses them."""
        strings = list(_strings(values))
        touched = [s for s in strings if self._touched(s)]
        if not touched:
            return ChatPrompt(tuple(self.spellings.split(render(values))))
        twice = self._looked_for is not None and any(map(self._looked_for.search, touched))
        alphabet = (self._every if twice else self._marked) | (self._firsts if self._changes else frozenset())
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
            near = filled(lambda text: self._mark_around(text, marks))
            pieces = near if near[1::2] == pieces[1::2] else pieces
        if self._changes:
            near = filled(lambda text: self._mark_spelled(text, marks))
            bare = [[_bare(piece, back) for piece in found] for found in (near, pieces)]
            pieces = near if bare[0] == bare[1] else pieces
        return ChatPrompt(pieces, self.spellings.split("".join(pieces)) == list(pieces))

    def _mark_around(self, text: str, marks: Mapping[str, str]) -> str:
        """Everything is marked but the words that the template may search for."""
        if not self._touched(text):
            return text
        assert self._looked_for is not None
        every, made, at = {ord(char): mark for char, mark in marks.items()}, [], 0
        for match in self._looked_for.finditer(text):
            made += [text[at : match.start()].translate(every), match[0]]
            at = match.end()
        return "".join([*made, text[at:].translate(every)])

    def _touched(self, text: str) -> bool:
        """Whether marks are to be set: not in a word of the template's own, by which it decides what to print."""
        assert self._search is not None
        found = self._search.search(text)
        return found is not None and not (self._joins and text in self._names and self._keys.isdisjoint(text))

    def _mark_spelled(self, text: str, marks: Mapping[str, str]) -> str:
        """The first character of each special token that a text spells is marked, and nothing else."""
        pieces = self.spellings.split(text)
        pieces[1::2] = [marks[token[0]] + token[1:] for token in pieces[1::2]]
        return "".join(pieces)

    def _marks(self, strings: Sequence[str], alphabet: Iterable[str]) -> dict[str, str]:
        """A private-use character for each of the alphabet, that neither the template nor the caller has."""
        taken = self._taken.union(*map(_private, strings))
        free = (chr(code) for code in range(FIRST, LAST + 1) if chr(code) not in taken)
        wanted = sorted(alphabet)
        marks = dict(zip(wanted, free, strict=False))
        if len(marks) < len(wanted):
            raise RequestError("messages: use every private-use character; want some that are left", "messages")
        return marks


def _private(text: str) -> Iterator[str]:
    for match in MARKED.finditer(text):
        yield chr(int(match[2], 16)) if match[2] else match[0]


def _restored(text: str, back: Mapping[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        char = back.get(chr(int(match[2], 16)) if match[2] else match[0])
        if char is None or not match[2]:
            return match[0] if char is None else char
        # JSON in JSON doubles the backslashes: 1, 2, 4, ... are the mark's own, before them are those of the text
        slashes = len(match[1])
        own = slashes & -slashes
        escaped = char if char.isascii() else json.dumps(char)[1:-1].replace("\\", "\\" * own)
        return "\\" * (slashes - own) + escaped

    return MARKED.sub(one, text)


def _bare(text: str, back: Mapping[str, str]) -> str:
    """Text without case and escapes."""
    return _restored(html.unescape(unquote(text)), back).casefold()


def _strings(values: Any) -> Iterator[str]:
    """Every string in nested values, keys too."""
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
        what = f"a value of type {type(values).__name__}: want text, numbers, booleans, null, lists and mappings"
        raise RequestError(f"messages: {what}", "messages")


def check_values(values: Any) -> None:
    """Check nested values; RequestError if they are more than text, numbers, booleans, null, lists and mappings."""
    for _ in _strings(values):
        pass


class _Keyed(dict[Any, Any]):
    """A mapping whose keys are marked where they are printed; a template reads it by their names as they were."""

    _by_name: Mapping[Any, Any] = {}

    def __missing__(self, key: Any) -> Any:
        return super().__getitem__(self._by_name[key])

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or key in self._by_name

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._by_name.get(key, key), default)


def _mapped(values: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested values with every string changed."""
    if isinstance(values, str):
        return change(str.__str__(values))
    if isinstance(values, Mapping):
        keys = {key: _mapped(key, change) for key in values}
        made = _Keyed((keys[key], _mapped(value, change)) for key, value in values.items())
        made._by_name = keys
        return made
    if isinstance(values, (list, tuple)):
        return type(values)([_mapped(value, change) for value in values])
    return values


def _both_cases(chars: Iterable[str]) -> frozenset[str]:
    """The characters, and what a change of case makes into them."""
    return frozenset(c for char in chars for c in (char, char.lower(), char.upper()) if len(c) == 1)


def _hitting(tokens: Iterable[str], used: set[str]) -> frozenset[str]:
    """Few characters of which every token has one: those first that a template does not use in its own text, that no
    filter for case, space or JSON changes, and that many tokens have."""
    left = list(tokens)
    count: dict[str, int] = {}
    for token in left:
        for char in set(token):
            count[char] = count.get(char, 0) + 1
    rank = lambda c: (c in NOT_IN_JSON, c.isspace(), c.isalnum(), c in used, -count[c], c)  # noqa: E731
    chosen = set()
    for char in sorted(count, key=rank):
        if any(char in token for token in left):
            chosen.add(char)
            left = [token for token in left if char not in token]
    return frozenset(chosen)


def _joins(tokens: Iterable[str], written: Sequence[str], keys: frozenset[str]) -> bool:
    """Whether text that a template prints is a part of a special token, with one of ``keys`` in it, so that what comes
    before or after could complete it."""
    begins: set[str] = set()
    ends: set[str] = set()
    tokens, low = [token.lower() for token in tokens], {key.lower() for key in keys}
    for token in tokens:
        for cut in range(1, len(token)):
            begins.update({token[:cut]} if not low.isdisjoint(token[:cut]) else ())
            ends.update({token[cut:]} if not low.isdisjoint(token[cut:]) else ())
    most = max(map(len, tokens), default=0)
    for text in map(str.lower, written):
        cuts = range(1, min(most, len(text) + 1))
        if any(text[-n:] in begins or text[:n] in ends for n in cuts):
            return True
        if len(text) < most and not low.isdisjoint(text) and any(text in t and text != t for t in tokens):
            return True
    return False


def without_spellings(backend: Any, tokens: Iterable[str]) -> tuple[Any, dict[str, str]]:
    """A ``tokenizers.Tokenizer`` with the same ids, for which ``tokens`` are ordinary text, and the secret spellings by
    which it knows them instead.

    Renaming, not ``encode_special_tokens``: a vocabulary may hold the spelling as a piece of its own, and the text on
    both sides of a special token is cut as it always is.  ModelError if the ids would not be the same.
    """
    from tokenizers import Tokenizer as Backend

    prefix = f"\ue000{secrets.token_hex(16)}"  # which no caller can know
    names = {token: f"{prefix}{number}\ue000" for number, token in enumerate(sorted(tokens))}
    data = json.loads(backend.to_str())
    for added in data["added_tokens"]:
        if added["content"] in names:
            added.update(content=names[added["content"]], single_word=False)
    model = data["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # Unigram: pieces with scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # what would have been merged to a special token stays in parts
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [m for m in pairs if names.keys().isdisjoint((*m, "".join(m)))]
    data["post_processor"] = None  # templates have their own special tokens
    made = Backend.from_str(json.dumps(data))
    for token, name in names.items():
        if made.token_to_id(name) != backend.token_to_id(token):
            raise ModelError(
                f"tokenizer.json: the special token {shown(token)} cannot be told from text that spells it"
            )
    return made, names
