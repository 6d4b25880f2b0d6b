"""Image data sets: CIFAR-10 through torchvision, any folder or archive of images, and embedded digits.

Whatever the source, the outcome is one :class:`ImageData` of uint8 arrays, known by the SHA-256 of its
decoded contents. Folders and archives are decoded once into a cache outside the repository. Archives are
read in memory: nothing of them is ever written to the disk under a name of theirs.
"""

import hashlib
import io
import json
import lzma
import os
import shutil
import socket
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image
from rich.console import Console
from rich.progress import track

from fedmask.errors import DataError
from fedmask.files import cache_root, sha256_of_file, write_json

__all__ = ["ImageData", "load_data"]

_CACHE_LAYOUT = 1
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"})
_SPLITS = frozenset({"train", "test", "val", "valid", "validation"})
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".zip")
_MEMBER_BYTES, _PIXELS, _TOTAL_BYTES = 32 * 2**20, 16 * 10**6, 8 * 2**30
_DOWNLOAD_TIMEOUT = 20.0
_LAYOUT = "<split>/<class>/<image>, with the splits train and test"
_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class ImageData:
    """A data set of images of one size, in memory or mapped from the cache.

    Attributes:
        name: of the source, never a path.
        train_images, test_images: uint8, (samples, channels, height, width).
        train_labels, test_labels: int64 class indices.
        classes: their names.
        fingerprint: SHA-256 of all of the above but the name.
    """

    name: str
    train_images: UInt8[np.ndarray, "..."]
    train_labels: Int64[np.ndarray, "..."]
    test_images: UInt8[np.ndarray, "..."]
    test_labels: Int64[np.ndarray, "..."]
    classes: tuple[str, ...]
    fingerprint: str

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

        Raises:
            DataError: if types, shapes, counts or labels do not fit together.
        """
        arrays = {
            "train_images": np.ascontiguousarray(train_images),
            "train_labels": np.ascontiguousarray(train_labels),
            "test_images": np.ascontiguousarray(test_images),
            "test_labels": np.ascontiguousarray(test_labels),
        }
        for split in ("train", "test"):
            _check_split(split, arrays[f"{split}_images"], arrays[f"{split}_labels"])
            arrays[f"{split}_labels"] = arrays[f"{split}_labels"].astype(np.int64)
        shapes = [arrays[f"{split}_images"].shape[1:] for split in ("train", "test")]
        if shapes[0] != shapes[1]:
            raise DataError(f"train images are {shapes[0]} and test images {shapes[1]}; all must have one shape")
        highest = max(int(arrays["train_labels"].max()), int(arrays["test_labels"].max()))
        names = tuple(str(label) for label in range(highest + 1)) if classes is None else tuple(classes)
        if highest >= len(names):
            raise DataError(f"label {highest} was given with {len(names)} classes; labels count from 0")
        return cls(name=name, classes=names, fingerprint=_fingerprint(arrays, names), **arrays)

    @cached_property
    def channel_mean(self) -> Float64[np.ndarray, " channels"]:
        """Mean of each channel over the training images, with white as 1."""
        return np.asarray(self._histograms @ np.arange(256) / self._histograms.sum(axis=1) / 255)

    @cached_property
    def channel_std(self) -> Float64[np.ndarray, " channels"]:
        """Standard deviation of each channel over the training images; 1 for a constant channel."""
        squares = self._histograms @ np.arange(256) ** 2 / self._histograms.sum(axis=1) / 255**2
        variance = np.maximum(squares - self.channel_mean**2, 0)
        varied = np.count_nonzero(self._histograms, axis=1) > 1
        return np.where(varied, np.sqrt(variance), 1.0)

    @cached_property
    def _histograms(self) -> Int64[np.ndarray, "channels 256"]:
        # Whole numbers, so that means do not depend on the order of summation.
        channels = range(self.train_images.shape[1])
        return np.stack([np.bincount(self.train_images[:, c].ravel(), minlength=256) for c in channels])


def load_data(source: str | Path, *, data_dir: Path | None = None, progress: bool = False) -> ImageData:
    """Load a data set.

    Args:
        source: "digits" (scikit-learn's, 8×8 grey, every fifth image for testing), "cifar10" (through
            torchvision), or the path of a folder or archive in the layout <split>/<class>/<image>.
        data_dir: for cifar10, where its archive is or goes; the cache if None.
        progress: show a bar on standard error while images are decoded.

    Raises:
        DataError: if the source is missing, unreadable or not in that layout.
    """
    if source == "digits":
        return _digits()
    if source == "cifar10":
        return _cifar10(data_dir or cache_root() / "cifar10")
    path = Path(source)
    if path.is_dir() or (path.is_file() and path.name.lower().endswith(_ARCHIVES)):
        return _cached(path, progress)
    if path.is_file():
        raise DataError(f"{path} is not an archive that can be read; use one of {', '.join(_ARCHIVES)}")
    raise DataError(f"data {str(source)!r} does not exist; use digits, cifar10, or a folder or archive of {_LAYOUT}")


def _digits() -> ImageData:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    test = np.arange(len(images)) % 5 == 4
    labels = digits.target.astype(np.int64)
    return ImageData.from_arrays("digits", images[~test], labels[~test], images[test], labels[test])


def _cifar10(root: Path) -> ImageData:
    from torchvision.datasets import CIFAR10

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT)
    try:
        # torchvision unpickles a batch only after its checksum and the archive's have passed.
        train, test = (CIFAR10(root, train=split, download=True) for split in (True, False))
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"CIFAR-10 is not in {root} and could not be downloaded ({str(error) or type(error).__name__}); "
            "put cifar-10-python.tar.gz into a folder and name it with --data-dir, "
            f"or give --data a folder or archive of {_LAYOUT}"
        ) from None
    finally:
        socket.setdefaulttimeout(before)
    arrays = [np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)) for part in (train, test)]
    return ImageData.from_arrays("cifar10", arrays[0], train.targets, arrays[1], test.targets, train.classes)


def _cached(path: Path, progress: bool) -> ImageData:
    """The folder or archive from the cache, decoding it into there if it is not there whole."""
    folder = cache_root() / "datasets" / _cache_key(path)
    try:
        return _read_cache(folder, path.name)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    data = _decode(path, progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".decoding-", dir=folder.parent))
    try:
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(data, name), allow_pickle=False)
        write_json(temporary / "meta.json", {"classes": data.classes, "fingerprint": data.fingerprint})
        try:
            os.rename(temporary, folder)
        except OSError:  # there is one: of another process, or damaged
            try:
                return _read_cache(folder, path.name)
            except (OSError, ValueError, KeyError, TypeError):
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _read_cache(folder, path.name)


def _read_cache(folder: Path, name: str) -> ImageData:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    arrays = {key: np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False) for key in _ARRAYS}
    if _fingerprint(arrays, meta["classes"]) != meta["fingerprint"]:
        raise ValueError("the cache is damaged")
    return ImageData(name=name, classes=tuple(meta["classes"]), fingerprint=meta["fingerprint"], **arrays)


def _cache_key(path: Path) -> str:
    if path.is_file():
        return f"{_CACHE_LAYOUT}-{sha256_of_file(path)}"
    listing = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            status = file.stat()
            listing.update(f"{file.relative_to(path).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return f"{_CACHE_LAYOUT}-folder-{listing.hexdigest()}"


def _decode(path: Path, progress: bool) -> ImageData:
    """Read and decode every image of the layout, train and test, sorted by class and file name."""
    splits: dict[str, dict[tuple[str, str], np.ndarray]] = {}
    found: list[str] = []
    total, size = 0, None
    bar = track(_members(path), description=f"decoding {path.name}", disable=not progress, console=Console(stderr=True))
    for name, content in bar:
        place = _place(name)
        if place is None:
            found.append(name)
            continue
        split, label, file = place
        pixels = _pixels(name, content)
        total += pixels.nbytes
        if total > _TOTAL_BYTES:
            raise DataError(f"{path.name} holds more than {_TOTAL_BYTES // 2**30} GiB of pixels; use a smaller set")
        size = size or pixels.shape[:2]
        if pixels.shape[:2] != size:
            raise DataError(f"{name} in {path.name} is {pixels.shape[:2]}, others are {size}; all must have one size")
        splits.setdefault(split, {})[label, file] = pixels
    test = next((split for split in ("test", "val", "valid", "validation") if split in splits), None)
    if "train" in splits and test is not None:
        return _stacked(path.name, splits["train"], splits[test])
    seen = [f"{split}/…" for split in splits] or found[:3] or ["no image"]
    raise DataError(f"{path.name} is not laid out as {_LAYOUT}; found {', '.join(seen)}")


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every image file, in whatever order; links, devices and hidden files are passed over."""
    try:
        if path.is_dir():
            for file in path.rglob("*"):
                if file.is_file() and _is_image(name := file.relative_to(path).as_posix()):
                    yield name, _bounded(name, file.stat().st_size, file.read_bytes)
        elif path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    if not entry.is_dir() and _is_image(entry.filename):
                        yield entry.filename, _bounded(entry.filename, entry.file_size, partial(archive.read, entry))
        else:
            if path.suffix.lower() == ".tar" and not _ends_as_tar(path):
                raise DataError(f"{path.name} cannot be read as an archive (its end is missing); is it whole?")
            with tarfile.open(path, "r|*") as stream:
                for member in stream:
                    file_object = stream.extractfile(member) if member.isreg() and _is_image(member.name) else None
                    if file_object is not None:
                        yield member.name, _bounded(member.name, member.size, file_object.read)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, lzma.LZMAError, zlib.error, RuntimeError) as error:
        raise DataError(f"{path.name} cannot be read as an archive ({error}); is it whole?") from None


