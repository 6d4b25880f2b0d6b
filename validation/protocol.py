"""A protocol: a named list of cells, each a run's configuration, kept as TOML beside this file."""

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmask.errors import FedmaskError
from fedmask.federated import RunConfig

__all__ = ["Cell", "Protocol", "load_protocol", "protocol_names"]

FOLDER = Path(__file__).parent / "protocols"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: one configuration, run once for each seed."""

    name: str
    config: RunConfig

    @property
    def id(self) -> str:
        """Batch size, local training and α: the cell's name on the command line and in file names."""
        config = self.config
        local = f"t{config.local_epochs}" if config.local_steps is None else f"steps{config.local_steps}"
        return f"b{config.batch_size}-{local}-alpha{config.alpha:g}"

    @property
    def slug(self) -> str:
        """The cell's id with its seed: the name of its run's directory."""
        return f"{self.id}-seed{self.config.seed}"


@dataclass(frozen=True)
class Protocol:
    """A protocol's cells for each of its seeds, and the data set that they share."""

    name: str
    title: str
    data: str
    cells: tuple[Cell, ...]


def protocol_names() -> list[str]:
    """The protocols that come with the kit."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_protocol(
    name: str, *, device: str = "cpu", seeds: Sequence[int] | None = None, cells: Sequence[str] | None = None
) -> Protocol:
    """Read a protocol by name, or by the path of a TOML file of your own.

    Args:
        name: of a protocol, or a path that ends in .toml.
        device: "cpu" or "cuda".
        seeds: instead of the protocol's own.
        cells: only these, by id.

    Raises:
        FedmaskError: if there is none, it has a field that no configuration knows, or a cell is unknown.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.exists():
        raise FedmaskError(f"protocol {name!r} is unknown; use one of {', '.join(protocol_names())}, or a TOML file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        found = [_cell(cell, content["defaults"], device) for cell in content["cells"]]
        own_seeds = [int(seed) for seed in content.get("seeds", [0])]
        if not own_seeds or not found:
            raise ValueError("it has no seeds or no cells")
        protocol = Protocol(content["name"], content["title"], content["data"], ())
    except (KeyError, TypeError, ValueError) as error:
        raise FedmaskError(f"{path} is no protocol: {error}") from None
    known = [cell.id for cell in found]
    if twice := [cell for cell in known if known.count(cell) > 1]:
        raise FedmaskError(f"{path} is no protocol: two of its cells are {twice[0]}")
    if unknown := [cell for cell in cells or () if cell not in known]:
        raise FedmaskError(f"cell {unknown[0]!r} is unknown; the cells of {protocol.name} are {', '.join(known)}")
    chosen = [
        Cell(cell.name, dataclasses.replace(cell.config, seed=seed))
        for seed in (own_seeds if seeds is None else seeds)
        for cell in found
        if cells is None or cell.id in cells
    ]
    return dataclasses.replace(protocol, cells=tuple(chosen))


def _cell(fields: dict[str, Any], defaults: dict[str, Any], device: str) -> Cell:
    settings = {**defaults, "device": device, **fields}
    name = settings.pop("name")
    return Cell(name, RunConfig.from_json(settings))
