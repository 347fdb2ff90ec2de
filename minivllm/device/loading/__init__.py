"""Build a worker's parts on one device from a model directory and a wiring, as config, weights, model and memory.

hub           a snapshot of the Hugging Face hub, from the cache or downloaded
hf_config     the directory, its config.json, and the architecture and dtype in it
numbers       the limits of numbers in config.json
gguf          a GGUF file in the form of such a directory
tensor_files  safetensors files and their headers
weights       safetensors or random numbers into the parameters of a model
shapes        config.json compared with the headers of the weights and the free memory, before memory is allocated
build         a Wiring to a Worker, with plug-ins, loaded model and KV memory
"""

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]  # an object of JSON, such as config.json
NewFields = dict[str, Any]  # a JSON object that is built here, so entries can be added
