"""Hypothesis strategies for cohorts of updates."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedmask import Blocks

# Values whose products are exact enough to compare: no overflow, no underflow of their squares in float64.
VALUES = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)


@dataclass
class Cohort:
    blocks: Blocks
    updates: torch.Tensor
    counts: list[int]
    masks: np.ndarray
    p: float


@st.composite
def cohorts(draw: st.DrawFn, granularities: tuple[str, ...] = ("element", "row", "tensor", "layer", "model")) -> Cohort:
    """One to five clients of a model of one to four tensors, with masks that fit its blocks."""
    layers = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
    shapes = {
        f"layer{i}.{j}": tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
        for i, tensors in enumerate(layers)
        for j in range(tensors)
    }
    blocks = Blocks.of(
        {name: torch.zeros(shape) for name, shape in shapes.items()}, draw(st.sampled_from(granularities))
    )
    clients = draw(st.integers(1, 5))
    updates = torch.from_numpy(draw(hnp.arrays(np.float32, (clients, blocks.parameters), elements=VALUES)))
    counts = draw(st.lists(st.integers(0, 500), min_size=clients, max_size=clients).filter(any))
    masks = draw(hnp.arrays(np.bool_, (clients, blocks.count)))
    return Cohort(blocks, updates, counts, masks, draw(st.sampled_from([1.0, 0.5, 0.3, 0.125])))
