"""Wrong requests of clients: the fixed cases of the lines A1 to A44.  A case is a name, a request and its refusal.

``BAD``: name -> ((path, body), status, words in the message, or the name of the field).  ``BODIES``: name -> (bytes of
a body for /v1/completions, status, word).
"""

from __future__ import annotations

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def with_prompt(**more):
    return COMPLETIONS, {"prompt": "a", **more}


def with_chat(**more):
    return CHAT, {"messages": HI, **more}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BAD = {
    "A6 no prompt": ((COMPLETIONS, {}), 400, "prompt"),
    "A6 no messages": ((CHAT, {}), 400, "messages"),
    "A7 model": (with_prompt(model="gpt-4"), 404, "does not exist", "model"),
    "A10 near field": (with_prompt(max_token=5), 400, "Did you mean 'max_tokens'"),
    "A10 near field chat": (with_chat(temprature=5), 400, "Did you mean 'temperature'"),
    "A13 zero": (with_prompt(max_tokens=0), 400, "max_tokens"),
    "A13 negative": (with_chat(max_completion_tokens=-1), 400, "max_completion_tokens"),
    "A13 text": (with_prompt(max_tokens="7"), 400, "max_tokens", "whole number"),
    "A13 part": (with_prompt(max_tokens=1.5), 400, "max_tokens"),
    "A14 many": (with_prompt(max_tokens=10**9), 400, "max_model_len"),
    "A15 long prompt": (with_prompt(prompt=[5] * 2000), 400, "1024", "2000"),
    "A15 long text": (with_prompt(prompt="a " * 20000), 400, "maximum context length is 1024 tokens"),
    "A16 both": (with_prompt(prompt=[5] * 1000, max_tokens=100), 400, "1000", "1100"),
    "A17 pool": (with_prompt(prompt=[5] * 8, max_tokens=1010), 400, "KV cache"),
    "A18 n": (with_prompt(n=0), 400, "n"),
    "A18 many": (with_prompt(n=10**6), 400, "n"),
    "A19 best_of": (with_prompt(n=2, best_of=1), 400, "best_of"),
    "A19 many": (with_prompt(best_of=10**6), 400, "best_of"),
    "A20 temperature": (with_prompt(temperature=-0.1), 400, "temperature"),
    "A20 hot": (with_prompt(temperature=1000), 400, "temperature"),
    "A20 top_p": (with_prompt(top_p=0), 400, "top_p"),
    "A20 top_p 2": (with_prompt(top_p=1.1), 400, "top_p"),
    "A20 top_k": (with_prompt(top_k=-5), 400, "top_k"),
    "A20 min_p": (with_prompt(min_p=2), 400, "min_p"),
    "A20 presence": (with_prompt(presence_penalty=3), 400, "presence_penalty"),
    "A20 repetition": (with_prompt(repetition_penalty=0), 400, "repetition_penalty"),
    "A22 seed": (with_prompt(seed=2**64), 400, "seed"),
    "A22 seed part": (with_prompt(seed=-1.5), 400, "seed"),
    "A23 logprobs": (with_prompt(logprobs=-1), 400, "logprobs"),
    "A23 many": (with_prompt(logprobs=10**6), 400, "logprobs"),
    "A23 top alone": (with_chat(top_logprobs=2), 400, "top_logprobs"),
    "A24 key": (with_prompt(logit_bias={"999999": 1}), 400, "logit_bias"),
    "A24 word": (with_prompt(logit_bias={"abc": 1}), 400, "logit_bias"),
    "A24 negative": (with_prompt(logit_bias={"-1": 1}), 400, "logit_bias"),
    "A24 value": (with_prompt(logit_bias={"1": 1000}), 400, "logit_bias"),
    "A25 vocabulary": (with_prompt(prompt=[10**6]), 400, "1000000"),
    "A25 negative": (with_prompt(prompt=[-1]), 400, "-1"),
    "A25 64 bits": (with_prompt(prompt=[2**63]), 400, "prompt"),
    "A25 stop": (with_prompt(stop_token_ids=[10**6]), 400, "stop_token_ids"),
    "A26 empty": (with_prompt(prompt=""), 400, "empty"),
    "A26 none": (with_prompt(prompt=[]), 400, "empty"),
    "A26 none in a batch": (with_prompt(prompt=["a", ""]), 400, "empty"),
    "A27 batch": (with_prompt(prompt=["a"] * 10**5), 400, "100000", "256"),
    "A28 stops": (with_prompt(stop=["x"] * 10**4), 400, "stop"),
    "A28 long": (with_prompt(stop="x" * 10**6), 400, "stop"),
    "A28 number": (with_prompt(stop=5), 400, "stop"),
    "A29 mixed": (with_prompt(prompt=[1, "a"]), 400, "prompt"),
    "A29 nested": (with_prompt(prompt=[[1, [2]]]), 400, "prompt"),
    "A29 truth": (with_prompt(prompt=[True, False]), 400, "prompt"),
    "A32 role": (with_chat(messages=[{"role": "root", "content": "a"}]), 400, "role"),
    "A32 null": (with_chat(messages=[{"role": "user", "content": None}]), 400, "content"),
    "A32 empty": (with_chat(messages=[]), 400, "messages"),
    "A32 object": (with_chat(messages={"role": "user", "content": "a"}), 400, "messages"),
    "A33 template": (with_chat(chat_template="{{ 1 }}"), 400, "chat_template"),
    "A34 tokenize": (with_chat(chat_template_kwargs={"tokenize": True}), 400, "chat_template_kwargs"),
    "A34 template": (with_chat(chat_template_kwargs={"chat_template": "a"}), 400, "chat_template_kwargs"),
    "A34 list": (with_chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs"),
    "A36 image": (
        with_chat(messages=[{"role": "user", "content": [{"type": "image_url",
        "image_url": {"url": "file:///etc/x"}}]}]),
        400, "image_url",
    ),
    "A37 embeddings": (with_prompt(prompt_embeds="AAAA"), 400, "prompt_embeds"),
    "A38 model path": (with_prompt(model="../../etc"), 404, "model"),
    "A41 salt": (with_prompt(cache_salt="x" * 10**4), 400, "cache_salt"),
    "A41 number": (with_prompt(cache_salt=5), 400, "cache_salt"),
    "A41 object": (with_prompt(cache_salt={}), 400, "cache_salt"),
    "A43 options": (with_prompt(stream_options={"include_usage": True}), 400, "stream_options"),
    "A43 key": (with_prompt(stream=True, stream_options={"include_use": True}), 400, "include_usage"),
    "surrogate": (with_prompt(prompt="\ud800"), 400, "Unicode"),
    "n of a batch": (with_prompt(prompt=["a"] * 20, n=100), 400, "n"),
    "suffix": (with_prompt(suffix="b"), 400, "suffix"),
    "format": (with_chat(response_format={"type": "yaml"}), 400, "response_format"),
    "format without": (with_chat(response_format={"type": "json_schema"}), 400, "json_schema"),
    "deadline": (with_chat(timeout_s=-1), 400, "timeout_s"),
    "tools": (with_chat(tools=[{"type": "function"}]), 400, "tools"),
    "twice": (with_chat(tools=[TOOL, TOOL]), 400, "tools"),
    "no such tool": (
        with_chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice",
    ),
    "no tools": (with_chat(tool_choice="required"), 400, "tool_choice"),
    "choice": (with_chat(tools=[TOOL], tool_choice="maybe"), 400, "tool_choice"),
    "functions": (with_chat(functions=[{"name": "f"}]), 400, "functions"),
    "guided": (with_chat(guided_json={"type": "object"}, guided_regex="a"), 400, "guided_json", "guided_regex"),
    "detokenize": (("/detokenize", {"tokens": [10**6]}), 400, "tokens"),
    "tokenize nothing": (("/tokenize", {}), 400, "prompt"),
}  # fmt: skip

BODIES = {
    "A1 half": (b'{"prompt":', 400, "JSON"),
    "A2 empty": (b"", 400, "JSON"),
    "A3 list": (b"[]", 400, "object"),
    "A3 null": (b"null", 400, "object"),
    "A3 text": (b'"x"', 400, "object"),
    "A21 NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
    "A21 Infinity": (b'{"prompt": "a", "top_p": -Infinity}', 400, "Infinity"),
    "A21 too large": (b'{"prompt": "a", "min_p": 1e999}', 400, "1e999"),
    "A5 large": (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', 413, "8388608"),
    "deep": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400, "deep"),
    "digits": (b'{"seed": ' + b"9" * 5000 + b"}", 400, "range"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, "UTF-8"),
    "key": (b'{"prompt": "a", "": 1, "a b": 2}', 200, ""),
}
