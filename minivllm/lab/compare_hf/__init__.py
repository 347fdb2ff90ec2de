"""``minivllm compare-hf``: where an engine and transformers part, by layer and operation.

    prompts ──► engine, greedy ──► tokens, values of every tap point ──┐
                                          │ as inputs                  ├──► errors ──► the first place that parts
                                          ▼                            │
                                    transformers' operations ──────────┘

Each operation of transformers is given the engine's own inputs, so its error is its own and no earlier one's.  A second
pass of transformers over the prompts alone shows what the errors come to along the way, and judges the tokens.
"""
