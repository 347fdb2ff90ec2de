"""The one table of the fields of request bodies.

A row (``BodyField``) describes how the server treats one name: the routes that declare the field and its type, the
parameter of ``SamplingParams`` that receives the value, the field that an alias stands for, or the reason why the value
is refused or has no effect.  The models of bodies (``bodies.py``), the reader of further fields (``fields.py``),
``make_params`` and the aliases in docs/api.md are all made from these rows.

To serve another protocol, add a route name and a block of ``DECLARED_FIELDS`` for it.  On a route that declares a name,
the declaration takes precedence over every other row of that name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from minivllm.core import declared_params

from . import JsonObject

CHAT, COMPLETION, TOKENIZE, DETOKENIZE = "chat", "completion", "tokenize", "detokenize"  # routes
TEMPLATE = "apply template"
CREATE, COUNT = "create message", "count tokens"  # routes of Anthropic's API
RESPONSES = "responses"
OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_MODEL = "ollama_chat", "ollama_generate", "ollama_model"
OLLAMA_EMBED, OLLAMA_PROMPT_EMBED = "ollama_embed", "ollama_embeddings"
EMBED, RERANK, SCORE = "embed", "rerank", "score"
LOAD_ADAPTER, UNLOAD_ADAPTER = "load adapter", "unload adapter"
PREFIX, PREFIX_FILE = "prefix", "prefix_file"
PAUSE, SLEEP, WEIGHTS = "pause", "sleep", "weights"
DECLARED, PARAMETER, ALIAS, REFUSED, IGNORED = "declared", "parameter", "alias", "refused", "ignored"  # treatments
FORM = "structured_outputs"
TAU = 5.0  # default of mirostat_tau in llama.cpp, in bits as in this server


@dataclass(frozen=True)
class BodyField:
    """The treatment of one name in request bodies.

    ``use`` is DECLARED (the bodies of ``routes`` have the field, with the annotation ``type``), PARAMETER (every body
    may have it, and ``SamplingParams`` receives it), ALIAS (another server's name), REFUSED or IGNORED.
    ``text`` is, in this order of uses: the description in the OpenAPI document, "", a remark for the documentation, the
    advice in the error message, the reason in the warning.
    ``to`` names the parameter or field that receives the value.  "" means that the code of the route reads it.
    ``neutral`` lists values that request nothing, so the server neither uses them nor warns of them.
    ``convert`` makes the value of ``to`` from an alias's value.  It returns None if the value requests nothing, and
    raises ValueError(expected values) for a value without meaning."""

    name: str
    use: str
    to: str = ""
    text: str = ""
    convert: Callable[[Any], Any] | None = None
    _: KW_ONLY
    neutral: tuple[Any, ...] = ()
    routes: tuple[str, ...] = ()
    type: Any = None


class StreamOptions(BaseModel):
    """The options of a stream in a request body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(None, description="send a last chunk with the token counts")
    continuous_usage_stats: bool | None = Field(None, description="send the token counts so far in every chunk")
    include_obfuscation: bool | None = Field(None, description="an option of OpenAI; it has no effect")


# ---- types -----------------------------------------------------------------------------------------------------------


def _list_of(items: JsonObject, **more: Any) -> JsonObject:
    """Return the JSON Schema of a list."""
    return {"type": "array", **more, "items": items}


def _optional(*schemas: JsonObject) -> Any:
    """Return a type that pydantic does not check and documents as any of ``schemas``, or null.

    The server checks lists and objects itself, because pydantic reports every wrong element of a list as an error."""
    return Annotated[Any, WithJsonSchema({"anyOf": [*schemas, NULL]})]


NULL = {"type": "null"}
STRING = {"type": "string"}
OBJECT = {"type": "object"}
TOKEN = {"type": "integer", "minimum": 0}
BOOL = bool | None
INT = int | None
FLOAT = float | None
TEXT = str | None
DICT = _optional(OBJECT)
ANY = Annotated[Any, WithJsonSchema({})]
IDS = _optional(_list_of(TOKEN))
OBJECTS = _optional(_list_of(OBJECT))
TEXTS = _optional(_list_of(STRING), STRING)
EFFORT = _optional({"enum": ["none", "minimal", "low", "medium", "high", "xhigh"]})
SWITCH = _optional({"type": "boolean"}, STRING, OBJECT)
CHOICE = _optional({"enum": ["none", "auto", "required"]}, OBJECT)
TAP_FIELDS = {
    "point": STRING,
    "read": {"enum": ["mean", "last", None]},
    "add": {"anyOf": [STRING, NULL]},
    "scale": {"anyOf": [{"type": "number"}, NULL]},
}
TAP = {"type": "object", "required": ["point"], "additionalProperties": False, "properties": TAP_FIELDS}
TAPS = _optional(_list_of(TAP))
ROUTES = _optional({"type": "boolean"}, OBJECT)
ROLE = {"enum": ["system", "developer", "user", "assistant", "tool"]}
CONTENT = {"anyOf": [STRING, _list_of(OBJECT), NULL]}
MESSAGE = {"type": "object", "required": ["role"], "properties": {"role": ROLE, "content": CONTENT}}
MESSAGES = Annotated[Any, WithJsonSchema(_list_of(MESSAGE, minItems=1))]
ANY_MESSAGES = Annotated[Any, WithJsonSchema(_list_of(OBJECT))]
TOKENS = Annotated[Any, WithJsonSchema(_list_of(TOKEN))]
PROMPTS = [STRING, _list_of(STRING), _list_of(TOKEN), _list_of(_list_of(TOKEN))]
PROMPT = Annotated[Any, WithJsonSchema({"anyOf": PROMPTS})]
TURN_ROLE = {"enum": ["user", "assistant", "system"]}
TURN_CONTENT = {"anyOf": [STRING, _list_of(OBJECT)]}
TURN = {"type": "object", "required": ["role", "content"], "properties": {"role": TURN_ROLE, "content": TURN_CONTENT}}
TURNS = Annotated[Any, WithJsonSchema(_list_of(TURN, minItems=1))]
SYSTEM = _optional(STRING, _list_of(OBJECT))
LENGTH = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1})]
INPUT = Annotated[Any, WithJsonSchema({"anyOf": [STRING, _list_of(OBJECT, minItems=1)]})]
POOLED_TEXT = Annotated[Any, WithJsonSchema({"anyOf": [*PROMPTS, OBJECT, _list_of(OBJECT)]})]
REQUIRED = (MESSAGES, PROMPT, TOKENS, TURNS, LENGTH, INPUT, POOLED_TEXT)  # types of fields that a body must have


