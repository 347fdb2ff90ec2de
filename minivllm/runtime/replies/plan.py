"""The plan of a parser: the tags and heads of a described format, compiled for the marks of a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .description import JSON, OBJECT, PAIRS, PYTHON, QUOTED, Calls, Pairs, ReplyFormat
from .elements import (
    NAME,
    NO,
    OBJECT_AHEAD,
    PARTIAL,
    SPACE,
    Element,
    Followed,
    Literal,
    Lookahead,
    Templates,
    Word,
    beginnings,
)
from .elements import matched as match_elements
from .grammar_rules import strict_spellings

MARK = "[\udc80-\udcff]"
# names for the beginning of the arguments, which follows the head of a call
STREAM, COLLECT, EMPTY, ARGUMENTS = "stream", "collect", "empty", "arguments"
KEYS = ('"arguments"', '"parameters"')
OTHER_KEYS = (*KEYS, '"type"', '"id"', '"function"')
QUOTE, COLON, COMMA = Literal(('"',)), Literal((":",)), Literal((",",))
OPEN, SHUT = Literal(("{",)), Literal(("}",))
NAMED: tuple[Element, ...] = (OPEN, SPACE, Literal(('"name"',)), SPACE, COLON, SPACE, QUOTE, NAME, QUOTE, SPACE)
KEY: tuple[Element, ...] = (*NAMED, COMMA, SPACE, Literal(KEYS), SPACE, COLON, SPACE)
SCALAR = Word(
    re.compile(r'"[^"\\\udc80-\udcff]{0,128}"|[-+.0-9a-zA-Z]{1,32}'),
    re.compile(r'"[^"\\\udc80-\udcff]{0,128}"?|[-+.0-9a-zA-Z]{0,32}'),
)
# elements that may follow the arguments in an object: a further member, which is ignored
MEMBER: tuple[Element, ...] = (SPACE, COMMA, SPACE, SCALAR, SPACE, COLON, SPACE, SCALAR)
END_OF_OBJECT: tuple[Element, ...] = (SPACE, SHUT)
# The start of a call that is a JSON object, if "name" is not its first member or its arguments are a string.
UNORDERED: tuple[Element, ...] = (OPEN, SPACE, Literal(OTHER_KEYS), SPACE, COLON)
# The same start without a tag before it.  It is narrower, so that other answers in JSON are not held back.
UNTAGGED: tuple[Element, ...] = (OPEN, SPACE, Literal((*KEYS, '"function"')), SPACE, COLON)
TYPED: tuple[Element, ...] = (OPEN, SPACE, Literal(('"type"',)), SPACE, COLON, SPACE, Literal(('"function"',)))
TEXT_ARGUMENTS: tuple[Element, ...] = (*KEY, Literal(('"', "null")))
KEYWORD = Lookahead(re.compile(r"\)|[A-Za-z_]\w{0,63}\s{0,8}="), re.compile(r"(?:[A-Za-z_]\w{0,63})?\s{0,8}"))


@dataclass(frozen=True)
class CallCandidate:
    """A syntax with which a call, or reasoning, may begin.

    ``before`` has the elements before the head of a call, and ``head`` those of the head.  ``then`` is the name of the
    beginning of the arguments, such as ``STREAM``.  ``form`` is the spelling of the call.

    For reasoning, ``form`` is None, ``before`` has the elements of the opening text after its tag, and ``head`` is
    empty.
    """

    form: FormPlan | None
    before: tuple[Element, ...]
    head: tuple[Element, ...]
    then: str

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Return the position in ``text`` at which the arguments begin, and the name of the function, or "".

        ``at`` is the position from which to read.  For an object that is read as a whole, the returned position is that
        of the object, and the name is "".  The position is ``NO`` if the head does not match, or ``PARTIAL`` if more
        text may complete it.
        """
        begin, _ = match_elements(self.before, text, at)
        if begin < 0:
            return begin, ""
        end, name = match_elements(self.head, text, begin)
        whole = self.then == COLLECT and self.form is not None and self.form.calls.arguments == OBJECT
        return (begin, "") if end >= 0 and whole else (end, name)


@dataclass
class FormPlan:
    """One spelling of calls (``description.Calls``), compiled for the parser.

    ``ends`` has the sequences of elements that may follow the arguments, in their order; each may be missing.
    ``following`` are the heads of a further call that has no tag.  ``closers`` has the tags that end arguments."""

    calls: Calls
    ends: list[tuple[Element, ...]] = field(default_factory=list)
    following: list[CallCandidate] = field(default_factory=list)
    outside: re.Pattern[str] = re.compile(MARK)
    significant: re.Pattern[str] = re.compile(MARK)  # the first characters of the matches of ``outside``
    closers: frozenset[str] = frozenset()
    begun_closer: re.Pattern[str] | None = None
    pair: PairPlan | None = None
    quotes: tuple[str, ...] = ()


