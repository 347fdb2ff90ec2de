"""The attention of vision towers by the kernel ``patch_attention``, where a device and a tower allow it.

    PatchTower            ──► hopper_attention ──► kernel, or None: torch's attention
    transformers' modules ──► use_in_modules: a function of transformers' attention interface ──► kernel or torch's

A launch of the kernel outside of a CUDA graph takes longer on the host than one of torch's attention.  Modules of
transformers are not captured, so they use it for images of many patches only.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.errors import describe_error

if TYPE_CHECKING:
    from collections.abc import Callable

    # attention within sequences: (q, k, v [T, heads, dim], patches of a sequence) -> outputs [T, heads, dim]
    Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]

log = logging.getLogger(__name__)
NAME = "minivllm_patches"  # name of ``attend_in_module`` in transformers' attention interface
LEAST = 3328  # fewest patches of a sequence for which modules of transformers use the kernel


def hopper_attention(dim: int, dtype: torch.dtype, device: torch.device) -> Attend | None:
    """Return the kernel of ``patch_attention`` for heads of ``dim`` elements.

    Return None for devices, dtypes and sizes that it does not serve, and if the kernel cannot be compiled on this
    device or gives other outputs than products in float32.  A lack of memory is no reason for later calls."""
    if dtype != torch.bfloat16 or device.type != "cuda":
        return None
    try:
        return _checked(dim, device)
    except torch.OutOfMemoryError as e:
        log.warning("images use torch's attention: %s", describe_error(e))
        return None


@lru_cache(maxsize=16)
def _checked(dim: int, device: torch.device) -> Attend | None:
    """Return the kernel after it has been compiled and compared, or None.  OutOfMemoryError if there was no memory for
    that."""
    if find_spec("triton") is None:
        return None
    try:
        from minivllm.device.kernels import patch_attention
        from minivllm.device.kernels.launch import capability

        if capability(device) != 9 or dim not in patch_attention.SIZES:
            return None
        distance = patch_attention.distance(dim, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # the compiler and the driver raise errors of many types
        log.warning("images use torch's attention: %s", describe_error(e))
        return None
    if not distance <= patch_attention.FAR:
        log.warning("images use torch's attention: the kernel's outputs have a distance of %.3g", distance)
        return None
    return patch_attention.attend


def use_in_modules(model: Any, dim: int) -> None:
    """Replace torch's attention by the kernel in a model of transformers with heads of ``dim`` elements.

    Nothing changes if ``hopper_attention`` has no kernel for them."""
    like = next(model.parameters())
    if hopper_attention(dim, like.dtype, like.device) is None:
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attend_in_module)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without a function for masks, the modules would make none
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = NAME


def attend_in_module(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **how: Any,
) -> tuple[Tensor, None]:
    """Return the outputs [sequences, patches, heads, dim] of q, k and v [sequences, heads, patches, dim], and None.

    It is a function of transformers' attention interface.  The kernel computes attention without a mask; other calls
    have torch's attention."""
    sequences, heads, length, dim = q.shape
    causal = how.get("is_causal", getattr(module, "is_causal", True))
    usual = attention_mask is None and scaling == dim**-0.5 and not causal
    attend = None
    if usual and length >= LEAST and q.shape == k.shape == v.shape:
        attend = hopper_attention(dim, q.dtype, q.device)
    if attend is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(module, q, k, v, attention_mask, scaling=scaling, **how)
        return found
    by_patch = [one.transpose(1, 2).reshape(sequences * length, heads, dim) for one in (q, k, v)]
    out = attend(by_patch[0], by_patch[1], by_patch[2], length)
    return out.view(sequences, length, heads, dim), None
