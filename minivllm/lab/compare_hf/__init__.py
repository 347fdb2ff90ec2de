"""``minivllm compare-hf``: find the layer and operation where the engine and transformers compute different values.

    prompts ──► engine, greedy ──► tokens, values of every tap point ──┐
                                          │ as inputs                  ├──► errors ──► the first point beyond its bound
                                          ▼                            │
                                    transformers' operations ──────────┘

Each operation of transformers gets the engine's inputs, so its error contains no error of an earlier operation.  A
second pass of transformers computes the whole model from the prompt.  It shows how errors grow from layer to layer, and
its logits decide whether the engine's tokens are right.
"""