# ---- values of aliases -----------------------------------------------------------------------------------------------


def _temperature_of(do_sample: Any) -> float | None:
    """Return the temperature that ``do_sample`` requests: 0 for false, None (no request) for true.  ValueError for
    anything else."""
    if not isinstance(do_sample, bool):
        raise ValueError("true or false")
    return None if do_sample else 0.0


def _grammar(value: Any) -> JsonObject:
    """Return the form of a grammar: text in GBNF or Lark, or TGI's object with ``type`` and ``value``.  ValueError for
    an object of another type."""
    if not isinstance(value, dict):
        return {"grammar": value}
    kind, inner = value.get("type"), value.get("value")
    if kind == "json_schema" and isinstance(inner, dict):
        kind, inner = "json", inner.get("schema", inner)
    if kind not in ("json", "regex") or inner is None:
        raise ValueError('a grammar as text, or {"type": "json" or "regex", "value": ...}')
    return {kind: inner}


def _format(value: Any) -> JsonObject:
    """Return the constraint of the answer for a value of Ollama's field ``format``.

    The value is the word "json" or a JSON schema.  ValueError for anything else.
    """
    if value == "json":
        return {"json_object": True}
    if not isinstance(value, dict):
        raise ValueError('"json" or a JSON schema')
    return {"json": value}


def _truncate(value: Any) -> Any:
    """Return the number of prompt tokens to keep.  Ollama's true becomes -1 (as many as fit)."""
    if isinstance(value, bool):
        return -1 if value else None
    return value


def _truncation(value: Any) -> int:
    """Return the number of prompt tokens to keep for the word "auto": -1 (as many as fit).  ValueError for any other
    word."""
    if value != "auto":
        raise ValueError('"auto" or "disabled"')
    return -1


# ---- rows ------------------------------------------------------------------------------------------------------------

