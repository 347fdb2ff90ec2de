"""The grammar of a described format: the calls of an answer, constrained to the declared functions and their schemas.

    forced   one or more calls, and no other text
    auto     free text; each call in it is constrained from its opening tag on
    answer   a JSON value that fits a schema, or calls

The grammar writes the texts that the parser of the same description reads (``ReplyContext.strict``).  A tag that is a
token is written as the token, never as text.  ``Rules.source`` has the notation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .description import JSON, OBJECT, PAIRS, PYTHON, QUOTED, Calls, Channels, Pairs, Reasoning, ReplyFormat
from .grammar_rules import Inexpressible, Rules, either, first_tag, joined, quoted, strict_spellings
from .grammar_values import Arguments, certain_types

FORCED, AUTO, ANSWER = "forced", "auto", "answer"
# beginnings that an object without a tag must not have in free text
UNTAGGED_KEYS = '("\\"name\\"" | "\\"arguments\\"" | "\\"parameters\\"" | "\\"function\\"" | "\\"type\\"")'
UNTAGGED = {
    OBJECT: f'BLANK "["? BLANK "{{" BLANK {UNTAGGED_KEYS} ANY',
    PYTHON: 'BLANK "[" BLANK /[A-Za-z0-9_.-]{1,64}/ BLANK "(" ANY',
}
OTHER = 'BLANK ("[" | "{") ANY'


@dataclass(frozen=True)
class Function:
    """A function that may be called, with the JSON schema of its arguments.

    ``strict=False`` means that any arguments are allowed."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = True


@dataclass(frozen=True)
class Spelling:
    """A format of replies, and the token ids of those tags that are tokens."""

    format: ReplyFormat
    tokens: Mapping[str, int]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Spelling:
        """Return the spelling that ``dataclasses.asdict`` has converted, as JSON or not."""
        form = dict(values["format"])
        calls = []
        for members in form["calls"]:
            pairs = members["pairs"]
            calls.append(Calls(**{**members, "pairs": None if pairs is None else Pairs(**pairs)}))
        reasoning, channels = form["reasoning"], form["channels"]
        form["calls"] = tuple(calls)
        form["tags"] = tuple(form["tags"])
        form["reasoning"] = None if reasoning is None else Reasoning(**reasoning)
        if channels is not None:
            lists = {key: tuple(channels[key]) for key in ("ends", "thoughts")}
            form["channels"] = Channels(**{**channels, **lists})
        return cls(ReplyFormat(**form), values["tokens"])


def reply_grammar(
    spelling: Spelling, functions: Sequence[Function], mode: str, parallel: bool = True, answer: Any = None
) -> str:
    """Return the source of the grammar (``GrammarSource`` of kind ``reply``).

    ``parallel=False`` allows one call.  ``answer`` is the schema of the mode ``ANSWER``.  ``Inexpressible`` if the
    format cannot express a schema of a strict function, or the mode."""
    form = spelling.format
    rules = Rules(form, spelling.tokens)
    if form.channels is not None:
        return _Messages(rules, form.channels, functions).source(mode, parallel, answer)
    lists = _Lists(rules, functions, parallel)
    used = strict_spellings(form, spelling.tokens)
    if mode == AUTO:
        return rules.source(_free(rules, lists, used))
    if mode == ANSWER and certain_types(answer, answer) != {"object"}:
        raise Inexpressible("an answer that is no object, in a grammar that also allows calls")
    if mode == ANSWER and any(_is_untagged(form, calls) and calls.arguments != PYTHON for calls in used):
        raise Inexpressible("calls without a tag, which cannot be distinguished from an answer in JSON")
    gap = f"({quoted(form.gap)})?" if form.reasoning is not None and form.gap else ""
    written = [lists.of(calls) for calls in used]
    if mode == ANSWER:
        written.append(rules.json(answer))
    return rules.source(joined(gap, either(written)), behind=True)


def writes(spelling: Spelling) -> bool:
    """Return whether grammars of a format can be written."""
    form = spelling.format
    tags = form.channels.tags if form.channels is not None else ()
    syntaxes = {JSON, OBJECT, PAIRS, PYTHON, QUOTED}
    return set(tags) <= spelling.tokens.keys() and all(calls.arguments in syntaxes for calls in form.calls)


def _is_untagged(form: ReplyFormat, calls: Calls) -> bool:
    """Return whether calls of a spelling begin without a tag."""
    return first_tag(form, calls.begin + calls.open + _head(calls)) is None


def _head(calls: Calls) -> str:
    """Return the text between the opening text and the arguments of a call."""
    if calls.arguments != OBJECT:
        return calls.head
    return f'{{"name": "{{name}}", "{calls.key}": '


class _Lists:
    """Writes the Lark rules for lists of calls."""

    def __init__(self, rules: Rules, functions: Sequence[Function], parallel: bool) -> None:
        self._rules, self._functions, self._parallel = rules, functions, parallel

    def of(self, calls: Calls, without: str = "") -> str:
        """Return the name of a rule for a list of calls in one spelling.

        ``without`` is the text at its beginning that has been written."""
        arguments = [self._arguments(calls, function) for function in self._functions]
        tail = {OBJECT: "}", PYTHON: ")"}.get(calls.arguments, "") + calls.tail + calls.close
        found = []
        for lead in (calls.begin + calls.open, calls.between + calls.open):
            template = (lead + _head(calls)).removeprefix(without)
            without = ""
            alternatives = []
            for function, body in zip(self._functions, arguments, strict=True):
                items = self._rules.items(template, function.name)
                alternatives.append(joined(*items, body, *self._rules.items(tail)))
            found.append(self._rules.rule(either(alternatives)))
        first, more = found
        return self._rules.rule(joined(first, f"{more}*" if self._parallel else "", *self._rules.items(calls.end)))

    def _arguments(self, calls: Calls, function: Function) -> str:
        """Return the Lark sequence (expressions in order) for the arguments of a function.  Inexpressible if a strict
        schema cannot be expressed in a grammar."""
        arguments = Arguments(self._rules, calls)
        if not function.strict:
            return arguments.open()
        try:
            return arguments.of(function.schema)
        except Inexpressible as e:
            raise Inexpressible(f"{function.name}: {e}") from None


