"""minivllm: an LLM inference engine whose parts are plug-ins that a researcher can replace.

>>> from minivllm import LLM, SamplingParams >>> llm = LLM(model="pocket") >>> llm.generate("Tell me a story about a
fox.", SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP

Importing this package imports neither torch nor transformers.  Each name below is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm import moved as _moved  # noqa: F401  (installs the finder of old import paths)
from minivllm.errors import (
    ConfigError,
    EngineDeadError,
    MinivllmError,
    ModelError,
    PluginError,
    RequestError,
    ResourceError,
)

if TYPE_CHECKING:
    from minivllm.config import EngineConfig
    from minivllm.runtime.text.outputs import RequestOutput

    from .core.interfaces.adapters import LoRARequest
    from .core.interfaces.params import SamplingParams
    from .core.interfaces.session import Session
    from .core.interfaces.structured import StructuredOutputsParams
    from .core.interfaces.taps import Tap
    from .frontend.async_llm import AsyncLLM
    from .frontend.explaining import explain
    from .frontend.llm import LLM

__version__ = "0.2.0"  # must equal the version in pyproject.toml; a test compares them

_LAZY = {
    "AsyncLLM": "minivllm.frontend.async_llm",
    "EngineConfig": "minivllm.config",
    "LLM": "minivllm.frontend.llm",
    "LoRARequest": "minivllm.core.interfaces.adapters",
    "RequestOutput": "minivllm.runtime.text.outputs",
    "SamplingParams": "minivllm.core.interfaces.params",
    "Session": "minivllm.core.interfaces.session",
    "StructuredOutputsParams": "minivllm.core.interfaces.structured",
    "Tap": "minivllm.core.interfaces.taps",
    "explain": "minivllm.frontend.explaining",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "LoRARequest",
    "MinivllmError",
    "ModelError",
    "PluginError",
    "RequestError",
    "RequestOutput",
    "ResourceError",
    "SamplingParams",
    "Session",
    "StructuredOutputsParams",
    "Tap",
    "__version__",
    "explain",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name in ("LLM", "AsyncLLM"):
        # Libraries of torch read environment variables when they are loaded.
        from minivllm.device import early
        from minivllm.device.hardware import prepare_environment

        prepare_environment()
        early.open_torch()
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
