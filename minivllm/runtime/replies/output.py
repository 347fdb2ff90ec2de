"""The parts of an answer as a parser makes them: whitespace beside reasoning and calls is left out."""

from __future__ import annotations

from .parts import Begun, Ended, Part, Said, Thought, Written

# treatment of whitespace before the next text of the answer: keep, hold, drop
KEEP, HOLD, DROP = 0, 1, 2


class Output:
    """Collects the parts (text, reasoning, calls) of an answer.

    Whitespace at the beginning of the content, and after a call, is held (``HOLD``): it belongs to text that follows,
    but not to a call.  Whitespace after reasoning, and at both ends of reasoning, is dropped."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.edge = HOLD
        self.lead = True  # whether the reasoning has no text yet
        self.spaces: list[str] = []  # held whitespace
        self.touched = False  # whether the reply has had reasoning or a call
        self.has_content = False

    def take(self) -> list[Part]:
        """Return the parts of the answer that were added since the last call of this method."""
        parts = self.parts
        self.parts = []
        return parts

    def add_text(self, text: str) -> None:
        """Add text for the user.  Spaces at an edge are dropped or held back, as ``edge`` requires."""
        if not text:
            return
        if self.edge != KEEP:
            if text.isspace():
                if self.edge == HOLD:
                    self.spaces.append(text)
                return
            if self.edge == DROP:
                text = text.lstrip()
            elif self.spaces:
                text = "".join(self.spaces) + text
                self.spaces = []
            self.edge = KEEP
        self.has_content = True
        self.parts.append(Said(text))

    def add_reasoning(self, text: str) -> None:
        """Add text of the reasoning.  Whitespace at its beginning is dropped, and whitespace at its end is held back
        until more text follows."""
        if not text:
            return
        if text.isspace():
            if not self.lead:
                self.spaces.append(text)
            return
        if self.lead:
            text = text.lstrip()
            self.lead = False
        elif self.spaces:
            text = "".join(self.spaces) + text
            self.spaces = []
        shown = text.rstrip()
        if len(shown) < len(text):
            self.spaces.append(text[len(shown) :])
        self.parts.append(Thought(shown))

    def begin_thought(self) -> None:
        """Begin reasoning."""
        self.spaces = []
        self.lead = True
        self.touched = True

    def end_thought(self) -> None:
        """End reasoning."""
        self.spaces = []
        self.edge = DROP

    def begin_call(self, name: str) -> None:
        """Begin a call."""
        self.spaces = []
        self.edge = HOLD
        self.touched = True
        self.parts.append(Begun(name))

    def write(self, text: str) -> None:
        """Add a piece of the arguments of the open call."""
        if text:
            self.parts.append(Written(text))

    def end_call(self) -> None:
        """End a call."""
        self.parts.append(Ended())

    def finish(self) -> None:
        """Add the held whitespace as content if the whole answer is whitespace."""
        if self.spaces and not self.touched and not self.has_content:
            self.parts.append(Said("".join(self.spaces)))
        self.spaces = []
