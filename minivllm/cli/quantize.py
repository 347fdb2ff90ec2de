"""``minivllm quantize``: write a model with weights of 4 or 8 bits.

Parsing it imports no large package.
"""

from __future__ import annotations

import argparse
from typing import Any

from minivllm.cli.common import add_repeatable, add_switch, add_value, report


def add_commands(command: Any) -> None:
    """Add the command ``quantize``; ``command(name, ...)`` makes its parser."""
    text = "Write a model directory whose linear layers are packed in 4 or 8 bits, as GPTQ's or compressed-tensors'."
    command("quantize", "cli.quantize:quantize", text).fill = _add_arguments


def _add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``quantize``, with the choices and defaults of ``lab.quantize``."""
    from minivllm.lab.quantize.options import BITS, DAMPING, FORMATS, LENGTH, METHODS, ORDERS, SAMPLES

    sub.add_argument("model", help="a directory, a Hugging Face id, or pocket")
    sub.add_argument("out", help="the directory to write; it must not exist")
    text = "rtn rounds the weights; gptq and awq also read a text"
    sub.add_argument("--method", choices=METHODS, required=True, help=text)
    sub.add_argument("--bits", type=int, choices=BITS, default=4)
    text = "inputs that share a scale; -1: all of them"
    add_value(sub, "--group", int, "N", text, 128)
    text = "file format (default gptq, AutoGPTQ's v1)"
    sub.add_argument("--format", choices=FORMATS, default="gptq", help=text)
    text = "a text file, or .jsonl with text, messages or ids in each line"
    add_value(sub, "--calibration", str, "FILE", text)
    text = f"gptq, awq: samples of the text (default {SAMPLES})"
    add_value(sub, "--samples", int, "N", text)
    text = f"gptq, awq: tokens of a sample (default {LENGTH})"
    add_value(sub, "--length", int, "N", text)
    text = "store a zero point for each group, in addition to its scale"
    add_switch(sub, "--asymmetric", text)
    text = "gptq: quantize inputs of large activations first; static keeps the groups, groups forms them in that order"
    sub.add_argument("--act-order", choices=ORDERS, default=ORDERS[0], help=text)
    text = f"gptq: share of the mean that is added to the Hessian's diagonal (default {DAMPING:g})"
    add_value(sub, "--damping", float, "X", text, DAMPING)
    text = "modules that stay unpacked, by the start of names such as model.layers.0.mlp.down_proj; repeatable"
    add_repeatable(sub, "--skip", "REGEX", text)
    text = "default: cuda if torch sees a GPU"
    sub.add_argument("--device", choices=("cpu", "cuda"), help=text)


def quantize(args: argparse.Namespace) -> int:
    """Run ``minivllm quantize``, which writes a checkpoint with quantized weights, and return its exit code."""
    from minivllm.lab.quantize.options import QuantizeOptions

    options = QuantizeOptions(
        method=args.method,
        bits=args.bits,
        group=args.group,
        format=args.format,
        symmetric=not args.asymmetric,
        act_order=args.act_order,
        damping=args.damping,
        samples=args.samples,
        length=args.length,
        skip=tuple(args.skip),
    )
    from tqdm import tqdm

    from minivllm.lab.quantize.run import Quantizing

    device = _device(args.device)
    work = Quantizing(args.model, args.out, options, args.calibration, device)
    with tqdm(total=work.steps, unit="sample" if options.calibrated else "layer", dynamic_ncols=True) as bar:

        def progress(done: int, what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update(done)

        try:
            summary = work.run(progress)
        except KeyboardInterrupt:
            bar.close()
            report(f"finished layers are in {work.work.folder}: the same command goes on")
            raise
    this_run = " of this run's layers" if summary.resumed else ""
    if summary.unscaled:
        report(f"no scales of inputs for {_some(summary.unscaled)}{this_run}")
    text = f"{summary.out}: {summary.bytes / 2**20:.1f} MiB in {summary.seconds:.0f} s"
    if summary.resumed:
        text += f", layers: {summary.resumed} finished by a run before"
    if summary.errors:
        mean = sum(summary.errors) / len(summary.errors)
        text += f", outputs of linear modules{this_run} lose {mean:.2%}"
    print(text)
    return 0


def _device(wanted: str | None) -> str:
    """Return the device to compute on; ``wanted`` None means a GPU if there is one.

    ResourceError if a wanted GPU is missing.
    """
    import torch

    from minivllm.errors import ResourceError

    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ResourceError("--device cuda: torch sees no GPU; use --device cpu")
    return wanted or ("cuda" if has_gpu else "cpu")


def _some(names: list[str]) -> str:
    """Return the first two names as a text, with the number of the remaining ones."""
    text = ", ".join(names[:2])
    return f"{text} and {len(names) - 2} more" if len(names) > 2 else text
