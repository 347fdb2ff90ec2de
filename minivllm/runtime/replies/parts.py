"""The parts of an answer: text for the user, reasoning, and calls of functions in pieces.

A parser yields these parts in the order of the text.  A call is ``Begun``, any number of ``Written``, and ``Ended``::

    <think>Let me look.</think>I look.<tool_call>{"name": "f", "arguments": {...}}</tool_call>
           └ Thought           └ Said                     └ Begun         └ Written, Written, ... Ended
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # name of a function


def new_id() -> str:
    """Return a random id of a call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(slots=True)
class Begun:
    """The beginning of a call.  Its arguments follow in pieces, until ``Ended`` or the next ``Begun``."""

    name: str
    id: str = field(default_factory=new_id)


@dataclass(slots=True)
class Written:
    """A piece of the arguments of the last call that has begun.  All pieces together are JSON text."""

    text: str


@dataclass(slots=True)
class Ended:
    """The end of the arguments of the last call that has begun.  A call without it is incomplete."""


Part = Said | Thought | Begun | Written | Ended
