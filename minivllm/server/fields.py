"""Names in a body that the engine does not know: a slip is refused, what changes the answer is refused, and what has
no effect is accepted and said so in ``warnings`` of the answer."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from minivllm.core.request import SamplingParams

from .errors import ApiError

NEAR = 0.8  # of difflib: max_token is as near to max_tokens, user_data to nothing
# of OpenAI's, without effect here
IDLE = {
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "verbosity", "reasoning_effort", "modalities", "prediction", "moderation",
    "web_search_options",
}  # fmt: skip
# of vLLM's, without effect here
IDLE_VLLM = {"request_id", "session_id", "stream_interval", "include_reasoning", "spaces_between_special_tokens"}
# what cannot be left out without a different answer
REFUSED = {
    "functions": "use tools", "function_call": "use tool_choice", "audio": "text only",
    "prompt_embeds": "send text or token ids", "chat_template": "the model's own is used, never a request's",
    "truncate_prompt_tokens": "shorten the prompt", "continue_final_message": "use /v1/completions",
    "documents": "put them into a message", "kv_transfer_params": "there is nothing to transfer from",
    "lora_request": "adapters are not served", "guided_json": 'use structured_outputs={"json": ...}',
    "guided_regex": 'use structured_outputs={"regex": ...}', "guided_choice": 'use structured_outputs={"choice": ...}',
    "guided_grammar": 'use structured_outputs={"grammar": ...}', "thinking_token_budget": "leave it out",
    "logprob_token_ids": "use logprobs", "echo": "use /v1/completions", "return_prompt_text": "it is what was sent",
    "return_token_offsets": "use return_token_ids", "truncation_side": "shorten the prompt",
}  # fmt: skip
# passed on where SamplingParams has them
PASSED = {
    "allowed_token_ids", "bad_words", "prompt_logprobs", "best_of", "beam_width", "use_beam_search", "length_penalty",
    "early_stopping", "repetition_detection", "no_repeat_ngram_size", "temperature_schedule", "typical_p",
    "mirostat_tau", "mirostat_eta",
}  # fmt: skip


def check(body: Any) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What of a body's further fields is for SamplingParams, and the warnings.  ApiError (400) for what is refused."""
    known = {"use_beam_search", *(field.name for field in fields(SamplingParams))}
    own = set(type(body).model_fields)
    names = [*own, *IDLE, *IDLE_VLLM, *REFUSED, *PASSED]
    passed, warnings = {}, []
    for name, value in (body.model_extra or {}).items():
        if name in PASSED and name in known:
            passed[name] = value
        elif name in PASSED or name in REFUSED:
            if value not in (None, False, [], {}, 1.0 if name == "length_penalty" else None):
                raise ApiError(400, f"{name} is not supported: {REFUSED.get(name, 'leave it out')}", name)
        elif name in IDLE or name in IDLE_VLLM:
            if value is not None:
                warnings.append({"field": name, "message": f"{name} has no effect here"})
        else:
            near = difflib.get_close_matches(name[:64], names, n=1, cutoff=NEAR)
            if near:
                raise ApiError(400, f"unknown field {name[:64]!r}. Did you mean {near[0]!r}?", name[:64])
            warnings.append({"field": name[:64], "message": "unknown field; it has no effect here"})
    return {name: value for name, value in passed.items() if value is not None}, warnings[:32]
