"""The parser of one answer in a described format.

    TEXT ⇄ THOUGHT        text until the next tag
      │ a whole head of a call
      ▼
    STREAM                arguments in JSON, returned as they come
    COLLECT               arguments in another syntax, converted at their end
    PAIRS → VALUE         arguments with tags, converted one by one
      │
      ▼
    REST                  the end of the object of the call
    AFTER → TEXT          closing tags, or a further call of a list

Text that is not certain is held, and no longer text than a head (about 200 characters) or, in ``COLLECT``, a call.  A
state reads each character once.  Its decisions depend only on the text, not on its division into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .brackets import Brackets, OpenString, json_brackets, python_brackets, quoted_brackets
from .contract import ReplyContext
from .description import OBJECT, PYTHON
from .elements import NO, PARTIAL, SPACES, matched
from .output import KEEP, Output
from .parts import Part, Said, Thought, Written
from .plan import COLLECT, EMPTY, END_OF_OBJECT, MEMBER, STREAM, CallCandidate, FormatPlan, FormPlan, PairPlan, choose
from .scan import INSIDE, Scanner
from .values import call_of, dumped, python_arguments, quoted_arguments, typed, types_of

NESTED = ("object", "array")  # types of values with brackets
TICKS = 3  # number of backticks that begin and end a block of code
WAIT, GO = False, True  # results of a step: wait for more text, or continue with the next state


class DescribedReply:
    """Finds reasoning and calls in one answer."""

    def __init__(self, plan: FormatPlan, context: ReplyContext) -> None:
        self._plan, self._context = plan, context
        self._out = Output()
        self._buffer = ""
        self._at = 0  # the text before this position of the buffer has been read
        self._read = 0  # number of characters of the answer before the buffer
        self._final = False
        self._fresh = bool(plan.first) and context.calls  # whether a call without a tag may begin here
        self._undecided = context.answer  # the content may be JSON
        self._thinking = context.opened and plan.format.reasoning is not None
        self._untagged = False  # whether the last head of a call was an object without a tag
        self._owed = False  # whether the closing tag of reasoning may still follow a call that ended the reasoning
        self._ticks = 0  # backticks in a row that end at ``_ticks_end``
        self._ticks_end = -1
        self._inline = False  # whether the text is inside inline code
        self._fenced = False  # whether the text is inside a block of code
        self._state: Callable[[], bool] = self._text
        self._is_text = True
        self._streams = self._collects = self._values = False
        self._form: FormPlan | None = None
        self._held: list[str] = []  # read text of a call that is not certain or not converted
        self._collected: list[str] = []  # its arguments
        self._brackets: Brackets = json_brackets()
        self._scanner = Scanner()
        self._notable = plan.notable
        self._significant = plan.notable  # characters that matter outside the strings of arguments
        self._name = ""
        self._ends = 0  # index of the next of the form's ``ends``
        self._key = ""
        self._count = 0  # number of arguments of the call so far
        self._as_string = False  # whether the value is a string, which is returned piece by piece
        self._begun_value = False
        self._string: OpenString | None = None  # the strings of a JSON value, in which a closing tag is ordinary text
        if self._thinking:
            self._out.begin_thought()

    def feed(self, text: str, final: bool = False) -> Sequence[Part]:
        """Return the parts of the answer (content, reasoning, calls) that are certain after new text.  ``final`` ends
        the answer."""
        if not final and not self._buffer:
            if not text:
                return ()
            if self._collects and self._brackets.skips(text):
                self._read += len(text)
                self._collected.append(text)
                return ()
            if self._values and self._begun_value and not self._pair().notable.search(text):
                self._read += len(text)
                self._hold_value(text, self._pair())
                return self._out.take()
            part = self._plain(text)
            if part is not None:
                self._read += len(text)
                return [part]
        self._buffer = self._buffer + text if self._buffer else text
        self._run(final)
        return self._out.take()

    def _plain(self, text: str) -> Part | None:
        """Return the only part of a text, or None if the text must be read state by state.  Most text takes this short
        path."""
        if self._streams:
            pattern = INSIDE if self._scanner.quoted else self._significant
            return None if pattern.search(text) else Written(text)
        if not self._is_text or self._undecided or self._ticks or self._inline or self._notable.search(text):
            return None
        out = self._out
        if not self._thinking:
            return Said(text) if out.edge == KEEP and not self._fresh else None
        return None if out.lead or out.spaces or text[-1].isspace() else Thought(text)

    def cut(self) -> Sequence[Part]:
        """End an answer at its length limit, and return the parts of the text that was held back.

        An incomplete tool call is dropped.
        """
        if self._collects and '"name"' not in "".join(self._held + self._collected) and self._is_object():
            self._release()  # the answer is JSON, but no call
        if self._is_text and not self._waits_for_head():
            return self.feed("", True)
        self._held = []
        self._buffer = ""
        return ()

    def _is_object(self) -> bool:
        """Return whether the call is an object with its name inside."""
        return self._form is not None and self._form.calls.arguments == OBJECT

    def _waits_for_head(self) -> bool:
        """Return whether the held text is the beginning of a call."""
        if self._fresh:
            return self._buffer != ""
        return self._buffer != "" and self._plan.find.match(self._buffer) is not None

    def _run(self, final: bool) -> None:
        """Read the buffer as far as its text is certain, and remove that text.  ``final`` ends the answer."""
        self._final = final
        while self._state():
            pass
        if self._at:
            self._read += self._at
            self._buffer = self._buffer[self._at :]
            self._at = 0
        if final:
            self._out.finish()

    def _enter(self, state: Callable[[], bool]) -> bool:
        """Change the state."""
        self._state = state
        self._is_text = state == self._text
        self._streams = state == self._stream
        self._collects = state == self._collect
        self._values = state == self._value
        return GO

    # ---- text --------------------------------------------------------------------------------------------------------

    def _text(self) -> bool:
        """Read text of the content or of the reasoning, up to the head of a call (its text before the arguments).

        Return False to wait for more text, True to continue with the next state."""
        if self._undecided and not self._thinking:
            return self._decide()
        if self._fresh and not self._thinking:
            if not self._first():
                return WAIT
            if not self._is_text:
                return GO
        plan, buffer = self._plan, self._buffer
        start = at = self._at
        while True:
            match = plan.find.search(buffer, at)
            if match is None:
                break
            self._pass(at, match.start())
            begin, at = match.span()
            if buffer[begin] == "`":
                self._ticks += at - begin
                self._ticks_end = self._read + at
                continue
            end = self._tag(match[0], start, begin, at)
            if end == PARTIAL:
                return WAIT
            if not self._is_text:
                return GO
            if end != NO:
                start = at = end
                if self._fresh and not self._thinking:
                    self._at = at
                    return GO
        stop = len(buffer)
        if plan.begun is not None and not self._final:
            begun = plan.begun.search(buffer, max(at, stop - plan.longest))
            stop = begun.start() if begun else stop
        self._pass(at, stop)
        self._emit(buffer[start:stop])
        self._at = stop
        return WAIT

    def _decide(self) -> bool:
        """Read the first character of the content, which decides whether the answer is JSON or text with calls.

        Return False to wait for more text, True to continue with the next state."""
        match = SPACES.match(self._buffer, self._at)
        begin = match.end() if match else self._at
        if begin == len(self._buffer) and not self._final:
            return WAIT
        self._undecided = False
        is_json = self._buffer.startswith("{", begin)
        return self._enter(self._answer if is_json else self._text)

    def _answer(self) -> bool:
        """Add the new text of an answer in JSON, in which tags are text, to the content.  Return WAIT: the parser waits
        for more text."""
        self._out.add_text(self._spelled(self._buffer[self._at :]))
        self._at = len(self._buffer)
        return WAIT

    def _emit(self, text: str) -> None:
        """Add text to the content, or to the reasoning while it is open."""
        if self._thinking:
            self._out.add_reasoning(text)
        else:
            self._out.add_text(text)

    def _pass(self, begin: int, end: int) -> None:
        """Pass text without tags and backticks, which may end a run of backticks, and a line with code."""
        if self._ticks and self._read + end != self._ticks_end:
            self._end_ticks()
        if self._inline and self._buffer.find("\n", begin, end) >= 0:
            self._inline = False

    def _end_ticks(self) -> None:
        """End a run of backticks.  Three or more begin or end a block of code, fewer begin or end inline code."""
        if self._ticks >= TICKS:
            self._fenced = not self._fenced
            self._inline = False
        elif self._ticks and not self._fenced:
            self._inline = not self._inline
        self._ticks = 0

    def _is_quoted(self) -> bool:
        """Return whether a tag is quoted by backticks."""
        self._end_ticks()
        return self._fenced or self._inline

    def _unquote(self) -> None:
        """Forget backticks where reasoning begins or ends."""
        self._ticks = 0
        self._inline = self._fenced = False

    def _first(self) -> bool:
        """Read the beginning of the content, where a call may stand without a tag.

        Return False to wait for more text."""
        match = SPACES.match(self._buffer, self._at)
        at = match.end() if match else self._at
        if at > self._at:
            self._out.add_text(self._buffer[self._at : at])
            self._at = at
        if at == len(self._buffer) and not self._final:
            return False
        candidate, end, name = choose(self._plan.first, self._buffer, at, self._final)
        if end == PARTIAL:
            return False
        form = None if candidate is None else candidate.form
        self._untagged = form is not None and form.calls.arguments == OBJECT
        if candidate is not None and self._allows(name):
            self._fresh = False
            self._begin(candidate, at, end, name)
            return True
        self._fresh = False
        return True

    def _tag(self, tag: str, start: int, begin: int, at: int) -> int:
        """Read a tag at ``begin`` of the buffer, after text from ``start``.

        Return the position after it, ``NO`` if it is text, or ``PARTIAL`` to wait for more text."""
        role = self._plan.roles.get(tag)
        mark = tag in self._plan.tag_of
        if role is not None and self._thinking and role.closes:
            self._out.add_reasoning(self._buffer[start:begin])
            self._leave_thought()
            return at
        if role is not None and role.closes and self._owed:
            self._out.add_text(self._buffer[start:begin])
            self._owed = False
            self._out.end_thought()
            return at
        quoted = not mark and self._is_quoted()
        if role is not None and not quoted:
            end = self._head_at(role.calls, start, begin, at) if self._may_call() else NO
            blank = not self._out.has_content and not self._buffer[start:begin].strip()
            if end == NO and role.thought is not None and not self._thinking and (mark or blank):
                end = self._thought_at(role.thought, start, begin, at)
            if end != NO:
                return end
        if not mark:
            return NO
        self._emit(self._buffer[start:begin] + self._shown(tag))
        return at

    def _shown(self, mark: str) -> str:
        """Return the text for a mark that belongs to no call or reasoning: its tag, or "" for a hidden tag."""
        tag = self._plan.tag_of.get(mark, "")
        return "" if tag in self._context.hidden else tag

    def _may_call(self) -> bool:
        """Return whether a call may begin."""
        reasoning = self._plan.format.reasoning
        if self._thinking and reasoning is not None and (self._context.behind or not reasoning.calls):
            return False
        return self._context.calls

    def _head_at(self, candidates: Sequence[CallCandidate], start: int, begin: int, at: int) -> int:
        """Begin a call if one of its heads follows a tag.  Return the position, ``NO`` or ``PARTIAL``."""
        candidate, end, name = choose(candidates, self._buffer, at, self._final)
        if candidate is not None and not self._allows(name):
            return NO
        if end == NO:
            return NO
        self._emit(self._buffer[start:begin])
        if candidate is None:
            self._at = begin
            return PARTIAL
        self._untagged = False
        if self._thinking:
            self._leave_thought()
            self._owed = True
        self._begin(candidate, begin, end, name)
        return end

    def _thought_at(self, candidate: CallCandidate, start: int, begin: int, at: int) -> int:
        """Begin reasoning if its opening text is complete.  Return the position, ``NO`` or ``PARTIAL``."""
        end, _ = matched(candidate.before, self._buffer, at)
        if end == NO or (end == PARTIAL and self._final):
            return NO
        self._out.add_text(self._buffer[start:begin])
        if end == PARTIAL:
            self._at = begin
            return PARTIAL
        self._thinking = True
        self._unquote()
        self._out.begin_thought()
        return end

    def _leave_thought(self) -> None:
        """End the reasoning."""
        self._thinking = False
        self._unquote()
        self._out.end_thought()
        self._fresh = bool(self._plan.first) and self._context.calls and not self._out.has_content

    def _allows(self, name: str) -> bool:
        """Return whether the model may call a function.  The name "" is not known yet."""
        only, functions = self._context.only, self._context.functions
        if name and self._untagged and functions and name not in functions:
            return False  # without a tag, an object with a name is a call only if it names a function
        return only is None or name == "" or name in only

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _begin(self, candidate: CallCandidate, begin: int, end: int, name: str) -> None:
        """Begin the call of a head between two positions of the buffer."""
        form = candidate.form
        assert form is not None
        self._form, self._name = form, name
        self._ends = 0
        self._fresh = False
        if candidate.then == COLLECT:
            self._held = [self._buffer[begin:end]]
            self._start_brackets(form)
            self._at = end
            self._collected = []
            self._enter(self._collect)
            return
        self._at = end
        self._out.begin_call(name)
        if candidate.then == EMPTY:
            self._out.write("{}")
            self._out.end_call()
            self._enter(self._after)
        elif candidate.then == STREAM:
            self._scanner = Scanner()
            self._significant = form.significant
            self._enter(self._stream)
        else:
            self._count = 0
            self._enter(self._pairs)

    def _start_brackets(self, form: FormPlan) -> None:
        """Set the finder of the bracket that ends the arguments, for a syntax that is converted to JSON at the end of
        the arguments."""
        if form.calls.arguments == PYTHON:
            self._brackets = python_brackets()
        elif form.calls.arguments == OBJECT:
            self._brackets = json_brackets()
        else:
            self._brackets = quoted_brackets(form.quotes)

    def _collect(self) -> bool:
        """Read a call up to its last bracket, then convert it to JSON, or add it to the content if it is no call.

        Return False to wait for more text, True to continue with the next state."""
        end, read = self._brackets.end(self._buffer, self._at)
        self._collected.append(self._buffer[self._at : read])
        self._at = read
        if self._brackets.deep or (end < 0 and self._final):
            return self._release()
        if end < 0:
            return WAIT
        call = self._converted("".join(self._collected))
        if call is None or not self._allows(call[0]):
            return self._release()
        self._held = []
        self._collected = []
        self._out.begin_call(call[0])
        self._out.write(call[1])
        self._out.end_call()
        return self._enter(self._after)

    def _converted(self, text: str) -> tuple[str, str] | None:
        """Return the name and the arguments of a collected call, or None if it is no call."""
        form = self._form
        assert form is not None
        syntax = form.calls.arguments
        if syntax == OBJECT:
            return call_of(self._spelled(text))
        if syntax == PYTHON:
            arguments = python_arguments(self._spelled(text))
        else:
            arguments = quoted_arguments(text, form.quotes, self._spelled)
        return None if arguments is None else (self._name, arguments)

    def _spelled(self, text: str) -> str:
        """Return text of a call with tags in place of marks."""
        if text.isascii():
            return text
        for mark in self._plan.tag_of:
            if mark in text:
                text = text.replace(mark, self._shown(mark))
        return text

    def _release(self) -> bool:
        """Add the held text to the content, because it turned out to be no call.  Return True: the parser goes on in
        the text."""
        held = "".join(self._held + self._collected)
        self._held = []
        self._collected = []
        self._out.add_text(self._spelled(held))
        return self._enter(self._text)

    def _stream(self) -> bool:
        """Add the new text of arguments in JSON to the parts of the call.

        Return False to wait for more text, True at the end of the arguments."""
        form = self._form
        assert form is not None
        pieces, self._at, ended = self._scanner.read(self._buffer, self._at, form, self._final, self._shown)
        for piece in pieces:
            self._out.write(piece)
        if not ended and self._final and not self._scanner.quoted:
            self._out.write(self._scanner.rest())  # the answer has ended without the closing brackets
            ended = True
        if not ended:
            return WAIT
        self._out.end_call()
        following = self._rest if form.calls.arguments == OBJECT else self._after
        return self._enter(following)

    def _rest(self) -> bool:
        """Read the end of an object with the name and the arguments of a call, and skip members before the end.

        Return False to wait for more text, True to continue with the next state."""
        while True:
            end, _ = matched(END_OF_OBJECT, self._buffer, self._at)
            member, _ = matched(MEMBER, self._buffer, self._at)
            if end >= 0:
                self._at = end
                return self._enter(self._after)
            if member >= 0:
                self._at = member
                continue
            if PARTIAL in (end, member) and not self._final:
                return WAIT
            return self._enter(self._after)

    def _after(self) -> bool:
        """Read the closing tags of a call, or the head of a further call of a list.

        Return False to wait for more text, True to continue with the next state."""
        form = self._form
        assert form is not None
        before = len(form.ends) - (1 if form.calls.end.strip() else 0)
        while self._ends < before:
            if not self._skip_end(form):
                return WAIT
        candidate, end, name = choose(form.following, self._buffer, self._at, self._final)
        if candidate is not None and self._allows(name):
            self._begin(candidate, self._at, end, name)
            return GO
        waits = candidate is None and end == PARTIAL
        while self._ends < len(form.ends):
            end, _ = matched(form.ends[self._ends], self._buffer, self._at)
            if end < 0 and (waits or (end == PARTIAL and not self._final)):
                return WAIT
            self._at = end if end >= 0 else self._at
            self._ends += 1
        return WAIT if waits else self._enter(self._text)

    def _skip_end(self, form: FormPlan) -> bool:
        """Read a closing text, which may be missing.  Return False to wait for more text."""
        end, _ = matched(form.ends[self._ends], self._buffer, self._at)
        if end == PARTIAL and not self._final:
            return False
        if end >= 0:
            self._at = end
        self._ends += 1
        return True

    # ---- arguments with tags -----------------------------------------------------------------------------------------

    def _pairs(self) -> bool:
        """Read the text before the value of an argument, which has the argument's name, or the end of the arguments.

        Return False to wait for more text, True to continue with the next state."""
        pair = self._pair()
        end, key = matched(pair.head, self._buffer, self._at)
        if end == PARTIAL and not self._final:
            return WAIT
        if end < 0:
            self._out.write("}" if self._count else "{}")
            self._out.end_call()
            return self._enter(self._after)
        self._at = end
        self._key = key
        self._held = []
        self._begun_value = False
        types = types_of(self._schema(), self._context.functions.get(self._name))
        self._as_string = types == {"string"}
        nests = not types or not types.isdisjoint(NESTED)
        self._string = OpenString() if nests and self._context.strict else None
        self._out.write(("," if self._count else "{") + dumped(key) + ":" + ('"' if self._as_string else ""))
        self._count += 1
        return self._enter(self._value)

    def _pair(self) -> PairPlan:
        """Return the compiled syntax of the arguments of the call, each of which is a text between tags."""
        assert self._form is not None and self._form.pair is not None
        return self._form.pair

    def _schema(self) -> object:
        """Return the JSON schema of the argument that is being read."""
        function = self._context.functions.get(self._name)
        properties = function.get("properties") if function else None
        return properties.get(self._key) if isinstance(properties, dict) else None

    def _value(self) -> bool:
        """Read the value of an argument, up to the tag that closes it.

        Return False to wait for more text, True to continue with the next state."""
        pair, buffer = self._pair(), self._buffer
        if pair.first and not self._begun_value:
            if self._at == len(buffer) and not self._final:
                return WAIT
            self._at += buffer.startswith("\n", self._at)
        self._begun_value = True
        at = self._at
        while True:
            match = pair.find.search(buffer, at)
            if match is None:
                break
            self._hold_value(buffer[at : match.start()], pair)
            at = match.end()
            if match[0] in pair.closers and not self._is_quoted_json():
                return self._end_value(at, pair)
            is_mark = match[0] in self._plan.tag_of
            self._hold_value(self._shown(match[0]) if is_mark else match[0], pair)
        stop = len(buffer)
        begun = pair.begun.search(buffer, max(at, stop - 64)) if pair.begun else None
        stop = begun.start() if begun else stop
        self._hold_value(buffer[at:stop], pair)
        self._at = stop
        return WAIT

    def _hold_value(self, text: str, pair: PairPlan) -> None:
        """Add text to the value.  The text of a string is returned, except for a line end that may be its last."""
        if not text:
            return
        if not self._as_string:
            self._held.append(text)
            if self._string is not None:
                self._string.add(text)
            return
        if self._held:
            text = self._held.pop() + text
        if pair.last and text.endswith("\n"):
            self._held = ["\n"]
            text = text[:-1]
        self._out.write(dumped(text)[1:-1])

    def _is_quoted_json(self) -> bool:
        """Return whether the value is JSON so far and ends within a string, which a grammar always closes."""
        return self._string is not None and self._string.quoted and self._held[0][0] in "{["

    def _end_value(self, at: int, pair: PairPlan) -> bool:
        """End the value of an argument, and return True: the parser goes on to the next argument at the index
        ``at``."""
        if self._as_string:
            self._out.write('"')
        else:
            text = "".join(self._held)
            text = text.removesuffix("\n") if pair.last else text
            self._out.write(typed(text, self._schema(), self._context.functions.get(self._name)))
        self._held = []
        self._at = at
        return self._enter(self._pairs)
