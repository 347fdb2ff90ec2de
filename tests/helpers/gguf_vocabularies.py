"""GGUF files that hold a vocabulary and no weights."""

from __future__ import annotations

import struct

import gguf

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def write_vocabulary(path, model, tokens, kinds, *, arch="llama", pre=None, merges=None, scores=None, more=None):
    """Write a file with a tokenizer; ``more(writer)`` adds keys.  Return its path as a text."""
    writer = gguf.GGUFWriter(str(path), arch)
    if model is not None:
        writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    if kinds is not None:
        writer.add_token_types(kinds)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    if more is not None:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def write_large(path, **values):
    """Write a file of ``tokenizer.ggml.*`` texts, numbers and lists of either, faster than the package does."""
    text = lambda value: struct.pack("<Q", len(raw := value.encode())) + raw  # noqa: E731
    parts = [b"GGUF", struct.pack("<IQQ", 3, 0, len(values) + 1)]
    parts += [text("general.architecture"), struct.pack("<I", 8), text("llama")]
    for key, value in values.items():
        parts.append(text(f"tokenizer.ggml.{key}"))
        if isinstance(value, str):
            parts += [struct.pack("<I", 8), text(value)]
        elif isinstance(value, int):
            parts.append(struct.pack("<II", 4, value))
        elif isinstance(value[0], str):
            parts += [struct.pack("<IIQ", 9, 8, len(value)), *map(text, value)]
        else:
            kind, form = (6, "f") if isinstance(value[0], float) else (5, "i")
            parts.append(struct.pack(f"<IIQ{len(value)}{form}", 9, kind, len(value), *value))
    path.write_bytes(b"".join(parts))
    return str(path)
