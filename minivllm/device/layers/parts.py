"""The factory passed to ``ModelArch.build``: it makes single modules, mixtures of experts and whole models."""

from __future__ import annotations

from minivllm.core.interfaces.decoder import DecoderSpec, Experts
from minivllm.core.interfaces.model import Model

from .decoder import Decoder
from .experts import Mixture, RouterHook
from .module_parts import ModuleParts


class ModelParts(ModuleParts):
    """A ``ModuleParts`` that can also make a mixture of experts and a whole model."""

    def experts(self, name: str, hidden: int, spec: Experts, hook: RouterHook | None = None) -> Mixture:
        """Make the router, experts and shared MLP of a layer: x [T, hidden] -> [T, hidden]."""
        return Mixture(name, hidden, spec, self, hook)

    def decoder(self, spec: DecoderSpec) -> Model:
        """Make the decoder model that ``spec``, a table of its sizes and options, describes."""
        return Decoder(spec, self)
