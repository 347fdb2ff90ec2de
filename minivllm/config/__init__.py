"""What the user wants: defaults < files < environment < ``--set`` < keywords, each value with its origin.

A file is TOML, YAML or JSON: the engine's options at the top, the sampling parameters in ``[sampling]``, the prompts of
``minivllm run`` in ``[run]`` and the settings of ``minivllm serve`` in ``[server]``.  Every fault is a ConfigError of
one line that names the place and what was wanted.

    files ─► layers ─► load: values ─► resolve: what each choice becomes ─► core.interfaces.executor.Wiring
"""

from __future__ import annotations

from .load import Loaded, load_config
from .values import PROCESSORS, SEAMS, SEVERAL, EngineConfig, PluginChoice, RunConfig

__all__ = [
    "PROCESSORS", "SEAMS", "SEVERAL", "EngineConfig", "Loaded", "PluginChoice", "RunConfig", "load_config",
]  # fmt: skip
