"""Where a result comes from: versions, machine, commit and times. Nothing here changes a result."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["now", "provenance"]

_PACKAGES = ("fedmask", "numpy", "scipy", "torch", "torchvision", "pillow", "scikit-learn")


def provenance(device: str) -> dict[str, Any]:
    """Versions, commit of this package (None outside its checkout), machine, device and time as JSON values."""
    return {
        "started": now(),
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "device": _device(device),
    }


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"CPU {platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, marked if files differ from it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        run = [
            subprocess.run(["git", "-C", str(root), *call], capture_output=True, text=True, timeout=10, check=True)
            for call in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return run[0].stdout.strip() + (" with changes" if run[1].stdout.strip() else "")
