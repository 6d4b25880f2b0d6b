"""What masking and statistics cost on the server, as ratios to one pure read of the updates in the same run.

Ten clients of ResNet-18 (torchvision stem): 62 tensors, 11,181,642 parameters, fp32, 447 MB. Nothing here
passes or fails by time; correctness is in tests/.
"""

import statistics

import pytest
import torch

from fedmask import Blocks, StreamingAggregator, cohort_masks, gram_matrices, masked_mean
from fedmask.federated import resnet18

CLIENTS = 10


@pytest.fixture(scope="module")
def cohort():
    blocks = Blocks.of(resnet18(stem="torchvision"))
    updates = torch.randn(CLIENTS, blocks.parameters, generator=torch.Generator().manual_seed(0))
    masks = cohort_masks(seed=0, round_=1, clients=range(CLIENTS), blocks=blocks.count, p=0.5)
    return blocks, updates, masks


def stream(blocks, updates):
    aggregator = StreamingAggregator(blocks)
    for update in updates:
        aggregator.add(update)
    return aggregator.result()


def stacked(blocks, updates, masks):
    """What a first implementation does: a masked, scaled copy of everything, then a sum."""
    kept = torch.from_numpy(masks)[
        :, torch.repeat_interleave(torch.arange(blocks.count), torch.from_numpy(blocks.sizes))
    ]
    return (updates * kept / 0.5 / len(updates)).sum(dim=0)


WORK = {
    "pure read": lambda blocks, updates, masks: updates.sum(),
    "plain mean (weights @ updates)": lambda blocks, updates, masks: torch.full((CLIENTS,), 0.1) @ updates,
    "masked mean, skipping dropped blocks": lambda blocks, updates, masks: masked_mean(
        updates, blocks, masks=masks, p=0.5, statistics="none"
    ),
    "Gram matrices": lambda blocks, updates, masks: gram_matrices(updates, blocks),
    "masked mean and Gram matrices": lambda blocks, updates, masks: masked_mean(updates, blocks, masks=masks, p=0.5),
    "streaming mean and sums": lambda blocks, updates, masks: stream(blocks, updates),
    "stacked copies (mean alone)": stacked,
}


@pytest.mark.parametrize("name", WORK)
def test_hot_path(benchmark, cohort, name):
    benchmark.pedantic(WORK[name], args=cohort, rounds=5, warmup_rounds=1)
    MEDIANS[name] = statistics.median(benchmark.stats.stats.data)


MEDIANS: dict[str, float] = {}


@pytest.fixture(scope="module", autouse=True)
def _ratios(request):
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\n{'hot path, 10 × 11.2 M fp32':40} {'ms':>8} {'× pure read':>12}")
        for name, seconds in MEDIANS.items():
            print(f"{name:40} {1e3 * seconds:8.1f} {seconds / MEDIANS['pure read']:12.2f}")
