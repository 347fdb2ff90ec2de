"""The parser of answers that are messages with headers, in the format of gpt-oss (harmony)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .brackets import OpenString
from .contract import ReplyContext
from .description import Channels
from .elements import beginnings
from .output import KEEP, Output
from .parts import NAME, Part, Said, Thought, Written
from .plan import MARK
from .scan import LONGEST
from .values import is_json

MOST_HEADER = 512  # largest number of characters of a header; a longer one is text
ANSWER, THOUGHTS, CALL, NOTHING = "answer", "thoughts", "call", "nothing"


class ChannelReply:
    """Finds reasoning, calls and content in one answer.

    A header ends with the tag ``message``.  Its channel decides whether the text up to the next tag is reasoning, the
    arguments of a call, or content.  Text outside messages is content.
    """

    def __init__(self, channels: Channels, context: ReplyContext) -> None:
        self._channels, self._context = channels, context
        self._out = Output()
        self._buffer = ""
        self._header: list[str] | None = None  # the pieces of a header so far
        self._size = 0  # number of characters of the header so far
        self._kind = ANSWER
        self._written: list[str] = []  # the arguments of the call so far
        # the strings of these arguments, in which a tag is text; None if the answer is not constrained by a grammar
        self._string: OpenString | None = None
        self._tag_of = {mark: tag for tag, mark in context.marks.items()}
        named = (channels.start, channels.channel, channels.message, channels.constrain, *channels.ends)
        spelled = [tag for tag in named if tag not in context.marks]
        ordered = sorted(spelled, key=len, reverse=True)
        self._find = re.compile("|".join([MARK, *map(re.escape, ordered)]))
        self._begun = beginnings(ordered)
        firsts = "".join(sorted({re.escape(tag[0]) for tag in ordered}))
        self._notable = re.compile(f"[\udc80-\udcff{firsts}]")

    def feed(self, text: str, final: bool = False) -> Sequence[Part]:
        """Return the parts of the answer (content, reasoning, calls) that are certain after new text.  ``final`` ends
        the answer."""
        if not final and not self._buffer and self._header is None and not self._notable.search(text):
            part = self._plain(text)
            if part is not None:
                return [part]
        self._buffer = self._buffer + text if self._buffer else text
        self._read(final)
        if final:
            if self._header is not None:
                self._release()
            if self._kind == CALL and is_json("".join(self._written)):
                self._end_call()
            self._out.finish()
        return self._out.take()

    def cut(self) -> Sequence[Part]:
        """Return the rest of an answer that the length limit has cut, without an incomplete call."""
        self._header = None
        if self._kind == CALL:
            self._kind = NOTHING
        return self.feed("", True)

    def _plain(self, text: str) -> Part | None:
        """Return the only part of a text without tags, or None if the text must be read by ``feed`` in full."""
        out = self._out
        kind = self._kind
        if not text:
            return None
        if kind == CALL and self._written:
            self._keep(text)
            return Written(text)
        if kind == THOUGHTS and not (out.lead or out.spaces or text[-1].isspace()):
            return Thought(text)
        return Said(text) if kind == ANSWER and out.edge == KEEP else None

    def _read(self, final: bool) -> None:
        """Read the buffer: text and tags up to a possible beginning of a tag, which stays in the buffer until more text
        arrives."""
        buffer = self._buffer
        at = 0
        for match in self._find.finditer(buffer):
            self._add(buffer[at : match.start()])
            self._tag(self._tag_of.get(match[0], match[0]))
            at = match.end()
        stop = len(buffer)
        if self._begun is not None and not final:
            begun = self._begun.search(buffer, max(at, stop - LONGEST))
            stop = begun.start() if begun else stop
        self._add(buffer[at:stop])
        self._buffer = buffer[stop:]

    def _add(self, text: str) -> None:
        """Add text without tags to the header or to the message.  A header that becomes too long is text."""
        if not text:
            return
        if self._header is not None:
            self._header.append(text)
            self._size += len(text)
            if self._size > MOST_HEADER:
                self._release()
            return
        if self._kind == THOUGHTS:
            self._out.add_reasoning(text)
        elif self._kind == CALL:
            text = text if self._written else text.lstrip()
            if text:
                self._keep(text)
                self._out.write(text)
        elif self._kind == ANSWER:
            self._out.add_text(text)

    def _keep(self, text: str) -> None:
        """Store a piece of the arguments of a call."""
        self._written.append(text)
        if self._string is not None:
            self._string.add(text)

    def _tag(self, tag: str) -> None:
        """Read a tag: begin or end a header or a message.  Inside a string of a call's arguments it is text."""
        channels = self._channels
        quoted = self._kind == CALL and self._string is not None and self._string.quoted
        if quoted and tag not in self._context.hidden:
            self._add(tag)
        elif tag == channels.start:
            self._end_message()
            self._header = []
        elif tag in (channels.channel, channels.constrain):
            if tag == channels.channel:
                self._end_message(keep_header=True)
            if self._header is None:
                self._header = []
            self._header.append(tag)
        elif tag == channels.message:
            self._begin_message()
        elif tag in channels.ends:
            self._end_message()
        elif tag not in self._context.hidden:
            self._add(tag)

    def _begin_message(self) -> None:
        """Begin the message (reasoning, call or content) that the complete header announces."""
        header = "".join(self._header or ())
        self._header = None
        self._size = 0
        channels = self._channels
        name = self._recipient(header)
        words = re.findall(rf"{re.escape(channels.channel)}\s*([a-z_]+)", header)
        channel = words[-1] if words else channels.content
        if name and self._context.calls:
            self._kind = CALL
            self._written = []
            self._string = OpenString() if self._context.strict else None
            self._out.begin_call(name)
        elif channel in channels.thoughts:
            self._kind = THOUGHTS
            self._out.begin_thought()
        else:
            self._kind = ANSWER

    def _recipient(self, header: str) -> str:
        """Return the name of the function that a header calls, or ""."""
        _, found, rest = header.partition(self._channels.recipient)
        match = NAME.match(rest) if found else None
        if match is None:
            return ""
        only = self._context.only
        return match[0] if only is None or match[0] in only else ""

    def _end_message(self, keep_header: bool = False) -> None:
        """End the message.  With ``keep_header`` the present header, which has no channel yet, continues."""
        if self._header is not None and not keep_header:
            self._header = None
            self._size = 0
        if self._kind == CALL:
            self._end_call()
        elif self._kind == THOUGHTS:
            self._out.end_thought()
        self._kind = ANSWER

    def _end_call(self) -> None:
        """End a call."""
        if not self._written:
            self._out.write("{}")
        self._out.end_call()
        self._kind = NOTHING

    def _release(self) -> None:
        """Add a header that no message followed to the content, as text."""
        tags = {self._channels.channel, self._channels.constrain}
        shown = [piece for piece in self._header or () if piece not in tags or piece not in self._context.hidden]
        self._header = None
        self._size = 0
        self._out.add_text("".join(shown))
