"""Texts as models write them in each format of replies, made by seed, and the expected results of a parser."""

import itertools
import random

from minivllm.plugins.parser.deepseek_r1 import DeepSeekR1, DeepSeekV31
from minivllm.plugins.parser.gemma import Gemma
from minivllm.plugins.parser.glm4 import Glm4Parser
from minivllm.plugins.parser.gpt_oss import GptOssParser
from minivllm.plugins.parser.hermes import Hermes
from minivllm.plugins.parser.json import Json
from minivllm.plugins.parser.llama3_json import Llama3Json
from minivllm.plugins.parser.mistral import MistralParser
from minivllm.plugins.parser.pythonic import Pythonic
from minivllm.plugins.parser.qwen3 import Qwen3Parser
from minivllm.plugins.parser.qwen3_coder import Qwen3Coder
from minivllm.runtime.replies import Begun, Ended, ReplyContext, Said, Thought, Written
from minivllm.runtime.replies.write import write_calls, write_reply

FORMATS = {
    "qwen3": Qwen3Parser,
    "qwen3_coder": Qwen3Coder,
    "deepseek_r1": DeepSeekR1,
    "deepseek_v31": DeepSeekV31,
    "gpt_oss": GptOssParser,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": MistralParser,
    "pythonic": Pythonic,
    "glm4": Glm4Parser,
    "gemma": Gemma,
    "json": Json,
}
SPECIAL = {  # tags that are special tokens of the models
    "deepseek_r1": lambda tag: "▁" in tag,
    "deepseek_v31": lambda tag: "▁" in tag,
    "gpt_oss": lambda tag: True,
    "llama3_json": lambda tag: True,
    "mistral": lambda tag: True,
    "gemma": lambda tag: True,
    "pythonic": lambda tag: True,
}
FUNCTIONS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
    "write-file.v2": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "f": {"type": "object", "properties": {"a": {"type": "number"}, "flags": {"type": "array"}, "x": {}}},
    "g": {"type": "object", "properties": {}},
}
WORDS = (
    "the", "a", "weather", "naïve", "中文", "🙂", "x < y", "a[0]", "{}", '"quoted"', "it's", "\\n", "1.5", "`code`",
    "if a <= b:", "[link](http://x)", "call:", "\n", "\n\n", "  ", "```\ncode <b>\n```", "name", "<", "<t", "[", "]",
    "}",
)  # fmt: skip
STRINGS = (
    "", "Paris", 'a"b', "back\\slash", "new\nline", "tab\t", "é 中 🙂", "}{][", "</p>", "<b>", "\u2028", "\x7f", "'",
    "a, b=1)",
)  # fmt: skip


