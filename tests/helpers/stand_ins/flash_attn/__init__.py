"""The package of FlashAttention-2, which must not be imported to test its presence, because the real one
imports torch.
"""

from .flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]