# name -> (type, description in the OpenAPI document, parameter of SamplingParams that receives the value)
GENERATION = {
    "model": (TEXT, "one of the names in /v1/models; absent: the model that the server loaded"),
    "n": (INT, "number of answers to each prompt", "n"),
    "stream": (BOOL, "send server-sent events, which end with data: [DONE]"),
    "stream_options": (StreamOptions | None, ""),
    "temperature": (FLOAT, "0 selects the most likely token", "temperature"),
    "top_p": (FLOAT, "", "top_p"),
    "top_k": (INT, "extension: draw from the k most likely tokens; -1 or 0: from all tokens", "top_k"),
    "min_p": (FLOAT, "extension: least probability of a token, relative to the most likely token's", "min_p"),
    "presence_penalty": (FLOAT, "", "presence_penalty"),
    "frequency_penalty": (FLOAT, "", "frequency_penalty"),
    "repetition_penalty": (FLOAT, "extension: values above 1 make repetition less likely", "repetition_penalty"),
    "logit_bias": (DICT, "token id -> number from -100 to 100 that is added to the token's logit", "logit_bias"),
    "seed": (INT, "makes the drawn tokens repeatable", "seed"),
    "stop": (TEXTS, "texts that end the answer; the answer does not include them", "stop"),
    "max_tokens": (INT, ""),
    "min_tokens": (INT, "extension: least number of tokens of an answer", "min_tokens"),
    "stop_token_ids": (IDS, "extension: tokens that end the answer", "stop_token_ids"),
    "include_stop_str_in_output": (
        BOOL, "extension: keep the stop text at the end of the answer", "include_stop_str_in_output",
    ),
    "ignore_eos": (BOOL, "extension: continue after the end-of-sequence token", "ignore_eos"),
    "skip_special_tokens": (BOOL, "extension: omit special tokens from the text", "skip_special_tokens"),
    FORM: (DICT, "extension: json, regex, choice, grammar or json_object"),
    "response_format": (DICT, "text, json_object or json_schema"),
    "priority": (INT, "extension: requests with smaller numbers run first, if the scheduler uses it", "priority"),
    "cache_salt": (TEXT, "extension: only requests with the same salt share prefixes", "cache_salt"),
    "ttft_ms": (FLOAT, "extension: target for the time to the first token, in ms", "ttft_ms"),
    "tpot_ms": (FLOAT, "extension: target for the time of each further token, in ms", "tpot_ms"),
    "expected_tokens": (INT, "extension: expected length of the answer, for the scheduler", "expected_tokens"),
    "session": (DICT, "extension: facts about the request's session: id, turn, parent, spans, ...", "session"),
    "timeout_s": (FLOAT, "extension: time limit of the whole answer, in seconds"),
    "vllm_xargs": (DICT, "extension: parameters of processors and samplers, by name", "extra"),
    "truncate_prompt_tokens": (INT, "extension: number of prompt tokens to keep; -1: as many as fit"),
    "truncation_side": (TEXT, "extension: the side of the prompt that is cut, left (default) or right"),
    "return_token_ids": (BOOL, "extension: return token_ids with the text"),
    "timings_per_token": (BOOL, "extension, of llama.cpp: return the speeds of the answer as timings"),
    "include_energy": (BOOL, "extension: return the joules of the answer in its usage"),
    "taps": (TAPS, "extension, for operators: points of the model to read, or to add vectors to"),
    "routes": (ROUTES, "extension, for operators: read (true), count, prune or give expert routes", "routes"),
    "return_tokens_as_token_ids": (BOOL, "extension: spell tokens of log-probabilities as token_id:N"),
}  # fmt: skip
CHAT_ONLY = {
    "messages": (MESSAGES, ""),
    "max_completion_tokens": (INT, "the same as max_tokens; absent: the rest of the context"),
    "logprobs": (BOOL, "return the log-probability of each token"),
    "top_logprobs": (INT, "number of most likely tokens to return for each token; requires logprobs"),
    "tools": (OBJECTS, ""),
    "tool_choice": (CHOICE, ""),
    "parallel_tool_calls": (BOOL, "false: at most one call"),
    "add_generation_prompt": (BOOL, "extension: begin a message of the assistant; default true"),
    "continue_final_message": (BOOL, "extension: continue the last message"),
    "echo": (BOOL, "extension: return the last message before the answer, if both have the same role"),
    "add_special_tokens": (
        BOOL, "extension: add the tokenizer's special tokens to those of the chat template; default false",
    ),
    "chat_template_kwargs": (DICT, "extension: variables of the chat template"),
    "reasoning_effort": (EFFORT, "how much the model reasons, if its chat template reads it"),
    "enable_thinking": (BOOL, "extension: whether the model reasons, if its chat template reads it"),
    "reasoning": (DICT, "extension: object with effort, enabled, exclude and max_tokens"),
    "thinking": (SWITCH, "extension: the same as enable_thinking, or an object with type and budget_tokens"),
    "think": (SWITCH, "extension: enable_thinking or reasoning_effort"),
    "include_reasoning": (BOOL, "extension: false leaves the reasoning out of the answer"),
    "documents": (OBJECTS, "extension: texts for a chat template that supports documents"),
    "chat_template": (
        TEXT, "extension: name of one of the model's templates; absent: tool_use for tools, or default",
    ),
    "split_special_tokens": (
        BOOL, "extension: encode spellings of special tokens in the request as plain text; default true",
    ),
}  # fmt: skip
COMPLETION_ONLY = {
    "prompt": (PROMPT, "text, token ids, or a list of either"),
    "logprobs": (INT, "number of most likely tokens to return for each token, besides the chosen token"),
    "echo": (BOOL, "return the prompt before the answer"),
    "best_of": (INT, "number of answers to draw; the n most likely of them are returned"),
    "suffix": (TEXT, "not supported"),
    "add_special_tokens": (BOOL, "extension: add the tokenizer's special tokens to a text"),
}  # fmt: skip
RENDERED = {
    "model": (TEXT, ""),
    "messages": (ANY_MESSAGES, ""),
    "add_special_tokens": (BOOL, "default true for a prompt, false for messages"),
    "add_generation_prompt": (BOOL, ""),
    "continue_final_message": (BOOL, "for messages, as in a chat"),
    "tools": (Any, ""),
    "documents": (OBJECTS, ""),
    "chat_template": (TEXT, "for messages, as in a chat"),
    "chat_template_kwargs": (DICT, ""),
    "split_special_tokens": (BOOL, "for messages, as in a chat"),
}  # fmt: skip
TOKENIZE_ONLY = {
    "prompt": (TEXT, ""),
    "return_token_strs": (BOOL, ""),
    "content": (TEXT, "llama.cpp's name of prompt"),
    "add_special": (BOOL, "llama.cpp's name of add_special_tokens; default false with content"),
    "parse_special": (BOOL, "true: spellings of special tokens are special tokens; false is not supported"),
    "with_pieces": (BOOL, "return objects with id and piece as tokens, as llama.cpp does"),
}  # fmt: skip
_UNUSED = "a feature of another service; it has no effect"
MESSAGE_AND_COUNT = {
    "model": (TEXT, "one of the names in /v1/models; absent: the model that the server loaded"),
    "messages": (TURNS, "a last message of the assistant is continued"),
    "system": (SYSTEM, "text, or blocks of text"),
    "tools": (OBJECTS, "objects with name, description and input_schema"),
    "tool_choice": (DICT, "an object with the type auto, any, tool (with name) or none"),
    "thinking": (DICT, "an object with the type enabled (with budget_tokens), adaptive or disabled"),
    "output_config": (DICT, "an object with format (type json_schema, with schema) or effort"),
    "output_format": (DICT, "the older form of output_config.format"),
    "cache_control": (DICT, "no effect: the server caches all prefixes"),
    "mcp_servers": (OBJECTS, "not supported: the client must call the tools"),
    "container": (ANY, _UNUSED),
    "context_management": (DICT, _UNUSED),
    "compaction": (DICT, _UNUSED),
    "diagnostics": (DICT, _UNUSED),
    "fallbacks": (ANY, _UNUSED),
    "fallback_credit_token": (ANY, _UNUSED),
    "inference_geo": (TEXT, _UNUSED),
    "billing_policy": (ANY, _UNUSED),
    "speed": (TEXT, _UNUSED),
    "user_profile_id": (TEXT, _UNUSED),
}
MESSAGE_ONLY = {
    "max_tokens": (LENGTH, "most tokens of the answer"),
    "stop_sequences": (TEXTS, "texts that end the answer; the answer does not include them"),
    "stream": (BOOL, "send the events of a message"),
    "temperature": (FLOAT, "0 selects the most likely token"),
    "top_k": (INT, "draw from the k most likely tokens"),
    "top_p": (FLOAT, ""),
    "metadata": (DICT, _UNUSED),
    "service_tier": (TEXT, _UNUSED),
}
RESPONSES_ONLY = {
    "model": (TEXT, "one of the names in /v1/models; absent: the model that the server loaded"),
    "input": (INPUT, "a text, or items: messages, calls, outputs of calls, reasoning, references to items"),
    "instructions": (TEXT, "a first message for the model, which a next response does not inherit"),
    "previous_response_id": (TEXT, "a stored response whose conversation the input continues"),
    "max_output_tokens": (INT, "most tokens of the answer; absent: the rest of the context"),
    "temperature": (FLOAT, "0 selects the most likely token"),
    "top_p": (FLOAT, ""),
    "text": (DICT, "format: text, json_object or json_schema"),
    "reasoning": (DICT, "effort"),
    "tools": (OBJECTS, "function, custom and namespace"),
    "tool_choice": (CHOICE, ""),
    "parallel_tool_calls": (BOOL, "false: at most one call"),
    "stream": (BOOL, "send server-sent events"),
    "stream_options": (DICT, "include_obfuscation, which has no effect"),
    "store": (BOOL, "keep the response for later requests; default true"),
    "background": (BOOL, "answer at once, and generate the response in the background"),
    "include": (TEXTS, "message.output_text.logprobs, reasoning.encrypted_content"),
    "top_logprobs": (INT, "number of most likely tokens to return for each token"),
    "truncation": (TEXT, "auto: leave out tokens at the begin of a long prompt; or disabled"),
    "metadata": (DICT, "up to 16 strings that are returned with the response"),
    "max_tool_calls": (INT, "has no effect, since this server runs no tools"),
    "user": (TEXT, "has no effect"),
    "service_tier": (TEXT, "has no effect"),
    "safety_identifier": (TEXT, "has no effect"),
    "prompt_cache_key": (TEXT, "has no effect"),
}
# the fields that both of Ollama's routes for generation have
OLLAMA = {
    "model": (TEXT, "a name of the model, with or without :latest; absent: the model that the server loaded"),
    "name": (TEXT, "the older name of model"),
    "stream": (BOOL, "send a line of JSON for each piece of text; default true"),
    "format": (_optional({"enum": ["json", ""]}, OBJECT), "json, or the JSON schema of the answer"),
    "options": (DICT, "num_predict, temperature, top_k, top_p, min_p, seed, stop, repeat_penalty, ..."),
    "think": (bool | str | None, "true, false, low, medium, high or max, for a chat template with reasoning"),
    "keep_alive": (_optional(STRING, {"type": "number"}), "it has no effect: the model stays loaded"),
    "logprobs": (BOOL, "return the log-probability of each token"),
    "top_logprobs": (INT, "number of most likely tokens to return for each token; requires logprobs"),
}
OLLAMA_CHAT_ONLY = {
    "messages": (_optional(_list_of(OBJECT)), "the conversation; empty: only load the model"),
    "tools": (OBJECTS, ""),
}
OLLAMA_GENERATE_ONLY = {
    "prompt": (TEXT, "the text of the user; empty: only load the model"),
    "system": (TEXT, "the text of a first message of role system"),
    "raw": (BOOL, "continue the prompt as it is, without the chat template"),
}
POOLED = {
    "model": (TEXT, "one of the names in /v1/models; absent: the model that the server loaded"),
    "pooling": (TEXT, "extension: mean, last, cls, or auto (default): as the model's files say, else last"),
    "truncate_prompt_tokens": (INT, "extension: number of tokens of a text to keep; -1: as many as fit"),
    "truncation_side": (TEXT, "extension: the side of the text that is cut, left (default) or right"),
    "add_special_tokens": (BOOL, "extension: add the tokenizer's special tokens to a text; default true"),
    "cache_salt": (TEXT, "extension: only requests with the same salt share prefixes"),
    "priority": (INT, "extension: requests with smaller numbers run first, if the scheduler uses it"),
    "timeout_s": (FLOAT, "extension: time limit of the whole answer, in seconds"),
    "user": (TEXT, "accepted for OpenAI's clients; it has no effect"),
}
EMBED_ONLY = {
    "input": (POOLED_TEXT, "text, token ids, or a list of either"),
    "encoding_format": (TEXT, "float (default) or base64: little-endian float32 values"),
    "dimensions": (INT, "number of values to keep, the first ones; the vector is then normalized again"),
    "normalize": (BOOL, "extension: scale the vector to length 1; default true"),
}
RERANK_ONLY = {
    "query": (POOLED_TEXT, "text"),
    "documents": (POOLED_TEXT, 'list of texts, or of objects {"text": ...}'),
    "top_n": (INT, "number of results, the best ones; absent or 0: all"),
    "return_documents": (BOOL, "return the text of each document; default true"),
}
SCORE_ONLY = {
    "text_1": (POOLED_TEXT, "text or token ids, which is compared with each in text_2, or a list as long as text_2"),
    "text_2": (POOLED_TEXT, "text, token ids, or a list of either"),
}
OLLAMA_EMBEDDINGS = {
    "model": (TEXT, "a name of the model, with or without :latest; absent: the model that the server loaded"),
    "options": (DICT, "they have no effect"),
    "keep_alive": (_optional(STRING, {"type": "number"}), "it has no effect: the model stays loaded"),
}
OLLAMA_EMBED_ONLY = {
    "input": (POOLED_TEXT, "text, or a list of texts"),
    "truncate": (BOOL, "cut the end of a text that is too long; default true"),
    "dimensions": (INT, "number of values to keep, the first ones"),
}
SAVED_PREFIX = {
    "name": (TEXT, "1 to 60 bytes"),
    "prompt": (PROMPT, "text or token ids"),
    "tenant": (TEXT, "whose requests find the prefix: key-0 is the first API key; absent: the key of this request"),
    "cache_salt": (TEXT, "only requests with the same salt find the prefix"),
}
NEW_WEIGHTS = {
    "path": (TEXT, "folder of a checkpoint, within the server's weights_dir"),
    "partial": (BOOL, "weights that are not in the folder stay as they are"),
    "finite": (BOOL, "refuse infinite numbers and NaN (default true)"),
    "kv": (TEXT, "recompute (default) or keep the keys and values of running requests"),
}
# routes -> the fields that their bodies declare
DECLARED_FIELDS: dict[tuple[str, ...], dict[str, tuple[Any, ...]]] = {
    (CHAT, COMPLETION): GENERATION,
    (CHAT,): CHAT_ONLY,
    (COMPLETION,): COMPLETION_ONLY,
    (TOKENIZE, TEMPLATE): RENDERED,
    (TOKENIZE,): TOKENIZE_ONLY,
    (OLLAMA_CHAT, OLLAMA_GENERATE): OLLAMA,
    (OLLAMA_CHAT,): OLLAMA_CHAT_ONLY,
    (OLLAMA_MODEL,): {"model": (TEXT, ""), "name": (TEXT, "the older name of model"), "stream": (BOOL, "")},
    (OLLAMA_GENERATE,): OLLAMA_GENERATE_ONLY,
    (DETOKENIZE,): {"model": (TEXT, ""), "tokens": (TOKENS, "")},
    (CREATE, COUNT): MESSAGE_AND_COUNT,
    (CREATE,): MESSAGE_ONLY,
    (RESPONSES,): RESPONSES_ONLY,
    (OLLAMA_EMBED, OLLAMA_PROMPT_EMBED): OLLAMA_EMBEDDINGS,
    (OLLAMA_EMBED,): OLLAMA_EMBED_ONLY,
    (OLLAMA_PROMPT_EMBED,): {"prompt": (TEXT, "the text")},
    (EMBED, RERANK, SCORE): POOLED,
    (EMBED,): EMBED_ONLY,
    (RERANK,): RERANK_ONLY,
    (SCORE,): SCORE_ONLY,
    (LOAD_ADAPTER, UNLOAD_ADAPTER): {"lora_name": (TEXT, "name of the adapter, which requests send as model")},
    (LOAD_ADAPTER,): {"lora_path": (TEXT, "folder of the adapter, within the server's lora_dir")},
    (UNLOAD_ADAPTER,): {"lora_int_id": (INT, "vLLM's number of the adapter; it has no effect")},
    (PAUSE,): {"keep_requests": (BOOL, "false aborts the requests that run; by default they wait")},
    (SLEEP,): {"level": (INT, "1 (default) keeps the weights in host memory, 2 drops them")},
    (WEIGHTS,): NEW_WEIGHTS,
    (PREFIX,): SAVED_PREFIX,
    (PREFIX_FILE,): {"file": (TEXT, "name of a tar file in server.prefix_dir")},
}

