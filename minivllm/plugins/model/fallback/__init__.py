"""Models of transformers that no family here serves, with the engine's attention, cache and layers inside.

blank       the model on torch's meta device, and why one is refused
trace       one step of it there: what attention is asked for, who reads what
plan        which of its modules become the engine's, and which weights stay its own
experts     products of experts that no kernel of the engine takes
layers      what stands in the place of a module
checkpoint  the names and tensors of a checkpoint, as transformers converts them
arch        the plug-in: attention layers, rules, the model that runs
"""