def _free(rules: Rules, lists: _Lists, used: Iterable[Calls]) -> str:
    """Return the start of a grammar of free text with calls."""
    form = rules.form
    untagged: list[Calls] = []
    tokens: dict[str, list[str]] = {}  # tag that is one token -> lists of calls that begin with it
    texts: dict[str, list[str]] = {}  # tag that is text -> lists of calls that begin after it
    for calls in used:
        if _is_untagged(form, calls):
            untagged.append(calls)
            continue
        variants = [calls] if not calls.begin or not calls.open else [calls, replace(calls, begin="")]
        for variant in variants:
            tag = first_tag(form, variant.begin + variant.open + _head(variant))
            if tag is None:
                continue
            if tag in rules.tokens:
                tokens.setdefault(tag, []).append(lists.of(variant))
            else:
                texts.setdefault(tag, []).append(lists.of(variant, tag))
    several = "*" if lists._parallel else "?"
    if not untagged and not texts:
        text = rules.free(tokens)
        body = either(rule for listed in tokens.values() for rule in listed)
        return f"{text}* ({body} {text}*)*" if lists._parallel else f"{text}* {body}?"
    return _spelled_text(rules, lists, untagged, tokens, texts, several)


def _spelled_text(
    rules: Rules,
    lists: _Lists,
    untagged: Sequence[Calls],
    tokens: Mapping[str, list[str]],
    texts: Mapping[str, list[str]],
    several: str,
) -> str:
    """Return the start of a grammar of free text in which an opening tag is text, or calls have no tag.  Inexpressible
    if such calls cannot be combined in one grammar."""
    if untagged and rules.form.reasoning is not None:
        raise Inexpressible("calls without a tag in answers that begin with reasoning")
    if untagged and texts:
        raise Inexpressible("calls both with and without a tag, because the tag is no token of the vocabulary")
    without = [f"~(ANY {quoted(tag)} ANY)" for tag in texts]
    text = rules.terminal(" & ".join(["ANY", *without]))
    segments = [joined(f"{text}?", either(listed)) for listed in tokens.values()]
    for tag, listed in texts.items():
        before = rules.rule(rules.terminal(f"ANY {quoted(tag)}"), "[lazy]")
        segments.append(joined(before, either(listed)))
    rest = f"({either(segments)}){several} {text}?" if segments else f"{text}?"
    if not untagged:
        return rest
    barred = dict.fromkeys(f"~({UNTAGGED.get(calls.arguments, OTHER)})" for calls in untagged)
    first = rules.terminal(" & ".join(["ANY", *barred]))
    later = f"({either(segments)}){several} {text}?" if segments else ""
    return either([*map(lists.of, untagged), joined(f"{first}?", later)])


class _Messages:
    """Writes the grammars of answers that are messages in channels."""

    def __init__(self, rules: Rules, channels: Channels, functions: Sequence[Function]) -> None:
        if not set(channels.tags) <= rules.tokens.keys():
            raise Inexpressible("messages in channels, because some of the tags are no tokens of the vocabulary")
        self._rules, self._channels = rules, channels
        self._text = rules.free(channels.tags)
        calls = Calls(JSON)
        alternatives = []
        for function in functions:
            arguments = Arguments(rules, calls)
            body = arguments.of(function.schema) if function.strict else arguments.open()
            alternatives.append(joined(self._call(function.name), body))
        self._calls = rules.rule(either(alternatives))

    def source(self, mode: str, parallel: bool, answer: Any) -> str:
        """Return the source of the grammar of a mode."""
        channels, rules = self._channels, self._rules
        end = either(rules.sequence(tag) for tag in channels.ends)
        again = rules.sequence(channels.start + channels.role)
        thought = self._message(channels.thoughts[0])
        thoughts = rules.rule(f"({thought} {rules.sequence(channels.ends[0])} {again})*")
        calls = self._calls
        if mode == AUTO:
            named = (*channels.thoughts, channels.calls, channels.content)
            message = rules.rule(either(map(self._message, named)))
            plain = rules.rule(f"{message} ({end} {again} {message})*")
            last = joined(f"({plain} {end} {again})?", calls)
            if parallel:
                whole = rules.rule(either([message, calls]))
                return rules.source(f"{self._text}* ({whole} ({end} {again} {whole})* ({end})?)?")
            return rules.source(f"{self._text}* ({plain} | {last})? ({end})?")
        following = rules.sequence(channels.ends[1])
        more = f"({following} {again} {thoughts} {calls})*" if parallel else ""
        body = joined(calls, more, f"({following})?")
        if mode == ANSWER:
            head = rules.sequence(channels.channel + channels.content + channels.message)
            body = either([body, joined(head, rules.json(answer), f"({end})?")])
        return rules.source(joined(thoughts, body))

    def _message(self, channel: str) -> str:
        """Return the grammar of a message in a channel, such as "analysis": its header, then free text without tags."""
        head = self._channels.channel + channel + self._channels.message
        return joined(self._rules.sequence(head), f"{self._text}*")

    def _call(self, name: str) -> str:
        """Return the grammar of the header of a call of function ``name``."""
        channels = self._channels
        recipient = f"{channels.calls} {channels.recipient}{name} "
        template = f"{channels.channel}{recipient}{channels.constrain}json{channels.message}"
        return self._rules.sequence(template)