PARAMETERS = (
    "allowed_token_ids", "bad_words", "prompt_logprobs", "best_of", "beam_width", "use_beam_search", "length_penalty",
    "early_stopping", *declared_params.builtin(),
)  # fmt: skip
# parameters that clients of other servers often send; ignored with a warning if no plug-in of the engine reads them
OPTIONAL = (
    "typical_p", "mirostat_tau", "mirostat_eta", "no_repeat_ngram_size", "encoder_repetition_penalty", "guidance_scale",
    "negative_prompt",
)  # fmt: skip
BEAM_PARAMETERS = ("length_penalty", "early_stopping")

# In the tables below, "name=JSON|JSON" gives the neutral values of a name.
# (receiving field, with ".key" for one key of an object; names; remark for the documentation; conversion of the value)
ALIASES: tuple[tuple[Any, ...], ...] = (
    ("max_tokens", "max_new_tokens max_output_tokens max_tokens_to_sample"),
    ("max_tokens", "n_predict num_predict", "-1 and -2 mean the rest of the context"),
    ("max_tokens", "max_completion_tokens", "in a chat it is a field of its own"),
    ("min_tokens", "min_new_tokens=0"),
    ("repetition_penalty", "repeat_penalty=1 rep_pen=1", "1 is neutral; applies to the whole text"),
    ("stop", 'stop_sequences=[]|"" stop_sequence=[]|"" stop_strings=[]|"" stop_words=[]|""'),
    ("seed", "random_seed"),
    ("seed", "sampler_seed=-1", "-1 means any seed"),
    ("n", "num_return_sequences"),
    ("beam_width", "num_beams=1", "1 is neutral"),
    ("bad_words", "bad_words_ids=[]"),
    ("temperature", "do_sample", "false means 0, whatever the temperature; true is neutral", _temperature_of),
    ("typical_p", "typical=1|0", "1 is neutral"),
    ("mirostat_tau", "mirostat mirostat_mode", "2 means 5 if mirostat_tau is absent; 0 is neutral; 1 has no effect"),
    ("truncate_prompt_tokens", "truncate", "true means as many as fit", _truncate),
    ("thinking_token_budget", "thinking_budget=-1 reasoning_budget=-1", "-1 means no limit"),
    (
        "truncate_prompt_tokens", 'truncation="disabled"', '"auto" means as many as fit; "disabled" is neutral',
        _truncation,
    ),
    ("include_stop_str_in_output", "no_stop_trim=false"),
    ("echo", "return_full_text=false", "in a completion; in a chat it has no effect"),
    ("structured_outputs.json", 'guided_json json_schema=""'),
    ("structured_outputs.regex", 'guided_regex regex=""'),
    ("structured_outputs.choice", "guided_choice"),
    ("structured_outputs.grammar", 'guided_grammar ebnf=""'),
    ("structured_outputs.json_object", "guided_json_object=false"),
    ("structured_outputs.whitespace_pattern", "guided_whitespace_pattern"),
    (
        FORM, 'grammar="" grammar_string=""',
        "its `grammar`, in GBNF or Lark; TGI's objects become its `json` and `regex`", _grammar,
    ),
    (FORM, 'format=""', 'its `json_object` for "json", else its `json`', _format),
)  # fmt: skip

