"""Predictors of the length of answers: none, known lengths with noise, features of the prompt, history by client."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from minivllm.core.interfaces.predictor import Predictor, PredictorContext, RequestFacts

from .options import HistoryOptions, OracleOptions, PromptOptions
from .steps import LearnedSteps

PRIOR = 1.0  # weight of the prior assumption that the features of a prompt do not predict the length
SLOW = 0.02  # weight of the newest answer in the mean of all clients
SPECIAL = 4  # number of the last prompt tokens whose ids are a feature


class NoPredictor(Predictor):
    """Predicts no lengths.  Requests are planned with the client's ``expected_tokens``, or else with their limit."""

    def output_tokens(self, request: RequestFacts) -> float | None:
        return None


class Oracle(LearnedSteps):
    """The true length times log-normal noise, where a trace has it; else the client's ``expected_tokens``.

    The noise of a request is a function of the engine's seed and the request's number."""

    def __init__(self, options: Any, ctx: PredictorContext) -> None:
        super().__init__(options or OracleOptions(), ctx)

    def output_tokens(self, request: RequestFacts) -> float | None:
        if request.truth is None:
            return request.expected
        key = self.ctx.seed, request.number
        generator = np.random.default_rng(key)
        noise = self.options.noise * generator.standard_normal()
        found = request.truth * math.exp(noise)
        return max(found, 1e-9)


class PromptFeatures(LearnedSteps):
    """Ridge regression of the logarithm of the length on features of the prompt, learned from requests that ended.

    The features are the length of the prompt, its square root and logarithm, the share of distinct tokens, and the
    digest of its last tokens, which separates templates.  ``expected_tokens`` of the client is preferred."""

    def __init__(self, options: Any, ctx: PredictorContext) -> None:
        super().__init__(options or PromptOptions(), ctx)
        self.prior = PRIOR * np.eye(5)
        self.sums = self.prior
        self.products = np.zeros(5)
        self.mean = 0.0  # weighted mean logarithm of the lengths
        self.weight = 0.0
        self.coefficients: np.ndarray | None = None
        self.learned = 0

    def features(self, prompt: np.ndarray) -> np.ndarray:
        """Return the features f64 [5] of a prompt, each of the order of 1."""
        n = len(prompt)
        end = prompt[-256:]
        distinct = len(np.unique(end)) / len(end)
        digest = 0
        for token in prompt[-SPECIAL:].tolist():
            digest = (31 * digest + token) % 997
        share = n / self.ctx.max_model_len
        logarithm = math.log1p(n) / 10
        root = math.sqrt(n) / 100
        return np.array([share, logarithm, root, distinct, digest / 997])

    def output_tokens(self, request: RequestFacts) -> float | None:
        if request.expected is not None:
            return request.expected
        if not self.learned:
            return None
        if self.coefficients is None:
            self.coefficients = np.linalg.solve(self.sums, self.products)
        features = self.features(request.prompt)
        found = self.mean + float(features @ self.coefficients)
        most = math.log(self.ctx.max_model_len)
        found = min(max(found, 0.0), most)
        return math.exp(found)

    def ended(self, request: RequestFacts, tokens: int, cut: bool) -> None:
        keep = self.options.forget
        length = math.log(tokens)
        self.weight = keep * self.weight + 1
        self.mean += (length - self.mean) / self.weight
        x = self.features(request.prompt)
        self.sums = keep * self.sums
        self.sums += np.outer(x, x)
        self.sums += (1 - keep) * self.prior  # adds back the share of the prior that the line above has removed
        self.products = keep * self.products
        self.products += x * (length - self.mean)
        self.coefficients = None
        self.learned += 1

    def figures(self) -> Mapping[str, float]:
        return {"learned": self.learned, "mean_tokens": math.exp(self.mean)}


class ClientHistory(LearnedSteps):
    """Predicts the mean logarithm of the lengths of earlier answers, with more weight for newer ones.

    The answers are those of the request's session, or else of its client.  A session or client without an answer uses
    the mean of all answers.  The client's ``expected_tokens`` is preferred.
    """

    def __init__(self, options: Any, ctx: PredictorContext) -> None:
        super().__init__(options or HistoryOptions(), ctx)
        # key of a client or session -> mean logarithm of its lengths; the key whose answer is oldest comes first
        self.means: OrderedDict[int, float] = OrderedDict()
        self.overall: float | None = None

    def output_tokens(self, request: RequestFacts) -> float | None:
        if request.expected is not None:
            return request.expected
        key = self.key(request)
        found = self.means.get(key, self.overall)
        if found is None:
            return None
        return math.exp(found)

    def key(self, request: RequestFacts) -> int:
        """Return the key for the mean of a request: the number of its session or, without a session, of its client."""
        return request.session or -1 - request.client

    def ended(self, request: RequestFacts, tokens: int, cut: bool) -> None:
        length = math.log(tokens)
        weight = self.options.weight
        key = self.key(request)
        last = self.means.pop(key, length)
        last += weight * (length - last)
        self.means[key] = last  # behind the others
        if len(self.means) > self.options.most_clients:
            self.means.popitem(last=False)
        before = self.overall
        if before is None:
            before = length
        self.overall = before + SLOW * (length - before)

    def figures(self) -> Mapping[str, float]:
        return {"clients": len(self.means)}
