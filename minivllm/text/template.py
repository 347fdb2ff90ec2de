"""Chat templates: compiled, and read where one is given in place of the model's own (the option ``chat_template``)."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError, shown


def is_template(text: str) -> bool:
    """Whether a ``chat_template`` is the template itself rather than the name of a file."""
    return "{{" in text or "{%" in text


def read_template(given: str) -> str:
    """The text of a template that is given as a file's name or as itself.  ConfigError if it is none."""
    text, name = given, "chat_template"
    if not is_template(given):
        text, name = files.read_text(given), f"chat_template={shown(given)}"
    if not is_template(text):
        raise ConfigError(f"{name}: want a Jinja template; there is no {{{{ }}}} and no {{% %}} in it")
    try:
        compile_template(text)
    except Exception as exc:  # jinja2's own, and what its extensions raise
        line = getattr(exc, "lineno", None)
        at = f" in line {line}" if line else ""
        raise ConfigError(f"{name}: want a Jinja template: {str(exc)[:200]}{at}") from exc
    return text


def compile_template(source: str) -> Any:
    """A jinja2 template with the conventions of transformers' chat templates, in a sandbox."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """``{% generation %} ... {% endgeneration %}`` marks the assistant's text for training; here it is text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # jinja's own escapes HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    extensions = [GenerationTag, "jinja2.ext.loopcontrols"]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return env.from_string(source)
