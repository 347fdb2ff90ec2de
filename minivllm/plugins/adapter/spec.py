"""Describe the built-in adapter methods."""

from minivllm.registration.spec import ANY, Spec

HERE = "minivllm.plugins.adapter."
API = (1, 2)
DEVICES = {"device": ANY}

LORA = Spec(
    impl=HERE + "lora:LoRA",
    api=API,
    summary="low-rank products added to linear layers (LoRA), in the folders of PEFT",
    priority=10,
    limits=DEVICES,
    traits={"peft_type": "LORA"},
)
IA3 = Spec(
    impl=HERE + "ia3:IA3",
    api=API,
    summary="factors of the outputs or inputs of linear layers (IA3), in the folders of PEFT",
    limits=DEVICES,
    traits={"peft_type": "IA3", "ranked": False},
)
STEERING = Spec(
    impl=HERE + "steering:Steering",
    api=API,
    summary="vectors added at tap points, such as the residual stream behind a layer",
    options=HERE + "options:SteeringOptions",
    limits=DEVICES,
    traits={"peft_type": "STEERING", "ranked": False},
)
