"""Describe the built-in decoding strategies."""

from minivllm.registration.spec import Param, Spec

MOST_SCALE = 100.0

BEAM = Spec(
    impl="minivllm.plugins.strategy.beam:Beam",
    api=(1, 4),
    summary="beam search: width, length penalty, early stopping as in transformers",
)
GUIDANCE = Spec(
    impl="minivllm.plugins.strategy.guidance:Guidance",
    api=(1, 4),
    summary="classifier-free guidance: towards the prompt, away from a negative prompt",
    params=(
        Param(
            "guidance_scale",
            float,
            1.0,
            ge=0,
            le=MOST_SCALE,
            wanted=f"a number from 0 to {MOST_SCALE:g}",
            summary="values above 1 move tokens towards the prompt and away from the negative prompt; 1 means off",
        ),
        Param("negative_prompt", str, "", summary="with guidance_scale: a text to move away from"),
        Param(
            "negative_prompt_token_ids",
            list,
            wanted="a list of token ids",
            summary="the negative prompt as token ids; without either, the last token of the prompt",
        ),
    ),
)
PARALLEL = Spec(
    impl="minivllm.plugins.strategy.parallel:Parallel",
    api=(1, 4),
    summary="n independent samples of one prompt, or the n likeliest of best_of, whose blocks they share",
)
SINGLE = Spec(
    impl="minivllm.plugins.strategy.single:Single",
    api=(1, 4),
    summary="one sample",
)
