"""From a model directory and a wiring to what runs on one device: config, weights, model, cache memory, processors.

hf_config   the directory: config.json, what it says of architecture and dtype
weights     safetensors, or dummies, to the parameters of a model
build       a Wiring to a Worker: plug-ins made, model loaded, KV memory allocated
"""
