"""The field ``taps`` of a request: points of the model that an operator reads, or adds a vector of the server's to.

"taps": [{"point": "layers.3.residual", "read": "mean"}, {"point": "layers.5.residual", "add": "calm", "scale": 2}]
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm import files
from minivllm.core.interfaces.taps import Tap
from minivllm.errors import RequestError, brief, shown, suggest
from minivllm.server.errors import ApiError
from minivllm.server.link.taps import NOTHING, POOLS, PooledTaps

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig
    from minivllm.core.interfaces.params import SamplingParams

MOST = 16  # taps of a request
LARGEST = files.MIB  # bytes of a file with a vector
NAMED = 8  # vectors that an error names
MOST_READ = 4 << 20  # bytes of the values of all choices: as JSON they are five times as many
SUFFIX = ".npy"
KEYS = ("point", "read", "add", "scale")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def read_taps(given: Any, state: Mapping[str, Any], server: ServerConfig, params: SamplingParams) -> PooledTaps:
    """The taps of a body.  ApiError: 403 for who is no operator (``state``), 404 for a vector that is not there, else
    400."""
    if given is None or given == []:
        return NOTHING
    if not state.get("operator"):
        what = "taps: want the operator's key, on a server with --admin, and HTTP"
        raise ApiError(403, f"{what}; leave the field out to ask without", "taps")
    if not isinstance(given, list) or len(given) > MOST:
        raise _wrong("taps", f"a list of at most {MOST} objects")
    adds: list[Tap] = []
    reads: list[tuple[str, str]] = []
    for number, one in enumerate(given):
        _read_tap(f"taps[{number}]", one, server, adds, reads)
    if reads and params.stop:
        what = "taps: values are pooled where tokens are made, and a stop string is found later"
        raise ApiError(400, f"{what}; want stop_token_ids in place of stop, or no read", "taps")
    return PooledTaps(tuple(adds), tuple(reads))


def check_reads(taps: PooledTaps, points: Mapping[str, int], prompts: int, params: SamplingParams) -> None:
    """ApiError (400) for more values than an answer may have; ``points`` are those of the model, with their widths."""
    size = 4 * sum(points.get(point, 0) for point, _ in taps.reads)
    branches = prompts * params.width
    if size * branches > MOST_READ:
        what = f"taps: what is read is {size} bytes as float32 for each of {branches} branches"
        raise ApiError(400, f"{what}; want at most {MOST_READ} together: read fewer points, or ask for less", "taps")


def _read_tap(at: str, one: Any, server: ServerConfig, adds: list[Tap], reads: list[tuple[str, str]]) -> None:
    if not isinstance(one, dict):
        raise _wrong(at, f"an object with {', '.join(KEYS)}")
    if unknown := next((key for key in one if key not in KEYS), None):
        raise ApiError(400, f"{at}: unknown key {shown(unknown)}.{suggest(unknown, KEYS)}", "taps")
    point, read, add = one.get("point"), one.get("read"), one.get("add")
    if not isinstance(point, str) or not point:
        raise _wrong(f"{at}.point", "the name of a point, such as layers.0.residual")
    if read is None and add is None:
        raise ApiError(400, f'{at}: nothing is asked of {brief(point)}: want "read" or "add"', "taps")
    if read is not None:
        if read not in POOLS:
            raise _wrong(f"{at}.read", f"{' or '.join(POOLS)}, what becomes of the values of all positions")
        if (point, read) in reads:
            raise ApiError(400, f"{at}: {brief(point)} is read twice by {read}; want each once", "taps")
        reads.append((point, read))
    scale = one.get("scale")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float)) or not _finite(scale)):
        raise _wrong(f"{at}.scale", "a finite number")
    if scale is not None and add is None:
        raise ApiError(400, f'{at}.scale: want it only beside "add"', "taps")
    if add is not None:
        vector = _vector(f"{at}.add", add, server)
        try:
            adds.append(Tap(point, add=vector, scale=1.0 if scale is None else float(scale)))
        except RequestError:
            raise _wrong(f"{at}.add: {add}{SUFFIX}", "finite numbers in the range of float32") from None


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _vector(at: str, name: Any, server: ServerConfig) -> np.ndarray:
    """The vector of that name in ``steering_dir``."""
    if server.steering_dir is None:
        raise ApiError(400, f"{at}: this server has no vectors; start it with --steering-dir", "taps")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(at, f"the name of a vector: letters, digits and ._-, without {SUFFIX}")
    folder = Path(server.steering_dir)
    if not os.path.lexists(folder / f"{name}{SUFFIX}"):
        there = sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))
        more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
        what = f"there are: {', '.join(map(brief, there[:NAMED]))}{more}" if there else "there is none at all"
        raise ApiError(404, f"{at}: there is no vector {name}; {what}", "taps")
    try:
        return read_npy(files.read_bytes(folder / f"{name}{SUFFIX}", LARGEST, RequestError, f"{at}: {name}{SUFFIX}"))
    except ValueError as exc:  # RequestError too
        text = str(exc) if isinstance(exc, RequestError) else f"{at}: {name}{SUFFIX}: {exc}"
        raise ApiError(400, text, "taps") from None


def read_npy(data: bytes) -> np.ndarray:
    """One list of numbers from the bytes of a .npy file, of which nothing is run and no more memory is taken than it
    has.  ValueError says what is wrong."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except (ValueError, SyntaxError, EOFError, OverflowError, MemoryError, RecursionError, TypeError):
        raise ValueError("not an array that numpy.save wrote") from None
    rest = data[stream.tell() :]
    if dtype.kind not in "fiu" or len(shape) != 1 or shape[0] < 1 or shape[0] * dtype.itemsize != len(rest):
        raise ValueError("want one list of numbers")
    return np.frombuffer(rest, dtype)


def _wrong(at: str, want: str) -> ApiError:
    return ApiError(400, f"{at}: want {want}", "taps")
