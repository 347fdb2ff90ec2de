"""Models of transformers that no built-in family serves, with the engine's attention, cache and layers.

blank       the model on torch's meta device, and the reasons for which a model is refused
trace       one step of it there, which records the calls of attention and the inputs of modules
plan        the modules that the engine replaces, and the weights that stay in the model's modules
experts     products of experts that no kernel of the engine supports
layers      the replacements of modules
checkpoint  the names and tensors of a checkpoint, as transformers converts them
arch        the plug-in with attention layers, rules and the model that runs
"""
