"""Specs of the built-in samplers."""

from functools import partial

from minivllm.registration.spec import ANY, Param, Spec

HERE = "minivllm.plugins.sampler"
GRAPH_SAFE = frozenset({"graph_safe"})
MULTI_POSITION = GRAPH_SAFE | {"multi_position"}
# Largest top-k for which the k best logits are selected. For a larger one, or for top-p alone, the row is sorted
# (kernels use bisection).
SMALL_K = 1024

_sampler = partial(Spec, api=(1, 4), limits={"device": ANY})
_share = partial(Param, le=1, wanted="a number in (0, 1]")

DEFAULT = _sampler(
    impl=f"{HERE}.default:DefaultSampler",
    summary="greedy, temperature, top-k, top-p and min-p",
    priority=10,
    features=MULTI_POSITION,
)

TAU = Param(
    "mirostat_tau",
    float,
    gt=0,
    le=64,
    wanted="bits, above 0 and up to 64",
    summary="the surprise of a token, in bits, that it holds on average",
)
ETA = _share("mirostat_eta", float, 0.1, ge=1e-6, summary="with `mirostat_tau`: how fast it learns")
MIROSTAT = _sampler(
    impl=f"{HERE}.mirostat:MirostatSampler",
    summary="default, and mirostat 2.0: holds the surprise at a target",
    features=GRAPH_SAFE,
    params=(TAU, ETA),
)

MASS = "the tokens of most typical surprise with this probability together"
TYPICAL_P = _share("typical_p", float, 1.0, gt=0, summary=MASS)
TYPICAL = _sampler(
    impl=f"{HERE}.typical:TypicalSampler",
    summary="default, and locally typical sampling",
    features=MULTI_POSITION,
    params=(TYPICAL_P,),
)
