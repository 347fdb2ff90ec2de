"""Names in a body that the engine does not know: a slip is refused, what changes the answer is refused, and what has
no effect is accepted and said so in ``warnings`` of the answer."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from minivllm.core import declared_params
from minivllm.core.interfaces.params import SamplingParams
from minivllm.server.errors import ApiError

from .field_aliases import IDLE, MAPPED

MOST = 32  # warnings of an answer
OF_BEAMS = ("length_penalty", "early_stopping")
NEUTRAL = {
    **{field.name: field.default for field in fields(SamplingParams)},
    **{name: one.param.default for name, one in declared_params.builtin().items()},
}
LOOKED_AT = 8  # unknown names for which a near one is looked for: each takes a millisecond
NEAR = 0.8  # of difflib: max_token is as near to max_tokens, user_data to nothing
# what cannot be left out without a different answer
REFUSED = {
    "functions": "use tools", "function_call": "use tool_choice", "audio": "text only",
    "prompt_embeds": "send text or token ids", "kv_transfer_params": "there is nothing to transfer from",
    "lora_request": "adapters are not served",
    "logprob_token_ids": "use logprobs", "return_prompt_text": "it is what was sent",
    "return_token_offsets": "use return_token_ids", "ec_transfer_params": "there is nothing to transfer from",
    "output_format": "use response_format", "output_config": "use response_format",
    "response_schema": "use response_format",
    **dict.fromkeys(("system", "system_prompt", "instructions", "tool_prompt"), "send a first message of role system"),
    **dict.fromkeys(("input", "inputs", "contents", "text"), "send messages or a prompt"),
    **dict.fromkeys(("input_ids", "input_embeds"), "send text, or token ids as the prompt of /v1/completions"),
    "prompt": "it belongs to /v1/completions; send messages", "messages": "they belong to /v1/chat/completions",
    **dict.fromkeys(
        (
            "images", "image", "image_data", "video", "videos", "video_data", "audios", "audio_data", "multimodal_data",
            "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs", "files", "attachments",
        ),
        "text only",
    ),
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "models with an encoder are not served"),
    **dict.fromkeys(("input_prefix", "input_suffix", "input_extra", "suffix"), "put it into the prompt"),
    "template": "the model's own is used, never a request's",
    **dict.fromkeys(("lora", "lora_path", "adapter_id", "adapter_source"), "adapters are not served"),
    **dict.fromkeys(
        ("context", "previous_response_id", "conversation"), "nothing is kept here; send the whole conversation"
    ),
    "mcp_servers": "tools are the client's to run",
}  # fmt: skip
# passed on to SamplingParams
PASSED = {
    "allowed_token_ids", "bad_words", "prompt_logprobs", "best_of", "beam_width", "use_beam_search", "length_penalty",
    "early_stopping", *declared_params.builtin(),
}  # fmt: skip
# of those, what other servers' clients send without knowing the configuration: without effect where nothing reads it
OPTIONAL = (
    "typical_p", "mirostat_tau", "mirostat_eta", "no_repeat_ngram_size", "encoder_repetition_penalty", "guidance_scale",
    "negative_prompt",
)  # fmt: skip


def check(body: Any, reads: Sequence[str] = ()) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What of a body's further fields is for SamplingParams, and the warnings.  ``reads``: parameters that a processor,
    the sampler or a strategy of this engine reads; those of other packages come in ``extra``.  ApiError (400) for what
    is refused."""
    peers = getattr(body, "_peers", None)
    own: dict[str, Any] = {}
    passed, warnings = {}, [*(peers.warnings if peers is not None else ())]
    looked_at = 0
    for name, value in (body.model_extra or {}).items():
        if name in PASSED:
            passed[name] = value
        elif name in REFUSED:
            if not _is_nothing(value):
                raise ApiError(400, f"{name} is not supported: {REFUSED[name]}", name)
        elif name in reads and name not in NEUTRAL:
            if value is not None:
                own[name] = value
        elif name in IDLE:
            if value is not None:
                warnings.append({"field": name, "message": f"{name} has no effect here"})
        else:
            looked_at += 1
            near = _near(name, type(body), looked_at <= LOOKED_AT)
            if near:
                raise ApiError(400, f"unknown field {name[:64]!r}. Did you mean {near[0]!r}?", name[:64])
            warnings.append({"field": name[:64], "message": "unknown field; it has no effect here"})
    passed = {name: value for name, value in passed.items() if value is not None}
    if peers is not None:
        _drop(passed, warnings, reads, peers.sent)
    return {**passed, **({"extra": own} if own else {})}, warnings[:MOST]


@cache
def _known(model: type[Any]) -> tuple[list[str], dict[str, str]]:
    """Names that a slip may have meant, those without effect not among them, and each by its letters alone."""
    names = [*model.model_fields, *REFUSED, *PASSED]
    return names, {_plain(one): one for one in (*MAPPED, *names)}


def _near(name: str, model: type[Any], closely: bool) -> list[str]:
    """The known name that is meant, if any.  ``closely``: look for one that is spelt nearly so as well."""
    names, plain = _known(model)  # type: ignore[arg-type]  # mypy takes type[Any] for unhashable
    if (found := plain.get(_plain(name))) is not None:
        return [found]
    return difflib.get_close_matches(name[:64], names, n=1, cutoff=NEAR) if closely else []


def _is_nothing(value: Any) -> bool:
    """Whether a value asks for nothing; token ids may be an array."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _plain(name: str) -> str:
    """As ``topK`` and ``top-k`` are written too."""
    return name[:64].replace("_", "").replace("-", "").lower()


def misplaced(values: Mapping[str, Any], model: Any) -> None:
    """ApiError (400) that names what came where a field is missing that the body must have."""
    for name, field in model.model_fields.items():
        if not field.is_required() or name in values:
            continue
        for other in (other for other in REFUSED if other not in model.model_fields):
            if not _is_nothing(values.get(other)):
                raise ApiError(400, f"{name} is missing, and {other} is not supported: {REFUSED[other]}", name)


def _drop(
    passed: dict[str, Any], warnings: list[dict[str, str]], reads: Sequence[str], sent: Mapping[str, str]
) -> None:
    """Leave out, with a warning, what clients send by habit and nothing here reads."""
    for name in [name for name in OPTIONAL if name in passed and name not in reads]:
        if passed.pop(name) != NEUTRAL.get(name):
            why = f"no sampler, processor or strategy of this server reads {name}"
            for shown in dict.fromkeys((sent.get(name, name), name)):
                warnings.append({"field": shown, "message": f"{shown} has no effect here: {why}"})
    if passed.get("beam_width") is None and passed.get("use_beam_search") in (None, False):
        for name in [name for name in OF_BEAMS if name in passed]:
            if passed.pop(name) not in (NEUTRAL[name], None):
                why = "it is of beam search, which beam_width asks for"
                warnings.append({"field": name, "message": f"{name} has no effect here: {why}"})
