"""Convert the parts of an answer to the content blocks of a message, as events of a stream and as a whole.

Said ──► text block        Thought ──► thinking block        Begun, Written, Ended ──► tool_use block
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minivllm.server.openai import JsonObject
from minivllm.server.openai.calls import Begun, Ended, Part, Said, Thought, Written, is_json, json_object

TEXT, THINKING, TOOL = "text", "thinking", "tool_use"
EMPTY: dict[str, JsonObject] = {
    TEXT: {"type": TEXT, "text": ""},
    THINKING: {"type": THINKING, "thinking": "", "signature": ""},
}


@dataclass
class Block:
    """One content block: its members without text, and its text in pieces.

    ``whole`` is unset for a call whose arguments are incomplete."""

    head: JsonObject
    texts: list[str] = field(default_factory=list)
    whole: bool = True

    @property
    def kind(self) -> str:
        """Return the type of the block."""
        return str(self.head["type"])


class ContentBlocks:
    """The content blocks of one message.

    Whitespace between blocks is not a block, because Anthropic's API would refuse such a block in the next request.
    ``shows_thoughts`` is whether thinking blocks have text.
    """

    def __init__(self, shows_thoughts: bool = True) -> None:
        self._shows_thoughts = shows_thoughts
        self._blocks: list[Block] = []
        self._open: Block | None = None
        self._spaces: list[str] = []  # whitespace that is held back, because it may begin a block
        self._spaces_kind = TEXT
        self._arguments = ""  # beginning of the arguments of a call, not yet sent

    @property
    def called(self) -> bool:
        """Return whether there is a complete call."""
        return any(block.kind == TOOL and block.whole for block in self._blocks)

    def events(self, parts: Sequence[Part]) -> Iterator[JsonObject]:
        """Yield the events of parts of an answer (text, reasoning, calls) that came together."""
        for number, part in enumerate(parts):
            if isinstance(part, Said):
                yield from self._write(TEXT, part.text)
            elif isinstance(part, Thought):
                yield from self._write(THINKING, part.text)
            elif isinstance(part, Begun):
                ident = f"toolu_{part.id.removeprefix('call_')}"
                head = {"type": TOOL, "id": ident, "name": part.name, "input": {}}
                yield from self._begin(Block(head, whole=False))
            elif isinstance(part, Written):
                following = parts[number + 1 : number + 2]
                yield from self._write_arguments(part.text, following == [Ended()])
            elif isinstance(part, Ended):
                yield from self._end_call()

    def finish(self) -> Iterator[JsonObject]:
        """Yield the events at the end of an answer."""
        yield from self._close()
        if self._spaces and not self._blocks:
            spaces = "".join(self._spaces)
            yield from self._begin(Block(EMPTY[self._spaces_kind]))
            yield self._delta(spaces)
            yield from self._close()

    def content(self) -> list[JsonObject]:
        """Return the content of the message, without a call whose arguments are incomplete."""
        return [self._content(block) for block in self._blocks if block.whole]

    def _write(self, kind: str, text: str) -> Iterator[JsonObject]:
        """Add text to the open block of a kind, or to a new block.  Text of only whitespace begins no block."""
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            if self._spaces_kind != kind:
                self._spaces = []
            self._spaces_kind = kind
            if text.isspace():
                self._spaces.append(text)
                return
            text = "".join([*self._spaces, text])
            yield from self._begin(Block(EMPTY[kind]))
        yield self._delta(text)

    def _begin(self, block: Block) -> Iterator[JsonObject]:
        """End the open block, and begin a new one."""
        yield from self._close()
        self._open = block
        self._spaces = []
        self._arguments = ""
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.head}

    def _delta(self, text: str) -> JsonObject:
        """Add text to the open block, and return its event.  The event has no text if it is reasoning that the client
        hides."""
        assert self._open is not None
        self._open.texts.append(text)
        if self._open.kind == TOOL:
            return self._event({"type": "input_json_delta", "partial_json": text})
        if self._open.kind == TEXT:
            return self._event({"type": "text_delta", "text": text})
        return self._event({"type": "thinking_delta", "thinking": text if self._shows_thoughts else ""})

    def _event(self, delta: JsonObject) -> JsonObject:
        """Return the event with a change of the open block."""
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[JsonObject]:
        """End the open block, if there is one."""
        if self._open is None:
            return
        if self._open.kind == THINKING:
            yield self._event({"type": "signature_delta", "signature": _signature(self._open)})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._open = None

    def _write_arguments(self, text: str, last: bool) -> Iterator[JsonObject]:
        """Add arguments to the open call.  ``last`` means that these are the last ones.

        Pieces of arguments are sent immediately if they begin an object.  Other pieces are held back, because the input
        of a tool_use block must be an object.
        """
        if self._open is None or self._open.kind != TOOL:
            return
        self._arguments += text
        first = self._arguments.lstrip()[:1]
        if not self._open.texts and (last or first != "{"):
            return
        yield self._delta(self._arguments)
        self._arguments = ""

    def _end_call(self) -> Iterator[JsonObject]:
        """End the open call.  Arguments that were held back become an object."""
        if self._open is None or self._open.kind != TOOL:
            return
        if self._arguments:
            yield self._delta(_object(self._arguments))
        self._open.whole = True
        yield from self._close()

    def _content(self, block: Block) -> JsonObject:
        """Return a block as a member of a message's content: text, reasoning with a signature, or a call with its
        input."""
        text = "".join(block.texts)
        if block.kind == TEXT:
            return {"type": TEXT, "text": text}
        if block.kind == THINKING:
            shown = text if self._shows_thoughts else ""
            return {"type": THINKING, "thinking": shown, "signature": _signature(block)}
        return {**block.head, "input": json.loads(_object(text))}


def _signature(block: Block) -> str:
    """Return the signature of a thinking block: a digest of its text.  The server accepts any signature."""
    digest = hashlib.sha256("".join(block.texts).encode(errors="replace")).digest()
    return base64.b64encode(digest).decode()


def _object(arguments: str) -> str:
    """Return the arguments of a call as JSON of an object.  Other arguments become its member ``arguments``."""
    if json_object(arguments) is not None:
        return arguments.strip() or "{}"
    value = json.loads(arguments) if is_json(arguments) else arguments
    return json.dumps({"arguments": value}, ensure_ascii=False)
