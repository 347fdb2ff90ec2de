"""Read and check a configuration.  Sources in ascending precedence: defaults, files, environment, ``--set``, keywords.

A file is TOML, YAML or JSON.  The options of the engine are at the top level.  The table ``[sampling]`` holds sampling
parameters, ``[run]`` the prompts of ``minivllm run``, and ``[server]`` the settings of ``minivllm serve``.  Each value
keeps its source.  Every error is a ConfigError of one line that names the source and the accepted values.

    files ─► layers ─► load: values ─► resolve: chosen plug-ins ─► core.interfaces.executor.Wiring
"""

from __future__ import annotations

from .load import Loaded, load_config, option_path
from .values import PROCESSORS, SEAMS, SEVERAL, EngineConfig, PluginChoice, RunConfig

__all__ = [
    "PROCESSORS", "SEAMS", "SEVERAL", "EngineConfig", "Loaded", "PluginChoice", "RunConfig", "load_config",
    "option_path",
]  # fmt: skip
