"""From a model directory and a wiring to what runs on one device: config, weights, model, cache memory, processors.

hub         a snapshot of the Hugging Face hub: in the cache, or fetched
hf_config   the directory: config.json, what it says of architecture and dtype
numbers     which numbers of config.json a model can have
gguf        a GGUF file as such a directory would have it
tensor_files  safetensors files, and what their headers say
weights     safetensors, or dummies, to the parameters of a model
shapes      config.json against the headers of the weights and the free memory, before either is taken
build       a Wiring to a Worker: plug-ins made, model loaded, KV memory allocated
"""

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]  # an object of JSON, such as config.json
NewFields = dict[str, Any]  # the same, to be filled
