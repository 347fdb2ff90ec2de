"""Checks whether a different token is explained by rounding, for engines without ``batch_invariant``.

The last bits of a logit depend on the batch.  A different token is accepted if both are equally likely except for these
bits, by the logits of the plain engine after the same tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import functions
from .adapters import lora_of
from .configs import VOCAB, rounds
from .drive import Output
from .oracle import Oracle, with_method
from .pictures import prompt_of

# allowed difference of logits after processors and temperature, and of noise, far above float32's rounding in these
# models
NEAR = 2e-3
EDGE = 2e-3  # allowed difference of a probability that decides whether a token is excluded
# factor of both limits if a last bit of a key or activation may become a step of its rounding; 0.34 was observed
COARSE = 200
TOO_MUCH = (
    "typical_p",
    "mirostat_tau",
    "beam_width",
    "best_of",
    "guidance_scale",
)  # samplers whose distribution cannot be computed this way


class Ties:
    """The function ``tie(got, want, i)`` for the outputs of a request."""

    def __init__(self, oracle: Oracle, options: dict[str, Any], prompt: list[int], params: dict[str, Any]) -> None:
        self.oracle, self.options, self.prompt, self.params = oracle, options, prompt, params
        self.times = COARSE if rounds(options) else 1
        self.near, self.edge = NEAR * self.times, EDGE * self.times

    def __call__(self, got: Output, want: Output, at: int) -> bool:
        p = self.params
        if any(name in p for name in TOO_MUCH):
            return True
        x = self._logits(want.tokens[:at])
        a, b = got.tokens[at], want.tokens[at]
        if not (np.isfinite(x[a]) and np.isfinite(x[b])):
            return False
        # choose_fn takes a rank of the logits, so neither temperature nor noise matter
        t = 0.0 if "choose_fn" in p else p.get("temperature", 1.0)
        x = x / t if t else x
        drawn = x + (self._noise(at, want.index, len(x)) if t else 0)
        if abs(drawn[a] - drawn[b]) <= self.near * max(1.0, abs(float(x[a]))):
            return True
        return bool(t) and (self._at_an_edge(x, a) or self._at_an_edge(x, b))

    def _logits(self, forced: list[int]) -> np.ndarray:
        """Return the logits from which the plain engine draws after ``forced``, float64 [V].

        Processors, functions and masks have been applied.
        """
        found: list[np.ndarray] = []
        start, p = len(self.prompt), self.params
        own = [functions.processor(*f) for f in p.get("logits_processors", ())]

        def follow(logits: np.ndarray, ids: Any) -> int:
            i = len(ids) - start
            if i < len(forced):
                return forced[i]
            found.append(self._own(logits, list(ids), own))
            return 0

        drop = ("logits_processors", "allowed_tokens_fn", "structured_outputs", "logprobs", "prompt_logprobs", "n",
                "stop", "stop_token_ids", "min_tokens", "typical_p", "choose_fn")  # fmt: skip
        requested = {k: v for k, v in p.items() if k not in drop}
        requested.update(max_tokens=len(forced) + 1, ignore_eos=True)
        vocab = VOCAB[self.options["model"]]
        made = functions.sampling_params(requested, vocab)
        made.choose_fn = follow
        llm = self.oracle.engine(with_method(self.options, p))
        lora = lora_of(p, self.oracle.folder, self.options["model"])
        taps = [tap for tap in functions.taps_of(p, llm.tap_points()) if tap.add is not None]
        llm.generate([prompt_of(self.prompt, p, self.options)], made, False, taps, lora)
        x = found[0]
        if "allowed_tokens_fn" in p:
            keep = np.full(vocab, -np.inf)
            keep[np.asarray(functions.allowed(*p["allowed_tokens_fn"], vocab)([*self.prompt, *forced]))] = 0
            x = x + keep
        return x

    def _own(self, logits: np.ndarray, ids: list[int], own: list[Any]) -> np.ndarray:
        """Apply the request's own functions to logits."""
        import torch

        x: Any = torch.from_numpy(logits.astype(np.float32))
        prompt, output = ids[: len(self.prompt)], ids[len(self.prompt) :]
        names = [name for name, _ in self.params.get("logits_processors", ())]
        for name, function in zip(names, own, strict=True):
            x = torch.as_tensor(function(prompt, output, x) if name == "ban_first" else function(output, x))
        return x.double().numpy()

    def _noise(self, at: int, sample: int, vocab: int) -> np.ndarray:
        import torch

        from minivllm.device.worker.sampling import gumbel

        one = [torch.tensor([v]) for v in (self.params["seed"], len(self.prompt) + at, sample)]
        return gumbel(*one, vocab)[0].double().numpy()

    def _at_an_edge(self, x: np.ndarray, token: int) -> bool:
        """Return whether rounding decides if top-k, top-p or min-p exclude a token."""
        p, probs = self.params, np.exp(x - x.max())
        probs /= probs.sum()
        mine = probs[token]
        above = probs[x > x[token] + self.near].sum()
        if p.get("top_k", 0) > 0:
            kth = np.sort(x)[-min(p["top_k"], len(x))]
            if abs(x[token] - kth) <= self.near:
                return True
        if p.get("top_p", 1.0) < 1 and (
            abs(above - p["top_p"]) <= self.edge or abs(above + mine - p["top_p"]) <= self.edge
        ):
            return True
        return p.get("min_p", 0) > 0 and abs(mine / probs.max() - p["min_p"]) <= self.edge
