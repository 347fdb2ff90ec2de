"""Chat templates: their compilation, and the option ``chat_template``, which replaces the model's own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError, RequestError, brief, shown

from .template_facts import facts_of

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_REFUSAL = 400  # largest number of characters of a template's error message


def is_template(text: str) -> bool:
    """Return whether a ``chat_template`` is the text of a template, not the name of a file."""
    return "{{" in text or "{%" in text


def is_name(given: str, folder: str | os.PathLike[str] = "") -> bool:
    """Return whether a ``chat_template`` may be the name of a model's template: a word, but not a file in a folder."""
    return NAME.fullmatch(given) is not None and not os.path.exists(os.path.join(folder, given))


def read_template(given: str) -> str:
    """Return the text of a template, given as text or as the name of a file.  ConfigError if it is not a template."""
    text, name = given, "chat_template"
    if not is_template(given):
        text, name = files.read_text(given), f"chat_template={shown(given)}"
    if not is_template(text):
        raise ConfigError(f"{name}: expected a Jinja template; there is no {{{{ }}}} and no {{% %}} in it")
    try:
        compile_template(text)
    except Exception as exc:  # errors of jinja2 and of its extensions
        line = getattr(exc, "lineno", None)
        at = f" in line {line}" if line else ""
        raise ConfigError(f"{name}: expected a Jinja template: {str(exc)[:200]}{at}") from exc
    return text


def chosen_template(own: Mapping[str, str], given: str | None) -> dict[str, str]:
    """Return the templates to use, by name: the model's ``own``, or the template of the option ``chat_template``.

    ``given`` is the option: a name, a file, the text of a template, or None.  ConfigError if it is not a template."""
    if given is None:
        return dict(own)
    if given in own:
        return {"default": own[given]}
    try:
        return {"default": read_template(given)}
    except ConfigError as exc:
        if is_template(given) or not own:
            raise
        raise ConfigError(f"{exc}; the model's own templates are {', '.join(sorted(own))}") from exc


MOST_SOURCE = 1 << 20  # largest number of characters of a template; published templates have some ten thousand at most


def compile_template(source: str) -> Any:
    """Compile a chat template with the conventions of transformers, and return a jinja2 template that runs in a
    sandbox.

    ``template_limits.time_limit`` bounds its time.  ConfigError if the source is too long, and jinja2's errors if it is
    malformed.
    """
    import jinja2
    from jinja2.ext import Extension

    from .template_limits import BoundedEnvironment

    class GenerationTag(Extension):
        """The tag ``{% generation %} ... {% endgeneration %}``, which marks text for training.  The text is printed."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # jinja2's own filter ``tojson`` would escape HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    if len(source) > MOST_SOURCE:
        raise ConfigError(f"a chat template of {len(source)} characters; expected at most {MOST_SOURCE}")
    env = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.bound_filters()
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return env.from_string(source)


class ChatTemplate:
    """A compiled chat template and the facts about it.  RequestError if it is broken."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._template = compile_template(source)
            self.facts = facts_of(self._template.environment, source)
        except MemoryError:
            raise
        except Exception as e:  # errors of jinja2 and of its extensions, or a RecursionError
            text = str(e) or type(e).__name__
            raise RequestError(f"the chat template is broken: {brief(text, 300)}", "messages") from e

    def render(self, scope: Mapping[str, Any]) -> str:
        """Return the text of the filled template.

        UndefinedFieldError if it reads a field that a message does not have.  RequestError if it refuses the messages,
        or takes too much time or memory."""
        from jinja2 import UndefinedError

        from .template_limits import time_limit

        try:
            with time_limit():
                return str(self._template.render(scope))
        except (RequestError, MemoryError):
            raise
        except UndefinedError as e:
            raise UndefinedFieldError(_refusal(e), "messages") from e
        except Exception as e:  # a template is a program, so it may raise any error
            raise RequestError(_refusal(e), "messages") from e


class UndefinedFieldError(RequestError):
    """Error of a chat template that reads a field which a message does not have."""


def _refusal(error: BaseException) -> str:
    """Return the message of an error that a template has raised."""
    text = (str(error) or type(error).__name__).replace("minivllm.runtime.text.literal._Keyed object", "dict object")
    return f"the chat template refuses the messages: {brief(text, MOST_REFUSAL)}"
