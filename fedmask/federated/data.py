"""Image data sets: CIFAR-10, any folder or archive of images, the embedded digits, and arrays of your own.

Whatever the source, the outcome is one :class:`ImageData` of uint8 arrays, known by the SHA-256 of its
decoded contents. Folders and archives are decoded once, in memory, into a cache of plain ``.npy`` files:
nothing of an archive is ever written to the disk under a name of its own.
"""

import contextlib
import hashlib
import io
import json
import lzma
import math
import os
import pickle
import shutil
import socket
import stat
import struct
import tarfile
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image, UnidentifiedImageError
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from fedmask.errors import DataError
from fedmask.files import cache_root, sha256_of_file, write_json

__all__ = ["ImageData", "load_data"]

_CACHE_LAYOUT = 1
_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp")
_FORMATS = ("PNG", "JPEG", "BMP", "PPM", "WEBP")  # no other decoder of Pillow's sees what a file holds
_TEST_SPLITS = ("test", "val", "valid", "validation")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".zip")
_LAYOUT = "<split>/<class>/<image>, with the splits train and test"
_HEADER_BYTES, _MEMBER_BYTES, _PIXELS, _TOTAL_BYTES = 2**20, 32 * 2**20, 16 * 10**6, 8 * 2**30
_MOST_CLASSES = 2**16
_DOWNLOAD_TIMEOUT = 20.0
_DAMAGE = (OSError, EOFError, ValueError, RuntimeError, OverflowError, struct.error)
_ARCHIVE_DAMAGE = (*_DAMAGE, tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set of images of one size, in memory or mapped read-only from the cache.

    Attributes:
        name: of the source, never a path.
        train_images, test_images: uint8, (samples, channels, height, width).
        train_labels, test_labels: int64 indices into ``classes``.
        classes: their names.
        fingerprint: SHA-256 of all of the above but the name.

    Raises:
        DataError: if types, shapes, counts or labels do not fit together.
    """

    name: str
    train_images: np.ndarray  # checked when made, so that a wrong shape is a DataError under every type checker
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]
    fingerprint: str

    def __post_init__(self) -> None:
        _check_split("train", self.train_images, self.train_labels, len(self.classes))
        _check_split("test", self.test_images, self.test_labels, len(self.classes))
        train, test = self.train_images.shape[1:], self.test_images.shape[1:]
        if train != test:
            raise DataError(f"train images are {train} and test images {test}; all must have one shape")

    @classmethod
    def from_arrays(
        cls,
        name: str,
        train_images: Any,
        train_labels: Any,
        test_images: Any,
        test_labels: Any,
        classes: Sequence[str] | None = None,
    ) -> "ImageData":
        """A data set of your own arrays or tensors: uint8 images (samples, channels, height, width), integer labels.

        Without ``classes``, they are called by their numbers, up to the highest label.

        Raises:
            DataError: if types, shapes, counts or labels do not fit together.
        """
        given = (train_images, train_labels, test_images, test_labels)
        arrays = {key: _array(key, value) for key, value in zip(_ARRAYS, given, strict=True)}
        if classes is None:
            highest = [int(part.max()) for part in arrays.values() if part.dtype == np.int64 and part.size]
            classes = [str(label) for label in range(min(max(highest, default=-1) + 1, _MOST_CLASSES))]
        data = cls(name=name, classes=tuple(str(label) for label in classes), fingerprint="", **arrays)
        return replace(data, fingerprint=_fingerprint(data))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return self.image_shape[0]

    @property
    def number_of_classes(self) -> int:
        """How many classes there are, whether or not each has images."""
        return len(self.classes)

    @cached_property
    def channel_mean(self) -> Float64[np.ndarray, " channels"]:
        """Mean of each channel over the training images, with white as 1."""
        return np.array([_moments(counts)[0] for counts in self._histograms])

    @cached_property
    def channel_std(self) -> Float64[np.ndarray, " channels"]:
        """Standard deviation of each channel over the training images; 1 for a constant channel."""
        return np.array([_moments(counts)[1] or 1.0 for counts in self._histograms])

    @cached_property
    def _histograms(self) -> Int64[np.ndarray, "channels 256"]:
        counts = np.zeros((self.channels, 256), dtype=np.int64)
        some = max(1, 2**24 // math.prod(self.image_shape))  # bincount makes eight bytes of each
        for start in range(0, len(self.train_images), some):
            for channel in range(self.channels):
                pixels = self.train_images[start : start + some, channel].ravel()
                counts[channel] += np.bincount(pixels, minlength=256)
        return counts


def load_data(source: str | Path, *, data_dir: Path | None = None, progress: bool = False) -> ImageData:
    """Load a data set.

    Args:
        source: "digits" (scikit-learn's, 8×8 grey, every fifth image for testing), "cifar10" (the official
            archive, by torchvision's checksums), or the path of a folder or archive in the layout
            <split>/<class>/<image>, possibly below one common folder.
        data_dir: for cifar10, where its archive is or goes; the cache if None.
        progress: show a bar on standard error while images are decoded.

    Raises:
        DataError: if the source is missing, unreadable or not in that layout.
    """
    if source == "digits":
        return _digits()
    if source == "cifar10":
        return _cifar10(data_dir or cache_root() / "cifar10", progress)
    archive = str(source).lower().endswith(_ARCHIVES)
    if os.path.isdir(source) or (archive and os.path.isfile(source)):
        return _cached(Path(os.path.abspath(source)), progress)
    if os.path.isfile(source):
        raise DataError(f"{source} is not an archive that can be read; use one of {', '.join(_ARCHIVES)}")
    raise DataError(f"data {str(source)!r} does not exist; use digits, cifar10, or a folder or archive of {_LAYOUT}")


def _digits() -> ImageData:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    test = np.arange(len(images)) % 5 == 4
    return ImageData.from_arrays("digits", images[~test], digits.target[~test], images[test], digits.target[test])


def _cifar10(root: Path, progress: bool) -> ImageData:
    from torchvision.datasets import CIFAR10

    checksums: dict[str, str] = dict([*CIFAR10.train_list, *CIFAR10.test_list])
    checksums[CIFAR10.meta["filename"]] = CIFAR10.meta["md5"]
    folder, archive = root / CIFAR10.base_folder, root / CIFAR10.filename
    files = _intact(folder, checksums) or _intact(archive, checksums)
    if files is None:
        _download_cifar10(root, progress)
        files = _intact(archive, checksums)
    if files is None:
        raise DataError(f"{archive} has the right checksum but not the files of CIFAR-10; remove it and try again")
    # Unlike in torchvision's own class, what is unpickled are the very bytes that were checked, not the file again,
    # which another process may have written to since; and nothing is extracted, so the folder may be read-only.
    batches = {name: pickle.loads(content, encoding="latin1") for name, content in files.items()}
    splits = [[batches[name] for name, _ in part] for part in (CIFAR10.train_list, CIFAR10.test_list)]
    images = [np.concatenate([batch["data"] for batch in split]).reshape(-1, 3, 32, 32) for split in splits]
    labels = [np.concatenate([batch["labels"] for batch in split]) for split in splits]
    classes = batches[CIFAR10.meta["filename"]][CIFAR10.meta["key"]]
    return ImageData.from_arrays("cifar10", images[0], labels[0], images[1], labels[1], classes)


def _intact(path: Path, checksums: Mapping[str, str]) -> dict[str, bytes] | None:
    """The files with these names and MD5 sums in a folder or archive; None if any is missing or altered."""
    files: dict[str, bytes] = {}
    try:
        for name, size, read in _members(path):
            if (base := name.rpartition("/")[2]) in checksums and size <= 2 * _MEMBER_BYTES:
                files[base] = read()
    except _ARCHIVE_DAMAGE:
        return None
    sums = {name: hashlib.md5(content, usedforsecurity=False).hexdigest() for name, content in files.items()}
    return files if sums == checksums else None


def _download_cifar10(root: Path, progress: bool) -> None:
    from torchvision.datasets import CIFAR10, utils

    archive, unfinished = CIFAR10.filename, root / f".{uuid.uuid4().hex}"
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT)
    try:
        with contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO()):
            utils.download_url(CIFAR10.url, root, unfinished.name, CIFAR10.tgz_md5)  # raises if the sum is wrong
        os.replace(unfinished, root / archive)
    except (*_DAMAGE, HTTPException) as error:
        raise DataError(
            f"CIFAR-10 is not whole in {root} and could not be downloaded ({_text(error)}); put {archive} into a "
            f"folder and name it with --data-dir, or give --data a folder or archive of {_LAYOUT}"
        ) from None
    finally:
        socket.setdefaulttimeout(before)
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _cached(path: Path, progress: bool) -> ImageData:
    """The folder or archive from the cache, decoding it into there if it is not there whole."""
    try:
        folder = cache_root() / "datasets" / _cache_key(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({_text(error)})") from None
    if cached := _read_cache(folder, path.name):
        return cached
    data = _decode(path, progress)
    try:
        _write_cache(folder, data)
    except OSError as error:
        warnings.warn(f"{path.name} could not be cached ({_text(error)}) and will be decoded again", stacklevel=3)
    return _read_cache(folder, path.name) or data


def _read_cache(folder: Path, name: str) -> ImageData | None:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {key: np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False) for key in _ARRAYS}
        data = ImageData(name=name, classes=tuple(meta["classes"]), fingerprint=meta["fingerprint"], **arrays)
        return data if meta["version"] == _CACHE_LAYOUT and _fingerprint(data) == data.fingerprint else None
    except Exception:  # absent or damaged in any way: then it is decoded again
        return None


def _write_cache(folder: Path, data: ImageData) -> None:
    """Put ``data`` where ``folder`` is, whole or not at all, unless another process has put it there already."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    damaged = temporary.with_name(f"{temporary.name}.damaged")
    meta = {"name": data.name, "classes": data.classes, "fingerprint": data.fingerprint, "version": _CACHE_LAYOUT}
    try:
        temporary.mkdir(parents=True)
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(data, name), allow_pickle=False)
        write_json(temporary / "meta.json", meta)
        if folder.exists() and _read_cache(folder, data.name) is None:
            with contextlib.suppress(FileNotFoundError):  # another process has moved it away
                os.rename(folder, damaged)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(damaged, ignore_errors=True)


def _cache_key(path: Path) -> str:
    if path.is_file():
        return f"{_CACHE_LAYOUT}-{sha256_of_file(path)}"
    listing = hashlib.sha256()
    for file in sorted(file for file in _files(path) if _is_image(file.name)):
        status = file.stat()
        listing.update(os.fsencode(file.relative_to(path)))
        listing.update(f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return f"{_CACHE_LAYOUT}-folder-{listing.hexdigest()}"


def _decode(path: Path, progress: bool) -> ImageData:
    """Read and decode every image of the layout, train and test, sorted by class and file name."""
    images = _Images(path.name)
    found: list[str] = []
    label, console = f"decoding {escape(_shown(path.name))}", Console(stderr=True)
    try:
        for name, size, read in track(_members(path), label, console=console, disable=not progress):
            found = found if len(found) == 3 else [*found, _shown(name)]
            if (place := _place(name)) is not None:
                images.add(name, place, _pixels(name, _bounded(name, size, read)))
    except DataError:
        raise
    except _ARCHIVE_DAMAGE as error:
        raise DataError(f"{_shown(path.name)} cannot be read ({_text(error)}); is it whole?") from None
    test = next((split for split in _TEST_SPLITS if split in images.splits), None)
    if test is None or "train" not in images.splits:
        raise DataError(f"{_shown(path.name)} is not laid out as {_LAYOUT}; found {', '.join(found) or 'no file'}")
    return images.data(test)


@dataclass
class _Images:
    """The decoded images of a source; one that does not fit is refused as soon as it comes."""

    source: str
    splits: dict[str, dict[tuple[str, str], np.ndarray]] = field(default_factory=dict)
    root: str = ""
    size: tuple[int, ...] = ()
    count: int = 0
    channels: int = 1

    def add(self, name: str, place: tuple[str, str, str, str], pixels: np.ndarray) -> None:
        """Take in an image (height, width) or (height, width, 3)."""
        root, split, label, file = place
        shown, size = f"{_shown(name)} in {_shown(self.source)}", pixels.shape[:2]
        if self.count == 0:
            self.root, self.size = root, size
        if size != self.size:
            raise DataError(f"{shown} is {size}, others are {self.size}; all must have one size")
        if root != self.root or (label, file) in self.splits.get(split, {}):
            raise DataError(f"{shown} is there twice or below another folder than others; keep one set of images")
        if _shown(label) != label:
            raise DataError(f"{shown} is of a class whose name is not printable text; rename the folder")
        self.count += 1
        self.channels = max(self.channels, 1 if pixels.ndim == 2 else 3)
        if self.count * self.channels * math.prod(size) > _TOTAL_BYTES:
            raise DataError(f"{shown} makes more than {_TOTAL_BYTES / 2**30:.2g} GiB of pixels; use a smaller set")
        self.splits.setdefault(split, {})[label, file] = pixels

    def data(self, test: str) -> ImageData:
        """The splits train and ``test`` as arrays; the images are given up on the way."""
        classes = sorted({label for label, _ in self.splits["train"]})
        if strange := sorted({label for label, _ in self.splits[test]} - set(classes)):
            raise DataError(f"{self.source} has test images of class {strange[0]!r} but no training images of it")
        index = {label: number for number, label in enumerate(classes)}
        labels = [np.array([index[label] for label, _ in sorted(self.splits[split])]) for split in ("train", test)]
        images = [self._array(self.splits[split]) for split in ("train", test)]
        return ImageData.from_arrays(self.source, images[0], labels[0], images[1], labels[1], classes)

    def _array(self, split: dict[tuple[str, str], np.ndarray]) -> UInt8[np.ndarray, "samples channels height width"]:
        array = np.empty((len(split), self.channels, *self.size), dtype=np.uint8)
        for row, key in enumerate(sorted(split)):
            array[row] = np.moveaxis(np.atleast_3d(split.pop(key)), 2, 0)  # grey among colour is repeated
        return array


def _members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """(name, size, read) of every regular file; links, devices and hidden files are passed over.

    Read a file before going on to the next one.
    """
    if path.is_dir():
        return ((file.relative_to(path).as_posix(), file.stat().st_size, file.read_bytes) for file in _files(path))
    return _zip_members(path) if path.name.lower().endswith(".zip") else _tar_members(path)


def _files(folder: Path, depth: int = 4) -> Iterator[Path]:
    # As deep as the layout goes: folders may be links, and no circle or whole disk is walked.
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith("."):
            yield from _files(entry, depth - 1) if depth > 1 else ()
        elif entry.is_file() or (_is_image(entry.name) and not entry.exists()):
            yield entry  # reading a broken link fails, as it must: images do not go missing silently


def _zip_members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.is_dir() and stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG):
                yield entry.filename, entry.file_size, partial(_unzip, archive, entry)


def _unzip(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    # Only these are unpacked no further than asked, whatever they hold.
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"{_shown(entry.filename)} is neither stored nor deflated")
    with archive.open(entry) as member:
        return member.read(entry.file_size)


def _tar_members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    with tarfile.open(path, "r:*", tarinfo=_TarHeader) as archive:
        for member in archive:
            if member.size < 0:
                raise tarfile.ReadError(f"{_shown(member.name)} has a negative size")
            if member.isreg() and (content := archive.extractfile(member)) is not None:
                yield member.name, member.size, content.read
        while archive.fileobj and archive.fileobj.read(2**20):  # the checksum of a compressed archive is at its end
            pass


class _TarHeader(tarfile.TarInfo):
    """A header that is whole and small. tarfile takes a damaged one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_TarHeader":
        if len(buf) != tarfile.BLOCKSIZE:
            raise tarfile.ReadError("it ends early")
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise tarfile.ReadError(str(error)) from None
            raise
        if header.size < 0 or (not header.isreg() and header.size > _HEADER_BYTES):
            raise tarfile.ReadError(f"it holds a header of {header.size} bytes")
        return header


def _bounded(name: str, size: int, read: Callable[[], bytes]) -> bytes:
    if size > _MEMBER_BYTES:
        raise DataError(f"{_shown(name)} has {size} bytes; more than {_MEMBER_BYTES // 2**20} MiB is not read")
    return read()


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _place(name: str) -> tuple[str, str, str, str] | None:
    """(root or "", split, class, file) of an image; None of another file or one that lies elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
    if hidden or len(parts) not in (3, 4) or not _is_image(parts[-1]):
        return None
    *root, split, label, file = parts
    split = split.lower()
    return ("".join(root), split, label, file) if split in ("train", *_TEST_SPLITS) else None


def _pixels(name: str, content: bytes) -> UInt8[np.ndarray, "height width *channels"]:
    """Grey images as (height, width), all others as (height, width, 3)."""
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if image.width * image.height > _PIXELS:
                raise DataError(f"{_shown(name)} has {image.width}×{image.height} pixels; so many are not read")
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{_shown(name)} has more than 8 bits a channel; convert it to 8 bits")
            return np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # decoders raise all sorts of errors
        raise DataError(f"{_shown(name)} is not an image that can be decoded ({_text(error)})") from None


def _array(name: str, value: Any) -> np.ndarray:
    """An array, of int64 if it holds labels of any integer type."""
    try:
        array = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is not an array ({_text(error)})") from None
    return array.astype(np.int64) if name.endswith("labels") and array.dtype.kind in "iu" else array


def _check_split(split: str, images: np.ndarray, labels: np.ndarray, classes: int) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.size == 0:
        wanted = "uint8 (samples, channels, height, width), not empty, was expected"
        raise DataError(f"{split} images have type {images.dtype} and shape {images.shape}; {wanted}")
    if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
        wanted = f"one integer for each of {len(images)} images was expected"
        raise DataError(f"{split} labels have type {labels.dtype} and shape {labels.shape}; {wanted}")
    if labels.min() < 0 or labels.max() >= classes:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"{split} labels hold {wrong}, with {classes} classes; labels count from 0 to {classes - 1}")


def _fingerprint(data: ImageData) -> str:
    digest = hashlib.sha256(json.dumps(list(data.classes)).encode())
    for name in _ARRAYS:
        array: np.ndarray = getattr(data, name)
        digest.update(f"{name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def _moments(histogram: Int64[np.ndarray, "256"]) -> tuple[float, float]:
    """Mean and standard deviation of byte values, with 255 as 1, from whole numbers: a constant has exactly 0."""
    counts = [int(count) for count in histogram]
    total = sum(counts)
    first = sum(value * count for value, count in enumerate(counts))
    second = sum(value**2 * count for value, count in enumerate(counts))
    return first / (total * 255), math.sqrt(total * second - first**2) / (total * 255)


def _shown(name: str) -> str:
    """A file's name for a message of one line, whatever characters it has."""
    return name if name.isprintable() else ascii(name)


def _text(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "no PNG, JPEG, BMP, PPM or WebP"
    return " ".join(str(error).split()) or type(error).__name__
