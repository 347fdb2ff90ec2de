"""The choice of the parser of a server's replies, by name or by the chat template of the model.

* ``--tool-parser auto`` takes the format that the tokenizer's response template or the chat template prints.
* ``--tool-parser NAME`` names a plug-in of the kind ``parser``, or a parser that ``tools.register`` has added.
* ``--reasoning-parser NAME`` names the format of the reasoning, if the format of calls has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, PluginError, shown, suggest
from minivllm.registration.discovery import LOCAL
from minivllm.registration.spec import PluginQuery
from minivllm.registry import Catalog
from minivllm.runtime.replies import DescribedParser, ReplyContext, ReplyParser, detect
from minivllm.runtime.replies.grammar import Spelling, writes
from minivllm.runtime.replies.thinking import ThinkingTags
from minivllm.runtime.text.marks import NO_MARKS, Marks

from . import tools
from .thoughts import tags_around

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig
    from minivllm.runtime.text.tokenizer import Tokenizer

AUTO = "auto"
TAIL = 24  # number of last tokens of a prompt that are searched for a text that opens the reasoning
# names of vLLM -> our names
ALSO: Mapping[str, str] = {
    "deepseek_v3": "deepseek_r1",
    "gemma4": "gemma",
    "glm45": "glm4",
    "glm47": "glm4",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": "gpt_oss",
    "openai_gptoss": "gpt_oss",
    "qwen3_xml": "qwen3_coder",
}


@dataclass(frozen=True)
class Chosen:
    """The parser of a server, its name, and the reason for the choice as a sentence."""

    name: str
    parser: ReplyParser
    reason: str


def choose(server: ServerConfig, tokenizer: Tokenizer | None, allow_targets: Sequence[str] = ()) -> Chosen:
    """Return the parser of a server.  ConfigError if the configuration names a parser that does not exist."""
    catalog = Catalog.discover().allow(allow_targets)
    name = server.tool_parser
    if name in tools.PARSERS and server.reasoning_parser is not None:
        text = (
            f"server.reasoning_parser={shown(server.reasoning_parser)}: tool_parser={shown(name)} is a registered class"
        )
        raise ConfigError(f"{text}, which finds reasoning itself or not at all; leave reasoning_parser out")
    reason = "it was named"
    if name == AUTO or name in tools.PARSERS:
        written = tokenizer.written if tokenizer is not None else ()
        response = tokenizer.response_template if tokenizer is not None else ""
        name, reason = detect(written, response)
    parser = _built(catalog, "tool_parser", name)
    named = server.reasoning_parser
    if named is not None:
        parser = with_reasoning(parser, name, _built(catalog, "reasoning_parser", named), named)
        reason = f"{reason}; reasoning as in {named}"
    return Chosen(name, parser, reason)


def with_reasoning(parser: ReplyParser, name: str, other: ReplyParser, named: str) -> ReplyParser:
    """Return a parser of the calls of one format and the reasoning of another.

    ConfigError if the formats cannot be combined."""
    if type(parser) is type(other):
        return parser
    if isinstance(parser, DescribedParser) and isinstance(other, DescribedParser):
        mine = parser.format
        theirs = other.format
        reasoning = theirs.reasoning
        if mine.reasoning is not None and mine.reasoning == reasoning:
            return parser
        if not parser.thinks() and reasoning is not None:
            opening = [tag for tag in theirs.tags if tag in reasoning.open]
            tags = dict.fromkeys((*mine.tags, *opening, reasoning.close))
            combined = replace(mine, reasoning=reasoning, tags=tuple(tags))
            kind = type("Combined", (DescribedParser,), {"format": combined})
            return kind()
    text = f"server.reasoning_parser={shown(named)}: its reasoning does not fit tool_parser={shown(name)}"
    raise ConfigError(f"{text}; leave it out, or name one parser with tool_parser")


def _entry(catalog: Catalog, option: str, name: str) -> Any:
    """Return the entry of a parser, by its name or an alias.  ConfigError if it does not exist or cannot be chosen."""
    registry = catalog["parser"]
    name = name if registry.installed(name) else ALSO.get(name, name)
    if not registry.installed(name):
        names = [AUTO, *(entry.name for entry in registry.entries), *tools.PARSERS]
        raise ConfigError(f"server.{option}={shown(name)}: there are {', '.join(names)}.{suggest(name, names)}")
    try:
        return registry.find(name)
    except PluginError as exc:
        raise ConfigError(f"server.{option}: {exc}") from exc


def _built(catalog: Catalog, option: str, name: str) -> ReplyParser:
    """Return the parser plug-in that has a name."""
    registry = catalog["parser"]
    entry = _entry(catalog, option, name)
    label = entry.name if entry.builtin or entry.dist == LOCAL else entry.label
    selection = registry.select(PluginQuery(), label)
    candidate = selection.require()
    options = registry.options(candidate, {}, f"server.{option}")
    made: ReplyParser = registry.load(candidate)(options)
    return made


def spelling_of(parser: Any, tokenizer: Tokenizer | None) -> Spelling | None:
    """Return the format in which a grammar writes calls, or None for a parser without such a description."""
    described = isinstance(parser, DescribedParser) and type(parser).start is DescribedParser.start
    if tokenizer is None or not described:
        return None
    added = tokenizer.added_tokens
    spelling = Spelling(parser.format, {tag: added[tag] for tag in parser.tags() if tag in added})
    return spelling if writes(spelling) else None


def hidden_tags(marks: Marks, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> frozenset[str]:
    """Return the tags that are special tokens, if the answer omits special tokens from its text, else no tags."""
    if tokenizer is None or not skip_special_tokens:
        return frozenset()
    special = {marks.by_token[i] for i in marks.by_token.keys() & tokenizer.special_ids}
    return frozenset(tag for tag, mark in marks.by_tag.items() if mark in special)


def context_of(offered: tools.Tools, marks: Marks = NO_MARKS, hidden: frozenset[str] = frozenset()) -> ReplyContext:
    """Return the facts about a request that the parser of its answer needs."""
    functions = {}
    for tool in offered.listed:
        function = tool["function"]
        functions[function["name"]] = function.get("parameters") or {}
    only = frozenset({offered.function}) if offered.choice == "named" else offered.only
    return ReplyContext(functions, only, marks.by_tag, hidden, calls=offered.choice == "auto")


def opens_reasoning(parser: Any, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> bool:
    """Return whether the prompt of an answer ends within the reasoning.

    Tags that are tokens are found in the same way as for the limit of the reasoning, even if no reasoning follows them.
    """
    if tokenizer is None or not isinstance(parser, ReplyParser):
        return False
    tags = tags_around(parser)
    added = tokenizer.added_tokens
    if tags is not None and all(tag in added for tag in tags):
        start, end = ((added[tag],) for tag in tags)
        return ThinkingTags(start, end, end).opened(prompt, tokenizer.eos_ids)
    return parser.opens(tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False))


def reasoning_tokens(ids: Sequence[int], marks: Marks, tags: tuple[str, str] | None, share: float, opened: bool) -> int:
    """Return the number of tokens of an answer that are reasoning, including its tags.

    ``opened`` means that the answer begins within the reasoning.  The number is exact if the tags around reasoning are
    tokens.  Otherwise it is ``share`` of all tokens, where ``share`` is the part of the text that is reasoning.
    """
    tokens = {mark: token for token, mark in marks.by_token.items()}
    start, end = (tokens.get(marks.by_tag.get(tag, "")) for tag in tags or ("", ""))
    if share == 0 or start is None or end is None or end not in ids:
        return round(share * len(ids))
    count = 0
    inside = opened
    for token in ids:
        inside = inside or token == start
        count += inside
        inside = inside and token != end
    return count