def _ends_as_tar(path: Path) -> bool:
    # Compressed archives know their end; a plain one cut between two members looks whole but for this.
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1024))
        return file.read() == bytes(1024)


def _bounded(name: str, size: int, read: Callable[[], bytes]) -> bytes:
    if size > _MEMBER_BYTES:
        raise DataError(f"{name} has {size} bytes; an image of more than {_MEMBER_BYTES // 2**20} MiB is not read")
    return read()


def _is_image(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return PurePosixPath(name).suffix.lower() in _SUFFIXES and not any(
        part.startswith(".") or part == "__MACOSX" for part in parts if part != "."
    )


def _place(name: str) -> tuple[str, str, str] | None:
    """(split, class, file) of a member, which may lie below one common root folder."""
    parts = [part for part in PurePosixPath(name).parts if part != "."]
    if len(parts) == 4:
        parts = parts[1:]
    return (parts[0].lower(), parts[1], parts[2]) if len(parts) == 3 and parts[0].lower() in _SPLITS else None


def _pixels(name: str, content: bytes) -> UInt8[np.ndarray, "height width *channels"]:
    """Grey images as (height, width), all others as (height, width, 3)."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > _PIXELS:
                raise DataError(f"{name} has {image.width}×{image.height} pixels; more than {_PIXELS:.0e} are not read")
            return np.asarray(image if image.mode == "L" else image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} is not an image that can be decoded ({error})") from None


def _stacked(name: str, train: dict[tuple[str, str], np.ndarray], test: dict[tuple[str, str], np.ndarray]) -> ImageData:
    classes = sorted({label for label, _ in train})
    if strange := sorted({label for label, _ in test} - set(classes)):
        raise DataError(f"{name} has test images of class {strange[0]!r} but no training images of it")
    grey = all(image.ndim == 2 for split in (train, test) for image in split.values())

    def array(split: dict[tuple[str, str], np.ndarray]) -> np.ndarray:
        images = [split[key] for key in sorted(split)]
        if grey:
            return np.stack(images)[:, None]
        colour = [image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2) for image in images]
        return np.ascontiguousarray(np.stack(colour).transpose(0, 3, 1, 2))

    labels = [np.array([classes.index(label) for label, _ in sorted(split)]) for split in (train, test)]
    return ImageData.from_arrays(name, array(train), labels[0], array(test), labels[1], classes)


def _check_split(split: str, images: np.ndarray, labels: np.ndarray) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.size == 0:
        raise DataError(
            f"{split} images have type {images.dtype} and shape {images.shape}; "
            "uint8 (samples, channels, height, width), not empty, was expected"
        )
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{split} labels have type {labels.dtype} and shape {labels.shape}; "
            f"one integer for each of {len(images)} images was expected"
        )
    if labels.min() < 0:
        raise DataError(f"{split} labels hold {labels.min()}; labels count from 0")


def _fingerprint(arrays: Mapping[str, np.ndarray], classes: Sequence[str]) -> str:
    digest = hashlib.sha256(json.dumps(list(classes)).encode())
    for name in _ARRAYS:
        digest.update(f"{name} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
