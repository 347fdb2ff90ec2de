"""Conversion of a conversation to the text of a prompt, by a chat template.

    check    messages of the caller    ->  mappings without nulls
    select   name or text, and tools   ->  a chat template
    fit      checked messages          ->  messages in the form that this template reads
    fill     template and messages     ->  text of the prompt

If the prompt continues the last message, a mark (a text that occurs nowhere else) is appended to this message.  The
prompt is then the filled text up to the mark.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import RequestError, shown

from . import messages as plain
from .messages import GOES_ON
from .template import ChatTemplate, UndefinedFieldError, is_template

log = logging.getLogger("minivllm")
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates, as in transformers
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
KEPT = 8  # largest number of compiled templates of callers in the cache


@dataclass(frozen=True)
class Filling:
    """A template and its input.  ``values`` are the messages, tools, documents, and variables by name.

    ``begins_answer`` is the template's variable ``add_generation_prompt``.  If the prompt continues the last message,
    ``mark`` is the text appended to this message, and the prompt is the filled text before it.  "" means that the
    prompt is the whole text."""

    template: ChatTemplate
    values: tuple[Any, Any, Any, dict[str, Any]]
    begins_answer: bool
    mark: str = ""


class ChatTemplates:
    """The chat templates of a model by name.  The name of a single template is ``default``."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._compiled: dict[str, ChatTemplate] = {}
        self._noted: set[str] = set()

    def select(self, name: str | None, tools: Any, documents: Any = None) -> ChatTemplate:
        """Return the template with a name, or the template whose Jinja text is ``name``.

        None means the template ``tool_use`` if there are tools and the model has this template, else ``default``.
        RequestError for an unknown name, and for documents if the template does not support them."""
        names = ", ".join(sorted(self.sources))
        if name is None:
            name = TOOL_USE if tools and TOOL_USE in self.sources else DEFAULT
            if not self.sources:
                raise RequestError("this model has no chat template: send a prompt instead of messages", "messages")
            if name not in self.sources:
                text = f"this model has several chat templates ({names}) and none is the default"
                raise RequestError(f"{text}: name one with chat_template", "chat_template")
        source = self.sources.get(name)
        if source is None and is_template(name):
            source = name
        if source is None:
            expected = f"{names}, or a Jinja template" if self.sources else "a Jinja template"
            raise RequestError(f"chat_template={shown(name)}: expected {expected}", "chat_template")
        found = self._compiled.get(source)
        if found is None:
            if len(self._compiled) >= len(self.sources) + KEPT:
                self._compiled.clear()
            found = self._compiled[source] = ChatTemplate(source)
        if documents and "documents" not in found.facts.variables:
            raise RequestError(self._no_documents(), "documents")
        return found

    def written(self) -> list[str]:
        """Return the literal texts in the model's templates, any of which a prompt may contain.

        They are the text outside of Jinja's tags, and the string constants inside.  A template with an error is
        returned whole."""
        found: list[str] = []
        for name, source in self.sources.items():
            try:
                found += self.select(name, None).facts.written
            except RequestError:  # a broken template; a chat that uses it reports the error
                found.append(source)
        return found

    def _no_documents(self) -> str:
        """Return the error about documents for a template that does not support them."""
        reading = [name for name, source in self.sources.items() if "documents" in source]
        hint = f"name one that has, with chat_template: {', '.join(reading)}" if reading else "put them into a message"
        return f"documents: the chat template has no place for them; {hint}"

    @plain.depth_checked()
    def prepare(
        self,
        messages: Any,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        tools: Any,
        documents: Any,
        chat_template: str | None,
        variables: Mapping[str, Any] | None,
    ) -> Filling:
        """Return the input of the template for a request.  RequestError names the wrong field."""
        chat = plain.check_messages(messages)
        tools, documents = plain.check_tools(tools), plain.check_documents(documents)
        extra = _checked(variables)
        template = self.select(_name(chat_template), tools, documents)
        facts = template.facts
        if not facts.reads_calls:
            chat = plain.calls_as_text(chat)
        chat = plain.fit(chat, facts)
        mark = ""
        # The list of tools may add a message, which would change the places of messages in errors, so the messages are
        # checked before.
        if tools and "tools" not in facts.variables:
            self._note_template(template)
            chat, tools = plain.tools_as_text(chat, tools, facts.content), None
        if continue_final_message:
            if add_generation_prompt:
                text = f"{GOES_ON} and add_generation_prompt contradict each other: use only one of them"
                raise RequestError(text, GOES_ON)
            chat, mark = plain.marked(chat, [tools, documents, extra])
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        return Filling(template, (chat, tools, documents, extra), begins, mark)

    def _note_template(self, template: ChatTemplate) -> None:
        """Log once that a template does not support tools."""
        if template.source not in self._noted:
            self._noted.add(template.source)
            log.warning("the chat template has no place for tools; they are described in the system message")


def fill(filling: Filling, special_tokens: Mapping[str, str], run: Callable[[Callable[[Any], str], Any], Any]) -> Any:
    """Return ``run(render, values)``, where ``render`` fills the template with the values or with marked copies.

    If a template reads the content of a message without content, it is filled again with empty text as content."""
    chat, tools, documents, extra = filling.values

    def render(values: Any) -> str:
        chat, tools, documents, set_to = values
        scope = {**special_tokens, **dict(zip(extra, set_to, strict=True))}
        scope |= {"tools": tools, "documents": documents, "messages": chat}
        return filling.template.render({**scope, "add_generation_prompt": filling.begins_answer})

    def attempt(chat: Any) -> Any:
        return run(render, (chat, tools, documents, list(extra.values())))

    with plain.depth_checked():
        try:
            return attempt(chat)
        except UndefinedFieldError:
            filled = plain.with_content(chat)
            if filled is None:
                raise
            return attempt(filled)


def _name(chat_template: Any) -> str | None:
    """Return the ``chat_template`` of a request, None if it has none.  RequestError if it is not text."""
    if chat_template is not None and not isinstance(chat_template, str):
        text = f"chat_template={shown(chat_template)}: expected a name or a Jinja template"
        raise RequestError(text, "chat_template")
    return chat_template


def _checked(variables: Any) -> dict[str, Any]:
    """Return the variables of a template.  RequestError for names that a caller cannot set."""
    if variables is not None and not isinstance(variables, Mapping):
        raise RequestError(f"chat_template_kwargs={shown(variables)}: expected a mapping", "chat_template_kwargs")
    extra = dict(variables or {})
    for name in RESERVED:
        if name in extra:
            raise RequestError(f"chat template variable {shown(name)} is set by the engine", "chat_template_kwargs")
    for name in extra:
        if not isinstance(name, str):
            raise RequestError(f"chat template variable {shown(name)}: expected a name", "chat_template_kwargs")
    return extra
