"""Reader of the IDX format, in which MNIST and its relatives are published; every byte of a file is accounted for.

The format: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit integer, then
the values in row-major order (http://yann.lecun.com/exdb/mnist/). Only unsigned bytes (type 8) occur in these data.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.errors import DataError

_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of unsigned bytes in ``path`` (gzip or plain), which must have ``dimensions`` dimensions.

    Raises DataError, naming the file and what is wrong with it.
    """
    data = _content(path)
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise _damaged(path, f"it has {len(data)} bytes, less than its header of {header}")
    zero, kind, count = struct.unpack(">HBB", data[:4])
    if zero != 0 or kind != _UNSIGNED_BYTE or count != dimensions:
        expected = f"00 00 08 {dimensions:02x}"
        raise _damaged(path, f"it begins with {data[:4].hex(' ')} instead of {expected}")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected_size = header + math.prod(shape)
    if len(data) != expected_size:
        sizes = " x ".join(map(str, shape))
        raise _damaged(path, f"{sizes} values need {expected_size} bytes, but it has {len(data)}")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, "its gzip stream is truncated or damaged") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", hint="check data.directory") from error


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: not a whole IDX file: {what}", hint="download the file again")
