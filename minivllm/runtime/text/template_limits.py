"""A jinja2 sandbox for chat templates, with limits of time and size, because templates come with a model.

jinja2's sandbox protects Python's internals from a template.  It does not prevent endless loops or texts of gigabytes.
So here each iteration of a loop, each call and each filter checks the time, and operations that lengthen a value check
its size first.  A server also fills templates in a process with its own limits (``server.worker_pool``).
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

from minivllm.errors import RequestError

SECONDS = 10.0  # time limit in seconds for one conversation; a published template takes milliseconds
MOST_TEXT = 1 << 26  # largest number of characters or elements of a value
MOST_NODES = 1 << 18  # largest number of values inside a list or mapping that becomes text
MOST_NUMBER = 100_000  # largest width, indent or count
MOST_BITS = 1 << 16  # largest number of bits of a whole number
MOST_INDENT = 64  # largest indentation of ``tojson``
WIDE = re.compile(r"\d{6,}|\*")  # pattern of a long width or precision in a format string
# filters that do not convert their input to text
STRUCTURAL = frozenset(
    {
        "length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "reverse",
        "sort", "unique", "items", "dictsort", "groupby", "default", "d", "attr", "batch", "slice", "sum", "min", "max",
        "random", "abs", "int", "float", "round",
    }
)  # fmt: skip
_local = threading.local()


class TemplateLimitError(RequestError):
    """Error of a chat template that exceeds its limits of time or memory."""


def _refuse(resource: str, limit: str) -> None:
    """Raise the error about an exceeded limit of "time" or "memory"."""
    text = f"the chat template takes more {resource} for this conversation than allowed ({limit}); send less"
    raise TemplateLimitError(text, "messages")


def _most_text(size: int) -> None:
    """Raise TemplateLimitError for a value that would be too large."""
    if size > MOST_TEXT:
        _refuse("memory", f"{MOST_TEXT} characters in a value")


@contextlib.contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Limit the time of templates that this thread fills in the context."""
    before = getattr(_local, "end", None)
    _local.end = time.monotonic() + seconds
    _local.seconds = seconds
    try:
        yield
    finally:
        _local.end = before


def _tick() -> None:
    """Raise TemplateLimitError if the time is over."""
    end = getattr(_local, "end", None)
    if end is not None and time.monotonic() > end:
        _refuse("time", f"{_local.seconds:g} s")


def _size(value: Any) -> int:
    """Return the approximate length of a value as text.  TemplateLimitError if it is too large."""
    if isinstance(value, (str, bytes)):
        return len(value)
    total = seen = 0
    left = [value]
    while left:
        inner = left.pop()
        seen += 1
        if not seen & 1023:
            _tick()
        if isinstance(inner, (str, bytes)):
            total += len(inner)
        elif isinstance(inner, dict):
            left += [*inner.keys(), *inner.values()]
        elif isinstance(inner, (list, tuple, set, frozenset)):
            left += inner
        if seen + len(left) > MOST_NODES:
            _refuse("memory", f"{MOST_NODES} values in a list that becomes text")
        _most_text(total + seen)
    return total + seen


def _check_numbers(values: Iterable[Any]) -> None:
    """Raise TemplateLimitError for large whole numbers, which may be widths or counts."""
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            _refuse("memory", f"widths and counts up to {MOST_NUMBER}")


def _check_replace(text: Any, args: tuple[Any, ...]) -> None:
    """Raise TemplateLimitError if ``text.replace(*args)`` would be too large."""
    if len(args) >= 2 and type(args[0]) is type(text) is type(args[1]):
        _most_text(len(text) + text.count(args[0]) * len(args[1]))


def _check_format(text: Any, args: Iterable[Any]) -> None:
    """Raise TemplateLimitError if a text formatted with ``args`` would be too large."""
    if WIDE.search(str(text)):
        _refuse("memory", "widths of five digits in a format")
    values = list(args)
    _check_numbers(values)
    _most_text(_size(text) + len(str(text)) * sum(map(_size, values)))


def _joined(*values: Any) -> str:
    """Return the operands of ``~`` as one text."""
    _most_text(sum(map(_size, values)))
    return "".join(map(str, values))


def _concat(pieces: Iterable[str]) -> str:
    """Return the pieces that a template prints as one text."""
    total = 0
    found: list[str] = []
    for piece in pieces:
        total += len(piece)
        _most_text(total)
        found.append(piece)
    return "".join(found)


def _is_wide(indent: Any) -> bool:
    """Return whether an indent, a text or a number, is too wide."""
    if isinstance(indent, str):
        return len(indent) > MOST_INDENT
    return isinstance(indent, int) and indent > MOST_INDENT


