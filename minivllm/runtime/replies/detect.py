"""The format of a model's replies, detected in the texts that its chat template prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# name of a parser -> texts that must all be printed; the first row that fits is chosen
SIGNS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("gemma", ("<|tool_call>",)),
    ("deepseek_r1", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("glm4", ("<arg_key>",)),
    ("qwen3_coder", ("<function=",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("mistral", ("[THINK]",)),
    ("qwen3", ("<tool_call>", "</think>")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("pythonic", ("[func_name1(",)),
    ("qwen3", ("</think>",)),
)
FALLBACK = "hermes"


def detect(written: Iterable[str], response: str = "") -> tuple[str, str]:
    """Return the name of the parser for a model, and the reason as a sentence.

    ``written`` has the texts that the chat template prints.  ``response`` is the ``response_template`` or the
    ``response_schema`` of the tokenizer, as JSON text, which is read first; "" means that there is none."""
    sources = [
        ("the tokenizer's response template has", response.replace("\\", "")),
        ("the chat template prints", "\n".join(written)),
    ]
    for source, text in sources:
        for name, signs in SIGNS:
            if text and all(sign in text for sign in signs):
                return name, f"{source} {' and '.join(signs)}"
    return FALLBACK, "neither the chat template nor the tokenizer has the tags of a known format"
