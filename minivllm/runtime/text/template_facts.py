"""Facts about a chat template, found in its syntax tree: the text it prints, and the forms in which it reads messages.

A template reads the content of a message as text, as a list of parts, or as either.  It reads the arguments of a tool
call as JSON text, as a mapping, or as either.  It supports some roles and variables.  With these facts ``messages.fit``
passes messages to each template in the form that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TEXT, PARTS, MAPPING, EITHER = "text", "parts", "mapping", "either"
CONTENT, ARGUMENTS, CALL, CALLS, ROLE = "content", "arguments", "function", "tool_calls", "role"
MESSAGES, MESSAGE = "messages", "one of messages"
ONE_TEXT = "Cannot pass both content and thinking"  # part of a template's error message
TRACKED = frozenset({CONTENT, ARGUMENTS, CALL, CALLS, ROLE})
SAME = frozenset({"default", "d", "list", "reverse", "selectattr", "rejectattr", "select", "reject", "first", "last"})
OF_PARTS = frozenset({"selectattr", "rejectattr", "map"})
OF_MAPPINGS = frozenset({"items", "dictsort", "tojson"})
METHODS_OF_MAPPINGS = frozenset({"items", "keys", "values", "get"})


@dataclass(frozen=True)
class TemplateFacts:
    """The facts about a chat template."""

    written: tuple[str, ...] = ()  # literal texts: text outside of Jinja's tags, and string constants
    names: frozenset[str] = frozenset()  # words that the template looks up or compares with
    filters: frozenset[str] = frozenset()  # names of the filters in the template
    variables: frozenset[str] = frozenset()  # variables that the caller may set
    roles: frozenset[str] = frozenset()  # roles with which the template compares a message's role
    content: str = TEXT  # form in which the template reads the content of a message
    arguments: str = EITHER  # form in which the template reads the arguments of a tool call
    prints_messages: bool = False  # whether the template prints whole messages as JSON

    @property
    def reads_calls(self) -> bool:
        """Return whether the template prints the tool calls of a message."""
        return self.prints_messages or CALLS in self.names

    @property
    def calls_have_one_text(self) -> bool:
        """Return whether the template refuses a message of calls with content and reasoning, as gpt-oss's does."""
        return any(ONE_TEXT in text for text in self.written)


