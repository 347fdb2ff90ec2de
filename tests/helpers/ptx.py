"""PTX instructions in numpy, for those that kernels write by ``tl.inline_asm_elementwise``.

Triton's interpreter runs them only after ``interpret``.  ``run`` packs operands as Triton does.  For ``pack`` elements
at a time each operand has as many registers as the elements fill.  The registers of the outputs come first, then those
of the inputs.  Elements of 8 and 16 bits share a register, and one of 64 bits has its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

PACKAGE = Path(__file__).resolve().parents[2] / "minivllm"
Words = np.ndarray  # uint32


class InlinePtx(NamedTuple):
    text: str
    constraints: list[str]
    pack: int


def written_in(file: str, function: str) -> list[InlinePtx]:
    """Return the inline assembly of a function of a file of the package, in order."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    calls = [n for n in ast.walk(found) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == ASM]
    found_in = []
    for call in sorted(calls, key=lambda call: call.lineno):
        before = [n for n in ast.walk(found) if isinstance(n, ast.AnnAssign) and n.lineno < call.lineno]
        named = {ast.unparse(n.target): n.value for n in sorted(before, key=lambda n: n.lineno)}
        found_in.append(_read(call, named))
    return found_in


ASM = "inline_asm_elementwise"


def _read(call: ast.Call, named: dict[str, Any]) -> InlinePtx:
    given = dict(zip(("asm", "constraints", "args", "dtype", "is_pure", "pack"), call.args, strict=False))
    given.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})
    given = {name: named.get(ast.unparse(value), value) for name, value in given.items()}  # constants of the function
    text, constraints, pack = (ast.literal_eval(given[name]) for name in ("asm", "constraints", "pack"))
    return InlinePtx(text, constraints.split(","), pack)


def bits_of_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return uint32 with the bfloat16 nearest to float64 x in its lower half.

    Sums and products in float64 are exact, so the result is rounded once.
    """
    bits = np.ascontiguousarray(x, dtype=np.float64).view(np.uint64)
    rest = np.uint64(52 - 7)
    odd = (bits >> rest) & np.uint64(1)
    bits = (bits + (np.uint64(1) << (rest - np.uint64(1))) - np.uint64(1) + odd) >> rest << rest
    return (bits.view(np.float64).astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint32)


def bfloat16_of(bits: np.ndarray) -> np.ndarray:
    """Return the lower half of each word, a bfloat16, as float64."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def _float16_of(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def _bits_of_float16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


KINDS = {"bf16x2": (bfloat16_of, bits_of_bfloat16), "f16x2": (_float16_of, _bits_of_float16)}
SUMS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


def _pairs(name: str, kind: str, *given: Words) -> Words:
    read, write = KINDS[kind]
    low, high = ([read(x & np.uint32(0xFFFF)) for x in given], [read(x >> np.uint32(16)) for x in given])
    return write(SUMS[name](*low)) | write(SUMS[name](*high)) << np.uint32(16)


def _permuted(a: Words, b: Words, selection: Words) -> Words:
    found, both = np.zeros_like(a), a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    for place in range(4):
        chosen = selection >> np.uint32(4 * place) & np.uint32(15)
        assert (chosen < 8).all(), "the sign of a byte is not modelled"
        byte = both >> (chosen.astype(np.uint64) * np.uint64(8)) & np.uint64(255)
        found |= byte.astype(np.uint32) << np.uint32(8 * place)
    return found


def _by_table(a: Words, b: Words, c: Words, table: Words) -> Words:
    found = np.zeros_like(a)
    for case in range(8):
        if int(table.flat[0]) >> case & 1:
            found |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return found


def _of_e4m3(x: Words) -> Words:
    halves = [torch.from_numpy((x >> np.uint32(8 * i) & np.uint32(255)).astype(np.uint8)) for i in range(2)]
    low, high = (_bits_of_float16(half.view(torch.float8_e4m3fn).float().numpy()) for half in halves)
    return low | high << np.uint32(16)


def _of_floats(high: Words, low: Words) -> Words:
    low, high = (bits_of_bfloat16(x.view(np.float32).astype(np.float64)) for x in (low, high))
    return low | high << np.uint32(16)


def _of_floats_in_16(high: Words, low: Words) -> Words:
    low, high = (_bits_of_float16(x.view(np.float32)) for x in (low, high))
    return low | high << np.uint32(16)


