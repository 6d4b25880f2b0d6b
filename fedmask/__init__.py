"""fedmask: how much of an update-masking regularizer survives federated averaging.

The library in three lines, given client updates Δ_k = θ − θ_k as rows of one tensor::

    from fedmask import Blocks, gram_matrices, recovery_factor
    gram = gram_matrices(updates, Blocks.of(model), counts=sample_counts)
    recovery_factor(gram).value, recovery_factor(gram, weighted=True).value
"""

from fedmask.aggregate import Aggregate, StreamingAggregator, masked_mean
from fedmask.blocks import Blocks, Granularity
from fedmask.curvature import (
    CurvatureGram,
    Objective,
    curvature_gram,
    independent_penalty,
    interval_over_draws,
    penalty,
    shared_penalty,
)
from fedmask.errors import BlockError, DataError, FedmaskError, NonFiniteUpdateError, RunDirectoryError
from fedmask.gram import CohortSums, GramMatrices, gram_matrices
from fedmask.masks import (
    Correlated,
    Groups,
    Independent,
    Sharing,
    Synchronized,
    bernoulli_mask,
    cohort_masks,
    fixed_size_mask,
)
from fedmask.statistics import (
    Interval,
    Statistic,
    correlation_for_recovery,
    cosines,
    effective_cohort_size,
    fedexp_step,
    gradient_diversity,
    noise,
    noise_interval,
    noise_scale,
    recovery_factor,
    recovery_factor_interval,
    recovery_factor_per_block,
    signal,
    signal_interval,
)

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "BlockError",
    "Blocks",
    "CohortSums",
    "Correlated",
    "CurvatureGram",
    "DataError",
    "FedmaskError",
    "GramMatrices",
    "Granularity",
    "Groups",
    "Independent",
    "Interval",
    "NonFiniteUpdateError",
    "Objective",
    "RunDirectoryError",
    "Sharing",
    "Statistic",
    "StreamingAggregator",
    "Synchronized",
    "bernoulli_mask",
    "cohort_masks",
    "correlation_for_recovery",
    "cosines",
    "curvature_gram",
    "effective_cohort_size",
    "fedexp_step",
    "fixed_size_mask",
    "gradient_diversity",
    "gram_matrices",
    "independent_penalty",
    "interval_over_draws",
    "masked_mean",
    "noise",
    "noise_interval",
    "noise_scale",
    "penalty",
    "recovery_factor",
    "recovery_factor_interval",
    "recovery_factor_per_block",
    "shared_penalty",
    "signal",
    "signal_interval",
]
