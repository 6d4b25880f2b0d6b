"""The curvature of a run's network: factors in three norms, and the excess loss beside the penalties."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedmask import FedmaskError, recovery_factor
from fedmask.curvature import Objective, curvature_gram, independent_penalty, shared_penalty
from fedmask.federated import RunConfig, load_data, simulate
from fedmask.federated.training import initial_model
from fedmask.randomness import Purpose, permutation
from validation import __main__ as main
from validation.attribution import load_measurements, open_state
from validation.curvature import _train_cohort, measure_curvature
from validation.tables import curvature_row, measured_markdown

CONFIG = RunConfig(clients=20, cohort=4, rounds=2, model="cnn", groups=8, batch_size=32, seed=11, checkpoint_every=1)
SCALES = (1.0, 0.25)


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    run = tmp_path_factory.mktemp("curvature") / "run"
    simulate(CONFIG, data=load_data("digits"), out=run, workers=1)
    return run, open_state(run, 1, load_data("digits"))


@pytest.fixture(scope="module")
def found(state):
    return measure_curvature(state[1], images=300, draws=6, pairs=24, scales=SCALES)


def test_random_signs_agree_with_products_block_by_block_at_the_mean_updates_end_point(state, found):
    state = state[1]
    updates, counts = _train_cohort(state, None)
    a = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    inputs, labels = state.trainer.samples(permutation(CONFIG.seed, Purpose.POOLED_SHARDS, 1437, draw=2)[:300])
    for name in ("hessian", "ggn"):
        gram = curvature_gram(
            Objective(initial_model(CONFIG, state.data), inputs, labels),
            updates,
            state.trainer.blocks,
            curvature=name,
            at=state.weights - (a @ updates.double()).float(),
            counts=counts,
        )
        penalties = found["penalties"][name]
        for sharing, key, exact in (
            ("independent", "independent_interval", independent_penalty(gram, 0.5)),
            ("synchronized", "shared_interval", shared_penalty(gram, 0.5)),
        ):
            low, high = found["norms"][name][key]
            assert abs(penalties[sharing] - exact) <= high - low <= exact
        assert found["norms"][name]["factor"] == pytest.approx(float(recovery_factor(gram, weighted=True)), rel=0.1)


def test_for_small_updates_masks_cost_what_the_expansion_says(found):
    for point in found["excess"]:
        if point["scale"] == SCALES[-1]:
            low, high = point["interval"]
            expected = point["scale"] ** 2 * found["penalties"]["hessian"][point["sharing"]]
            assert abs(point["excess"] - expected) <= high - low, point
            assert low > 0


def test_a_shared_mask_costs_the_recovery_factor_more_than_independent_ones(found):
    by_sharing = {p["sharing"]: p["excess"] for p in found["excess"] if p["scale"] == SCALES[-1]}
    ratio = by_sharing["synchronized"] / by_sharing["independent"]
    assert ratio == pytest.approx(found["norms"]["hessian"]["factor"], rel=0.5)
    assert found["penalties"]["hessian"]["synchronized"] / found["penalties"]["hessian"]["independent"] == (
        pytest.approx(found["norms"]["hessian"]["factor"])
    )


def test_shares_are_of_the_whole_penalty(found):
    for norm in found["norms"].values():
        assert np.sum(norm["block_shares"]) == pytest.approx(1)
        assert len(norm["block_factors"]) == len(found["blocks"])


def test_the_command_prints_tables_and_keeps_strict_json(state, tmp_path):
    options = [
        "--rounds",
        "0,1",
        "--images",
        "50",
        "--draws",
        "2",
        "--pairs",
        "2",
        "--to",
        str(tmp_path / "attribution"),
    ]
    done = CliRunner().invoke(main.app, ["curvature", str(state[0]), *options])
    assert done.exit_code == 0, done.output
    assert "Gauss-Newton" in done.output
    assert "synchronized" in done.output
    measured = load_measurements([tmp_path], "curvature")
    assert [one["after_round"] for one in measured] == [0, 1]
    rows = [curvature_row(one) for one in measured]
    assert measured_markdown([], [], measured).count("\n| b32-t1-alpha100-seed11 |") == len(rows) == 2


@pytest.mark.parametrize(
    ("fields", "message"), [({"images": 0}, "images is 0"), ({"pairs": 1}, "pairs is 1"), ({"draws": 1}, "draws is 1")]
)
def test_what_cannot_be_measured_is_refused(state, fields, message):
    with pytest.raises(FedmaskError, match=message):
        measure_curvature(state[1], **fields)
