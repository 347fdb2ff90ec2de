"""The functions that the worker pool's processes run.

``WorkerPool`` sends a job and parts of bytes.  The job is a JSON object that has the name of a function under ``op``.
A function returns the parts of the answer.  The first part is a JSON object with the small values, ``{}`` if there are
none.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from minivllm.core.interfaces.structured import StructuredOutputsParams
from minivllm.errors import RequestError
from minivllm.runtime.processes.confined import PIECE, Work, allow, prepare
from minivllm.runtime.replies.grammar import Spelling
from minivllm.runtime.text.tokenizer import Tokenizer

from .errors import ApiError
from .http import bounds
from .http.body import check_text, load_object
from .link.scored import Scored
from .openai import answers, tools
from .openai.logprobs import Speller
from .openai.params import whole_form
from .openai.tokens import too_long

# factor of the limits of time and memory for the first use of the tokenizer, which creates objects that are kept
WARM = 5
FEW = 256  # largest number of token ids that are sent as JSON; only longer lists are faster as arrays
LONGEST_PATH = 1024  # length of a text's path from which the text stays in the JSON: each path repeats its names
Job = dict[str, Any]
Parts = list[bytes]


def make(hello: bytes) -> Work:
    """Return the function that runs a job.  ``hello`` is the pool's JSON of the tokenizer and the limits of a chat."""
    setup = json.loads(hello)
    tokenizer = None if setup["tokenizer"] is None else Tokenizer.from_json(setup["tokenizer"])
    if tokenizer is not None:
        prepare(lambda: warm(tokenizer), WARM * setup["seconds"], WARM * setup["megabytes"])

    def work(job: Job, parts: Parts) -> Parts:
        try:
            return run(tokenizer, job, parts)
        except (ApiError, RequestError) as e:
            status = e.status if isinstance(e, ApiError) else 400
            return [dump({"error": [status, str(e), e.param]})]

    return work


def run(tokenizer: Tokenizer | None, job: Job, parts: Parts) -> Parts:
    """Run a job, chosen by ``job["op"]``, and return the parts of its answer."""
    if job["op"] == "read":
        return read(parts[0], job["inner"])
    if job["op"] == "form":
        return form(parts[0], job["spelling"])
    if job["op"] == "shape":
        return shape(tokenizer, job, parts)
    if job["op"] == "places":
        return places(tokenizer, job, *parts)
    assert tokenizer is not None
    return JOBS[job["op"]](tokenizer, job, parts[0])


def warm(tokenizer: Tokenizer) -> None:
    """Encode a short text and chat, so that workers inherit the objects that their first use creates."""
    tokenizer.encode("a")
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat(tokenizer.chat_prompt([{"role": "user", "content": "<a>"}]))


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def read(raw: bytes, inner: str) -> Parts:
    """Parse and check a request body.  Return its JSON without its long lists of token ids and its long texts, then the
    lists as arrays, then the UTF-8 bytes of all texts if there are any.

    ``inner`` is the field of a WebSocket message that contains the body; "" means that ``raw`` is the body.
    """
    bounds.check_shape(raw)
    value = load_object(raw)
    flawed = None
    try:
        check_text(raw, value)
    except ApiError as e:
        if not inner:
            raise
        flawed = e.status, str(e), e.param
    body = value.get(inner) if inner else value
    columns, arrays = [], []
    if isinstance(body, dict):
        bounds.check_fields(body)
        for name in (*bounds.IDS, *bounds.INPUTS):
            found = ids_of(body.get(name))
            if found is not None:
                ids, lengths = found
                columns.append([name, lengths])
                arrays.append(ids.tobytes())
                body[name] = None
    rest = compact(value)
    bounds.check_values(bounds.shape_of(rest).values)
    texts: list[tuple[list[str | int], list[int]]] = []
    encoded: list[bytes] = []
    if flawed is None and len(rest) > PIECE:
        for path, text in take_texts(value):
            parts = [text[at : at + PIECE].encode() for at in range(0, len(text), PIECE)]
            sizes = list(map(len, parts))
            texts.append((path, sizes))
            encoded += parts
        rest = compact(value)
    if texts:
        arrays.append(b"".join(encoded))
    about = {"columns": columns, "flawed": flawed, "texts": texts}
    return [dump(about), rest, *arrays]


