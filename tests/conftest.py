"""Shared by all tests: replayable randomness, the slow marker, and CUDA only where there is a device."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fedmask", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("fedmask")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too, as continuous integration does")
    parser.addoption("--fedmask-seed", type=int, default=None, help="replay the seed that a report printed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fedmask-seed") is None:
        # Workers of pytest-xdist inherit the environment, so that all of a run share one seed.
        seed = os.environ.setdefault("FEDMASK_TEST_SEED", str(random.SystemRandom().randrange(2**32)))
        config.option.fedmask_seed = int(seed)


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("--fedmask-seed")
    return f"fedmask: random seed {seed}; replay with --fedmask-seed {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True)
def _one_thread_and_own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    if "FEDMASK_CACHE" not in os.environ:
        monkeypatch.setenv("FEDMASK_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh randomness for statistical tests; the seed is in the report's header."""
    return np.random.default_rng(request.config.getoption("--fedmask-seed"))
