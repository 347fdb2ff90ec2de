"""Print a table of pocket's quality by compressor: found needles, and the distance of a text's token distributions.

    python benchmarks/compression_quality.py --budget 0.5

A needle is a sentence in a story of about 550 words and signs with six needles.  The question at the end of the prompt
is about one of them, and the greedy answer must be right.  Perplexity and KL are those of stories behind prompts of 128
tokens, as by ``minivllm compare``.  Requests run on the CPU in float32.  Intervals have 95 %, Wilson's for shares and
Student's over pieces of the text for KL.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from random import Random
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.lab.bench import quality
from minivllm.lab.bench.statistics import interval
from minivllm.pocket.tasks import TaskCase, needle, score

SCORERS = ("snapkv", "tova", "rkv", "h2o", "keydiff", "knorm", "streaming", "random")
HEAD = ("| compressor | needles, % | interval | KL, nats | perplexity |", "|---|---|---|---|---|")
TOKENS = 1024  # of the text that are scored


def needles(count: int, seed: int = 0) -> list[TaskCase]:
    """Return cases with needles in shorter stories than those of the task ``needle``."""
    rng = Random(f"compression {seed}")
    return [needle(rng, pieces=(520, 560), needles=(6, 6)) for _ in range(count)]


def found(llm: LLM, cases: Sequence[TaskCase], budget: float) -> int:
    """Return the number of right answers of requests with a budget."""
    params = SamplingParams(temperature=0, max_tokens=16, kv_budget=budget, seed=0)
    outputs = llm.chat([case.messages for case in cases], params, use_tqdm=False)
    return sum(score(case, output.text) for case, output in zip(cases, outputs, strict=True))


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, by Wilson's formula."""
    z = 1.96
    share = right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def engine(scorer: str, budget: float) -> LLM:
    """Return pocket with a compressor, whose requests have the budget unless they say otherwise."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 16, "num_kvcache_blocks": 1024}
    return LLM("pocket", compressor=scorer, kv_budget=budget, enable_prefix_caching=False, **options)


def measured(scorer: str, budget: float, cases: Sequence[TaskCase]) -> tuple[int, Any]:
    """Return the number of found needles and the scores of the text."""
    with engine(scorer, budget) as llm:
        scores = quality.score(llm, quality.text_of(""), TOKENS, quality.LONG_PROMPT)
        return found(llm, cases, budget), scores


def line(name: str, right: int, count: int, scores: Any, reference: Any) -> str:
    """Return the row of a compressor."""
    low, high = wilson(right, count)
    own = quality.summary(scores, reference)
    bounds = interval(own["kl_pieces"])
    assert bounds is not None
    half = (bounds[1] - bounds[0]) / 2
    return (
        f"| {name} | {100 * right / count:.0f} | {100 * low:.0f} to {100 * high:.0f} | "
        f"{own['kl']:.3f} ± {half:.3f} | {own['perplexity']:.2f} |"
    )


def table(scorers: Sequence[str], budget: float, count: int) -> list[str]:
    """Return the lines of the table, first without compression."""
    cases = needles(count)
    right, reference = measured(scorers[0], 0, cases)
    lines = [*HEAD, line("none", right, count, reference, reference)]
    for scorer in scorers:
        right, scores = measured(scorer, budget, cases)
        lines.append(line(f"`{scorer}`", right, count, scores, reference))
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.5, help="kv_budget")
    parser.add_argument("--cases", type=int, default=40, help="needles")
    parser.add_argument("--scorers", nargs="+", default=list(SCORERS))
    args = parser.parse_args()
    print("\n".join(table(args.scorers, args.budget, args.cases)))


if __name__ == "__main__":
    main()
