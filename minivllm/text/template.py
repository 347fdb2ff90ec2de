"""A chat template that is given in place of the model's own: the option ``chat_template``."""

from __future__ import annotations

from minivllm import files
from minivllm.config import is_template
from minivllm.errors import ConfigError, shown


def read_template(given: str) -> str:
    """The text of a template that is given as a file's name or as itself.  ConfigError if it is none."""
    from .tokenizer import compile_template

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