# advice -> names.  Ignoring these fields would change the answer, so the server refuses them.
REFUSALS = {
    "use tools": "functions",
    "use tool_choice": "function_call",
    "this server accepts text only": (
        "audio images image image_data video videos video_data audios audio_data multimodal_data multi_modal_data "
        "multi_modal_uuids mm_processor_kwargs media_io_kwargs files attachments"
    ),
    "send text or token ids": "prompt_embeds",
    "this server cannot receive a KV cache from another server": "kv_transfer_params ec_transfer_params",
    "send the name of an adapter as model": "lora_request lora lora_path adapter_id adapter_source",
    "use logprobs": "logprob_token_ids",
    "it would repeat the prompt that the client has sent": "return_prompt_text",
    "use return_token_ids": "return_token_offsets",
    "use response_format": "output_format output_config response_schema",
    "send a first message of role system": "system system_prompt instructions tool_prompt",
    "send messages or a prompt": "input inputs contents text",
    "send text, or token ids as the prompt of /v1/completions": "input_ids input_embeds",
    "it is a field of /v1/completions; send messages": "prompt",
    "it is a field of /v1/chat/completions": "messages",
    "this server has no models with an encoder": "encoder_prompt decoder_prompt",
    "put it into the prompt": "input_prefix input_suffix input_extra suffix",
    "only templates of the model are used": "template",
    "this server stores no conversations; send the whole conversation": "context previous_response_id conversation",
    "the client must call the tools": "mcp_servers",
}

