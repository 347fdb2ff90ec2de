"""An ``LLM`` as a model of lm-evaluation-harness, in this process.  Importing this needs the extra ``lm-eval``.

loglikelihood           log-probabilities of a prompt's tokens (``prompt_logprobs``), all requests in one call
loglikelihood_rolling   the same over windows, as lm-eval cuts them
generate_until          greedy unless the task says otherwise, up to its stop strings
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import ConfigError, MinivllmError, shown

MAX_TOKENS = 256  # of an answer where the task does not say
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

Scored = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, tokens of the context and of what follows


class MinivllmLM(TemplateLM):  # type: ignore[misc]
    """``llm`` has a tokenizer; contexts that are too long lose their beginning, as with lm-eval's own models."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise ConfigError("lm-eval's tasks are texts, and there is no tokenizer; drop skip_tokenizer_init")
        self.llm, self.own = llm, llm.tokenizer
        # a window is scored as a prompt that has one token more, and the engine draws one after it
        self.max_length = llm.engine.wiring.max_model_len - 2

    # ---- texts and tokens ----------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.config.tokenizer or self.llm.config.model)

    @property
    def eot_token_id(self) -> int:
        if not self.own.eos_ids:
            raise ConfigError("lm-eval needs a token that ends a text, and the tokenizer has none")
        return int(self.own.eos_ids[0])

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text whose first token is scored."""
        begins = self.own.special_tokens.get("bos_token")
        found = None if begins is None else self.own.token_id(begins)
        return self.eot_token_id if found is None else int(found)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self.own.encode(string, add_special_tokens is not False))

    # ---- scores --------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """For each (log-probability of what follows, whether each of its tokens is the likeliest)."""
        asked = [((context + follows)[-(self.max_length + 1) :], len(follows)) for _, context, follows in requests]
        if over := next((n for ids, n in asked if n >= len(ids)), None):
            raise ConfigError(f"lm-eval scores {over} tokens at once, more than max_model_len takes: raise it")
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        found = []
        for output, (ids, n) in zip(self._run([ids for ids, _ in asked], params), asked, strict=True):
            last = zip(output.prompt_logprobs[-n:], ids[-n:], strict=True) if n else ()
            entries = [one[token] for one, token in last]
            found.append((sum(one.logprob for one in entries), all(one.rank == 1 for one in entries)))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[Scored] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            for window in utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            ):
                windows.append((None, *map(list, utils.make_disjoint_window(window))))  # type: ignore[arg-type]
                owner.append(number)
        total = [0.0] * len(requests)
        for number, (score, _) in zip(owner, self._loglikelihood_tokens(windows), strict=True):
            total[number] += score
        return total

    # ---- answers -------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            text, wanted = request.args
            params.append(self._sampling(wanted))
            room = self.max_length - int(params[-1].max_tokens or 0)
            if room < 1:
                asked = params[-1].max_tokens
                raise ConfigError(f"a task asks for {asked} tokens, more than max_model_len takes: raise it")
            prompts.append(self.tok_encode(text)[-room:])
        return [output.outputs[0].text for output in self._run(prompts, params)]

    def _sampling(self, wanted: Mapping[str, Any]) -> SamplingParams:
        """ConfigError names what a task asks for and this has not."""
        given = dict(wanted)
        until = given.pop("until", None) or []
        lengths = [given.pop(name) for name in LENGTHS if name in given]
        sampled = bool(given.pop("do_sample", given.get("temperature", 0) not in (0, None)))
        kept = {name: value for name in SAMPLED if (value := given.pop(name, None)) is not None}
        if unknown := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"a task asks for {shown(unknown[0])} in its generation_kwargs, which is not known here")
        if not sampled:
            kept["temperature"] = 0.0
        stop = [until] if isinstance(until, str) else list(until)
        return SamplingParams(max_tokens=int(lengths[0] if lengths else MAX_TOKENS), stop=stop, **kept)

    def _run(self, prompts: list[list[int]], params: Any) -> list[Any]:
        outputs = self.llm.generate(prompts, params, use_tqdm=False) if prompts else []
        if failed := next((output.error for output in outputs if output.error), None):
            raise MinivllmError(f"lm-eval's requests could not be answered: {failed}")
        return list(outputs)
