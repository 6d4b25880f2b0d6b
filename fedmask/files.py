"""Files that are whole or absent, and JSON that every parser accepts."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["cache_root", "sha256_of_file", "to_json", "write_atomic", "write_json"]


def cache_root() -> Path:
    """Where decoded data sets live: ``$FEDMASK_CACHE``, else fedmask in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if explicit := os.environ.get("FEDMASK_CACHE"):
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedmask"


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` so that ``path`` holds either its old bytes or all of the new ones.

    The bytes go to a temporary name in the same folder, are flushed to the disk, and renamed.

    Raises:
        OSError: if the folder is read-only or the disk is full; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # make the rename itself durable
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become null, NumPy scalars and arrays plain numbers and lists.

    Raises:
        TypeError: if ``value`` holds something that JSON has no form for.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` atomically as indented strict JSON in UTF-8."""
    write_atomic(path, (to_json(value, indent=2) + "\n").encode("utf-8"))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