# reason -> names
NO_EFFECT = {
    "no sampler of this server reads it": (
        "top_a=0 tfs_z=1 tfs=1 top_n_sigma=-1|0 nsigma=0 top_h=0 epsilon_cutoff=0 eta_cutoff=0 min_keep=0|1 "
        "xtc_probability=0 xtc_threshold smoothing_factor=0 smoothing_curve dynatemp_range=0 dynatemp_exponent "
        "dynamic_temperature=false dynatemp_low dynatemp_high temperature_last samplers sampler_order "
        "sampler_priority penalty_alpha=0 watermark=false watermarking=false temp_exponent adaptive_target=-1 "
        "adaptive_decay min_temp max_temp xtc_special_tokens token_healing=false"
    ),
    "no penalty of this server reads it, and penalties apply to the whole text": (
        "dry_multiplier=0 dry_base dry_allowed_length dry_penalty_last_n dry_range dry_sequence_breakers "
        "repeat_last_n=-1 repetition_penalty_range=0 rep_pen_range rep_pen_slope penalize_nl=false "
        'penalize_newline=false penalty_prompt="" exponential_decay_length_penalty diversity_penalty=0 '
        "num_beam_groups=1 repetition_detection repetition_decay penalty_range=-1"
    ),
    "servers differ in whether it includes the prompt; use min_tokens and max_tokens": "min_length=0 max_length",
    "functions cannot be sent over HTTP; use structured_outputs or logit_bias": (
        "prefix_allowed_tokens_fn logits_processor logits_processors custom_logit_processor stopping_criteria "
        "stop_regex"
    ),
    "the server uses the special tokens of the model; stop_token_ids and bad_words add others": (
        "eos_token_id pad_token_id bos_token_id end_id pad_id forced_bos_token_id forced_eos_token_id suppress_tokens "
        "begin_suppress_tokens custom_token_bans ban_eos_token=false add_bos_token=true"
    ),
    "only the server's configuration can set it": (
        "num_ctx num_keep num_batch num_gpu main_gpu num_thread use_mmap use_mlock low_vram f16_kv numa vocab_only "
        "keep_alive cache_prompt=true n_keep=0 n_discard n_cache_reuse use_cache=true id_slot=-1 slot_id=-1 "
        "t_max_predict_ms t_max_prompt_ms truncation_length guided_decoding_backend request_id session_id rid "
        'stream_interval mode="instruct" parse_tool_calls=true tool_call_parser'
    ),
    "answers have the fields of OpenAI's API; see logprobs, return_token_ids, stream_options": (
        "details=false decoder_input_details=false top_n_tokens n_probs=0 return_tokens return_progress "
        "post_sampling_probs response_fields output_scores return_dict_in_generate "
        "return_likelihoods return_hidden_states=false return_routed_experts=false usage trim_stop "
        "spaces_between_special_tokens"
    ),
    "a chat template reads it, and a completion has none; in a chat it is a field of its own": (
        "reasoning_effort enable_thinking thinking think reasoning include_reasoning=true"
    ),
    "reasoning is a part of its own in each answer": (
        'reasoning_format="auto"|"deepseek" separate_reasoning=true stream_reasoning=true'
    ),
    "send options that the chat template reads in chat_template_kwargs": "verbosity",
    "it is a feature of another service": (
        "user metadata store service_tier prompt_cache_key prompt_cache_options prompt_cache_retention "
        'safety_identifier moderation prediction web_search_options modalities=["text"] provider transforms models '
        "route plugins safe_prompt enable_search=false search_options search_parameters background=false include "
        "max_tool_calls"
    ),
}


