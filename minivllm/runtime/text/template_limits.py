"""A jinja2 sandbox for chat templates, which come with a model: no way to Python, and bounds of time and size.

The sandbox of jinja2 keeps a template from Python's internals.  It does not keep it from looping forever or from making
a text of gigabytes.  Here every turn of a loop, call and filter looks at the clock, and what makes a value longer is
measured before it is done.  A server fills templates in a process with limits of its own as well (``server.desk``).
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

SECONDS = 10.0  # for one conversation; a template of a published model takes milliseconds
MOST_TEXT = 1 << 26  # characters, or elements, of a value
MOST_NODES = 1 << 18  # values within a list or mapping that becomes text
MOST_NUMBER = 100_000  # a width, an indent or a count
MOST_BITS = 1 << 16  # of a whole number
MOST_INDENT = 64  # of ``tojson``
WIDE = re.compile(r"\d{6,}|\*")  # a width or precision in a format
# filters that make no text of what they are given
STRUCTURAL = frozenset(
    {
        "length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "reverse",
        "sort", "unique", "items", "dictsort", "groupby", "default", "d", "attr", "batch", "slice", "sum", "min", "max",
        "random", "abs", "int", "float", "round",
    }
)  # fmt: skip
_local = threading.local()


class TemplateLimitError(RequestError):
    """A chat template takes more time or memory than it may."""


def _refuse(what: str, limit: str) -> None:
    text = f"the chat template takes more {what} for this conversation than it may ({limit}); send less"
    raise TemplateLimitError(text, "messages")


def _most_text(size: int) -> None:
    if size > MOST_TEXT:
        _refuse("memory", f"{MOST_TEXT} characters in a value")


@contextlib.contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Bound the time of templates that this thread fills in the block."""
    before = getattr(_local, "end", None)
    _local.end, _local.seconds = time.monotonic() + seconds, seconds
    try:
        yield
    finally:
        _local.end = before


def _tick() -> None:
    end = getattr(_local, "end", None)
    if end is not None and time.monotonic() > end:
        _refuse("time", f"{_local.seconds:g} s")


def _size(value: Any) -> int:
    """Return about how many characters a value has as text.  TemplateLimitError if they are too many."""
    if isinstance(value, (str, bytes)):
        return len(value)
    total, seen, left = 0, 0, [value]
    while left:
        one = left.pop()
        seen += 1
        if not seen & 1023:
            _tick()
        if isinstance(one, (str, bytes)):
            total += len(one)
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        if seen + len(left) > MOST_NODES:
            _refuse("memory", f"{MOST_NODES} values in a list that becomes text")
        _most_text(total + seen)
    return total + seen


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            _refuse("memory", f"widths and counts up to {MOST_NUMBER}")


def _check_replace(text: Any, args: tuple[Any, ...]) -> None:
    if len(args) >= 2 and type(args[0]) is type(text) is type(args[1]):
        _most_text(len(text) + text.count(args[0]) * len(args[1]))  # an empty text is counted between all characters


def _check_format(text: Any, args: Iterable[Any]) -> None:
    if WIDE.search(str(text)):
        _refuse("memory", "widths of five digits in a format")
    given = list(args)
    _check_numbers(given)
    _most_text(_size(text) + len(str(text)) * sum(map(_size, given)))


def _joined(*values: Any) -> str:
    _most_text(sum(map(_size, values)))
    return "".join(map(str, values))


def _concat(pieces: Iterable[str]) -> str:
    total, found = 0, []
    for piece in pieces:
        total += len(piece)
        _most_text(total)
        found.append(piece)
    return "".join(found)


def _is_wide(indent: Any) -> bool:
    return len(indent) > MOST_INDENT if isinstance(indent, str) else isinstance(indent, int) and indent > MOST_INDENT


def _checked_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with its sizes looked at before it runs."""
    skips = 1 if getattr(run, "jinja_pass_arg", None) is not None else 0  # the environment or context comes first

    @functools.wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _tick()
        value, rest = args[skips] if len(args) > skips else None, (*args[skips + 1 :], *kwargs.values())
        if name not in STRUCTURAL:
            size = _size(value)
            _check_numbers(rest)
            if name == "replace":
                _check_replace(str(value), tuple(map(str, rest)))
            elif name == "format":
                _check_format(value, rest)
            elif name == "indent":
                width = max([4, *(len(one) if isinstance(one, str) else int(one) for one in rest)])
                _most_text(size + width * (str(value).count("\n") + 1))
            elif name in ("join", "wordwrap"):
                _most_text(size + size * max([0, *(len(one) for one in rest if isinstance(one, str))]))
            elif name == "tojson" and any(map(_is_wide, rest)):
                _refuse("memory", f"an indent up to {MOST_INDENT}")
        elif name in ("batch", "slice"):
            _check_numbers(rest)
        elif name == "sum" and isinstance(value, (list, tuple)):
            _most_text(sum(len(one) for one in value if isinstance(one, (list, tuple))))
        return run(*args, **kwargs)

    return checked


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    """Return ``n`` paragraphs of ``min`` to ``max`` words that mean nothing, as jinja2's function of that name."""
    if n > MOST_INDENT or max > 1000:
        _refuse("time", f"{MOST_INDENT} paragraphs of 1000 words")
    return generate_lorem_ipsum(n, html, min, max)


class _LimitedTree(NodeTransformer):
    """Adds a look at the clock to every turn of a loop, and a look at the size to ``~``."""

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        look = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body = [nodes.ExprStmt(look, lineno=node.lineno), *node.body]
        return node

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None, lineno=node.lineno)


class PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no ``self``: a template may have a variable of that name
        self, *rest = args
        given = dict(*rest, **kwargs)
        for name in given:
            PlainNamespace._check(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        PlainNamespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no names that begin with an underscore, such as {name!r}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that are bounded in time (``time_limit``) and in the size of each value."""

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
        """Look at the sizes that filters make; called once all filters are there."""
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
            bits = max(right, 0) * left.bit_length() if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                _refuse("time", f"whole numbers of {MOST_BITS} bits")
        elif operator == "*":
            text, count = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(text, (str, bytes, list, tuple)) and isinstance(count, int):
                _most_text(len(text) * max(count, 0))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _tick()
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, (str, bytes)):
            _check_numbers((*args, *kwargs.values()))
            if name == "replace":
                _check_replace(text, args)
            elif name == "join" and args:
                given = list(args[0])
                args = (given, *args[1:])
                _most_text(sum(map(_size, given)) + len(text) * len(given))
            elif name == "translate" and args and isinstance(args[0], dict):
                _most_text(len(text) * max([1, *(len(v) for v in args[0].values() if isinstance(v, str))]))
            elif name == "expandtabs":
                _most_text(len(text) * max([8, *args]))
        elif isinstance(text, int) and not isinstance(text, bool):
            _check_numbers((*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        made = super().wrap_str_format(value)
        if made is None:
            return None
        text = value.__self__

        @functools.wraps(made)
        def checked(*args: Any, **kwargs: Any) -> Any:
            mapped = args[0].values() if value.__name__ == "format_map" and args else ()
            _check_format(text, (*(() if mapped else args), *mapped, *kwargs.values()))
            return made(*args, **kwargs)

        return checked


def _printable(value: Any) -> Any:
    """Return a value that is printed, once its size as text was looked at."""
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        _size(value)
    return value
