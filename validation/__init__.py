"""The paper's experiment, rerun with the masking code of :mod:`fedmask` and laid beside its tables."""
