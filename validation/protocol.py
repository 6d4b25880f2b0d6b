"""A protocol: a named list of cells, each a run's configuration, kept as TOML beside this file."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmask.errors import FedmaskError
from fedmask.federated import RunConfig

__all__ = ["Cell", "Protocol", "load_protocol", "protocol_names"]

FOLDER = Path(__file__).parent / "protocols"


@dataclass(frozen=True)
class Cell:
    """One run of a protocol; ``slug`` names its directory."""

    name: str
    slug: str
    config: RunConfig


@dataclass(frozen=True)
class Protocol:
    """A protocol's cells, and the data set that they share."""

    name: str
    title: str
    data: str
    cells: tuple[Cell, ...]


def protocol_names() -> list[str]:
    """The protocols that come with the kit."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_protocol(name: str, *, device: str = "cpu", seed: int = 0) -> Protocol:
    """Read a protocol by name, or by the path of a TOML file of your own.

    Raises:
        FedmaskError: if there is none, or it has a field that no configuration knows.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.exists():
        raise FedmaskError(f"protocol {name!r} is unknown; use one of {', '.join(protocol_names())}, or a TOML file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        cells = [_cell(cell, content["defaults"], device, seed) for cell in content["cells"]]
        return Protocol(content["name"], content["title"], content["data"], tuple(cells))
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise FedmaskError(f"{path} is no protocol: {error}") from None


def _cell(fields: dict[str, Any], defaults: dict[str, Any], device: str, seed: int) -> Cell:
    settings = {**defaults, "device": device, "seed": seed, **fields}
    name = settings.pop("name")
    config = RunConfig.from_json(settings)
    steps = f"t{config.local_epochs}" if config.local_steps is None else f"steps{config.local_steps}"
    return Cell(name, f"b{config.batch_size}-{steps}-alpha{config.alpha:g}-seed{seed}", config)
