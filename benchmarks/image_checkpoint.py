"""Write the shape of Qwen3-VL-8B for ``load_format=dummy``: config.json, processors, a tokenizer with a word for an id.

    python benchmarks/image_checkpoint.py FOLDER [--tiny]

The sizes are those of the published checkpoint.  Its weights and its vocabulary are not needed: a prompt of token ids
and the names of the special tokens are enough for the processors.  ``--tiny`` keeps the ids and shrinks the layers, to
try a script on a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

VOCAB = 151936
MARKS = {
    151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>", 151652: "<|vision_start|>",
    151653: "<|vision_end|>", 151654: "<|vision_pad|>", 151655: "<|image_pad|>", 151656: "<|video_pad|>",
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "rope_parameters": ROPE, "dtype": "bfloat16",
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 4096, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
TINY = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1}
TINY_VISION = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 128}
TINY_VISION |= {"deepstack_visual_indexes": [0, 1, 2]}
SCALE = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor"}
PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}


def write(folder: Path, tiny: bool) -> None:
    """Write the files of a checkpoint without weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Qwen3VLConfig

    def put(name: str, fields: dict[str, Any]) -> None:
        (folder / name).write_text(json.dumps(fields, indent=1) + "\n")

    folder.mkdir(parents=True, exist_ok=True)
    text, vision = {**TEXT, **(TINY if tiny else {})}, {**VISION, **(TINY_VISION if tiny else {})}
    names = ["Qwen3VLForConditionalGeneration"]
    whole = Qwen3VLConfig(text_config=text, vision_config=vision, architectures=names, dtype="bfloat16")
    config = whole.to_diff_dict()
    config["text_config"] |= {"eos_token_id": 151645, "bos_token_id": 151643}
    config["vision_config"].pop("rope_parameters", None)  # the default, which older releases do not have
    put("config.json", config)
    put("generation_config.json", {"eos_token_id": [151645, 151643]})
    sizes = {"shortest_edge": 65536, "longest_edge": 16777216}
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    put("preprocessor_config.json", {**PATCHES, **SCALE, "size": sizes, **kind})
    sizes, kind = {"shortest_edge": 4096, "longest_edge": 25165824}, {"video_processor_type": "Qwen3VLVideoProcessor"}
    put("video_preprocessor_config.json", {**PATCHES, **SCALE, "size": sizes, **kind})
    tokenizer = Tokenizer(models.WordLevel({MARKS.get(i, f"w{i}"): i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(MARKS.values()))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    put("tokenizer_config.json", {**fields, "model_max_length": 262144, "processor_class": "Qwen3VLProcessor"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    write(args.folder, args.tiny)
