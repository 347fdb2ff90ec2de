"""The items of an answer, made from its parts, and the events by which a client gets them.

    Thought             reasoning item        output_item.added, content_part.added,
    Said                message item          output_text.delta ..., output_text.done,
    Begun ... Ended     call item             content_part.done, output_item.done

An item ends when the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from minivllm.server.link.scored import Scored
from minivllm.server.openai import JsonObject, logprobs
from minivllm.server.openai.answers import TokenScores
from minivllm.server.openai.calls import Begun, Ended, Finished, Part, Said, Thought, Written
from minivllm.server.openai.generate import SCORES
from minivllm.server.openai.logprobs import Speller

from .items import PREFIXES, sealed
from .tools import CUSTOM, ClientTool, ToolSet, input_of

COMPLETED, INCOMPLETE, FAILED, IN_PROGRESS = "completed", "incomplete", "failed", "in_progress"
CANCELLED = "cancelled"
Events = Iterator[JsonObject]


class ResponseOutput:
    """The items of one answer.  ``feed`` returns the events of each part.

    ``top`` is the number of most likely tokens of each position in the log-probabilities, or None without them.
    ``seal`` adds ``encrypted_content`` to reasoning."""

    def __init__(self, ident: str, tools: ToolSet, speller: Speller, top: int | None, seal: bool) -> None:
        self.ident, self.tools, self.speller, self.top, self.seal = ident, tools, speller, top, seal
        self.items: list[JsonObject] = []
        self.status = IN_PROGRESS
        self.reason: str | None = None  # finish reason
        self.sequence = 0  # number of events so far
        self.thought = 0.0  # estimated number of tokens of reasoning so far
        self._open: _TextItem | _CallItem | None = None
        self._blank = ""  # whitespace that is sent only if text follows it
        self._scored = Scored()  # scores of tokens that may not belong to the text of a message

    def event(self, kind: str, **members: Any) -> JsonObject:
        """Return an event with the next sequence number."""
        number = self.sequence
        self.sequence += 1
        return {"type": kind, **members, "sequence_number": number}

    def item_event(self, kind: str, **members: Any) -> JsonObject:
        """Return an event about the last item."""
        index = len(self.items) - 1
        return self.event(kind, output_index=index, item_id=self.items[index]["id"], **members)

    def add_scores(self, scored: Scored | None) -> None:
        """Add the log-probabilities of new tokens, before the parts of their text."""
        if scored is not None and self.top is not None:
            self._scored.extend(scored)

    def feed(self, parts: Iterable[Part]) -> Events:
        """Yield the events of new parts: text, reasoning, calls, or the end of the answer."""
        for part in parts:
            if isinstance(part, Said):
                yield from self._text_events(part.text)
            elif isinstance(part, Finished):
                yield from self._finish(part.reason)
            else:
                self._scored = Scored()
                yield from self._other(part)

    def _other(self, part: Thought | Begun | Written | Ended) -> Events:
        """Yield the events of a part that is no text of a message."""
        if isinstance(part, Thought):
            if self._kind() != "reasoning":
                yield from self._begin(_TextItem(self, "reasoning"))
            yield from self._text_item().add(part.text)
        elif isinstance(part, Begun):
            yield from self._begin(_CallItem(self, part, self.tools.client_tool(part.name)))
        elif isinstance(self._open, _CallItem):
            if isinstance(part, Written):
                yield from self._open.add(part.text)
            else:
                yield from self.close()

    def _text_events(self, text: str) -> Events:
        """Yield the events of text for the user.  Whitespace is held back until the first text of a message follows."""
        if self._kind() != "message":
            self._blank += text
            if not self._blank.strip():
                return
            text = self._blank
            yield from self._begin(_TextItem(self, "message"))
        scored, self._scored = self._scored, Scored()
        yield from self._text_item().add(text, scored)

    def _kind(self) -> str:
        """Return the type of the open item, or ""."""
        return "" if self._open is None else str(self._open.item["type"])

    def _text_item(self) -> _TextItem:
        """Return the open item, which has text."""
        assert isinstance(self._open, _TextItem)
        return self._open

    def _begin(self, item: _TextItem | _CallItem) -> Events:
        """Close the open item and begin another one.  Yield the events of both."""
        yield from self.close()
        self._blank = ""
        self._open = item
        self.items.append(item.item)
        yield from item.begin()

    def close(self, status: str = COMPLETED) -> Events:
        """Yield the last events of the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        yield from item.end(status)
        if item.item["type"] != "reasoning" or status != COMPLETED:
            item.item["status"] = status
        index = len(self.items) - 1
        yield self.event("response.output_item.done", output_index=index, item=item.item)

    def _finish(self, reason: str | None) -> Events:
        """Yield the events of the end of an answer, without the last event, which has the whole response."""
        self.reason = reason
        self.status = {"length": INCOMPLETE, "abort": FAILED}.get(reason or "", COMPLETED)
        if not self.items or (self._blank and not self._called()):
            text, self._blank = self._blank, ""
            yield from self._begin(_TextItem(self, "message"))
            if text:
                yield from self._text_item().add(text, self._scored)
        yield from self.close(COMPLETED if self.status == COMPLETED else INCOMPLETE)

    def finished(self) -> list[JsonObject]:
        """Return the items that are complete, without log-probabilities."""
        found = [item for item in self.items if self._open is None or item is not self._open.item]
        return [plain_item(item) for item in found]

    def _called(self) -> bool:
        """Return whether an item of the answer is a call."""
        return any("call_id" in item for item in self.items)

    def new_id(self, kind: str) -> str:
        """Return the id of the next item."""
        return f"{PREFIXES[kind]}_{self.ident}_{len(self.items)}"