def _to_e4m3(high: Words, low: Words) -> Words:
    found = np.zeros_like(low)
    for place, x in enumerate((low, high)):
        numbers = torch.from_numpy(x.view(np.float32).copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
        found |= numbers.view(torch.uint8).numpy().astype(np.uint32) << np.uint32(8 * place)
    return found


WORDS: dict[str, Callable[..., Words]] = {
    "add.f32": lambda a, b: (a.view(np.float32) + b.view(np.float32)).view(np.uint32),
    "cvt.f32.f16": lambda a: _float16_of(a).astype(np.float32).view(np.uint32),
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3,
    "mov.b32": lambda a: a.copy(),
    "mov.u32": lambda a: a.copy(),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "cvt.u32.u16": lambda a: a & np.uint32(0xFFFF),
    "cvt.rn.f16x2.e4m3x2": _of_e4m3,
    "cvt.rn.bf16x2.f32": _of_floats,
    "cvt.rn.f16x2.f32": _of_floats_in_16,
    "prmt.b32": _permuted,
    "lop3.b32": _by_table,
}


def run(ptx: InlinePtx, operands: Sequence[np.ndarray], outputs: Sequence[type]) -> list[np.ndarray]:
    """Return the outputs, [n] each of these unsigned types.

    ``operands`` are [n] each, in unsigned types, and n is a multiple of pack.
    """
    n, pack = len(operands[0]), ptx.pack
    registers: dict[str, Words] = {}
    wide = [max(pack * np.dtype(kind).itemsize // 4, 1) for kind in outputs]
    place = sum(wide)
    assert sum(c.startswith("=") for c in ptx.constraints) == place, "the outputs fill other registers than are named"
    for operand in operands:
        assert operand.dtype.kind == "u"
        if operand.dtype == np.uint64:
            registers[f"${place}"] = operand.copy()
            place += 1
            continue
        rows = np.ascontiguousarray(operand).view(np.uint8).reshape(n // pack, -1)
        count = max(rows.shape[1] // 4, 1)
        padded = np.zeros((len(rows), 4 * count), np.uint8)
        padded[:, : rows.shape[1]] = rows
        for i, column in enumerate(padded.view(np.uint32).T):
            registers[f"${place + i}"] = column.copy()
        assert re.search(rf"\${place}\b", ptx.text), f"operand {operands.index(operand)}, from ${place} on, is not read"
        place += count
    assert place == len(ptx.constraints), f"the operands fill {place} registers, and {len(ptx.constraints)} are named"
    for line in re.split(r"[;\n]", ptx.text.strip().strip("{}")):
        if line.strip(" {}") and not line.strip().startswith(".reg"):
            _step(line.strip(), registers, n // pack)
    found, place = [], 0
    for kind, count in zip(outputs, wide, strict=True):
        words = np.stack([registers[f"${place + i}"] for i in range(count)], axis=1)
        place += count
        found.append(
            np.ascontiguousarray(words).view(np.uint8)[:, : pack * np.dtype(kind).itemsize].copy().view(kind).ravel()
        )
    return found


def _step(line: str, registers: dict[str, Words], rows: int) -> None:
    name, _, rest = line.partition(" ")
    if "prefetch" in name:
        return
    halves = re.match(r"\{(\w+), (\w+)\}, (\S+)$", rest.strip())
    if name == "mov.b32" and halves:
        whole = registers[halves[3]]
        registers[halves[1]], registers[halves[2]] = whole & np.uint32(0xFFFF), whole >> np.uint32(16)
        return
    if name == "mov.b64" and halves:
        whole = registers[halves[3]]
        registers[halves[1]], registers[halves[2]] = whole.astype(np.uint32), (whole >> np.uint64(32)).astype(np.uint32)
        return
    target, *given = [part.strip() for part in rest.split(",")]
    values = [registers[p] if p in registers else np.full(rows, int(p, 0), np.uint32) for p in given]
    what, _, kind = name.partition(".rn.")
    registers[target] = _pairs(what, kind, *values) if kind in KINDS and what in SUMS else WORDS[name](*values)


class _Results(NamedTuple):
    handles: list[Any]

    def get_result(self, place: int) -> Any:
        return self.handles[place]


def interpret() -> None:
    """Let Triton's interpreter run inline assembly with ``run``."""
    from triton.runtime import interpreter

    def create(self: Any, text: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> _Results:
        shape, kinds = values[0].data.shape, [getattr(t, "element_ty", t) for t in types]
        padding = -values[0].data.size % pack
        flat = [np.pad(np.ascontiguousarray(v.data).ravel(), (0, padding)) for v in values]
        unsigned = [np.dtype(f"u{kind.primitive_bitwidth // 8}") for kind in kinds]
        lines = InlinePtx(text, constraints.split(","), pack)
        found = run(lines, [v.view(f"u{v.itemsize}") for v in flat], [u.type for u in unsigned])
        handles = []
        for kind, numbers in zip(kinds, found, strict=True):
            typed = numbers.view(interpreter._get_np_dtype(kind))[: numbers.size - padding]
            handles.append(interpreter.TensorHandle(typed.reshape(shape), kind))
        return _Results(handles)

    interpreter.InterpreterBuilder.create_inline_asm = create
