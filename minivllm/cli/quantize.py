"""``minivllm quantize``: a model directory with weights of 4 or 8 bits.  Parsing it imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_commands(command: Any) -> None:
    """Add ``quantize``.  ``command`` is that of ``minivllm.cli``."""
    text = "Write a model directory whose linear layers are packed in 4 or 8 bits, as GPTQ's or compressed-tensors'."
    command("quantize", "cli.quantize:quantize", text).fill = _add_arguments


def _add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``quantize``, with the choices and defaults of ``lab.quantize``."""
    from minivllm.lab.quantize.options import BITS, DAMPING, FORMATS, LENGTH, METHODS, ORDERS, SAMPLES

    sub.add_argument("model", help="a directory, a Hugging Face id, or pocket")
    sub.add_argument("out", help="the directory to write; it must not be there")
    sub.add_argument("--method", choices=METHODS, required=True, help="rtn: rounding; gptq and awq read a text")
    sub.add_argument("--bits", type=int, choices=BITS, default=4)
    sub.add_argument("--group", type=int, default=128, metavar="N", help="inputs that share a scale; -1: all of them")
    sub.add_argument("--format", choices=FORMATS, default="gptq", help="of the files (default gptq, AutoGPTQ's v1)")
    sub.add_argument("--calibration", metavar="FILE", help="text, or .jsonl with text, messages or ids in each line")
    sub.add_argument("--samples", type=int, metavar="N", help=f"gptq, awq: of the text (default {SAMPLES})")
    sub.add_argument("--length", type=int, metavar="N", help=f"gptq, awq: tokens of a sample (default {LENGTH})")
    sub.add_argument("--asymmetric", action="store_true", help="a zero point for each group, beside its scale")
    sub.add_argument("--act-order", choices=ORDERS, default=ORDERS[0], help="gptq: inputs of large activations first")
    sub.add_argument("--damping", type=float, default=DAMPING, metavar="X", help=f"gptq: default {DAMPING:g}")
    skip = "modules that are not packed: matched from the start of names such as model.layers.0.mlp.down_proj; again "
    skip += "for several"
    sub.add_argument("--skip", action="append", default=[], metavar="REGEX", help=skip)
    sub.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default cuda if torch sees it")


def quantize(args: argparse.Namespace) -> int:
    """Write the quantized model directory; the exit code."""
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
            report = work.run(progress)
        except KeyboardInterrupt:
            bar.close()
            print(f"minivllm: finished layers are in {work.work.folder}: the same command goes on", file=sys.stderr)
            raise
    of_run = " of this run's layers" if report.resumed else ""
    if report.unscaled:
        print(f"minivllm: no scales of inputs for {_listed(report.unscaled)}{of_run}", file=sys.stderr)
    resumed = f", layers: {report.resumed} finished by a run before" if report.resumed else ""
    mean = sum(report.errors) / max(len(report.errors), 1)
    lost = f", outputs of linear modules{of_run} lose {mean:.2%}" if report.errors else ""
    print(f"{report.out}: {report.bytes / 2**20:.1f} MiB in {report.seconds:.0f} s{resumed}{lost}")
    return 0


def _device(wanted: str | None) -> str:
    import torch

    from minivllm.errors import ResourceError

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ResourceError("--device cuda: torch sees no GPU; want --device cpu")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