@dataclass
class PairPlan:
    """The syntax of arguments that are each a text between tags (``description.Pairs``), compiled for the parser.

    ``first`` means that the value begins after a line end, and ``last`` that it ends before one; these line ends are
    not part of the value."""

    head: tuple[Element, ...]
    closers: tuple[str, ...]
    find: re.Pattern[str]
    begun: re.Pattern[str] | None
    notable: re.Pattern[str]  # the first characters of the matches of ``find``
    first: bool
    last: bool


@dataclass(frozen=True)
class TagRole:
    """The meanings that a tag may have where it occurs."""

    calls: tuple[CallCandidate, ...] = ()  # the syntaxes of calls that may begin with this tag
    thought: CallCandidate | None = None  # the syntax of reasoning that begins with this tag, or None
    closes: bool = False  # whether the tag ends reasoning


class FormatPlan:
    """The compiled form of a format for given marks.

    ``roles`` has the meaning of each tag in text.  ``find`` finds the next tag, mark or backtick.  ``notable`` finds a
    character with which one of these may begin.  ``begun`` finds the beginning of a tag at the end of a text.
    ``first`` are the heads of calls at the beginning of the content.  ``strict`` reads only the spellings that a
    grammar writes.
    """

    def __init__(self, form: ReplyFormat, marks: Mapping[str, str], strict: bool = False) -> None:
        self.format = form
        self.tag_of = {mark: tag for tag, mark in marks.items()}
        spellings = {tag: (marks.get(tag, tag),) for tag in form.tags}  # a tag is replaced by its mark if it has one
        self._templates = Templates(spellings)
        self.roles: dict[str, TagRole] = {}
        self.first: list[CallCandidate] = []
        for calls in strict_spellings(form, marks) if strict else form.calls:
            self._add_calls(calls)
        if form.reasoning is not None:
            tag, rest = self._trigger(form.reasoning.open)
            opening = CallCandidate(None, rest, (), "")
            self._add_role(tag, thought=opening)
            for text in spellings[form.reasoning.close]:
                self._merge(text, TagRole(closes=True))
        texts = sorted(self.roles, key=len, reverse=True)
        self.find = re.compile("|".join(["`+", MARK, *map(re.escape, texts)]))
        firsts = "".join(sorted({re.escape(text[0]) for text in texts}))
        self.notable = re.compile(f"[`\udc80-\udcff{firsts}]")
        self.begun = beginnings(texts)
        self.longest = max(map(len, texts), default=0)

    def _add_calls(self, calls: Calls) -> None:
        """Add the heads (the syntax of their beginnings) of one spelling of calls, by the tag with which they begin."""
        form = FormPlan(calls)
        self._plan_ends(form)
        opening = calls.begin + calls.open + ("" if calls.arguments == OBJECT else calls.head)
        tagged = self._tagged(opening)
        if not tagged:
            before = self._templates.elements(calls.begin + calls.open)
            self.first += self._heads(form, before, untagged=True)
        for lead in dict.fromkeys((calls.begin + calls.open, calls.open)) if tagged else ():
            if not self._tagged(lead + calls.head):
                continue
            pieces = self._templates.split((lead + calls.head).strip())
            inside = lead.strip().startswith(pieces[0])
            before = self._templates.elements(lead.strip().removeprefix(pieces[0])) if inside else []
            self._add_role(pieces[0], self._heads(form, before, "" if inside else pieces[0]))
        if not self._tagged(calls.open):
            between = self._templates.elements(calls.between.strip())
            before = [SPACE, *between, SPACE, *self._templates.elements(calls.open)]
            form.following = self._heads(form, before)

    def _tagged(self, template: str) -> bool:
        """Return whether a template begins with a tag."""
        return any(self._first_tags(template))

    def _plan_ends(self, form: FormPlan) -> None:
        """Set the texts that end arguments and calls of one spelling."""
        calls = form.calls
        for template in (calls.tail, calls.close, calls.end):
            if template.strip():
                form.ends.append((SPACE, *self._templates.elements(template.strip())))
        closers = list(self._first_tags(calls.tail, calls.close, calls.end))
        form.closers = frozenset(closers)
        form.outside = re.compile("|".join(['["{}\\[\\]]', MARK, *map(re.escape, closers)]))
        form.begun_closer = beginnings(closers)
        firsts = "".join(sorted({re.escape(closer[0]) for closer in closers}))
        form.significant = re.compile(f'["{{}}\\[\\]\udc80-\udcff{firsts}]')
        form.quotes = self._templates.spellings.get(calls.quote, ())
        if calls.pairs is not None:
            form.pair = self._pair_plan(calls.pairs)

    def _pair_plan(self, pairs: Pairs) -> PairPlan:
        """Return the compiled syntax of arguments that are each a text between tags."""
        head = self._templates.elements(pairs.before.strip())
        closers = tuple(self._first_tags(pairs.after))
        find = re.compile("|".join([*map(re.escape, closers), MARK]))
        characters = "".join(sorted({re.escape(closer[0]) for closer in closers}))
        notable = re.compile(f"[\udc80-\udcff{characters}]")
        first, last = pairs.before.endswith("\n"), pairs.after.startswith("\n")
        return PairPlan((SPACE, *head), closers, find, beginnings(closers), notable, first, last)

    def _first_tags(self, *templates: str) -> Iterator[str]:
        """Yield the spellings of the tags with which templates begin."""
        for template in templates:
            pieces = self._templates.split(template.strip())
            if pieces:
                yield from self._templates.spellings.get(pieces[0], ())

    def _heads(
        self, form: FormPlan, before: Iterable[Element], without: str = "", untagged: bool = False
    ) -> list[CallCandidate]:
        """Return the candidates for the head of a call after the elements ``before``.

        ``without`` is the tag at the beginning of the head that has been read.  ``untagged`` means that no tag
        separates a call from other text.
        """
        lead = (*before, SPACE)
        if form.calls.arguments == OBJECT:
            unordered = (UNTAGGED, TYPED) if untagged else (UNORDERED,)
            return [
                CallCandidate(form, lead, (*KEY, OBJECT_AHEAD), STREAM),
                CallCandidate(form, lead, (*NAMED, SHUT), EMPTY),
                CallCandidate(form, lead, TEXT_ARGUMENTS, COLLECT),
                *(CallCandidate(form, lead, head, COLLECT) for head in unordered),
            ]
        template = form.calls.head.strip().removeprefix(without)
        head = self._templates.elements(template)
        if form.calls.arguments == PAIRS:
            return [CallCandidate(form, lead, (*head, SPACE, self._first_pair(form.calls)), ARGUMENTS)]
        if form.calls.arguments == PYTHON:
            return [CallCandidate(form, lead, (*head, KEYWORD), COLLECT)]
        then = {JSON: STREAM, QUOTED: COLLECT}[form.calls.arguments]
        return [CallCandidate(form, lead, (*head, SPACE, OBJECT_AHEAD), then)]

    def _first_pair(self, calls: Calls) -> Element:
        """Return the element (syntax) for the tags that may follow the head of a call whose arguments stand between
        tags."""
        before = calls.pairs.before if calls.pairs is not None else ""
        return Followed(Literal(tuple(self._first_tags(before, calls.tail, calls.close))))

    def _trigger(self, template: str) -> tuple[str, tuple[Element, ...]]:
        """Return the tag with which a template begins, and the elements of the rest."""
        pieces = self._templates.split(template.strip())
        rest = template.strip().removeprefix(pieces[0])
        return pieces[0], tuple(self._templates.elements(rest))

    def _add_role(self, tag: str, calls: Sequence[CallCandidate] = (), thought: CallCandidate | None = None) -> None:
        """Add meanings of a tag: the syntaxes of calls, and of reasoning, that may begin with it."""
        for text in self._templates.spellings[tag]:
            self._merge(text, TagRole(tuple(calls), thought))

    def _merge(self, text: str, role: TagRole) -> None:
        """Add the meanings ``role`` to those that the text ``text``, one of the spellings of a tag, has already."""
        old = self.roles.get(text, TagRole())
        thought = old.thought or role.thought
        self.roles[text] = TagRole(old.calls + role.calls, thought, old.closes or role.closes)


def choose(
    candidates: Iterable[CallCandidate], text: str, at: int, final: bool
) -> tuple[CallCandidate | None, int, str]:
    """Return the first candidate that fits a text at a position, with the result of its ``read``.

    If more text may complete a candidate before it, the candidate is None and the position is ``PARTIAL``.  ``final``
    means that no more text follows.  If none fits, the position is ``NO``."""
    for candidate in candidates:
        end, name = candidate.read(text, at)
        if end >= 0:
            return candidate, end, name
        if end == PARTIAL and not final:
            return None, PARTIAL, ""
    return None, NO, ""