def _names(text: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each name of a text such as "a=0|1 b", with its neutral values."""
    for word in text.split():
        name, _, values = word.partition("=")
        yield name, tuple(map(json.loads, values.split("|"))) if values else ()


def _rows() -> Iterator[BodyField]:
    """Yield all rows of the table of body fields: declared fields, parameters, aliases, and refused and ignored
    fields."""
    for routes, declared in DECLARED_FIELDS.items():
        for name, (kind, text, *to) in declared.items():
            yield BodyField(name, DECLARED, "".join(to), text, routes=routes, type=kind)
    for name in PARAMETERS:
        yield BodyField(name, PARAMETER, name)
    for to, names, *rest in ALIASES:
        for name, neutral in _names(names):
            yield BodyField(name, ALIAS, to, *rest, neutral=neutral)
    for use, texts in ((REFUSED, REFUSALS), (IGNORED, NO_EFFECT)):
        for text, names in texts.items():
            for name, neutral in _names(names):
                yield BodyField(name, use, text=text, neutral=neutral)


TABLE = tuple(_rows())
# name -> its treatment in bodies that do not declare it
OTHER = {row.name: row for row in TABLE if row.use != DECLARED}


def declared_by(*routes: str) -> dict[str, BodyField]:
    """Return the fields that exactly these routes declare together."""
    return {row.name: row for row in TABLE if row.routes == routes}


def names_of(use: str) -> list[str]:
    """Return the names with a treatment (ALIAS, REFUSED, ...)."""
    return [row.name for row in TABLE if row.use == use]


def documented() -> list[str]:
    """Return the rows of aliases in the table of docs/api.md, one row for aliases with the same effect."""
    groups: dict[str, list[str]] = {}
    for row in OTHER.values():
        if row.use != ALIAS:
            continue
        to, _, key = row.to.partition(".")
        remark = f"its `{key}`" if key else row.text
        effect = f"`{to}`: {remark}" if remark else f"`{to}`"
        groups.setdefault(effect, []).append(row.name)
    return [f"| {', '.join(f'`{name}`' for name in names)} | {effect} |" for effect, names in groups.items()]
