"""Named blocks of a model's parameters, and the one flat order in which everything else sees them.

A :class:`Blocks` is made from a reference model (or its named tensors). It fixes the order of parameters in
a flat vector and cuts that vector into contiguous, named blocks at one granularity. A block's id is its
index here. Everyone who holds the same reference model has the same blocks.

Tensors are matched by canonical name, never by order: the wrappers of ``torch.compile``, activation
checkpointing, FSDP and (Distributed)DataParallel are looked through. Tied parameters stand once, under the
first of their names. Buffers are not parameters: they have no block, no mask and no place in a statistic;
:func:`average_buffers` says what becomes of them.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from fedmask.errors import BlockError

__all__ = ["Blocks", "Granularity", "Piece", "average_buffers", "canonical_name", "named_parameters"]

Granularity: TypeAlias = Literal["element", "row", "tensor", "layer", "model"]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class Piece:
    """One parameter tensor's place in the flat vector: columns start … start + rows·width.

    It is cut into ``rows`` equal runs of ``width`` columns; run i belongs to block ``first_block + i`` (a
    tensor of one run may share its block with its neighbours, at granularity layer and model).
    """

    start: int
    rows: int
    width: int
    first_block: int

    @property
    def stop(self) -> int:
        """End of the tensor in the flat vector."""
        return self.start + self.rows * self.width


@dataclass(frozen=True)
class Blocks:
    """The parameters of a reference model in a fixed order, cut into named contiguous blocks.

    Attributes:
        names: canonical names of the parameter tensors, in flat order.
        shapes: their shapes.
        granularity: element, row (index along a tensor's first axis), tensor (the paper's), layer (the
            parameters of one module), or model (one block).
        aliases: for tied parameters, further name → the name that stands for it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    granularity: Granularity = "tensor"
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.granularity not in get_args(Granularity):
            raise BlockError(
                f"granularity {self.granularity!r} is unknown; use one of {', '.join(get_args(Granularity))}"
            )
        if not self.names:
            raise BlockError("the reference model has no parameters, so there is nothing to cut into blocks")
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise BlockError(f"two tensors have the canonical name {twice!r}; give each its own name")

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Tensor], granularity: Granularity = "tensor") -> "Blocks":
        """The blocks of a module's parameters, or of named tensors (all of them parameters).

        Raises:
            BlockError: if there are no parameters, two of them have one canonical name, or one is not of a
                floating type.
        """
        if isinstance(model, nn.Module):
            everything = named_parameters(model)
        else:
            everything = [(canonical_name(name), tensor) for name, tensor in model.items()]
        for name, tensor in everything:
            if not tensor.is_floating_point():
                raise BlockError(f"parameter {name!r} is of type {tensor.dtype}; only floating types are masked")
        name_of = {_identity(tensor): name for name, tensor in reversed(everything)}
        pairs = [(name, tensor) for name, tensor in everything if name_of[_identity(tensor)] == name]
        kept = {name for name, _ in pairs}
        aliases = {name: name_of[_identity(tensor)] for name, tensor in everything if name not in kept}
        # A layer is one block, so its tensors stand together even where the mapping scatters them.
        layers = {layer: place for place, layer in reversed(list(enumerate(_layer(name) for name, _ in pairs)))}
        pairs.sort(key=lambda pair: layers[_layer(pair[0])])
        return cls(
            names=tuple(name for name, _ in pairs),
            shapes=tuple(tuple(tensor.shape) for _, tensor in pairs),
            granularity=granularity,
            aliases=aliases,
        )

    def at(self, granularity: Granularity) -> "Blocks":
        """The same parameters in the same flat order, cut at another granularity."""
        return Blocks(self.names, self.shapes, granularity, self.aliases)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """One :class:`Piece` a tensor, in flat order."""
        pieces: list[Piece] = []
        start, block, previous_layer = 0, 0, None
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = int(np.prod(shape, dtype=np.int64))
            rows = self._rows(shape, size)
            joined = self.granularity == "model" or (self.granularity == "layer" and _layer(name) == previous_layer)
            if joined and pieces:
                block = pieces[-1].first_block
            pieces.append(Piece(start, rows, size // rows if rows else 0, block))
            start, block, previous_layer = start + size, block + rows, _layer(name)
        return tuple(pieces)

    @property
    def parameters(self) -> int:
        """d, the length of the flat vector."""
        return self.pieces[-1].stop

    @property
    def count(self) -> int:
        """B, the number of blocks."""
        return max(piece.first_block + piece.rows for piece in self.pieces)

    @cached_property
    def sizes(self) -> Int64[np.ndarray, " blocks"]:
        """Parameters in each block."""
        sizes = np.zeros(self.count, dtype=np.int64)
        for piece in self.pieces:
            sizes[piece.first_block : piece.first_block + piece.rows] += piece.width
        return sizes

    @cached_property
    def block_names(self) -> tuple[str, ...]:
        """A name for each block: ``conv1.weight``, ``conv1.weight[3]``, ``conv1`` or ``model``."""
        if self.granularity == "model":
            return ("model",)
        if self.granularity == "layer":
            return tuple(dict.fromkeys(_layer(name) for name in self.names))
        return tuple(self.block_name(block) for block in range(self.count))

    def block_name(self, block: int) -> str:
        """The name of one block, without making all of them (at granularity element there are d)."""
        if self.granularity in ("model", "layer"):
            return self.block_names[block]
        if not 0 <= block < self.count:
            raise BlockError(f"block {block} is unknown; there are {self.count} blocks, counted from 0")
        place = bisect_right(self.pieces, block, key=lambda piece: piece.first_block) - 1
        name, shape, row = self.names[place], self.shapes[place], block - self.pieces[place].first_block
        if self.granularity == "tensor" or not shape:
            return name
        index = (row,) if self.granularity == "row" else np.unravel_index(row, shape)
        return f"{name}[{','.join(str(int(i)) for i in index)}]"

    def flatten(
        self, tensors: Mapping[str, Tensor], out: Float[Tensor, " parameters"] | None = None
    ) -> Float[Tensor, " parameters"]:
        """Copy named tensors into one flat vector, each to its place by name.

        Args:
            tensors: every parameter by (canonicalizable) name; tied names may come with equal values.
            out: where to write, for example a row of the cohort's (K_c, d) buffer; a new vector if None.

        Raises:
            BlockError: if a tensor is unknown, missing, mis-shaped, or tied but not equal; ``out`` is then
                unchanged.
        """
        named = self._matched(tensors)
        if out is None:
            first = named[self.names[0]]
            out = torch.empty(self.parameters, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for name, view in self.views(out).items():
                view.copy_(named[name])
        return out

    def views(self, flat: Float[Tensor, " parameters"]) -> dict[str, Tensor]:
        """The named tensors as views into a flat vector: nothing is copied.

        Raises:
            BlockError: if the vector has another length than the model has parameters.
        """
        if flat.shape != (self.parameters,):
            raise BlockError(
                f"a flat vector of shape {tuple(flat.shape)} was given; this model has {self.parameters} parameters"
            )
        return {
            name: flat[piece.start : piece.stop].view(shape)
            for name, shape, piece in zip(self.names, self.shapes, self.pieces, strict=True)
        }

    def bind(self, model: nn.Module, flat: Float[Tensor, " parameters"]) -> None:
        """Make a module's parameters views into ``flat``: writing one writes the other.

        The values are those of ``flat``; the module's former values are let go.

        Raises:
            BlockError: if the module's parameters are not those of the reference model.
        """
        parameters = dict(named_parameters(model))
        self._matched(parameters)
        for name, view in self.views(flat).items():
            parameters[name].data = view

    def _matched(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {canonical_name(name): tensor for name, tensor in tensors.items()}
        if len(named) != len(tensors):
            raise BlockError("two of the tensors given have one canonical name; give each tensor once")
        if all(name.startswith("module.") for name in named) and not self.names[0].startswith("module."):
            named = {name.removeprefix("module."): tensor for name, tensor in named.items()}
        for alias, name in self.aliases.items():
            twin = named.pop(alias, None)
            if twin is not None and name in named and not torch.equal(twin, named[name]):
                raise BlockError(f"{alias!r} and {name!r} are tied in the reference model but differ here")
            if twin is not None:
                named.setdefault(name, twin)
        if missing := [name for name in self.names if name not in named]:
            raise BlockError(f"tensor {missing[0]!r} is missing ({_more(missing)}); every parameter is needed")
        if unknown := sorted(named.keys() - set(self.names)):
            raise BlockError(
                f"tensor {unknown[0]!r} is unknown to the reference model ({_more(unknown)}); "
                "leave out buffers and whatever is not a parameter"
            )
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(named[name].shape) != shape:
                raise BlockError(
                    f"tensor {name!r} has shape {tuple(named[name].shape)}; the reference model's is {shape}"
                )
        return named

    def _rows(self, shape: tuple[int, ...], size: int) -> int:
        if self.granularity == "element":
            return size
        if self.granularity == "row":
            return shape[0] if shape else 1
        return 1


def canonical_name(name: str) -> str:
    """A parameter's name without the parts that wrappers put in (``_orig_mod`` and the like)."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def average_buffers(cohort: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The server's buffers after a round, from those of the clients.

    Policy: a floating buffer (a running mean or variance) becomes the weighted mean, computed in float64
    and returned in its own type; any other (a counter of batches, a boolean) becomes the elementwise
    maximum, so integers stay integers. Masks never touch buffers.

    Args:
        cohort: each client's buffers by name.
        weights: the clients' weights a_k, which sum to one.

    Raises:
        BlockError: if clients differ in their buffers' names or shapes.
    """
    merged: dict[str, Tensor] = {}
    for name in cohort[0] if cohort else ():
        values = [buffers.get(name) for buffers in cohort]
        present = [value for value in values if value is not None and value.shape == cohort[0][name].shape]
        if len(present) != len(cohort) or any(buffers.keys() != cohort[0].keys() for buffers in cohort):
            raise BlockError(f"buffer {name!r} is missing or has another shape at some client of the cohort")
        stacked = torch.stack(present)
        if stacked.is_floating_point():
            a = torch.tensor(weights, dtype=torch.float64, device=stacked.device)
            merged[name] = torch.tensordot(a, stacked.double(), dims=1).to(stacked.dtype)
        else:
            merged[name] = stacked.amax(dim=0)
    return merged


def named_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Canonical names and parameters, a tied one under each of its names."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    named = model.named_parameters(remove_duplicate=False)
    return [(canonical_name(name), parameter) for name, parameter in named]


def _identity(tensor: Tensor) -> object:
    # A state dict holds tied parameters as different tensor objects over the same memory.
    if isinstance(tensor, nn.Parameter) or tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or "(root)"


def _more(names: Sequence[str]) -> str:
    return "only that one" if len(names) == 1 else f"and {len(names) - 1} more"
