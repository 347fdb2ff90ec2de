"""An ``LLM`` as a model of lm-evaluation-harness, in this process.  Importing this needs the extra ``lm-eval``.

loglikelihood           log-probabilities of a prompt's tokens (``prompt_logprobs``), all requests in one call
loglikelihood_rolling   the same for a long text, in windows that lm-eval cuts
generate_until          answers up to the task's stop strings, greedy unless the task requests sampling
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import ConfigError, MinivllmError, shown

from . import Row

MAX_TOKENS = 256  # largest number of tokens of an answer if the task sets no limit
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# (context, continuation) as texts or None, token ids of the context, token ids to score
Scored = tuple[tuple[str, str] | None, list[int], list[int]]


class MinivllmLM(TemplateLM):  # type: ignore[misc]
    """An ``LLM`` with the interface of lm-eval's models.

    A context that is too long loses its beginning, as with lm-eval's own models.  Raise ConfigError if ``llm`` has no
    tokenizer.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise ConfigError("lm-eval's tasks are texts, and there is no tokenizer; drop skip_tokenizer_init")
        self.llm = llm
        self.own = llm.tokenizer
        # two less than the longest sequence, because a scored window has a token before it and a generated one after it
        self.max_length = llm.engine.wiring.max_model_len - 2

    # ---- texts and tokens ----------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Return the name by which lm-eval caches tokenized requests."""
        return str(self.llm.config.tokenizer or self.llm.config.model)

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text.  Raise ConfigError if the tokenizer has none."""
        if not self.own.eos_ids:
            raise ConfigError("lm-eval needs a token that ends a text, and the tokenizer has none")
        return int(self.own.eos_ids[0])

    @property
    def prefix_token_id(self) -> int:
        """Return the token that precedes a text whose first token is scored."""
        begins = self.own.special_tokens.get("bos_token")
        found = None if begins is None else self.own.token_id(begins)
        return self.eot_token_id if found is None else int(found)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; None adds special tokens."""
        return list(self.own.encode(string, add_special_tokens is not False))

    # ---- scores --------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """Return for each request the log-probability of its scored tokens, and whether each is the most likely.

        Raise ConfigError for a request that scores more tokens than the model's context holds.
        """
        prompts = []
        for _texts, context, scored in requests:
            ids = (context + scored)[-(self.max_length + 1) :]
            if len(scored) >= len(ids):
                raise ConfigError(f"lm-eval scores {len(scored)} tokens at once; raise max_model_len")
            prompts.append(ids)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        found = []
        outputs = self._run(prompts, params)
        for output, ids, (_texts, _context, scored) in zip(outputs, prompts, requests, strict=True):
            first = len(ids) - len(scored)
            logprobs = output.prompt_logprobs[first:]
            entries = [one[token] for one, token in zip(logprobs, ids[first:], strict=True)]
            total = sum(one.logprob for one in entries)
            found.append((total, all(one.rank == 1 for one in entries)))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each request's text, as a sum over windows."""
        windows: list[Scored] = []
        owner: list[int] = []  # index of the request of each window
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                context, scored = utils.make_disjoint_window(window)
                windows.append((None, list(context), list(scored)))
                owner.append(number)
        total = [0.0] * len(requests)
        for number, (score, _) in zip(owner, self._loglikelihood_tokens(windows), strict=True):
            total[number] += score
        return total

    # ---- answers -------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text of the answer to each request.  Raise ConfigError for an answer longer than the context."""
        prompts = []
        params = []
        for request in requests:
            text, wanted = request.args
            params.append(self._sampling(wanted))
            length = int(params[-1].max_tokens or 0)
            room = self.max_length - length
            if room < 1:
                raise ConfigError(f"a task generates answers of {length} tokens; raise max_model_len")
            prompts.append(self.tok_encode(text)[-room:])
        return [output.outputs[0].text for output in self._run(prompts, params)]

    def _sampling(self, wanted: Row) -> SamplingParams:
        """Return the sampling parameters of a task's ``generation_kwargs``.  Raise ConfigError for an unknown one."""
        options = dict(wanted)
        until = options.pop("until", None) or []
        lengths = [options.pop(name) for name in LENGTHS if name in options]
        has_temperature = options.get("temperature", 0) not in (0, None)
        sampled = options.pop("do_sample", has_temperature)
        kept = {name: options.pop(name, None) for name in SAMPLED}
        kept = {name: value for name, value in kept.items() if value is not None}
        for name, value in options.items():
            if value is not None:
                raise ConfigError(f"a task has {shown(name)} in its generation_kwargs, which minivllm does not support")
        if not sampled:
            kept["temperature"] = 0.0
        stop = [until] if isinstance(until, str) else list(until)
        return SamplingParams(max_tokens=int(lengths[0] if lengths else MAX_TOKENS), stop=stop, **kept)

    def _run(self, prompts: list[list[int]], params: Any) -> list[Any]:
        """Generate the answers to all prompts.  Raise MinivllmError if a request fails."""
        outputs = self.llm.generate(prompts, params, use_tqdm=False) if prompts else []
        for output in outputs:
            if output.error:
                raise MinivllmError(f"lm-eval's requests could not be answered: {output.error}")
        return list(outputs)