def facts_of(environment: Any, source: str) -> TemplateFacts:
    """Return the facts about a template's source.  It raises the errors of jinja2's parser."""
    from jinja2 import meta, nodes

    tree = environment.parse(source)
    uses = _Uses(tree)
    constants = [str(node.value) for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    data = [node.data for node in tree.find_all(nodes.TemplateData)]
    attributes = [node.attr for node in tree.find_all(nodes.Getattr)]
    filters = frozenset(node.name for node in tree.find_all(nodes.Filter))
    variables = frozenset(meta.find_undeclared_variables(tree))
    roles = frozenset(uses.roles())
    prints_messages = uses._filtered({MESSAGE, MESSAGES}, frozenset({"tojson"}))
    written = tuple(constants + data)
    names = frozenset(constants + attributes)
    forms = uses.content(), uses.arguments()
    return TemplateFacts(written, names, filters, variables, roles, *forms, prints_messages)


class _Uses:
    """The uses of a message's fields in a template, followed through assignments, loops and macros.

    Scopes are ignored: a name that a template uses for two objects counts as both.
    """

    def __init__(self, tree: Any) -> None:
        from jinja2 import nodes

        self._nodes, self._tree = nodes, tree
        self._aliases: dict[str, set[str]] = {}  # name in the template -> tracked fields that it may hold
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        while self._follow():
            pass

    def _follow(self) -> bool:
        """Find variables of the template that may hold messages or calls, and return whether new ones were found."""
        before = sum(map(len, self._aliases.values()))
        for node in self._tree.find_all(self._nodes.Assign):
            self._alias(node.target, self._fields(node.node))
        for node in self._tree.find_all(self._nodes.For):
            fields = self._fields(node.iter)
            if CALLS in fields:
                self._alias(node.target, {CALL})
            elif MESSAGES in fields:
                self._alias(node.target, {MESSAGE})
        for node in self._tree.find_all(self._nodes.Call):
            macro = self._macros.get(getattr(node.node, "name", ""))
            if macro is not None:
                for param, value in self._given(macro, node):
                    self._alias(param, self._fields(value))
        return sum(map(len, self._aliases.values())) > before

    @staticmethod
    def _given(macro: Any, call: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each parameter of a macro with its argument in a call."""
        yield from zip(macro.args, call.args, strict=False)
        by_name = {param.name: param for param in macro.args}
        for keyword in call.kwargs:
            if keyword.key in by_name:
                yield by_name[keyword.key], keyword.value

    def _alias(self, target: Any, fields: set[str]) -> None:
        """Add fields to the fields that the name ``target`` may hold."""
        name = getattr(target, "name", None)
        if fields and isinstance(target, self._nodes.Name):
            self._aliases.setdefault(str(name), set()).update(fields)

    def _fields(self, node: Any) -> set[str]:
        """Return which fields of the conversation (``TRACKED`` or the messages) an expression of the template may refer
        to."""
        n = self._nodes
        if isinstance(node, n.Name):
            return {MESSAGES} if node.name == MESSAGES else self._aliases.get(node.name, set())
        key = self._key(node)
        if key is not None:
            return {key} if key in TRACKED else set()
        if isinstance(node, n.Getitem):  # an element or a slice of a list
            found = self._fields(node.node)
            if isinstance(node.arg, n.Slice):
                return found
            return {CALL} if CALLS in found else set()
        if isinstance(node, n.Filter):
            return self._fields(node.node) if node.name in SAME else set()
        if isinstance(node, n.CondExpr):
            return self._fields(node.expr1) | self._fields(node.expr2)
        if isinstance(node, (n.Or, n.And)):
            return self._fields(node.left) | self._fields(node.right)
        if isinstance(node, n.Call) and isinstance(node.node, n.Getattr) and node.node.attr == "get" and node.args:
            key = node.args[0].value if isinstance(node.args[0], n.Const) else None
            return {key} if key in TRACKED else set()
        return set()

    def _key(self, node: Any) -> str | None:
        """Return the name in ``x.name`` or ``x['name']``, or None for other expressions."""
        if isinstance(node, self._nodes.Getattr):
            return str(node.attr)
        if isinstance(node, self._nodes.Getitem) and isinstance(node.arg, self._nodes.Const):
            return node.arg.value if isinstance(node.arg.value, str) else None
        return None

    def _tested(self, field: str, *names: str) -> bool:
        """Return whether the template applies one of the tests ``names`` to a field."""
        tests = self._tree.find_all(self._nodes.Test)
        return any(test.name in names and field in self._fields(test.node) for test in tests)

    def _looped(self, field: str) -> bool:
        """Return whether the template loops over a field."""
        return any(field in self._fields(loop.iter) for loop in self._tree.find_all(self._nodes.For))

    def _loops_over_parts(self) -> bool:
        """Return whether a loop over content reads the type or the text of each part."""
        n = self._nodes
        for loop in self._tree.find_all(n.For):
            if CONTENT not in self._fields(loop.iter):
                continue
            part = getattr(loop.target, "name", None)
            reads = (node for node in loop.find_all((n.Getattr, n.Getitem)) if self._reads_part(node))
            if any(getattr(node.node, "name", "") == part for node in reads):
                return True
        return False

    def _reads_part(self, node: Any) -> bool:
        """Return whether an expression reads the type or the text of a value."""
        return self._key(node) in ("type", "text")

    def _filtered(self, fields: set[str], names: frozenset[str]) -> bool:
        """Return whether the template applies one of the filters ``names`` to one of the fields."""
        filters = self._tree.find_all(self._nodes.Filter)
        return any(one.name in names and fields & self._fields(one.node) for one in filters)

    def content(self) -> str:
        """Return the form in which the content of a message is read: TEXT, PARTS (a list), or EITHER."""
        if not (self._loops_over_parts() or self._indexes_parts() or self._filtered({CONTENT}, OF_PARTS)):
            return TEXT
        return EITHER if self._tested(CONTENT, "string") else PARTS

    def _indexes_parts(self) -> bool:
        """Return whether the template reads the type or the text of an element of content."""
        n = self._nodes
        for node in self._tree.find_all((n.Getattr, n.Getitem)):
            element = node.node
            if not self._reads_part(node) or not isinstance(element, n.Getitem) or isinstance(element.arg, n.Slice):
                continue
            if CONTENT in self._fields(element.node):
                return True
        return False

    def arguments(self) -> str:
        """Return the form in which the arguments of a tool call are read: MAPPING, TEXT, or EITHER."""
        n = self._nodes
        if self._tested(ARGUMENTS, "string"):
            return EITHER
        whole = self._filtered({ARGUMENTS, CALL, CALLS}, frozenset({"tojson"}))
        methods = [call.node for call in self._tree.find_all(n.Call) if isinstance(call.node, n.Getattr)]
        called = any(
            method.attr in METHODS_OF_MAPPINGS and ARGUMENTS in self._fields(method.node) for method in methods
        )
        parted = self._filtered({ARGUMENTS}, OF_MAPPINGS) or self._looped(ARGUMENTS)
        if whole or called or parted or self._tested(ARGUMENTS, "mapping"):
            return MAPPING
        read = any(ARGUMENTS in self._fields(node) for node in self._tree.find_all((n.Getattr, n.Getitem)))
        return TEXT if read else EITHER

    def roles(self) -> Iterator[str]:
        """Yield the roles that a message's role is compared with."""
        n = self._nodes
        for node in self._tree.find_all(n.Compare):
            sides = [node.expr, *(operand.expr for operand in node.ops)]
            if not any(ROLE in self._fields(side) for side in sides):
                continue
            for side in sides:
                listed = side.items if isinstance(side, (n.List, n.Tuple)) else [side]
                values = [item.value for item in listed if isinstance(item, n.Const)]
                yield from (value for value in values if isinstance(value, str))
