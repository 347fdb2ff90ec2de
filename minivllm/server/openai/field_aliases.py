"""Fields that other servers and their clients know: each is mapped to ours where it means the same, or has no effect,
which the answer says.  ``MAPPED`` and ``IDLE`` are all that is known of them; docs/server.md shows them as a table.

``translate`` works on a body as it came, before its types are checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.interfaces.structured import FORMS
from minivllm.server.errors import ApiError

FORM = "structured_outputs"
ENDLESS = (-1, -2)  # of n_predict and num_predict: until the context is full
TAU = 5.0  # llama.cpp's, in bits as ours
NESTED = ("options", "parameters", "sampling_params")  # objects of such fields, of Ollama, TGI and SGLang
TOGETHER = {"max_tokens": "max_completion_tokens"}  # fields that mean the same here


@dataclass(frozen=True)
class Mapped:
    """``to``: our field; ``says``: what is to be known of it.  ``read`` makes its value, or None where nothing is asked
    for, as ``neutral`` values ask for nothing; ValueError(what is wanted) for one that means nothing."""

    to: str
    says: str = ""
    neutral: tuple[Any, ...] = ()
    read: Callable[[Any], Any] = lambda value: value


def _greedy(value: Any) -> float | None:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return None if value else 0.0


def _form(key: str) -> Callable[[Any], Any]:
    return lambda value: {key: value}


def _grammar(value: Any) -> dict[str, Any]:
    """A text in GBNF or Lark, or TGI's {"type", "value"}."""
    if not isinstance(value, dict):
        return {"grammar": value}
    kind, inner = value.get("type"), value.get("value")
    if kind == "json_schema" and isinstance(inner, dict):
        kind, inner = "json", inner.get("schema", inner)
    if kind not in ("json", "regex") or inner is None:
        raise ValueError('a grammar as text, or {"type": "json" or "regex", "value": ...}')
    return {kind: inner}


def _format(value: Any) -> dict[str, Any]:
    if value == "json":
        return {"json_object": True}
    if not isinstance(value, dict):
        raise ValueError('"json" or a JSON schema')
    return {"json": value}


def _kept(value: Any) -> Any:
    """How many tokens of a prompt are kept; Ollama's true: as many as fit."""
    return (-1 if value else None) if isinstance(value, bool) else value


def _truncation(value: Any) -> int:
    if value != "auto":
        raise ValueError('"auto" or "disabled"')
    return -1


MAPPED: dict[str, Mapped] = {
    **dict.fromkeys(("max_new_tokens", "max_output_tokens", "max_tokens_to_sample"), Mapped("max_tokens")),
    **dict.fromkeys(("n_predict", "num_predict"), Mapped("max_tokens", "-1 and -2: the rest of the context")),
    "max_completion_tokens": Mapped("max_tokens", "of a chat it is a field of its own"),
    "min_new_tokens": Mapped("min_tokens", neutral=(0,)),
    **dict.fromkeys(
        ("repeat_penalty", "rep_pen"), Mapped("repetition_penalty", "1 is neutral; of the whole text", neutral=(1,))
    ),
    **dict.fromkeys(
        ("stop_sequences", "stop_sequence", "stop_strings", "stop_words"), Mapped("stop", neutral=([], ""))
    ),
    "random_seed": Mapped("seed"),
    "sampler_seed": Mapped("seed", "-1: any", neutral=(-1,)),
    "num_return_sequences": Mapped("n"),
    "num_beams": Mapped("beam_width", "1 is neutral", neutral=(1,)),
    "bad_words_ids": Mapped("bad_words", neutral=([],)),
    "do_sample": Mapped("temperature", "false: 0, whatever the temperature; true is neutral", read=_greedy),
    "typical": Mapped("typical_p", "1 is neutral", neutral=(1, 0)),
    **dict.fromkeys(
        ("mirostat", "mirostat_mode"),
        Mapped("mirostat_tau", f"2, with {TAU:g} if that is not given; 0 is neutral, 1 has no effect"),
    ),
    "truncate": Mapped("truncate_prompt_tokens", "true: what fits", read=_kept),
    "truncation": Mapped(
        "truncate_prompt_tokens", '"auto": what fits; "disabled" is neutral', neutral=("disabled",), read=_truncation
    ),
    "no_stop_trim": Mapped("include_stop_str_in_output", neutral=(False,)),
    "return_full_text": Mapped("echo", "of a completion; in a chat it has no effect", neutral=(False,)),
    **{f"guided_{key}": Mapped(FORM, f"`{key}`", read=_form(key)) for key in ("json", "regex", "choice", "grammar")},
    "guided_json_object": Mapped(FORM, "`json_object`", neutral=(False,), read=_form("json_object")),
    "guided_whitespace_pattern": Mapped(FORM, "`whitespace_pattern`", read=_form("whitespace_pattern")),
    "json_schema": Mapped(FORM, "`json`", neutral=("",), read=_form("json")),
    "regex": Mapped(FORM, "`regex`", neutral=("",), read=_form("regex")),
    "ebnf": Mapped(FORM, "`grammar`", neutral=("",), read=_form("grammar")),
    **dict.fromkeys(
        ("grammar", "grammar_string"),
        Mapped(FORM, "`grammar`, in GBNF or Lark; TGI's objects are `json` and `regex`", neutral=("",), read=_grammar),
    ),
    "format": Mapped(FORM, '`json_object` for "json", else `json`', neutral=("",), read=_format),
}


