"""The four files of MNIST: found in a folder or downloaded, checked, and read.

Files are in the IDX format of LeCun, Cortes and Burges: a magic number (two zero bytes, the
element type, the number of dimensions), the dimensions as big-endian 32-bit integers, the data.
Each may be plain or gzipped.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stiefel.errors import DataError

__all__ = ["MNIST_FILES", "IdxFile", "Mnist", "load_mnist", "locate", "read_idx"]

_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_UNSIGNED_BYTE = 8


class IdxFile(NamedTuple):
    """What one file must be: name without ``.gz``, shape, MD5 of the gzipped and plain bytes."""

    name: str
    shape: tuple[int, ...]
    md5_gz: str
    md5: str


MNIST_FILES = {
    "train_images": IdxFile(
        "train-images-idx3-ubyte",
        (60000, 28, 28),
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "6bbc9ace898e44ae57da46a324031adb",
    ),
    "train_labels": IdxFile(
        "train-labels-idx1-ubyte",
        (60000,),
        "d53e105ee54ea40749a09fcbcd1e9432",
        "a25bea736e30d166cdddb491f175f624",
    ),
    "test_images": IdxFile(
        "t10k-images-idx3-ubyte",
        (10000, 28, 28),
        "9fb629c4189551a2d022fa330f9573f3",
        "2646ac647ad5339dbf082846283269ea",
    ),
    "test_labels": IdxFile(
        "t10k-labels-idx1-ubyte",
        (10000,),
        "ec29112dd5afa0611ce80d1b7f02629c",
        "27ae3e4e09519cfbb04c329615203637",
    ),
}


class Mnist(NamedTuple):
    """The images, uint8 (N, 28, 28), and labels, uint8 (N,), of both parts."""

    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.uint8]
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.uint8]


def load_mnist(data_dir: str | os.PathLike[str] | None = None) -> Mnist:
    """Reads MNIST from a folder, or downloads it once into the user's cache.

    Args:
        data_dir: Folder with the four files, plain or gzipped, or with a folder ``mnist`` or
            ``MNIST/raw`` that has them. None takes the environment variable STIEFEL_DATA; where
            that is not set either, the files are downloaded (11 MB) and kept.

    Returns:
        Images and labels, each checked against the published checksums.

    Raises:
        DataError: If a file is missing, cannot be downloaded, is truncated, or is another file.
    """
    folder = data_dir if data_dir is not None else os.environ.get("STIEFEL_DATA") or None
    arrays = {}
    for part, file in MNIST_FILES.items():
        path = _download(file) if folder is None else locate(Path(folder), file.name)
        arrays[part] = read_idx(path, shape=file.shape, md5=file.md5)
    return Mnist(**arrays)


def locate(folder: Path, name: str) -> Path:
    """Finds ``name`` or ``name.gz`` in `folder` or in its ``mnist`` or ``MNIST/raw``.

    Raises:
        DataError: If it is in none of them.
    """
    folders = (folder, folder / "mnist", folder / "MNIST" / "raw")
    for candidate in (place / f"{name}{end}" for place in folders for end in ("", ".gz")):
        if candidate.is_file():
            return candidate
    raise DataError(
        f"no {name} or {name}.gz in {folder} (nor in its folders mnist, MNIST/raw): name the "
        "folder that has it with --data-dir or the environment variable STIEFEL_DATA. Without "
        "either smnist and pmnist download it, and moving-digits draws shapes"
    )


def read_idx(
    path: str | os.PathLike[str], *, shape: tuple[int, ...], md5: str | None = None
) -> npt.NDArray[np.uint8]:
    """Reads one IDX file of unsigned bytes, plain or gzipped.

    Args:
        path: The file; gzipped when its first two bytes say so, whatever its name.
        shape: The shape that its header must declare.
        md5: MD5 of the plain bytes, None to skip the check.

    Returns:
        A uint8 array of that shape, read-only.

    Raises:
        DataError: If the file is not an IDX file of that shape, is too short or too long, or has
            another checksum. The message names the file, what was expected, what came, and what
            to do.
    """
    path = Path(path)
    plain = _read_plain(path)
    header = 4 + 4 * len(shape)
    magic = bytes([0, 0, _UNSIGNED_BYTE, len(shape)])
    if plain[:4] != magic:
        raise _wrong(
            path,
            f"an IDX file of unsigned bytes in {len(shape)} dimensions (magic {magic.hex()})",
            f"magic {plain[:4].hex() or 'nothing'}",
        )
    found = tuple(
        int(size) for size in np.frombuffer(plain[4 : len(plain[:header]) // 4 * 4], ">u4")
    )
    if found != shape:
        raise _wrong(path, f"a header that declares the shape {shape}", f"{found}")
    size = header + math.prod(shape)
    if len(plain) != size:
        kind = "truncated, " if len(plain) < size else ""
        raise _wrong(path, f"{size:,} bytes of plain IDX", f"{kind}{len(plain):,}")
    if md5 is not None and (came := _md5(plain)) != md5:
        raise _wrong(path, f"MD5 {md5} of the plain bytes", came)
    return np.frombuffer(plain, np.uint8, offset=header).reshape(shape)


def _read_plain(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise _wrong(
            path,
            "a whole gzip file",
            f"a truncated or damaged one of {len(content):,} bytes ({error})",
        ) from error


def _download(file: IdxFile) -> Path:
    import pooch

    name = f"{file.name}.gz"
    folder = pooch.os_cache("stiefel") / "mnist"
    try:
        return Path(
            pooch.retrieve(_URL + name, known_hash=f"md5:{file.md5_gz}", fname=name, path=folder)
        )
    except Exception as error:  # whatever the network, its libraries or the checksum raise
        raise DataError(
            f"{_URL}{name}: expected a download with MD5 {file.md5_gz}, got "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; fetch "
            "the four MNIST files in another way and name their folder with --data-dir"
        ) from error


def _wrong(path: Path, expected: str, got: str) -> DataError:
    return DataError(
        f"{path}: expected {expected}, got {got}. Delete the file and fetch it again: without "
        "--data-dir and STIEFEL_DATA it is downloaded and checked"
    )


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
