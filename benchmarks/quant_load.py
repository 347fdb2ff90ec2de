"""Measure the time and the memory to convert a bfloat16 checkpoint to a quantized model.

    python benchmarks/quant_load.py --model DIR_WITH_CONFIG --folder /tmp/checkpoint none int4 int8

It writes a checkpoint of random weights of that shape in shards of up to 2 GiB, and loads it in each format in a new
process.  It prints the seconds from the start to an engine, the largest memory on the device (torch's count) and on the
host (anonymous pages, because the kernel can drop pages of mapped files), and the final size of the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from quant_speed import options_of

SHARD = 2 << 30  # bytes


def write(config: Path, folder: Path) -> None:
    """Write a checkpoint of the shape of ``config`` with transformers' names.

    Every matrix has the same random numbers.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    text = (config / "config.json").read_text()
    (folder / "config.json").write_text(text)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    numbers = torch.randn(max(shape.numel() for shape in shapes.values())).mul_(0.02).to(torch.bfloat16)
    shards: list[dict[str, Any]] = [{}]
    held = 0
    for name, shape in shapes.items():
        if held and held + 2 * shape.numel() > SHARD:
            shards.append({})
            held = 0
        shards[-1][name] = numbers[: shape.numel()].view(shape)
        held += 2 * shape.numel()
    where = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.clone() for name, tensor in shard.items()}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


class Watched(threading.Thread):
    """The largest anonymous memory of this process, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = self.look()

    @staticmethod
    def look() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) << 10
        return 0

    def run(self) -> None:
        while True:
            self.most = max(self.most, self.look())
            time.sleep(0.01)


def measure(folder: Path, name: str) -> dict[str, Any]:
    import torch

    from minivllm import LLM

    watched, began = Watched(), time.perf_counter()
    watched.start()
    sizes = dict(skip_tokenizer_init=True, num_kvcache_blocks=64, max_model_len=256, max_num_seqs=1, graph="off")
    with LLM(model=str(folder), **sizes, **options_of(name)) as llm:
        found: dict[str, Any] = {"format": name, "seconds": time.perf_counter() - began}
        found["weights"] = llm.engine.capacity.weight_bytes
        found["device_peak"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        found["host_peak"] = watched.most - watched.first
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--here", action="store_true", help="in this process: one format, as JSON")
    args = parser.parse_args()
    folder = Path(args.folder)
    if args.here:
        print("FOUND " + json.dumps(measure(folder, args.formats[0])), flush=True)
        return
    if not (folder / "model.safetensors.index.json").exists():
        began = time.perf_counter()
        write(Path(args.model), folder)
        print(f"written in {time.perf_counter() - began:.0f} s", flush=True)
    for name in args.formats:
        command = [sys.executable, str(Path(__file__).resolve()), name, "--model", args.model]
        ran = subprocess.run([*command, "--folder", args.folder, "--here"], capture_output=True, text=True, check=False)
        lines = [line[6:] for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
        if not lines:
            print(f"{name}: failed: {ran.stderr.strip().splitlines()[-1:]}", flush=True)
            continue
        found = json.loads(lines[0])
        sizes = {key: found[key] / 2**30 for key in ("weights", "device_peak", "host_peak")}
        print(
            f"{name}: {found['seconds']:.1f} s, weights {sizes['weights']:.2f} GiB, most on the device "
            f"{sizes['device_peak']:.2f}, on the host {sizes['host_peak']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