def words(rng, most=12):
    """Return random prose."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, most)))


def value(rng, depth=2):
    """Return a random JSON value."""
    kind = rng.randrange(9 if depth else 6)
    if kind < 2:
        return rng.choice(STRINGS)
    if kind == 2:
        return rng.choice([0, -1, 3, 12345678901234567890, 10])
    if kind == 3:
        return rng.choice([0.5, -2.25, 1e-7])
    if kind == 4:
        return rng.choice([True, False])
    if kind == 5:
        return None
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {rng.choice(("k", "key_2", "z")): value(rng, depth - 1) for _ in range(rng.randrange(3))}


def call(rng):
    """Return a random call: the name of a function and arguments that fit its schema."""
    name = rng.choice(list(FUNCTIONS))
    arguments = {}
    for key, schema in FUNCTIONS[name]["properties"].items():
        if rng.random() < 0.7:
            makers = {
                "string": lambda: rng.choice(STRINGS),
                "integer": lambda: rng.randrange(-5, 100),
                "number": lambda: rng.choice([1, 2.5, -3]),
                "object": lambda: {"k": value(rng, 1)},
                "array": lambda: [value(rng, 1) for _ in range(rng.randrange(3))],
            }
            arguments[key] = makers.get(schema.get("type"), lambda: rng.choice([1, True, None, [1, {"b": "c"}]]))()
    return name, arguments


def calls(rng, name):
    """Return one to three random calls that the format can write."""
    made = [call(rng) for _ in range(rng.randrange(1, 4))]
    if name == "pythonic":
        made = [(function.replace("-file.v2", "_file"), arguments) for function, arguments in made]
    return made


def texts(name, seed):
    """Return a text of a format, made by one of about twenty generators."""
    rng = random.Random(f"{name}-{seed}")
    form = FORMATS[name].format
    makers = [maker for maker in MAKERS if maker(random.Random(0), name, form) is not None]
    return makers[seed % len(makers)](rng, name, form)


def _whole(rng, name, form):
    return write_reply(form, words(rng), words(rng), calls(rng, name))


def _calls_only(rng, name, form):
    return write_reply(form, "", "", calls(rng, name))


def _thought_and_calls(rng, name, form):
    return write_reply(form, words(rng), "", calls(rng, name))


def _content_only(rng, name, form):
    return write_reply(form, words(rng) if rng.random() < 0.5 else "", words(rng, 20))


def _prose(rng, name, form):
    return words(rng, 30)


def _tags_in_prose(rng, name, form):
    return " ".join(rng.choice([*(form.tags or WORDS), *WORDS]) for _ in range(rng.randrange(2, 15)))


def _quoted_tag(rng, name, form):
    if not form.tags:
        return None
    return f"{words(rng)} `{rng.choice(form.tags)}` {words(rng)}"


def _call_in_a_block(rng, name, form):
    return f"{words(rng, 4)}\n```\n{write_reply(form, '', '', calls(rng, name))}\n```\n{words(rng, 4)}"


def _text_behind(rng, name, form):
    return write_reply(form, "", "", calls(rng, name)) + rng.choice(["", " ", "\n\n"]) + words(rng)


def _missing_end(rng, name, form):
    text = write_reply(form, "", words(rng), calls(rng, name))
    ends = [tag for tag in form.tags if tag.startswith("</") or "end" in tag] or ["]"]
    tag = rng.choice(ends)
    at = text.rfind(tag)
    return text if at < 0 else text[:at] + text[at + len(tag) :] + rng.choice(["", words(rng)])


def _truncated(rng, name, form):
    text = write_reply(form, words(rng), words(rng), calls(rng, name))
    return text[: rng.randrange(1, len(text))]


def _damaged(rng, name, form):
    text = write_reply(form, words(rng), words(rng, 4), calls(rng, name))
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(["", "}", "]", '"', "<", " ", "\\", "x"]) + text[at + rng.randrange(3) :]


def _doubled(rng, name, form):
    text = write_reply(form, words(rng), words(rng, 4), calls(rng, name))
    at = rng.randrange(len(text))
    return text[:at] + text[max(at - rng.randrange(1, 30), 0) :]


def _unknown_function(rng, name, form):
    return write_reply(form, "", words(rng, 4), [("unknown", {"a": 1}), *calls(rng, name)])


def _thought_without_end(rng, name, form):
    if form.reasoning is None:
        return None
    spelled = write_calls(form.calls[0], calls(rng, name)) if form.calls else ""
    return form.reasoning.open + words(rng) + spelled


def _other_spelling(rng, name, form):
    if len(form.calls) < 2:
        return None
    return words(rng, 3) * rng.randrange(2) + write_calls(rng.choice(form.calls[1:]), calls(rng, name))


def _spaces(rng, name, form):
    text = write_reply(form, words(rng), words(rng, 4), calls(rng, name))
    return "".join(char + rng.choice(["", "", "", " ", "\n"]) if char in ">{,:" else char for char in text)


def _escapes(rng, name, form):
    text = write_reply(form, "", "", [("write-file.v2", {"path": "\u0001/\b\f", "text": 'é🙂\n"\\'})])
    return text.replace("é🙂", r"\u00e9\ud83d\ude00") if rng.random() < 0.5 else text


def _begins_again(rng, name, form):
    one = write_reply(form, "", "", calls(rng, name))
    return one + rng.choice(["", "\n", "so ", ","]) + one


def _shuffled(rng, name, form):
    pieces = [write_reply(form, words(rng, 3), "", []), words(rng, 3), write_reply(form, "", "", calls(rng, name))]
    rng.shuffle(pieces)
    return "".join(pieces)


def _only_tags(rng, name, form):
    return "".join(rng.choice(form.tags) for _ in range(rng.randrange(1, 9))) if form.tags else None


MAKERS = (
    _whole, _calls_only, _thought_and_calls, _content_only, _prose, _tags_in_prose, _quoted_tag, _call_in_a_block,
    _text_behind, _missing_end, _truncated, _damaged, _doubled, _unknown_function, _thought_without_end,
    _other_spelling, _spaces, _escapes, _begins_again, _shuffled, _only_tags,
)  # fmt: skip


def context(name, seed=0):
    """Return the request of a recording: whether tags are tokens, reasoning is open, and names are limited."""
    rng = random.Random(f"context-{name}-{seed}")
    form = FORMATS[name].format
    special = SPECIAL.get(name, lambda tag: False)
    marks = {}
    if rng.random() < 0.6:
        marks = {tag: chr(0xDC80 + k) for k, tag in enumerate(form.tags) if "=" not in tag and tag[:6] != "</func"}
    hidden = frozenset(tag for tag in marks if special(tag))
    only = frozenset([*FUNCTIONS, "write_file"]) if rng.random() < 0.5 else None
    opened = form.reasoning is not None and rng.random() < 0.3
    return ReplyContext(FUNCTIONS, only, marks, hidden, opened, rng.random() < 0.95)


def marked(text, marks):
    """Return a text with the mark of each tag."""
    for tag, mark in marks.items():
        text = text.replace(tag, mark)
    return text


def found(reply, pieces, cut=False):
    """Return the reasoning, the content and the calls [name, arguments, whether it ended] of pieces."""
    parts = [part for piece in pieces for part in reply.feed(piece)]
    parts += reply.cut() if cut else reply.feed("", True)
    return summed(parts)


def summed(parts):
    """Return the reasoning, the content and the calls of parts."""
    thought, reported, made = "", "", []
    for part in parts:
        if isinstance(part, Thought):
            thought += part.text
        elif isinstance(part, Said):
            reported += part.text
        elif isinstance(part, Begun):
            made.append([part.name, "", False])
        elif isinstance(part, Written):
            made[-1][1] += part.text
        elif isinstance(part, Ended):
            made[-1][2] = True
    return thought, reported, made


def divided(text, places):
    """Return the pieces of a text that is cut at some places."""
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]
