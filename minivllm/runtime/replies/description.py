"""The description of a format of replies: plain data, from which the parser, the writer and the grammar are made.

Texts of a description are templates.  Whitespace in them is what a model usually writes; a parser accepts any.
``{name}`` stands for the name of a function, ``{key}`` for the name of an argument, ``{id}`` for an id of a call.

    begin  open  head  arguments  tail  close  between  open  head  arguments  tail  close  end
           └──────────── a call ────────────┘           └──────────── a call ────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

# syntaxes of arguments
JSON = "json"  # arguments are an object after the head
OBJECT = "object"  # one object has the name and the arguments, and there is no head
PAIRS = "pairs"  # a tagged text for each argument
PYTHON = "python"  # keyword arguments of a call in Python
QUOTED = "quoted"  # an object whose keys have no quotes, and whose strings are enclosed in two tags


@dataclass(frozen=True)
class Reasoning:
    """The tags around reasoning.  ``open`` begins with a tag, and ``close`` is one tag.

    ``calls`` means that a complete head of a call ends reasoning that is not closed, and begins the call.
    """

    open: str
    close: str
    calls: bool = True


@dataclass(frozen=True)
class Pairs:
    """An argument: the text before its value, with ``{key}``, and the text after it."""

    before: str
    after: str


@dataclass(frozen=True)
class Calls:
    """One spelling of calls.

    ``begin``, ``open`` and ``head`` together begin with a tag.  Without a tag, calls are found only at the beginning of
    the content.  ``key`` names the member of an ``OBJECT`` with the arguments.  ``pairs`` belongs to the syntax
    ``PAIRS``, and ``quote`` to ``QUOTED``.
    """

    arguments: str
    head: str = ""
    open: str = ""
    close: str = ""
    tail: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    key: str = "arguments"
    pairs: Pairs | None = None
    quote: str = ""


@dataclass(frozen=True)
class Channels:
    """The tags of messages with a header, such as those of gpt-oss::

        <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}

    ``thoughts`` names the channels with reasoning.  ``recipient`` is the text before the name of a called function."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    constrain: str = "<|constrain|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")
    role: str = "assistant"
    thoughts: tuple[str, ...] = ("analysis",)
    calls: str = "commentary"
    content: str = "final"
    recipient: str = "to=functions."

    @property
    def tags(self) -> tuple[str, ...]:
        """Return all tags."""
        return (self.start, self.channel, self.message, self.constrain, *self.ends)


@dataclass(frozen=True)
class ReplyFormat:
    """A format of replies.

    ``calls`` has the spellings of calls; the first one is written, and all are read.  ``tags`` lists the tags in all
    texts.  ``gap`` is the whitespace between reasoning and content.  A format with ``channels`` has no other fields.
    """

    reasoning: Reasoning | None = None
    calls: tuple[Calls, ...] = ()
    tags: tuple[str, ...] = ()
    channels: Channels | None = None
    gap: str = "\n\n"