def _idle(why: str, *names: str) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Names, and values that ask for nothing as JSON: ``name``, ``name=0``, ``name=0|1``."""
    found = {}
    for word in " ".join(names).split():
        name, _, values = word.partition("=")
        found[name] = (why, tuple(json.loads(value) for value in values.split("|")) if values else ())
    return found


# name -> (why it has no effect, the values that ask for nothing)
IDLE: dict[str, tuple[str, tuple[Any, ...]]] = {
    **_idle(
        "no sampler here reads it",
        "top_a=0 tfs_z=1 tfs=1 top_n_sigma=-1|0 nsigma=0 top_h=0 epsilon_cutoff=0 eta_cutoff=0 min_keep=0|1",
        "xtc_probability=0 xtc_threshold smoothing_factor=0 smoothing_curve dynatemp_range=0 dynatemp_exponent",
        "dynamic_temperature=false dynatemp_low dynatemp_high temperature_last samplers sampler_order sampler_priority",
        "penalty_alpha=0 watermark=false watermarking=false temp_exponent adaptive_target=-1 adaptive_decay min_temp",
        "max_temp xtc_special_tokens token_healing=false",
    ),
    **_idle(
        "no penalty here reads it, and penalties are of the whole text",
        "dry_multiplier=0 dry_base dry_allowed_length dry_penalty_last_n dry_range dry_sequence_breakers",
        "repeat_last_n=-1 repetition_penalty_range=0 rep_pen_range rep_pen_slope penalize_nl=false",
        'penalize_newline=false penalty_prompt="" exponential_decay_length_penalty',
        "diversity_penalty=0 num_beam_groups=1 repetition_detection",
        "repetition_decay penalty_range=-1",
    ),
    **_idle(
        "servers differ in whether it counts the prompt; use min_tokens and max_tokens",
        "min_length=0 max_length",
    ),
    **_idle(
        "functions do not come over HTTP; use structured_outputs or logit_bias",
        "prefix_allowed_tokens_fn logits_processor logits_processors custom_logit_processor stopping_criteria",
        "stop_regex",
    ),
    **_idle(
        "the model's own tokens are used; stop_token_ids and bad_words add others",
        "eos_token_id pad_token_id bos_token_id end_id pad_id forced_bos_token_id forced_eos_token_id suppress_tokens",
        "begin_suppress_tokens custom_token_bans ban_eos_token=false add_bos_token=true",
    ),
    **_idle(
        "it belongs to the server's configuration",
        "num_ctx num_keep num_batch num_gpu main_gpu num_thread use_mmap use_mlock low_vram f16_kv numa vocab_only",
        "keep_alive cache_prompt=true n_keep=0 n_discard n_cache_reuse use_cache=true id_slot=-1 slot_id=-1",
        "t_max_predict_ms t_max_prompt_ms truncation_length guided_decoding_backend request_id session_id rid",
        'stream_interval mode="instruct" parse_tool_calls=true tool_call_parser',
    ),
    **_idle(
        "answers have the form of OpenAI's; see logprobs, return_token_ids, stream_options",
        "details=false decoder_input_details=false top_n_tokens n_probs=0 return_tokens return_progress",
        "timings_per_token post_sampling_probs response_fields output_scores return_dict_in_generate",
        "return_likelihoods return_hidden_states=false return_routed_experts=false usage trim_stop",
        "spaces_between_special_tokens",
    ),
    **_idle(
        "what a chat template knows of reasoning goes into chat_template_kwargs",
        "reasoning_effort reasoning reasoning_format reasoning_budget include_reasoning separate_reasoning",
        "stream_reasoning thinking think enable_thinking thinking_budget thinking_token_budget verbosity",
    ),
    **_idle(
        "it belongs to another service",
        "user metadata store service_tier prompt_cache_key prompt_cache_options prompt_cache_retention",
        'safety_identifier moderation prediction web_search_options modalities=["text"] provider transforms models',
        "route plugins safe_prompt enable_search=false search_options search_parameters background=false include",
        "max_tool_calls",
    ),
}


@dataclass
class Translated:
    """``values``: the body with our names; ``sent``: our field -> the name under which it came; ``endless``: as many
    tokens as the context has room for."""

    values: dict[str, Any]
    warnings: list[dict[str, str]] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)
    endless: bool = False

    def ignore(self, name: str, why: str) -> None:
        self.warnings.append({"field": name, "message": f"{name} has no effect here: {why}"})

    def set(self, name: str, to: str, value: Any, given: Any) -> None:
        """ApiError (400) where the field was given another value."""
        for other in (to, TOGETHER.get(to, "")):
            there = self.values.get(other)
            if there is not None and value not in (there, [there]) and there != [value]:
                before = self.sent.get(other, other)
                raise ApiError(400, f"{name}={_shown(given)} and {before}={_shown(there)} contradict each other", name)
        if value is not None:
            self.values[to] = value
        self.sent.setdefault(to, name)


def translate(values: Mapping[str, Any], own: Collection[str]) -> Translated:
    """A body in our names.  ``own``: the fields of its route, and what plug-ins declare.  ApiError (400) for values
    that mean nothing, or that contradict each other; the message names the fields as they came."""
    made = Translated(dict(values))
    _flatten(made, own)
    for name in [name for name in made.values if name in IDLE and name not in own]:
        why, neutral = IDLE[name]
        value = made.values.pop(name)
        if value is not None and not _is_one_of(value, neutral):
            made.ignore(name, why)
    for name in [name for name in made.values if name in MAPPED and name not in own]:
        value, peer = made.values.pop(name), MAPPED[name]
        if value is None or _is_one_of(value, peer.neutral):
            continue
        if peer.to == "max_tokens" and value in ENDLESS and name in ("n_predict", "num_predict"):
            made.endless = True
            made.set(name, "max_tokens", None, value)
        elif peer.to == "mirostat_tau":
            _mirostat(made, name, value)
        elif peer.to == "echo" and "prompt" not in own:
            made.ignore(name, "the answer of a chat is a message of its own")
        elif name == "do_sample" and value is False:
            _draw_nothing(made)
        elif peer.to == FORM:
            _merge_form(made, name, _read(name, peer, value))
        elif (meant := _read(name, peer, value)) is not None:
            made.set(name, peer.to, meant, value)
        elif name == "do_sample" and made.values.get("temperature") == 0:
            raise ApiError(400, f"{name}=true and temperature=0 contradict each other", name)
    form = made.values.get(FORM) if made.sent.get(FORM) else None
    if form and "whitespace_pattern" in form and form.keys().isdisjoint(("json", "json_object")):
        made.values[FORM] = {key: value for key, value in form.items() if key != "whitespace_pattern"} or None
        made.ignore("guided_whitespace_pattern", "it is of JSON, which nothing asks for")
    return made


def _draw_nothing(made: Translated) -> None:
    """As in transformers, where what shapes a draw is not looked at without one."""
    if made.values.get("temperature"):
        made.ignore(made.sent.get("temperature", "temperature"), "do_sample=false asks for the likeliest token")
    made.values["temperature"] = 0.0
    made.sent.setdefault("temperature", "do_sample")


def _flatten(made: Translated, own: Collection[str]) -> None:
    """Fields of objects such as Ollama's ``options`` are as good as those beside them."""
    for outer in NESTED:
        inner = made.values.get(outer)
        if outer in own or inner is None:
            continue
        if not isinstance(inner, dict):
            raise ApiError(400, f"{outer}: want an object of names and values", outer)
        del made.values[outer]
        for name, value in inner.items():
            if name in own or name in MAPPED or name in IDLE:
                before = made.values.get(name)
                if before is not None and value is not None and before != value:
                    what = f"{outer}.{name}={_shown(value)} and {name}={_shown(before)} contradict each other"
                    raise ApiError(400, what, name)
                made.values[name] = value if before is None else before
            elif len(made.warnings) < 32:
                made.ignore(f"{outer}.{str(name)[:64]}", "it is not known")


