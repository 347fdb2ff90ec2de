"""``minivllm quantize``: a model directory to one whose linear layers are packed in 4 or 8 bits.

options      what is asked for, and what of it cannot be
grid         groups of a weight to codes, scales and zero points
gptq         a weight by its inputs' second moments, column after column
awq          scales of inputs that are taken out of a weight, and how far its groups are cut
layouts      codes to the tensors and the settings of a format, and back
calibration  a file of text to token ids
layers       transformers' modules of a model, of which one layer at a time has weights
folding      which modules scales of inputs can be put into
work         the directory in which finished layers wait for the others
run          all of it, layer after layer
"""
