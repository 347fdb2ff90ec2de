"""A small table of costs for the simulator."""

from minivllm.plugins.executor.costs import SLOPES, BrokenLine, CostTable, PromptCosts

SIZES = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 400,
    "max_model_len": 1000,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "depth": 0,
    "windows": [None],
}
NOTHING = dict.fromkeys(SLOPES, 0.0)
PROMPTS = PromptCosts(BrokenLine([1, 64], [2.0, 65.0]), {"row": 0.0, "kv": 0.0, "pairs": 0.0, "chunk": 10.0})
COSTS = CostTable(
    BrokenLine([0, 1, 8], [1.0, 2.0, 9.0]),
    PROMPTS,
    PROMPTS,
    0,
    NOTHING,
    watts={"busy": 30.0, "idle": 10.0},
    engine=SIZES,
)
