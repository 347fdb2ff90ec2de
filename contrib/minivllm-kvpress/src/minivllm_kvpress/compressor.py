"""A compressor whose scores are those of a press of kvpress.

    StoredTokens                    press.score(module, hidden_states, keys, values, attentions, kwargs)
    keys    [n, kv_heads, dim]      keys [1, kv_heads, n, dim]
    values  [n, kv_heads, dim]      values [1, kv_heads, n, dim]
    queries [w, heads, dim]         attentions [1, heads, w, n], probabilities of the last w tokens

A press gets ``hidden_states``, ``kwargs`` and a ``module`` that raise a PluginError when it reads a value that a
compressor does not have.
"""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minivllm.plugin import Compressor, CompressorContext, PluginError, StoredTokens

from .supported import LEAST, READS_ATTENTION, REFUSED

PROBED = 600  # random tokens that a press scores when it is built; more than twice the default lag of LagKVPress


def press_class(name: str) -> type:
    """Return the class of a press from its name in kvpress or "module:Class".

    PluginError if it does not exist or cannot score stored tokens, with the reason."""
    import kvpress
    from kvpress.presses.scorer_press import ScorerPress

    module, colon, own = name.partition(":")
    found = getattr(importlib.import_module(module), own, None) if colon else getattr(kvpress, name, None)
    if not isinstance(found, type):
        usable = ", ".join(sorted(usable_presses()))
        raise PluginError(f"press={name!r}: no such class; expected module:Class, or one of {usable}")
    if found.__module__.partition(".")[0] == "kvpress" and found.__name__ in REFUSED:
        raise PluginError(f"press={name!r}: it {REFUSED[found.__name__]}")
    if not issubclass(found, ScorerPress):
        raise PluginError(f"press={name!r}: it is no ScorerPress, and a compressor needs the scores of tokens")
    if found.compress is not ScorerPress.compress:
        raise PluginError(f"press={name!r}: its own `compress` chooses tokens otherwise than by their scores")
    return found


def usable_presses() -> list[str]:
    """Return the names of the scorers of the installed kvpress that are not refused."""
    import kvpress
    from kvpress.presses.scorer_press import ScorerPress

    classes = {name: value for name, value in vars(kvpress).items() if isinstance(value, type)}
    return [name for name, cls in classes.items() if issubclass(cls, ScorerPress) and name not in REFUSED]


def attention_of(stored: StoredTokens) -> Tensor:
    """Return the attention probabilities [1, heads, w, n] of the queries over the stored tokens, in the queries'
    dtype."""
    assert stored.queries is not None
    w, heads, dim = stored.queries.shape
    n, kv_heads, _ = stored.keys.shape
    queries = (stored.queries.float() * stored.scale).to(stored.keys.dtype)
    rows = queries.view(w, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(rows, stored.keys.permute(1, 2, 0)).view(heads, w, n)
    later = torch.ones(w, w, dtype=torch.bool, device=scores.device).triu(1)
    scores[..., n - w :].masked_fill_(later, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(stored.keys.dtype)[None]


class Absent:
    """A value that a compressor does not have; reading it raises a PluginError.

    ``given`` are the attributes that it has nevertheless.
    """

    def __init__(self, press: str, name: str, **given: Any) -> None:
        self.__dict__.update(given, _press=press, _name=name)

    def _refuse(self, what: str) -> PluginError:
        return PluginError(f"press={self._press!r}: it reads {what}, which the seam `compressor` does not give")

    def __getattr__(self, name: str) -> Any:
        raise self._refuse(f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Any:
        raise self._refuse(f"{key} of {self._name}" if isinstance(key, str) else self._name)


class PressCompressor(Compressor):
    """Keep the tokens that a press scores highest.

    Of fewer tokens than the press accepts, the newest stay."""

    def __init__(self, options: Any, ctx: CompressorContext) -> None:
        super().__init__(options, ctx)
        self.name = options.press
        cls = press_class(self.name)
        self.press = self._made(cls)
        if self.name == "RandomPress" and self.press.seed is None:
            raise PluginError("press='RandomPress': it draws from torch's generator; set its option seed")
        if getattr(self.press, "use_random_leverage", False):
            raise PluginError(f"press={self.name!r}: use_random_leverage draws from torch's generator; set it to false")
        self.window = self._window()
        self.least = max((getattr(self.press, name, 0) or 0 for name in LEAST), default=0)
        self._probe()

    def _made(self, cls: type) -> Any:
        """Create the press.  PluginError if its class does not accept the options."""
        given = dict(self.options.options)
        if "compression_ratio" in given:
            raise PluginError(
                "options.compression_ratio: the kv_budget of a request is the number of tokens; remove it"
            )
        if is_dataclass(cls):
            known = [field.name for field in fields(cls) if field.init and field.name != "compression_ratio"]
            for name in given:
                if name not in known:
                    accepted = ", ".join(known) or "none"
                    raise PluginError(f"options.{name}: {self.name} has no such argument; it has {accepted}")
        try:
            return cls(**given)
        except Exception as e:
            raise PluginError(f"press={self.name!r}: {type(e).__name__}: {e}") from e

    def _window(self) -> int:
        """Return the number of last queries that the press reads."""
        reads = READS_ATTENTION.get(type(self.press).__name__, 0)
        own = getattr(self.press, reads) if isinstance(reads, str) else reads
        wanted = self.options.window
        if wanted is None:
            return int(own)
        if own and wanted != own:
            raise PluginError(f"window={wanted}: {self.name} reads {own} queries; leave window out")
        return int(wanted)

    def _probe(self) -> None:
        """Score random tokens once.

        PluginError if the press reads values that a compressor does not have.
        """
        n = max(PROBED, 2 * self.least)
        generator = torch.Generator().manual_seed(0)
        keys, values = (torch.randn(n, 2, 16, generator=generator) for _ in range(2))
        queries = torch.randn(self.window, 4, 16, generator=generator) if self.window else None
        stored = StoredTokens(0, keys, values, queries, 0.25, n // 2, n, 0)
        state = torch.get_rng_state()
        try:
            scores = self.score(stored)
        except PluginError:
            raise
        except Exception as e:
            raise PluginError(f"press={self.name!r}: scoring {n} random tokens failed: {type(e).__name__}: {e}") from e
        if not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
            raise PluginError(f"press={self.name!r}: it draws from torch's generator, so scores would not repeat")
        if tuple(scores.shape) != (2, n):
            raise PluginError(f"press={self.name!r}: scores of shape {tuple(scores.shape)}; expected (2, {n})")

    def score(self, stored: StoredTokens) -> Tensor:
        n, kv_heads, dim = stored.keys.shape
        if n <= self.least:
            return torch.arange(n, device=stored.keys.device).float()
        heads = kv_heads if stored.queries is None else stored.queries.shape[1]
        config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim)
        module = Absent(
            self.name, "the model's layer", config=config, head_dim=dim, layer_idx=stored.layer, scaling=stored.scale
        )
        hidden = Absent(self.name, "hidden states", shape=(1, n, heads * dim), device=stored.keys.device)
        attention = None if stored.queries is None else attention_of(stored)
        # int(n * (1 - ratio)) is the number of kept tokens, for presses that read the ratio
        self.press.compression_ratio = max(0.0, 1 - (stored.keep + 0.5) / n)
        keys, values = (part.transpose(0, 1)[None].contiguous() for part in (stored.keys, stored.values))
        scores = self.press.score(module, hidden, keys, values, attention, Absent(self.name, "the layer's arguments"))
        return scores[0].float()
