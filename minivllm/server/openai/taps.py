"""The field ``taps`` of a request: tap points (named tensors of the model) that an operator reads, or adds a vector of
the server to.

"taps": [{"point": "layers.3.residual", "read": "mean"}, {"point": "layers.5.residual", "add": "calm", "scale": 2}]
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm import files
from minivllm.core.interfaces.taps import KEPT, Tap
from minivllm.errors import RequestError, brief, shown, suggest
from minivllm.server.errors import ApiError
from minivllm.server.link.taps import NOTHING, POOLS, PooledTaps

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig
    from minivllm.core.interfaces.params import SamplingParams

MOST = 16  # largest number of taps of a request
LARGEST = files.MIB  # largest size in bytes of a file with a vector
NAMED = 8  # largest number of vectors that an error message names
MOST_READ = 4 << 20  # largest size in bytes of the values of all choices; their JSON is five times as large
SUFFIX = ".npy"
KEYS = ("point", "read", "add", "scale")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def read_taps(taps: Any, state: Mapping[str, Any], server: ServerConfig, params: SamplingParams) -> PooledTaps:
    """Return the taps of a body.

    ``state`` contains whether the client is an operator.  ApiError: 403 for other clients, 404 for an unknown vector,
    400 for malformed taps.
    """
    if taps is None or taps == []:
        return NOTHING
    if not state.get("operator"):
        text = "taps: expected the operator's key, over HTTP, on a server with --admin; or omit the field"
        raise ApiError(403, text, "taps")
    if not isinstance(taps, list) or len(taps) > MOST:
        raise _wrong("taps", f"a list of at most {MOST} objects")
    adds: list[Tap] = []
    reads: list[tuple[str, str]] = []
    for number, tap in enumerate(taps):
        _read_tap(f"taps[{number}]", tap, server, adds, reads)
    if reads and params.stop:
        text = "taps: values are pooled before stop strings are found; expected stop_token_ids, or no read"
        raise ApiError(400, text, "taps")
    return PooledTaps(tuple(adds), tuple(reads))


def check_reads(taps: PooledTaps, points: Mapping[str, int], prompts: int, params: SamplingParams) -> None:
    """Raise ApiError (400) if the values that are read, of all branches, take more than ``MOST_READ`` bytes.

    ``points`` maps the points of the model to their widths."""
    size = 4 * sum(points.get(point, 0) for point, _ in taps.reads)
    branches = prompts * params.width
    if size * branches > MOST_READ:
        text = f"taps: the values have {size} bytes as float32 for each of {branches} branches"
        raise ApiError(400, f"{text}; expected at most {MOST_READ} together: read fewer points or branches", "taps")


def _read_tap(at: str, tap: Any, server: ServerConfig, adds: list[Tap], reads: list[tuple[str, str]]) -> None:
    """Append a tap of a body to ``adds`` or ``reads``, or to both.  ``at`` is the place of the tap for errors."""
    if not isinstance(tap, dict):
        raise _wrong(at, f"an object with {', '.join(KEYS)}")
    unknown = next((key for key in tap if key not in KEYS), None)
    if unknown:
        raise ApiError(400, f"{at}: unknown key {shown(unknown)}.{suggest(unknown, KEYS)}", "taps")
    point, read, add = tap.get("point"), tap.get("read"), tap.get("add")
    if not isinstance(point, str) or not point:
        raise _wrong(f"{at}.point", "the name of a point, such as layers.0.residual")
    if point == KEPT:
        text = f"{at}: {KEPT} has positions, which are not pooled: expected a point of the model; read it with LLM"
        raise ApiError(400, text, "taps")
    if read is None and add is None:
        raise ApiError(400, f'{at}: {brief(point)} is neither read nor changed: expected "read" or "add"', "taps")
    if read is not None:
        if read not in POOLS:
            raise _wrong(f"{at}.read", f"{' or '.join(POOLS)}, the pooling of the values of all positions")
        if (point, read) in reads:
            raise ApiError(400, f"{at}: {brief(point)} is read twice by {read}; expected each once", "taps")
        reads.append((point, read))
    scale = tap.get("scale")
    if scale is not None and not _finite(scale):
        raise _wrong(f"{at}.scale", "a finite number")
    if scale is not None and add is None:
        raise ApiError(400, f'{at}.scale: expected only with "add"', "taps")
    if add is not None:
        vector = _vector(f"{at}.add", add, server)
        try:
            adds.append(Tap(point, add=vector, scale=1.0 if scale is None else float(scale)))
        except RequestError:
            raise _wrong(f"{at}.add: {add}{SUFFIX}", "finite numbers in the range of float32") from None


def _finite(number: Any) -> bool:
    """Return whether a value is a number that is finite as a float.  A whole number of hundreds of digits is not."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _vector(at: str, name: Any, server: ServerConfig) -> np.ndarray:
    """Return the vector with a name in the server's ``steering_dir``.  ``at`` is its place in the body for errors."""
    if server.steering_dir is None:
        raise ApiError(400, f"{at}: this server has no vectors; start it with --steering-dir", "taps")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(at, f"the name of a vector: letters, digits and ._-, without {SUFFIX}")
    folder = Path(server.steering_dir)
    if not os.path.lexists(folder / f"{name}{SUFFIX}"):
        there = sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))
        more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
        listed = (
            f"the vectors are {', '.join(map(brief, there[:NAMED]))}{more}" if there else "the server has no vectors"
        )
        raise ApiError(404, f"{at}: there is no vector {name}; {listed}", "taps")
    try:
        return read_npy(files.read_bytes(folder / f"{name}{SUFFIX}", LARGEST, RequestError, f"{at}: {name}{SUFFIX}"))
    except ValueError as exc:  # RequestError too
        text = str(exc) if isinstance(exc, RequestError) else f"{at}: {name}{SUFFIX}: {exc}"
        raise ApiError(400, text, "taps") from None


def read_npy(data: bytes) -> np.ndarray:
    """Return the list of numbers in a .npy file from an untrusted source.

    No code of the file is run, and its header cannot make the server allocate more memory than the file has bytes.
    ValueError unless it contains one list of numbers.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except (ValueError, SyntaxError, EOFError, OverflowError, MemoryError, RecursionError, TypeError, TokenError):
        raise ValueError("not an array that numpy.save wrote") from None
    rest = data[stream.tell() :]
    one_list = dtype.kind in "fiu" and len(shape) == 1 and shape[0] >= 1
    if not one_list or shape[0] * dtype.itemsize != len(rest):
        raise ValueError("expected one list of numbers")
    return np.frombuffer(rest, dtype)


def _wrong(at: str, expected: str) -> ApiError:
    """Return the error about a place in ``taps``."""
    return ApiError(400, f"{at}: expected {expected}", "taps")
