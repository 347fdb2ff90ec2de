"""The tokenizer and the chat templates of a model directory.

A plug-in of the kind ``tokenizer`` converts text.  This module adds the conventions of chat templates, as transformers
does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.tokenizer import TokenizerBackend, TokenizerContext
from minivllm.device.loading.gguf_file import is_gguf, read_gguf
from minivllm.errors import ModelError, RequestError, shown

from .chat import DEFAULT, ChatTemplates, fill
from .growth import panics_as
from .library import LibraryTokenizer
from .literal import ROLES, ChatFiller, ChatPrompt, Spellings, check_values, without_spellings
from .messages import Chat, cut_at
from .template import ChatTemplate, chosen_template
from .tokenizer_files import read_object, read_templates

NOT_UNICODE = "prompt is not valid Unicode: expected text without lone surrogates"
MOST_ENDS = 32  # largest number of ids that end an answer, a limit of the device
MOST_FILLERS = 16  # largest number of cached ``ChatFiller`` objects


def load_tokenizer(
    model_dir: str | Path, chat_template: str | None = None, eos: Sequence[int] | None = None, part: Part | None = None
) -> Tokenizer:
    """Return the tokenizer of a model directory or GGUF file.  ModelError if it is missing or broken.

    ``chat_template`` is the text or the file of a template that replaces the model's.  ConfigError if it is not a
    template.  ``eos`` has end-of-sequence ids that replace those of the directory.  ``part`` is the plug-in, None for
    the built-in one of the format.

    Code from the directory is never run (``trust_remote_code`` is off).
    """
    from minivllm.registry import build_part

    path = Path(model_dir)
    chosen = built_in(path) if part is None else part
    plugin: TokenizerBackend = build_part("tokenizer", chosen, TokenizerContext(path))
    found = dict(plugin.chat_templates)
    if not found and not is_gguf(path):
        found = read_templates(path, read_object(path / "tokenizer_config.json"))
    templates = chosen_template(found, chat_template)
    ends = configured_eos(path) if eos is None else eos
    made = Tokenizer(plugin.library, plugin, plugin.special_tokens, templates, ends)
    made._folder, made._part = path, chosen
    return made


def built_in(path: Path) -> Part:
    """Return the built-in tokenizer for a directory or a GGUF file."""
    if is_gguf(path):
        return Part("minivllm/gguf", "minivllm.plugins.tokenizer.gguf:GgufTokenizer")
    return Part("minivllm/hf", "minivllm.plugins.tokenizer.hf:HfTokenizer")


class Tokenizer:
    """A tokenizer with the model's special tokens and chat templates.

    ``backend`` is a ``tokenizers.Tokenizer``, or None if the plug-in has none.  ``plugin`` is the tokenizer plug-in;
    None means that there is only the ``backend``."""

    def __init__(
        self,
        backend: Any,
        plugin: TokenizerBackend | None,
        special: Mapping[str, str],
        templates: str | Mapping[str, str] | None,
        eos: Sequence[int] = (),
    ) -> None:
        self.backend = backend
        self.plugin = LibraryTokenizer(backend) if plugin is None else plugin
        self.special_tokens = dict(special)  # "eos_token" -> "<|im_end|>"
        self._templates = ChatTemplates({DEFAULT: templates} if isinstance(templates, str) else templates or {})
        self._fillers: dict[str, ChatFiller] = {}
        own = self._special_id("eos_token")
        # the model's and the tokenizer's files may name different end-of-sequence tokens, and all of them are used
        self.eos_ids = tuple(dict.fromkeys([*eos] if own is None else [*eos, own]))
        self._folder: Path | None = None  # folder from which the tokenizer's files were read
        self._part: Part | None = None  # the plug-in that read the files
        self.pool: Any = None  # a ``TokenizerPool``, which converts long lists of texts

    @property
    def chat_templates(self) -> dict[str, str]:
        """Return the chat templates by name.  The name of a single template is ``default``."""
        return self._templates.sources

    @property
    def chat_template(self) -> str | None:
        """Return the default chat template, or None."""
        return self.chat_templates.get(DEFAULT)

    @property
    def written(self) -> list[str]:
        """Return the literal texts in the chat templates, any of which a prompt may contain."""
        return self._templates.written()

    @cached_property
    def response_template(self) -> str:
        """Return the description of replies in tokenizer_config.json as JSON text, or "" without one."""
        if self._folder is None or is_gguf(self._folder):
            return ""
        config = read_object(self._folder / "tokenizer_config.json")
        found = config.get("response_template") or config.get("response_schema")
        return json.dumps(found, ensure_ascii=False) if found else ""

    def template_variables(self, chat_template: str | None = None, tools: bool = False) -> frozenset[str]:
        """Return the variables that one of the model's chat templates reads, or none for an unknown name.

        ``tools`` means that the request has tools."""
        if chat_template is not None and chat_template not in self.chat_templates:
            return frozenset()
        try:
            return self._templates.select(chat_template, tools).facts.variables
        except RequestError:
            return frozenset()

    def to_json(self) -> dict[str, Any]:
        """Return the fields for ``from_json``, which makes the same tokenizer in another process."""
        if self.backend is None:
            part = None if self._part is None else vars(self._part)
            folder = str(self._folder)
            return {"folder": folder, "part": part, "templates": self.chat_templates, "eos": list(self.eos_ids)}
        return {
            "backend": self.backend.to_str(),
            "special": self.special_tokens,
            "templates": self.chat_templates,
            "eos": list(self.eos_ids),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Return a tokenizer made from the fields of ``to_json``: from the files of a folder, or from the JSON of a
        ``tokenizers.Tokenizer``."""
        if "folder" in fields:
            part = fields["part"]
            made = load_tokenizer(fields["folder"], None, fields["eos"], None if part is None else Part(**part))
            made._templates = ChatTemplates(fields["templates"])
            return made
        from tokenizers import Tokenizer as Backend

        return cls(
            Backend.from_str(fields["backend"]),
            None,
            fields["special"],
            fields["templates"],
            fields["eos"],
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.  RequestError if it is not valid text."""
        if not isinstance(text, str):
            raise RequestError(f"prompt of type {type(text).__name__}: expected a string", "prompt")
        if self.backend is not None:
            return self._encoded(text, add_special_tokens).ids
        try:
            return self.plugin.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as e:
            raise RequestError(NOT_UNICODE, "prompt") from e

    def _encoded(self, text: str, add_special_tokens: bool = False) -> Any:
        """Return the ``tokenizers.Encoding`` of a text.  RequestError if the text is not Unicode."""
        try:
            with panics_as(lambda why: RequestError(why, "prompt")):
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as e:  # the text contains half of a surrogate pair
            raise RequestError(NOT_UNICODE, "prompt") from e

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.  Unknown ids have no text.  Spaces before punctuation are kept."""
        ids = [int(i) for i in ids]
        with panics_as(RequestError):
            return self.plugin.decode(ids, skip_special_tokens)

    def batch_decode(self, batch: Iterable[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of ids."""
        rows = list(batch)
        if self.pool is not None:
            return self.pool.decode_all(rows, skip_special_tokens)
        return [self.decode(ids, skip_special_tokens) for ids in rows]

    def batch_encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text, as ``encode`` does."""
        if self.pool is not None and all(isinstance(text, str) for text in texts):
            return self.pool.encode_all(texts, add_special_tokens)
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_some(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text, in the thread of the caller.  RequestError if a text is not Unicode."""
        if self.backend is None:
            return [self.encode(text, add_special_tokens) for text in texts]
        try:
            with panics_as(lambda why: RequestError(why, "prompt")):
                # encode_batch_fast computes no positions of tokens, which takes a fifth less time
                found = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as e:
            raise RequestError(NOT_UNICODE, "prompt") from e
        return [each.ids for each in found]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, list[Any]]:
        """Return ``input_ids`` and ``attention_mask`` of a text, or of each text of a list, without padding."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        batch = self.batch_encode(text, add_special_tokens)
        return {"input_ids": batch, "attention_mask": [[1] * len(ids) for ids in batch]}

    def __len__(self) -> int:
        return self.vocab_size

    def __bool__(self) -> bool:
        return True  # an empty vocabulary is possible too

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the tokenizer's end-of-sequence token, or None.  ``eos_ids`` also has the model's ids."""
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Return the id of the begin-of-sequence token, or None."""
        return self._special_id("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Return the id of the padding token, or None."""
        return self._special_id("pad_token")

    def _special_id(self, name: str) -> int | None:
        """Return the id of a special token such as "eos_token", or None."""
        return self.token_id(self.special_tokens[name]) if name in self.special_tokens else None

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token ("Ġthe", "<0x0A>"), or None for an unknown id."""
        return self.plugin.token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by the vocabulary's spelling, or None."""
        return self.plugin.token_id(token)

    @cached_property
    def vocab_size(self) -> int:
        """Return the number of tokens, including added tokens.  The model's logits may be wider."""
        return self.plugin.vocab_size

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids that ``skip_special_tokens`` omits from text."""
        return self.plugin.special_ids

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Return the ids of the tokens that were added to the vocabulary, special or not, by their texts."""
        return dict(self.plugin.added_tokens)

    def apply_chat_template(
        self,
        messages: Any,
        add_generation_prompt: bool | None = None,
        *,
        tokenize: bool = True,
        tools: Chat | None = None,
        documents: Chat | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int] | str:
        """Return the prompt of a conversation, as token ids or (``tokenize=False``) as text.

        As in transformers, text of a message that is spelled like a special token becomes the special token.

        ``add_generation_prompt`` begins the answer.  None means True, or False with ``continue_final_message``, which
        ends the prompt with the last message.  ``chat_template`` is the name of one of the model's templates, or the
        text of a template.  Without it, the template ``tool_use`` is used for tools if the model has one.
        ``variables`` are further variables of the template, such as ``enable_thinking``.  RequestError if the model has
        no template, the messages are malformed, or the template refuses them.
        """
        filling = self._templates.prepare(
            messages, add_generation_prompt, continue_final_message, tools, documents, chat_template, variables
        )

        def run(render: Callable[[Any], str], values: Any) -> str:
            check_values(values)
            return render(values)

        text = fill(filling, self.special_tokens, run)
        if filling.mark:
            text = cut_at((text,), filling.mark)[0]
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def chat_prompt(
        self,
        messages: Any,
        add_generation_prompt: bool | None = None,
        *,
        tools: Chat | None = None,
        documents: Chat | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation in which only text of the template can be a special token.

        Text of messages, tools, documents and variables that is spelled like a special token stays text.
        ``encode_chat`` returns the ids of the prompt.  Arguments and errors are those of ``apply_chat_template``.
        """
        filling = self._templates.prepare(
            messages, add_generation_prompt, continue_final_message, tools, documents, chat_template, variables
        )
        prompt = fill(filling, self.special_tokens, self._filler_of(filling.template).fill)
        return replace(prompt, pieces=cut_at(prompt.pieces, filling.mark)) if filling.mark else prompt

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Return the ids of a prompt, in which only ``prompt.special`` are special tokens."""
        if self.backend is None:
            ids = self.encode(prompt.text, add_special_tokens=False)
            wanted = [self.token_id(token) for token in prompt.special]
            if prompt.plain and [i for i in ids if i in self._kept_apart] == wanted:
                return ids
            encoded = [self._encode_piece(piece, bool(n % 2)) for n, piece in enumerate(prompt.pieces)]
            return [i for part in encoded for i in part]
        found = self._in_place(prompt)
        if found is not None:
            return found
        backend, names = self._literal
        text = "".join(names[piece] if n % 2 else piece for n, piece in enumerate(prompt.pieces))
        return backend.encode(text, add_special_tokens=False).ids

    def _in_place(self, prompt: ChatPrompt) -> list[int] | None:
        """Return the ids of the prompt's text, or None if the special tokens in it differ from those of the prompt.

        Positions are compared too.  An added token may begin in the text before a special token and contain it, while
        text of the caller spells another special token.
        """
        found = self._encoded(prompt.text)
        wanted = []
        at = 0
        for n, piece in enumerate(prompt.pieces):
            if n % 2:
                wanted.append((self.token_id(piece), at, at + len(piece)))
            at += len(piece)
        spans = zip(found.ids, found.offsets, strict=True)
        there = [(i, *span) for i, span in spans if i in self._kept_apart]
        if len(there) != len(wanted):
            return None
        for (i, begin, end), (token, first, last) in zip(there, wanted, strict=True):
            if i != token or begin > first or end < last:  # a token that includes adjacent spaces is wider
                return None
        return found.ids

    def _encode_piece(self, piece: str, special: bool) -> list[int]:
        """Return the ids of a piece of a prompt, for a tokenizer without a ``tokenizers.Tokenizer``.  RequestError if
        text is spelled like a special token."""
        if special:
            return [i for i in [self.token_id(piece)] if i is not None]
        try:
            return self.plugin.encode_plain(piece)
        except ValueError as e:
            raise RequestError(f"messages: text is spelled like a special token: {e}", "messages") from e

    @cached_property
    def _kept_apart(self) -> frozenset[int]:
        """Return the ids of tokens that text of a caller cannot contain in a chat.

        They are special tokens, and added tokens that end an answer or that the chat template prints.  Pairs of tags
        (<think>, </think>) are excluded, because callers send answers back with such tags.
        """
        if self.backend is None:
            return self.special_ids
        added = {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}
        closing = {text for text in added.values() if text[:2] == "</"}
        tags = closing | {"<" + text[2:] for text in closing}
        written = self._templates.written()
        own = {i for i, token in added.items() if token not in tags and _writes(written, token)}
        return self.special_ids | own | added.keys() & set(self.eos_ids)

    @cached_property
    def _spellings(self) -> Spellings:
        """Return the search for text that spells one of the tokens ``_kept_apart``."""
        words: list[str] = []
        if self.backend is not None:
            words = [t.content for t in self.backend.get_added_tokens_decoder().values() if t.single_word]
        tokens = [self.token(i) for i in self._kept_apart]
        return Spellings([token for token in tokens if token is not None], words)

    @cached_property
    def _literal(self) -> tuple[Any, dict[str, str]]:
        """Return the tokenizer and the spellings of ``without_spellings``, for the special tokens of this tokenizer."""
        return without_spellings(self.backend, self._spellings.tokens)

    def _filler_of(self, template: ChatTemplate) -> ChatFiller:
        """Return the filler of a template, from the cache of at most MOST_FILLERS."""
        found = self._fillers.get(template.source)
        if found is None:
            if len(self._fillers) >= MOST_FILLERS:
                self._fillers.clear()
            facts = template.facts
            found = ChatFiller(self._spellings, facts.written, facts.names, facts.filters)
            self._fillers[template.source] = found
        return found


def _writes(written: Sequence[str], token: str) -> bool:
    """Return whether a template prints a token, as a whole or around the name of a role ("<|" + role + "|>")."""
    if any(token in text for text in written):
        return True
    for role in ROLES:
        before, found, after = token.lower().partition(role)
        begins = before and any(text.lower().endswith(before) for text in written)
        if found and begins and after and any(text.lower().startswith(after) for text in written):
            return True
    return False


def configured_eos(folder: Path, generation: Path | None = None) -> list[int]:
    """Return the end-of-sequence ids of a model directory or GGUF file.  ModelError if they are not ids.

    generation_config.json (or the file ``generation``) takes precedence over config.json."""
    ends = None if generation is None else read_object(generation).get("eos_token_id")
    if ends is not None:
        return token_ids(ends, str(generation))
    if is_gguf(folder):
        return list(read_gguf(folder).ends)
    for name in ("generation_config.json", "config.json"):
        found = read_object(folder / name).get("eos_token_id")
        if found is not None:
            return token_ids(found, str(folder / name))
    return []


def token_ids(found: Any, where: str) -> list[int]:
    """Return the ids of an ``eos_token_id``, which is one id or a list.  ModelError, which begins with ``where``."""
    ids = found if isinstance(found, list) else [found]
    valid = all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    if len(ids) > MOST_ENDS or not valid:
        raise ModelError(f"{where}: eos_token_id={shown(found)}: expected at most {MOST_ENDS} token ids")
    return ids
