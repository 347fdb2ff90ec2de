"""``minivllm quantize``: write a model directory whose linear layers have weights of 4 or 8 bits.

options      the options of the command, and their limits
grid         convert groups of weights to codes, scales and zero points
gptq         quantize a weight column after column, using the second moments of its inputs
columns      the same in a GPU kernel
awq          find scales of a weight's inputs, and measure the error of a quantized weight
layouts      convert codes to the tensors and settings of a checkpoint format, and back
calibration  convert a file of text to token ids
layers       run transformers' model one layer at a time, so that only this layer's weights are in memory
folding      multiply a weight by scales of its inputs, and divide the module that computes these inputs
work         the directory that holds finished layers until all are written
run          quantize a model, layer after layer
"""
