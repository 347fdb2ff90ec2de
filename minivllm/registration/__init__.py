"""The private parts of ``minivllm.registry``: finding entry points and importing plug-ins safely."""