def _mirostat(made: Translated, name: str, version: Any) -> None:
    """llama.cpp's 0 (off), 1 and 2, of which ours is 2; its tau is in bits too."""
    if version == 2 and not isinstance(version, bool):
        if made.values.get("mirostat_tau") is None:
            made.values["mirostat_tau"] = TAU
        made.sent["mirostat_tau"] = name
        return
    for other in ("mirostat_tau", "mirostat_eta"):
        made.values.pop(other, None)
    if version == 1:
        made.ignore(name, "version 1 is not offered, 2 is")
    elif version != 0:
        raise ApiError(400, f"{name}={_shown(version)}: want 0, 1 or 2", name)


def _merge_form(made: Translated, name: str, part: dict[str, Any]) -> None:
    """One form is made of several fields, such as guided_json and guided_whitespace_pattern."""
    form = made.values.get(FORM)
    if form is not None and made.sent.get(FORM) is None:
        raise ApiError(400, f"{name} and {FORM} contradict each other: want one of them", name)
    both = {**(form or {}), **part}
    # two forms of a text, or two values of one field of a form
    if form is not None and (
        len(both.keys() & set(FORMS)) > 1 or any(form.get(key, both[key]) != both[key] for key in part)
    ):
        raise ApiError(400, f"{name} and {made.sent[FORM]} contradict each other: want one of them", name)
    made.values[FORM] = both
    made.sent.setdefault(FORM, name)


def _read(name: str, peer: Mapped, value: Any) -> Any:
    try:
        return peer.read(value)
    except ValueError as e:
        raise ApiError(400, f"{name}={_shown(value)}: want {e}", name) from None


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """0 is 0.0, and no False."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _shown(value: Any) -> str:
    """A value in a message, short: as JSON where it is no list or object."""
    if isinstance(value, str):
        return repr(value[:40])
    return json.dumps(value)[:40] if isinstance(value, (int, float)) else {dict: "{...}"}.get(type(value), "[...]")


def table() -> list[str]:
    """The lines of the table in docs/server.md: fields that are mapped, then those without effect."""
    groups: dict[str, list[str]] = {}
    for name, peer in MAPPED.items():
        groups.setdefault(f"`{peer.to}`{': ' if peer.says else ''}{peer.says}", []).append(name)
    for name, (why, _) in IDLE.items():
        groups.setdefault(f"no effect: {why}", []).append(name)
    return [f"| {', '.join(f'`{name}`' for name in names)} | {what} |" for what, names in groups.items()]