def plain_item(item: JsonObject) -> JsonObject:
    """Return an item without log-probabilities."""
    if item["type"] != "message":
        return item
    content = [{**part, "logprobs": []} if "logprobs" in part else part for part in item["content"]]
    return {**item, "content": content}


class _TextItem:
    """A message or reasoning while it is generated."""

    def __init__(self, output: ResponseOutput, kind: str) -> None:
        self._output = output
        self._texts: list[str] = []
        self._scored = Scored()
        self._event = "response.output_text" if kind == "message" else "response.reasoning_text"
        self.item: JsonObject = {"id": output.new_id(kind), "type": kind, "status": IN_PROGRESS}
        if kind == "message":
            self.item.update(role="assistant", content=[])
            self._empty: JsonObject = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            self.item.update(summary=[], content=[])
            self._empty = {"type": "reasoning_text", "text": ""}

    def begin(self) -> Events:
        """Yield the first events of the item."""
        output = self._output
        added = {**self.item, "content": []}
        yield output.event("response.output_item.added", output_index=len(output.items) - 1, item=added)
        yield output.item_event("response.content_part.added", content_index=0, part=self._empty)

    def add(self, text: str, scored: Scored | None = None) -> Events:
        """Yield the events of new text.  Each has at most ``SCORES`` log-probabilities."""
        self._texts.append(text)
        if self.item["type"] == "reasoning":
            yield self._delta(text)
            return
        if scored is None or not len(scored):
            yield self._delta(text, logprobs=[])
            return
        self._scored.extend(scored)
        for low, high in scored.parts(SCORES):
            rows = scored.rows(low, high)
            yield self._delta(text, logprobs=logprobs.chat(rows, self._output.top or 0, self._output.speller))
            text = ""

    def _delta(self, text: str, **more: Any) -> JsonObject:
        """Return the event that adds a piece of text to the open item."""
        return self._output.item_event(f"{self._event}.delta", content_index=0, delta=text, **more)

    def end(self, status: str) -> Events:
        """Yield the last events of the content."""
        output = self._output
        text = "".join(self._texts)
        part = {**self._empty, "text": text}
        more: JsonObject = {}
        if self.item["type"] == "message":
            if len(self._scored):
                part["logprobs"] = TokenScores("chat", self._scored, output.top or 0)
            more["logprobs"] = part["logprobs"]
        else:
            self.item.pop("status")
            if output.seal:
                self.item["encrypted_content"] = sealed(text)
        yield output.item_event(f"{self._event}.done", content_index=0, text=text, **more)
        yield output.item_event("response.content_part.done", content_index=0, part=part)
        self.item["content"] = [part]


class _CallItem:
    """A call of a function or of a custom tool while it is generated."""

    def __init__(self, output: ResponseOutput, begun: Begun, tool: ClientTool) -> None:
        self._output = output
        self._texts: list[str] = []
        self._custom = tool.kind == CUSTOM
        kind = "custom_tool_call" if self._custom else "function_call"
        self._key = "input" if self._custom else "arguments"
        self.item: JsonObject = {"id": output.new_id(kind), "type": kind, "status": IN_PROGRESS}
        self.item.update({"call_id": begun.id, "name": tool.name, self._key: ""})
        if tool.namespace is not None:
            self.item["namespace"] = tool.namespace

    def begin(self) -> Events:
        """Yield the first event of the item."""
        index = len(self._output.items) - 1
        yield self._output.event("response.output_item.added", output_index=index, item=dict(self.item))

    def add(self, text: str) -> Events:
        """Yield the event of new arguments.  The text for a custom tool is known only when the arguments end."""
        self._texts.append(text)
        if not self._custom and text:
            yield self._output.item_event("response.function_call_arguments.delta", delta=text)

    def end(self, status: str) -> Events:
        """Yield the events of the end of the arguments."""
        output, arguments = self._output, "".join(self._texts)
        if not self._custom:
            self.item["arguments"] = arguments
            name = self.item["name"]
            yield output.item_event("response.function_call_arguments.done", name=name, arguments=arguments)
            return
        text = self.item["input"] = input_of(arguments)
        if text:
            yield output.item_event("response.custom_tool_call_input.delta", delta=text)
        yield output.item_event("response.custom_tool_call_input.done", input=text)
