"""Do the jobs of the worker pool, in processes that ``minivllm.runtime.processes.confined`` keeps."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from minivllm.core.interfaces.structured import StructuredOutputsParams
from minivllm.errors import RequestError
from minivllm.runtime.processes.confined import Work, allow, prepare
from minivllm.runtime.text.tokenizer import Tokenizer

from .errors import ApiError
from .http import bounds
from .http.body import load_object, parse_object
from .link.scored import Scored
from .openai import answers, tools
from .openai.logprobs import Speller
from .openai.params import whole_form
from .openai.tokens import too_long

WARM = 5  # times the limits of a chat, for what is made once: a second tokenizer, perhaps
FEW = 256  # ids that may as well travel as JSON


def make(hello: bytes) -> Work:
    told = json.loads(hello)
    tokenizer = None if told["tokenizer"] is None else Tokenizer.from_json(told["tokenizer"])
    if tokenizer is not None:
        prepare(lambda: warm(tokenizer), WARM * told["seconds"], WARM * told["megabytes"])

    def work(job: dict[str, Any], parts: list[bytes]) -> list[bytes]:
        try:
            if job["op"] == "read":
                return read(parts[0], job["inner"])
            if job["op"] == "form":
                return form(parts[0])
            if job["op"] == "shape":
                return shape(tokenizer, job, parts)
            if job["op"] == "places":
                return places(tokenizer, job, *parts)
            assert tokenizer is not None
            return JOBS[job["op"]](tokenizer, job, parts[0])
        except ApiError as e:
            return [dump({"error": [e.status, str(e), e.param]})]
        except RequestError as e:
            return [dump({"error": [400, str(e), e.param]})]

    return work


def warm(tokenizer: Tokenizer) -> None:
    """Make what is made by need."""
    tokenizer.encode("a")
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat(tokenizer.chat_prompt([{"role": "user", "content": "<a>"}]))


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def read(raw: bytes, inner: str) -> list[bytes]:
    """The body without its token ids, and these."""
    bounds.check_shape(raw)
    value = load_object(raw) if inner else parse_object(raw)
    body = value.get(inner) if inner else value
    columns, parts = [], []
    if isinstance(body, dict):
        bounds.check_fields(body)
        for name in bounds.IDS:  # token ids travel as arrays
            if (found := ids_of(body.get(name))) is not None:
                ids, lengths = found
                columns.append([name, lengths])
                parts.append(ids.tobytes())
                body[name] = None
    rest = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    bounds.check_values(bounds.shape_of(rest).values)
    return [dump({"columns": columns}), rest, *parts]


def ids_of(value: Any) -> tuple[np.ndarray, list[int] | None] | None:
    """The ids (i64) of a list of many whole numbers, or of a list of lists of them and the lengths of these; None if it
    is anything else."""
    if not isinstance(value, list) or not value:
        return None
    nested = all(type(one) is list for one in value)
    flat = [i for one in value for i in one] if nested else value
    if len(flat) <= FEW or set(map(type, flat)) != {int} or (nested and not all(value)):
        return None
    try:
        return np.array(flat, np.int64), [len(one) for one in value] if nested else None
    except OverflowError:
        return None


def form(part: bytes) -> list[bytes]:
    """What the text must fit; a schema is closed where it has to be, and text."""
    body = SimpleNamespace(**json.loads(part))
    asked = whole_form(body, tools.read_tools(body.tools, body.tool_choice, body.parallel_tool_calls))
    made = StructuredOutputsParams.of(asked)
    if made is not None and made.source.kind == "json":
        of = made.source
        asked = {"json": of.text, "disable_any_whitespace": not of.any_whitespace}
        asked |= {} if of.whitespace is None else {"whitespace_pattern": of.whitespace}
    return [b"{}", dump(asked)]


def chat(tokenizer: Tokenizer, job: dict[str, Any], part: bytes) -> list[bytes]:
    """Return the ids of a conversation.  The template has limits of its own; tokenizing what it printed has the rest
    of the job's."""
    asked = json.loads(part)
    allow(job["render"])
    if job["split"]:
        prompt = tokenizer.chat_prompt(**asked)
        text = prompt.text
    else:
        text = str(tokenizer.apply_chat_template(tokenize=False, **asked))
    allow(job["seconds"] - job["render"])
    too_long(text, job["most"], "messages")
    ids = tokenizer.encode_chat(prompt) if job["split"] else tokenizer.encode(text, False)
    return [b"{}", np.array(ids, np.int32).tobytes()]


def encode(tokenizer: Tokenizer, job: dict[str, Any], part: bytes) -> list[bytes]:
    found = [tokenizer.encode(text, job["special"]) for text in json.loads(part)]
    return [dump({"lengths": list(map(len, found))}), np.array([i for ids in found for i in ids], np.int32).tobytes()]


def decode(tokenizer: Tokenizer, job: dict[str, Any], part: bytes) -> list[bytes]:
    ids = np.frombuffer(part, np.int64).tolist()
    return [b"{}", tokenizer.decode(ids, skip_special_tokens=job["skip"]).encode("utf-8", "surrogatepass")]


def shape(tokenizer: Tokenizer | None, job: dict[str, Any], columns: list[bytes]) -> list[bytes]:
    speller = Speller(tokenizer, job["as_ids"], job["detokenize"])
    return [b"{}", *answers.shaped(job["kind"], Scored.unpack(columns).rows(), job["top"], speller)]


def places(tokenizer: Tokenizer | None, job: dict[str, Any], tokens: bytes, text: bytes) -> list[bytes]:
    prompt = text.decode("utf-8", "surrogatepass") if job["given"] else None
    ids = np.frombuffer(tokens, np.int64).tolist()
    return [b"{}", answers.places(tokenizer, ids, job["skip"], job["begin"], prompt).tobytes()]


JOBS = {"chat": chat, "encode": encode, "decode": decode}
