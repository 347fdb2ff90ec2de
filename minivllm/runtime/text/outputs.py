"""What a client gets: outputs that are objects and dicts at once, and the text side of a running sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

from minivllm.core.engine.scores import Scores, TokenLogprobs
from minivllm.core.interfaces.finish import FinishReason
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError, shown

from .detokenize import IncrementalDetokenizer, StopStrings
from .tokenizer import Tokenizer

_T = TypeVar("_T")


class Logprob(NamedTuple):
    """Natural log-probability, of the raw logits unless ``logprobs_mode`` says otherwise; ``rank`` is 1 + the number of
    tokens that are strictly likelier."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class _Record(dict[str, Any]):
    """A dataclass that is a dict of its fields and of the names in ``_also``, which are properties.

    A dict and no other mapping, because ``json`` takes no other.  Invariant: its fields are its entries and nowhere
    else.  An entry may be a function, which is called when it is first read: to make a hundred thousand dicts takes a
    second, most of it the garbage collector's.
    """

    _also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self._also:
            dict.__setitem__(self, name, getattr(self, name))

    def __getattr__(self, name: str) -> Any:
        if dict.__contains__(self, name):
            return self[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._also:
            raise AttributeError(f"{name} follows from the rest of the output: set that")
        self[name] = value

    def __getitem__(self, key: str) -> Any:
        if key in self._also:
            return getattr(self, key)
        try:
            value = dict.__getitem__(self, key)
        except KeyError:
            raise KeyError(f"{shown(key)}: an output has {', '.join(self._names())}") from None
        if callable(value):
            value = self[key] = value()
        return value

    # what dict does without asking __getitem__

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> Any:
        return {name: self[name] for name in self}.items()

    def values(self) -> Any:
        return {name: self[name] for name in self}.values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.copy() == dict(other.items())

    def __ne__(self, other: object) -> bool:
        return not self == other

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        names = cls.__dict__.get("_all_names")
        if names is None:
            names = (*(f.name for f in fields(cls)), *cls._also)  # type: ignore[arg-type]
            cls._all_names = names  # type: ignore[attr-defined]
        return names


def _entries(cls: type[_T]) -> type[_T]:
    """Take away the defaults that ``dataclass`` leaves on the class: an attribute is looked for there first."""
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in vars(cls):
            delattr(cls, f.name)
    return cls


@_entries
@dataclass(eq=False)
class CompletionOutput(_Record):
    """One sequence of a request.

    ``finish_reason`` is "stop" (end-of-sequence, stop token, stop string), "length", "abort" or "error"; None while it
    runs.  ``stop_reason`` is the stop string or stop token id that ended it; None for end-of-sequence.  ``logprobs``
    has one dict per token, {token id: Logprob}: the chosen token first, then the best, of equal ones the lower id
    first; made when they are first looked at.  A token without any probability (-inf) is listed only if it was chosen,
    so there may be fewer than were asked for.  ``score`` orders the outputs of beam search: ``cumulative_logprob`` /
    tokens ** length_penalty.  ``taps``: of each point that was read a numpy array float32 [positions, width], a row for
    each token that the model was given (the prompt's, and the generated ones but the last), of "logits" one for each
    generated token unless the prompt is scored; None if nothing was read.
    """

    _also = ("tokens", "finished")

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    taps: dict[str, Any] | None = field(default=None, compare=False)  # arrays have no one answer to ==

    @property
    def tokens(self) -> list[int]:
        return self.token_ids

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@_entries
@dataclass(eq=False)
class RequestMetrics(_Record):
    """Seconds of ``time.monotonic``, ``scheduled_time`` that of leaving the queue; ``cached_tokens`` of the prompt were
    found in the prefix cache; of ``drafted_tokens`` that were guessed (speculative decoding) ``accepted_tokens`` were
    right; ``joules`` are its share of what a counter gave, None without the option ``energy``."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    scheduled_time: float | None = None
    joules: float | None = None


@_entries
@dataclass(eq=False)
class RequestOutput(_Record):
    """A request's answer so far.  As a mapping, and as an object, it also has ``text``, ``tokens``, ``finish_reason``,
    ``stop_reason`` and ``taps``, those of the first output."""

    _also = ("text", "tokens", "finish_reason", "stop_reason", "num_cached_tokens", "taps")

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text if self.outputs else ""

    @property
    def tokens(self) -> list[int]:
        return self.outputs[0].token_ids if self.outputs else []

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason if self.outputs else ("error" if self.error is not None else None)

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason if self.outputs else None

    @property
    def taps(self) -> dict[str, Any] | None:
        return self.outputs[0].taps if self.outputs else None

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.cached_tokens


class TextDelta(NamedTuple):
    """What one ``feed`` gave: new text, the stop string that ended the sequence if one did, and how many of the ids
    that were fed belong to the sequence."""

    text: str
    stopped: str | None
    used: int


def entry_of(
    token_id: int, got: TokenLogprobs, most: int | None, spell: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """The token itself first, then the ``most`` best (None: all that came) as far as they have any probability."""
    entry = {token_id: Logprob(float(got.chosen), int(got.rank), spell(token_id))}
    rank, before = 0, math.nan
    for place, (other, value) in enumerate(zip(got.top_ids[:most], got.top, strict=False), 1):
        if not value > -math.inf:  # nor has what follows; of a NaN nothing can be said
            break
        if value != before:
            rank, before = place, value
        other = int(other)
        if other not in entry:
            entry[other] = Logprob(float(value), rank, spell(other))
    return entry


class SequenceText:
    """Text, tokens and log-probabilities of one sequence as its tokens are accepted.

    With ``detokenize=False``, or without a tokenizer, no text is made.  ``scored=False``: log-probabilities are kept
    elsewhere, whatever ``params`` asks for.  Invariant: the deltas joined are ``text``, and after a final ``feed`` that
    is all the text there is.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, index: int = 0, scored: bool = True
    ) -> None:
        if params.stop and tokenizer is None:
            raise RequestError("stop: stop strings need a tokenizer; use stop_token_ids", "stop")
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        scored = scored and params.logprobs is not None
        self._scores: Scores | None = Scores() if scored else None
        self._entries: list[dict[int, Logprob]] = []  # of the first tokens, as far as somebody looked
        self.cumulative_logprob: float | None = 0.0 if scored else None
        self._most = None if params.logprobs == -1 else params.logprobs
        self._tokenizer, self._params = tokenizer, params
        self._pieces: list[str] = []
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops: StopStrings | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
            if params.stop:
                self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        # nothing but text is made of its tokens: ``extend`` will do for those in the middle of an answer
        self.plain = self._stops is None and self._scores is None

    def feed(
        self,
        ids: Sequence[int],
        final: bool = False,
        stop_token: bool = False,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> TextDelta:
        """Take accepted token ids, ``logprobs`` one per id.  ``final``: no more will come, give out what was held back.

        ``stop_token`` (only with ``final``): the last id ended the sequence; it is kept in ``token_ids`` but, unless
        ``include_stop_str_in_output``, not in the text.  If a stop string is found ``finish_reason`` is set here and
        the ids behind it are left out; what is fed afterwards is ignored (the device may be ahead).
        """
        if self.finish_reason is not None:
            return TextDelta("", None, 0)
        ids = list(ids)
        shown = ids[:-1] if stop_token and not self._params.include_stop_str_in_output else ids
        text, stopped, used = "", None, len(ids)
        if self._stops is not None:
            text, stopped, used = self._scan(self._stops, ids, shown, final)
        elif self._detokenizer is not None:
            text = self._detokenizer.add(shown)
            if final:
                text += self._detokenizer.finish()
        self.token_ids += ids if used == len(ids) else ids[:used]
        if self._scores is not None:
            self._take(ids[:used], logprobs)
        if text:
            self._pieces.append(text)
        if stopped is not None:
            self.finish_reason, self.stop_reason = "stop", stopped
        return TextDelta(text, stopped, used)

    def extend(self, ids: Sequence[int]) -> str:
        """The new text of ``feed(ids)``, if it is ``plain`` and has not ended."""
        self.token_ids += ids
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.add(ids)
        if text:
            self._pieces.append(text)
        return text

    def _scan(self, stops: StopStrings, ids: list[int], shown: list[int], final: bool) -> tuple[str, str | None, int]:
        """Token by token, to know which one completed a stop string."""
        pieces, before, wanted = [], len(self.token_ids), self._params.min_tokens
        assert self._detokenizer is not None
        for used, token_id in enumerate(shown, 1):
            text, stopped = stops.push(self._detokenizer.add((token_id,)), before + used > wanted)
            pieces.append(text)
            if stopped is not None:
                return "".join(pieces), stopped, used
        if final:
            text, stopped = stops.push(self._detokenizer.finish(), before + len(ids) > wanted)
            pieces.append(text)
            if stopped is not None:
                return "".join(pieces), stopped, len(ids)
            pieces.append(stops.finish())
        return "".join(pieces), None, len(ids)

    def _take(self, ids: list[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        if not ids:
            return
        assert self._scores is not None and self.cumulative_logprob is not None
        if logprobs is None or len(logprobs) < len(ids):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs or ())} log-probabilities: want one each")
        before = len(self._scores)
        self._scores.extend(logprobs if len(logprobs) == len(ids) else logprobs[: len(ids)])
        self.cumulative_logprob = sum(self._scores.chosen[before:], self.cumulative_logprob)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Of each token so far, {token id: Logprob}; None if they were not asked for."""
        return self.logprobs_from(0)

    def logprobs_from(self, start: int) -> list[dict[int, Logprob]] | None:
        """``logprobs[start:]``."""
        return None if self._scores is None else self._shown(len(self._scores), start)

    def _shown(self, count: int, start: int = 0) -> list[dict[int, Logprob]]:
        """Entries of the tokens [start, count), a list of the caller's own."""
        assert self._scores is not None
        for i in range(len(self._entries), count):
            self._entries.append(entry_of(self.token_ids[i], self._scores[i], self._most, self._spell))
        return self._entries[start:count]

    def prompt_logprobs(self, prompt: Sequence[int], parts: Sequence[tuple[int, Any]]) -> list[Any]:
        """One entry a prompt token, None for the first.  ``parts``: (position, plan.LogProbs), of which later ones
        count; of a request that ended early some are missing, and are None."""
        out: list[dict[int, Logprob] | None] = [None] * len(prompt)
        for first, lp in parts:
            for j in range(len(lp.chosen)):
                got = TokenLogprobs(float(lp.chosen[j]), int(lp.rank[j]), lp.top_ids[j].tolist(), lp.top[j].tolist())
                out[first + j] = entry_of(int(prompt[first + j]), got, None, self._spell)
        return out

    def _spell(self, token_id: int) -> str | None:
        if self._tokenizer is None or not self._params.detokenize:
            return None
        return self._tokenizer.decode((token_id,), skip_special_tokens=False)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Set why it ended; a stop string that was found before is kept."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def output(self) -> CompletionOutput:
        """A snapshot, independent of what is fed later."""
        scores: Any = None if self._scores is None else partial(self._shown, len(self._scores))
        return CompletionOutput(
            self.index,
            self.text,
            list(self.token_ids),
            self.cumulative_logprob,
            scores,
            self.finish_reason,
            self.stop_reason,
        )


class StopProbe:
    """Whether generated ids complete a stop string with the last of them, asked of any ids at any time: of those of a
    beam, which share no state.  Only as many ids are looked at as a stop string can span."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._span = 4 * max(map(len, params.stop or ("",))) + 8  # a character is four tokens at most

    def __call__(self, ids: Sequence[int]) -> str | None:
        if len(ids) <= self._params.min_tokens or self._tokenizer is None:
            return None
        text = IncrementalDetokenizer(self._tokenizer, self._params.skip_special_tokens)
        stops = StopStrings(self._params.stop or ())
        *before, last = ids[-self._span :]
        stops.push(text.add(before), armed=False)
        return stops.push(text.add((last,)))[1]