def _longest(values: Iterable[Any], least: int = 0) -> int:
    """Return the length of the longest text among some values, at least ``least``."""
    return max([least, *(len(value) for value in values if isinstance(value, str))])


def _checked_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the time and the size of its result before it runs."""
    skips = 1 if getattr(run, "jinja_pass_arg", None) is not None else 0  # the first argument is the environment

    @functools.wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _tick()
        value = args[skips] if len(args) > skips else None
        rest = (*args[skips + 1 :], *kwargs.values())
        if name not in STRUCTURAL:
            _check_text_filter(name, value, rest)
        elif name in ("batch", "slice"):
            _check_numbers(rest)
        elif name == "sum" and isinstance(value, (list, tuple)):
            _most_text(sum(len(part) for part in value if isinstance(part, (list, tuple))))
        return run(*args, **kwargs)

    return checked


def _check_text_filter(name: str, value: Any, rest: tuple[Any, ...]) -> None:
    """Raise TemplateLimitError if a filter would make too large a text of a value.  ``rest`` are further arguments."""
    size = _size(value)
    _check_numbers(rest)
    if name == "replace":
        _check_replace(str(value), tuple(map(str, rest)))
    elif name == "format":
        _check_format(value, rest)
    elif name == "indent":
        widths = [len(indent) if isinstance(indent, str) else int(indent) for indent in rest]
        width = max([4, *widths])
        _most_text(size + width * (str(value).count("\n") + 1))
    elif name in ("join", "wordwrap"):
        _most_text(size + size * _longest(rest))
    elif name == "tojson" and any(map(_is_wide, rest)):
        _refuse("memory", f"an indent up to {MOST_INDENT}")


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    """Return ``n`` paragraphs of ``min`` to ``max`` meaningless words, as jinja2's function ``lipsum``."""
    if n > MOST_INDENT or max > 1000:
        _refuse("time", f"{MOST_INDENT} paragraphs of 1000 words")
    return generate_lorem_ipsum(n, html, min, max)


class _LimitedTree(NodeTransformer):
    """Transformer that adds a check of the time to each iteration of a loop, and a check of the size to ``~``."""

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        check = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body = [nodes.ExprStmt(check, lineno=node.lineno), *node.body]
        return node

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None, lineno=node.lineno)


class PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no ``self``: a template may have a variable of that name
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            PlainNamespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        PlainNamespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        """Raise SecurityError for a name that begins with an underscore."""
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot have names that begin with an underscore, such as {name!r}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment for templates with limits of time (``time_limit``) and of the size of each value."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    concat = staticmethod(_concat)
    tick = staticmethod(_tick)
    joined = staticmethod(_joined)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=_printable, optimized=False, **kwargs)
        self.globals["lipsum"] = _lipsum
        self.globals["namespace"] = PlainNamespace
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)

    def bound_filters(self) -> None:
        """Add the checks to all filters.  Call it after the last filter was added."""
        for name, run in list(self.filters.items()):
            self.filters[name] = _checked_filter(name, run)

    def _generate(self, source: Any, name: Any, filename: Any, defer_init: bool = False) -> str:
        return super()._generate(_LimitedTree().visit(source), name, filename, defer_init)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _tick()
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _most_text(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**":
                bits = max(right, 0) * left.bit_length()
            if bits > MOST_BITS:
                _refuse("time", f"whole numbers of {MOST_BITS} bits")
        elif operator == "*":
            text, count = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(text, (str, bytes, list, tuple)) and isinstance(count, int):
                _most_text(len(text) * max(count, 0))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _tick()
        text = getattr(__obj, "__self__", None)  # the object to which the method belongs
        name = getattr(__obj, "__name__", "")
        if isinstance(text, (str, bytes)):
            _check_numbers((*args, *kwargs.values()))
            if name == "replace":
                _check_replace(text, args)
            elif name == "join" and args:
                parts = list(args[0])
                args = (parts, *args[1:])
                _most_text(sum(map(_size, parts)) + len(text) * len(parts))
            elif name == "translate" and args and isinstance(args[0], dict):
                _most_text(len(text) * _longest(args[0].values(), 1))
            elif name == "expandtabs":
                _most_text(len(text) * max([8, *args]))
        elif isinstance(text, int) and not isinstance(text, bool):
            _check_numbers((*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> Any:
            mapped = args[0].values() if value.__name__ == "format_map" and args else ()
            _check_format(text, (*(() if mapped else args), *mapped, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked


def _printable(value: Any) -> Any:
    """Return a value that a template prints.  TemplateLimitError if it is too large as text."""
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        _size(value)
    return value