def compact(value: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def take_texts(value: Any) -> list[tuple[list[str | int], str]]:
    """Take the texts of more than ``PIECE`` characters out of nested objects and lists.  Return each with its path.

    They are sent separately, because the event loop would parse their JSON in one turn."""
    found: list[tuple[list[str | int], str]] = []
    todo: list[tuple[list[str | int], Any]] = [([], value)]
    while todo:
        path, holder = todo.pop()
        for key, inner in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(inner, str) and len(inner) > PIECE and len(str(path)) < LONGEST_PATH:
                found.append(([*path, key], inner))
                holder[key] = None
            elif isinstance(inner, (dict, list)):
                todo.append(([*path, key], inner))
    return found


def ids_of(value: Any) -> tuple[np.ndarray, list[int] | None] | None:
    """Return a long list of token ids as an array (i64 [n]) and None.

    For a list of lists, return the array of all their ids and the length of each list.
    Return None for every other value, for short lists and for numbers that i64 cannot hold.
    """
    if not isinstance(value, list) or not value:
        return None
    nested = all(type(row) is list for row in value)
    flat = [i for row in value for i in row] if nested else value
    kinds = set(map(type, flat))
    if len(flat) <= FEW or kinds != {int}:
        return None
    if nested and not all(value):  # an empty list is an error, which the reader of the JSON reports
        return None
    lengths = [len(row) for row in value] if nested else None
    try:
        return np.array(flat, np.int64), lengths
    except OverflowError:
        return None


def form(part: bytes, spelling: Any = None) -> Parts:
    """Return the ``structured_outputs`` of a body, from the JSON of the body's fields in ``worker_pool.FORMS``.

    A JSON schema is returned as the final text of the schema.  ``spelling`` is the format of calls as
    JSON values, or None.
    """
    body = SimpleNamespace(**json.loads(part))
    read = tools.read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    wanted = whole_form(body, read, None if spelling is None else Spelling.of(spelling))
    params = StructuredOutputsParams.of(wanted)
    if params is not None and params.source.kind == "json":
        source = params.source
        wanted = {"json": source.text, "disable_any_whitespace": not source.any_whitespace}
        if source.whitespace is not None:
            wanted["whitespace_pattern"] = source.whitespace
    return [b"{}", dump(wanted)]


def chat(tokenizer: Tokenizer, job: Job, part: bytes) -> Parts:
    """Return the token ids (i32) of a conversation.

    Filling the template is limited to ``job["render"]`` seconds, and encoding its text to the rest of the job's time.
    """
    conversation = json.loads(part)
    allow(job["render"])
    if job["split"]:
        prompt = tokenizer.chat_prompt(**conversation)
        text = prompt.text
    else:
        text = str(tokenizer.apply_chat_template(tokenize=False, **conversation))
    allow(job["seconds"] - job["render"])
    too_long(text, job["most"], "messages")
    ids = tokenizer.encode_chat(prompt) if job["split"] else tokenizer.encode(text, False)
    return [b"{}", np.array(ids, np.int32).tobytes()]


def encode(tokenizer: Tokenizer, job: Job, part: bytes) -> Parts:
    """Return the token ids (i32) of texts in one array, and the number of ids of each text.

    ``part`` has all texts without separators, and ``job["lengths"]`` the number of characters of each."""
    text, end, encoded = part.decode("utf-8", "surrogatepass"), 0, []
    for length in job["lengths"]:
        start = end
        end += length
        encoded.append(tokenizer.encode(text[start:end], job["special"]))
    lengths = [len(row) for row in encoded]
    ids = [i for row in encoded for i in row]
    return [dump({"lengths": lengths}), np.array(ids, np.int32).tobytes()]


def decode(tokenizer: Tokenizer, job: Job, part: bytes) -> Parts:
    """Return the text of token ids (i64), in UTF-8 that may have halves of surrogate pairs."""
    ids = np.frombuffer(part, np.int64).tolist()
    text = tokenizer.decode(ids, skip_special_tokens=job["skip"])
    return [b"{}", text.encode("utf-8", "surrogatepass")]


def shape(tokenizer: Tokenizer | None, job: Job, columns: Parts) -> Parts:
    """Return the JSON of a part of an answer's log-probabilities, which were packed by ``Scored.pack``."""
    speller = Speller(tokenizer, job["as_ids"], job["detokenize"])
    rows = Scored.unpack(columns).rows()
    return [b"{}", *answers.shaped(job["kind"], rows, job["top"], speller)]


def places(tokenizer: Tokenizer | None, job: Job, tokens: bytes, text: bytes) -> Parts:
    """Return the position in the answer's text (i64) at which each token begins."""
    prompt = text.decode("utf-8", "surrogatepass") if job["given"] else None
    ids = np.frombuffer(tokens, np.int64).tolist()
    positions = answers.places(tokenizer, ids, job["skip"], job["begin"], prompt)
    return [b"{}", positions.tobytes()]


JOBS = {"chat": chat, "encode": encode, "decode": decode}
