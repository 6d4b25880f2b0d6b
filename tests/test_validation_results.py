"""Records, comparison, report and attribution, on short real runs and on records made for the purpose."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmask import FedmaskError, gram_matrices
from fedmask.federated import RunConfig, load_data
from fedmask.files import to_json
from validation.attribution import (
    OWN_LAW,
    PARTS,
    TRAININGS,
    attribute,
    batch_sizes,
    data_of,
    load_measurements,
    noise_parts,
    open_state,
    write_measurement,
)
from validation.compare import comparisons, paper_cells
from validation.curvature import measure_curvature
from validation.intervals import COVERAGE, block_bootstrap, wilson
from validation.protocol import load_protocol
from validation.records import Record, load_records, record_runs, unfinished
from validation.run import duration, image_passes, plan, run_protocol
from validation.tables import comparison_json, markdown
from validation.verdicts import verdicts

from .kill_harness import kill_and_resume, results

ROOT = Path(__file__).parents[1]
TINY = """
name = "tiny"
title = "Tiny"
data = "digits"
seeds = [0]

[defaults]
clients = 10
cohort = 5
rounds = {rounds}
model = "cnn"
groups = 8
evaluate_every = 2
checkpoint_every = 2

[[cells]]
name = "full"
batch_size = "full"
local_epochs = 1

[[cells]]
name = "batch 16"
batch_size = 16
local_epochs = 1
alpha = 0.5
"""


@pytest.fixture(scope="module")
def protocol_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("protocol") / "tiny.toml"
    path.write_text(TINY.format(rounds=8), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def runs(protocol_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    run_protocol(load_protocol(protocol_file), out, workers=1, quiet=True)
    return out


def validation(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "validation", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def papers_record(cell, values, *, rounds=40, **config):
    """A record of the paper's experiment whose every round has these values."""
    base = next(c.config for c in load_protocol("short").cells if c.id == cell)
    fields = {**base.to_json(), "rounds": rounds, **config}
    columns = {name: [1.0] * rounds for name in ("effective_cohort_size", "loss", "train_loss")}
    for name in ("recovery_factor", "recovery_factor_weighted", "signal", "noise"):
        columns[name] = [values[name]] * rounds
    columns["recovery_factor"][: round(values["share_below_one"] * rounds)] = [0.9] * round(
        values["share_below_one"] * rounds
    )
    columns["accuracy"] = [None] * (rounds - 1) + [values["accuracy"]]
    data = {
        "name": "made",
        "fingerprint": "0" * 64,
        "train_samples": 50_000,
        "test_samples": 10_000,
        "image_shape": [3, 32, 32],
        "classes": list("abcdefghij"),
    }
    provenance = {
        "started": "then",
        "commit": None,
        "versions": {"torch": "2"},
        "device": "CPU",
        "starts": 1,
        "commits": [None],
    }
    blocks = {
        "names": ["w", "b"],
        "rounds": [1, rounds],
        "clients": [10, 10],
        "mean_squared_norm": [[1.0, 2.0], [1.0, 0.0]],
        "squared_norm_of_mean": [[0.5, 0.2], [0.5, 0.0]],
    }
    return {
        "format": 1,
        "config": fields,
        "data": data,
        "partition": {},
        "model": {"parameters": 2},
        "provenance": provenance,
        "median_local_steps": 1,
        "rounds": columns,
        "blocks": blocks,
    }


@pytest.fixture
def papers(tmp_path):
    """The paper's own figures as if they were runs of 200 rounds."""
    for cell in paper_cells():
        record = papers_record(cell.id, cell.values, rounds=200)
        (tmp_path / f"{cell.id}-seed0.json").write_text(json.dumps(record), encoding="utf-8")
    return tmp_path


def test_the_papers_tables_are_twelve_cells_and_agree_where_they_overlap():
    cells = paper_cells()
    assert [cell.table for cell in cells] == [1] * 9 + [2] * 3
    assert len({cell.id for cell in cells}) == 11
    twice = [cell for cell in cells if cell.id == "b32-t2-alpha100"]
    assert twice[0].values == twice[1].values
    assert {cell.id for cell in cells} == {cell.id for cell in load_protocol("paper", seeds=[0]).cells}
    assert {cell.id for cell in cells} == {cell.id for cell in load_protocol("short").cells}


def test_the_papers_own_figures_reproduce_every_claim_of_the_paper(papers):
    (found,) = comparisons(load_records([papers]))
    assert [(v.claim, v.verdict) for v in verdicts(found.rows) if v.verdict != "reproduced"] == []
    assert all(row.ours["noise"].value == row.paper.values["noise"] for row in found.rows)


@pytest.mark.parametrize(
    ("cell", "changes", "claim"),
    [
        ("b128-t1-alpha100", {"recovery_factor": 3.0}, "A cliff lies"),
        ("b128-t2-alpha100", {"recovery_factor": 1.37}, "Within a batch size"),
        ("bfull-t5-alpha100", {"recovery_factor": 2.0}, "Five full-batch steps"),
        ("bfull-t5-alpha100", {"accuracy": 0.2}, "Five full-batch steps"),
        ("bfull-t2-alpha100", {"signal": 6e-6}, "Over Table I noise"),
        ("b32-t2-alpha0.1", {"recovery_factor": 12.0}, "Heterogeneity moves"),
        ("b32-t2-alpha1", {"recovery_factor_weighted": 1.1}, "Weighted and unweighted"),
        ("b32-t2-alpha0.1", {"recovery_factor_weighted": 1.5}, "Weighted and unweighted"),
        ("bfull-t2-alpha100", {"accuracy": 0.2}, "Of Table I one cell"),
        ("bfull-t2-alpha100", {"share_below_one": 0.02}, "Rounds below one"),
    ],
)
def test_each_claim_can_fail(papers, cell, changes, claim):
    values = next(c.values for c in paper_cells() if c.id == cell)
    record = papers_record(cell, {**values, **changes}, rounds=200)
    (papers / f"{cell}-seed0.json").write_text(json.dumps(record), encoding="utf-8")
    (found,) = comparisons(load_records([papers]))
    failed = [v for v in verdicts(found.rows) if v.verdict == "not reproduced"]
    assert any(v.claim.startswith(claim) for v in failed)


def test_claims_that_lack_their_cells_cannot_be_judged(papers):
    for path in papers.glob("bfull*"):
        path.unlink()
    (found,) = comparisons(load_records([papers]))
    words = {v.claim[:20]: v.verdict for v in verdicts(found.rows)}
    assert words["Five full-batch step"] == "cannot be judged"
    assert words["Of Table I one cell,"] == "cannot be judged"
    assert words["A cliff lies between"] == "cannot be judged"


@settings(max_examples=25)
@given(chosen=st.sets(st.sampled_from(sorted({cell.id for cell in paper_cells()})), min_size=1))
def test_no_part_of_the_papers_own_figures_fails_a_claim_and_none_shows_one_without_what_it_compares(chosen):
    records = [
        Record(RunConfig.from_json(content["config"]), content)
        for cell in paper_cells()
        if cell.id in chosen and (content := papers_record(cell.id, cell.values, rounds=200))
    ]
    (found,) = comparisons(list({record.id: record for record in records}.values()))
    judged = {v.claim: v.verdict for v in verdicts(found.rows)}
    assert "not reproduced" not in judged.values()
    full = any(cell.startswith("bfull") for cell in chosen)
    mini = any(not cell.startswith("bfull") for cell in chosen)
    if not (full and mini):
        shown = [claim for claim, verdict in judged.items() if verdict == "reproduced"]
        assert all(claim.startswith(("Within a batch size", "Weighted and")) for claim in shown)


def test_runs_of_another_kind_are_in_a_table_of_their_own(papers):
    values = paper_cells()[0].values
    other = papers_record("bfull-t1-alpha100", values, rounds=40, stem="cifar")
    (papers / "other.json").write_text(json.dumps(other), encoding="utf-8")
    found = comparisons(load_records([papers]))
    assert len(found) == 2
    assert ["cifar stem" in kind.label for kind in found].count(True) == 1


def test_several_seeds_give_their_median_and_spread(papers):
    values = paper_cells()[0].values
    for seed, factor in ((1, 8.0), (2, 9.5)):
        record = papers_record("bfull-t1-alpha100", {**values, "recovery_factor": factor}, rounds=200, seed=seed)
        (papers / f"seed{seed}.json").write_text(json.dumps(record), encoding="utf-8")
    (found,) = comparisons(load_records([papers]))
    estimate = found.rows[0].ours["recovery_factor"]
    assert (estimate.value, estimate.seeds) == (8.96, (8.0, 9.5))
    assert "(8.00 to 9.50)" in markdown(found)


def test_a_record_says_what_the_run_says(runs, tmp_path):
    files = record_runs(runs, tmp_path)
    assert [file.name for file in files] == ["b16-t1-alpha0.5-seed0.json", "bfull-t1-alpha100-seed0.json"]
    records = {record.slug: record for record in load_records([tmp_path])}
    for slug, record in records.items():
        summary = json.loads((runs / slug / "summary.json").read_text(encoding="utf-8"))
        last = record.column("recovery_factor")[-record.last :]
        assert np.median(last) == pytest.approx(summary["recovery_factor"], rel=1e-6)
        assert record.accuracy() == pytest.approx(summary["accuracy"], rel=1e-6)
        log = [json.loads(line) for line in (runs / slug / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        assert np.isnan(record.column("accuracy")[0])
        rounds, factors = record.block_factors()
        assert rounds == list(range(1, 9))
        a, b = (np.array(log[-1][name]) for name in ("mean_squared_norm", "squared_norm_of_mean"))
        assert factors[-1] == pytest.approx(5 * b / a, rel=1e-2)
        text = json.dumps(record.content)
        assert str(runs) not in text
        assert "command" not in text
    once, again = (path.read_bytes() for path in record_runs(runs, tmp_path))
    assert (once, again) == tuple(path.read_bytes() for path in files)
    assert [r.slug for r in load_records([runs / "bfull-t1-alpha100-seed0"])] == ["bfull-t1-alpha100-seed0"]
    (merged,) = comparisons(load_records([tmp_path, runs]))
    assert len(merged.rows) == 2
    assert all(row.paper is None for row in merged.rows)
    json.loads(to_json(comparison_json(merged)), parse_constant=lambda token: pytest.fail(token))


def test_damaged_unfinished_and_missing_results_are_one_clear_line(runs, tmp_path):
    with pytest.raises(FedmaskError, match="holds neither runs nor records"):
        load_records([tmp_path])
    (tmp_path / "bad.json").write_text('{"format": 1, "config"', encoding="utf-8")
    with pytest.raises(FedmaskError, match=r"bad\.json is no record"):
        load_records([tmp_path])
    (tmp_path / "bad.json").write_text('{"format": 99}', encoding="utf-8")
    with pytest.raises(FedmaskError, match=r"bad\.json is no record .*format 99"):
        load_records([tmp_path])
    broken = tmp_path / "broken"
    (broken / "cell").mkdir(parents=True)
    source = runs / "bfull-t1-alpha100-seed0"
    for name in ("config.json", "provenance.json", "rounds.jsonl"):
        (broken / "cell" / name).write_bytes((source / name).read_bytes())
    with pytest.raises(FedmaskError, match="no run is finished there"):
        load_records([broken])
    assert unfinished([broken]) == ["cell (8 rounds so far)"]
    (broken / "cell" / "summary.json").write_bytes((source / "summary.json").read_bytes())
    (broken / "cell" / "rounds.jsonl").write_bytes((source / "rounds.jsonl").read_bytes()[:-9])
    with pytest.raises(FedmaskError, match="cell is damaged"):
        load_records([broken])
    done = validation("compare", str(tmp_path / "absent"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("missing", ["data", "provenance", "median_local_steps", "blocks"])
def test_a_record_without_one_of_its_parts_is_refused(papers, missing):
    path = papers / "bfull-t1-alpha100-seed0.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content[missing]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(FedmaskError, match=r"bfull-t1-alpha100-seed0\.json is no record of a run"):
        load_records([papers])


def test_a_start_outside_a_checkout_and_a_changed_tree_are_recorded_as_such(runs, tmp_path):
    copied = tmp_path / "copied" / "bfull-t1-alpha100-seed0"
    shutil.copytree(runs / "bfull-t1-alpha100-seed0", copied)
    provenance = json.loads((copied / "provenance.json").read_text(encoding="utf-8"))
    (start,) = provenance["starts"]
    starts = [{**start, "commit": commit} for commit in (None, "0123456789abcdef", "0123456789abcdef with changes")]
    (copied / "provenance.json").write_text(json.dumps({"starts": starts}), encoding="utf-8")
    (record,) = load_records([tmp_path / "copied"])
    assert record.commits == "0123456, 0123456 with changes, unknown"


def test_data_are_what_their_fingerprint_says_whatever_they_are_called(papers):
    values = paper_cells()[0].values
    record = papers_record("bfull-t1-alpha100", values, rounds=200, seed=1)
    record["data"]["name"] = "another name"
    (papers / "seed1.json").write_text(json.dumps(record), encoding="utf-8")
    assert len(comparisons(load_records([papers]))) == 1


def test_two_runs_of_one_cell_that_differ_are_refused(papers, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    values = paper_cells()[0].values
    record = papers_record("bfull-t1-alpha100", {**values, "noise": 1.0}, rounds=200)
    (other / "a.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(FedmaskError, match="different runs of bfull-t1-alpha100-seed0"):
        load_records([papers, other])


# Intervals.


def test_the_block_bootstrap_covers_the_mean_of_a_correlated_series(rng):
    """AR(1) with ρ = 0.5: about 0.85 to 0.95 at 100 rounds; independent resampling of rounds would cover 0.75."""
    covered, tries = 0, 300
    for _ in range(tries):
        x = np.zeros(130)
        for t in range(1, 130):
            x[t] = 0.5 * x[t - 1] + rng.standard_normal()
        low, high = block_bootstrap(x[30:], lambda rows: rows.mean(axis=1))
        covered += low <= 0 <= high
    assert covered / tries > 0.80


@pytest.mark.slow
def test_the_coverage_that_is_stated_is_the_coverage(rng):
    stated = [
        int(n) for n in re.findall(r"(\d\d)(?=,| and| %)", COVERAGE.replace("10 rounds", "").replace("50 rounds", ""))
    ]
    assert len(stated) == 6
    tries, found = 400, []
    for rounds, correlation in itertools.product((10, 50), (0.0, 0.5, 0.7)):
        covered = 0
        for _ in range(tries):
            x = np.empty(rounds)
            x[0] = rng.standard_normal() / np.sqrt(1 - correlation**2)
            for t in range(1, rounds):
                x[t] = correlation * x[t - 1] + rng.standard_normal()
            low, high = block_bootstrap(x, lambda rows: np.median(rows, axis=1))
            covered += low <= 0 <= high
        found.append(100 * covered / tries)
    print(found)
    # Both are of 400 series: differences of five standard errors come about once in a million.
    assert np.abs(np.array(found) - stated).max() < 5 * 100 * np.sqrt(2 * 0.25 / tries)


def test_the_block_bootstrap_replays_and_leaves_out_what_is_undefined():
    series = np.array([1.0, np.nan, 2.0, 5.0, 3.0, 4.0, np.nan])
    first, second = (block_bootstrap(series, lambda rows: np.median(rows, axis=1)) for _ in range(2))
    assert first == second
    assert 1 <= first[0] <= first[1] <= 5
    assert np.isnan(block_bootstrap(series[:3], lambda rows: rows.mean(axis=1))).all()
    low, high = wilson(0.0, 6)
    assert (low, round(high, 2)) == (0.0, 0.39)


# Attribution.


@given(seed=st.integers(0, 2**32), clients=st.integers(3, 6))
def test_the_parts_are_those_of_the_updates_written_out(seed, clients):
    random = np.random.default_rng(seed)
    updates = random.standard_normal((TRAININGS, clients, 7))
    flat = updates.reshape(-1, 7)
    parts = noise_parts(flat @ flat.T)

    def noise(rows):
        return ((rows - rows.mean(axis=0)) ** 2).sum() / (clients - 1)

    def halved(one, other):
        return ((one - other) ** 2).sum(axis=1).mean() / 2

    own, again, redrawn, twin, other = updates
    total, pooled = (noise(own) + noise(again)) / 2, (noise(redrawn) + noise(twin)) / 2
    expected = {
        "minibatch": halved(own, again),
        "finite shards": pooled - halved(redrawn, twin),
        "heterogeneity": total - halved(own, again) - (pooled - halved(redrawn, twin)),
        "finite shards, own law": (halved(own, other) + halved(again, other)) / 2 - halved(own, again),
        "heterogeneity, own law": total - (halved(own, other) + halved(again, other)) / 2,
    }
    assert parts.noise == pytest.approx(total)
    assert parts.parts == pytest.approx(expected, abs=1e-9)
    assert sum(parts.parts[name] for name in PARTS) == pytest.approx(total)
    assert sum(parts.parts[name] for name in ("minibatch", *OWN_LAW)) == pytest.approx(total)
    assert parts.signal == pytest.approx(total_cross(own) / (clients * (clients - 1)))


def total_cross(rows):
    return (rows.sum(axis=0) ** 2).sum() - (rows**2).sum()


def test_the_parts_find_the_variances_that_made_the_updates(rng):
    """Δ = client + sample + batch noise with variances 4, 1 and 0.25 a coordinate, in many dimensions."""
    clients, d = 60, 400
    client = 2.0 * rng.standard_normal((clients, d))
    sample, other_sample = (rng.standard_normal((clients, d)) for _ in range(2))

    def batch():
        return 0.5 * rng.standard_normal((clients, d))

    redrawn = 2.0 * rng.standard_normal((clients, d))  # an i.i.d. shard's own sampling noise, variance 4
    updates = [client + sample + batch(), client + sample + batch()]
    updates += [redrawn + batch(), redrawn + batch(), client + other_sample + batch()]
    flat = np.concatenate(updates)
    parts = noise_parts(flat @ flat.T)
    true = {"minibatch": 0.25, "finite shards": 4, "heterogeneity": 1}
    true |= {"finite shards, own law": 1, "heterogeneity, own law": 4}
    for name, value in true.items():
        assert parts.parts[name] / d == pytest.approx(value, abs=0.25)
        low, high = parts.share_intervals[name]
        assert low - 0.1 < value / 5.25 < high + 0.1
        low, high = parts.intervals[name]
        assert low - 0.1 * d < value * d < high + 0.1 * d


def test_a_share_is_known_well_where_one_client_makes_most_of_the_noise(rng):
    """Minibatch noise alone, one client's a hundred times the others': its share is all, to little more or less."""
    scale = np.ones((10, 1))
    scale[3] = 10
    flat = np.concatenate(
        [scale * rng.standard_normal((10, 4000)) for _ in range(2)] + [rng.standard_normal((30, 4000))]
    )
    parts = noise_parts(flat @ flat.T)
    low, high = parts.share_intervals["minibatch"]
    assert 0.9 < low < high < 1.1  # the level is 95 %, so the share itself may lie beside it
    assert parts.intervals["minibatch"][0] / parts.noise < 0


def test_the_first_training_is_the_runs_own_and_full_batches_have_no_minibatch_noise(runs):
    data = load_data("digits")
    for slug, round_ in (("bfull-t1-alpha100-seed0", 4), ("b16-t1-alpha0.5-seed0", 4)):
        state = open_state(runs / slug, round_, data)
        log = json.loads((runs / slug / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[round_])
        assert state.cohort == log["clients"]
        update = torch.empty(len(state.cohort), len(state.weights))
        for row, client in enumerate(state.cohort):
            state.trainer.train(round_ + 1, client, state.weights, state.buffers, update[row])
        sums = gram_matrices(update, state.trainer.blocks).sums()
        assert (sums.squared_norms / 5).tolist() == log["mean_squared_norm"]
        found = attribute(state)
        assert sum(found["parts"][name]["share"] for name in PARTS) == pytest.approx(1)
        assert (found["parts"]["minibatch"]["value"] == 0) == slug.startswith("bfull")


def test_one_steps_noise_is_what_per_sample_gradients_predict(runs, tmp_path):
    data = load_data("digits")
    state = open_state(runs / "bfull-t1-alpha100-seed0", 0, data)
    found = batch_sizes(state, [8, 10_000], repeats=12)
    small, whole = found["points"]
    low, high = small["measured"]["noise_interval"]
    assert low - 0.1 * high < small["predicted"]["noise"] < 1.1 * high
    # A batch larger than every shard is the full batch.
    assert whole["predicted"]["noise"] == pytest.approx(found["full_batch"]["noise"], rel=1e-3)
    assert whole["measured"]["noise"] == pytest.approx(found["full_batch"]["noise"], rel=1e-3)
    path = write_measurement(found, tmp_path / "attribution")
    assert load_measurements([tmp_path], "batch sizes")[0]["gradient_variance"] == found["gradient_variance"]
    path.write_text("{", encoding="utf-8")
    with pytest.raises(FedmaskError, match="is no measurement"):
        load_measurements([tmp_path], "attribution")


def test_the_trace_of_the_gradient_covariance_is_that_of_all_batches_of_one(runs):
    state = open_state(runs / "bfull-t1-alpha100-seed0", 0, load_data("digits"))
    client = state.cohort[0]
    shard = state.trainer.shard(client)
    rate = state.config.learning_rate
    one = state.with_config(batch_size=1, local_steps=1)
    updates = torch.empty(len(shard), len(state.weights))
    for place, sample in enumerate(shard):
        one.trainer.train(1, client, state.weights, state.buffers, updates[place], shard=np.array([sample]))
    gradients = updates.double() / rate
    expected = float((gradients - gradients.mean(dim=0)).square().sum()) / (len(shard) - 1)
    found = state.trainer.gradient_variance(client, state.weights, state.buffers)
    assert found == pytest.approx(expected, rel=1e-3)


def test_states_that_are_not_there_are_refused(runs, tmp_path):
    data = load_data("digits")
    with pytest.raises(FedmaskError, match="is no directory of a run"):
        open_state(tmp_path, 0, data)
    named = tmp_path / "named"
    named.mkdir()
    identity = json.loads((runs / "bfull-t1-alpha100-seed0" / "config.json").read_text(encoding="utf-8"))
    identity["data"]["name"] = "other"
    (named / "config.json").write_text(json.dumps(identity), encoding="utf-8")
    with pytest.raises(FedmaskError, match="was run on other; give the same data by --data"):
        data_of(named)
    assert data_of(runs / "bfull-t1-alpha100-seed0") == "digits"
    with pytest.raises(FedmaskError, match=r"missing or not whole; there are checkpoints of rounds \[4, 6, 8\]"):
        open_state(runs / "bfull-t1-alpha100-seed0", 3, data)
    other = data.__class__.from_arrays(
        "other", data.train_images[:9], data.train_labels[:9], data.test_images, data.test_labels
    )
    with pytest.raises(FedmaskError, match="give the same data by --data"):
        open_state(runs / "bfull-t1-alpha100-seed0", 0, other)


# Costs, and the command line.


def test_costs_count_every_image(protocol_file, tmp_path):
    protocol = load_protocol(protocol_file)
    assert image_passes(protocol.cells[0].config, 1000, 400) == (5 * 100, 200)
    costs = plan(protocol, tmp_path, workers=1)
    assert [cost.passes for cost in costs] == [cost.left for cost in costs]
    assert all(cost.seconds > 0 for cost in costs)
    assert (duration(59.6), duration(3700)) == ("1 min 00 s", "1 h 01 min")


def test_cells_and_seeds_are_chosen_by_name(protocol_file):
    protocol = load_protocol(protocol_file, seeds=[3, 4], cells=["bfull-t1-alpha100"])
    assert [cell.slug for cell in protocol.cells] == ["bfull-t1-alpha100-seed3", "bfull-t1-alpha100-seed4"]
    with pytest.raises(FedmaskError, match="cell 'b7' is unknown; the cells of tiny are bfull-t1-alpha100, b16"):
        load_protocol(protocol_file, cells=["b7"])
    done = validation("plan", protocol_file, "--seeds", "0;1")
    assert done.returncode == 2
    assert "give whole numbers separated by commas" in done.stderr


@pytest.mark.slow
def test_the_report_is_one_file_that_needs_no_other(runs, tmp_path):
    pytest.importorskip("matplotlib")
    data = load_data("digits")
    state = open_state(runs / "b16-t1-alpha0.5-seed0", 8, data)
    folder = runs / "attribution"
    write_measurement(attribute(state), folder)
    write_measurement(batch_sizes(state, [8, 16], repeats=3), folder)
    write_measurement(measure_curvature(state, images=50, draws=2, pairs=2), folder)
    done = validation("report", str(runs), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    names = ("recovery-steps", "recovery-rounds", "signal-noise", "accuracy", "blocks", "noise-parts", "batch-sizes")
    names += ("curvature",)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(names)
    assert page.count('src="data:image/png;base64,') == len(names)
    assert not [word for word in ("http://", "https://", "<link", "<script", str(runs)) if word in page]
    for words in ("Settings that the paper does not state", "momentum", "Provenance", "heterogeneity, own law", "σ"):
        assert words in page or words == "σ"


@pytest.mark.slow
def test_a_protocol_killed_ten_times_at_random_moments_ends_as_the_same_bytes(tmp_path, rng):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(rounds=90), encoding="utf-8")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    command = [sys.executable, "-m", "validation", "run", str(path), "--quiet", "--workers", "1", "--out"]
    assert subprocess.run([*command, str(undisturbed)], capture_output=True, timeout=300).returncode == 0
    kill_and_resume([*command, str(killed)], killed, 10, (2.0, 7.0), rng)
    assert results(killed) == results(undisturbed)
    summaries = [name for name in results(killed) if name.endswith("summary.json")]
    assert len(summaries) == 2
    one, other = (comparisons(load_records([runs]))[0] for runs in (killed, undisturbed))
    assert to_json(comparison_json(one)["cells"]) == to_json(comparison_json(other)["cells"])


def test_a_missing_data_path_is_one_line(protocol_file, tmp_path):
    done = validation("run", protocol_file, "--data", str(tmp_path / "absent"), "--out", str(tmp_path / "out"))
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
    assert "absent" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX's")
def test_where_the_disk_takes_no_more_there_is_one_line_and_nothing_is_lost(protocol_file, runs, tmp_path):
    import resource

    command = [sys.executable, "-m", "validation", "run", protocol_file, "--out", str(tmp_path), "--quiet"]
    command += ["--workers", "1"]  # shared memory counts as files too
    least = 30_000  # bytes a file; a checkpoint is larger
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (least, least)),
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "run the same command again" in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert again.returncode == 0, again.stderr
    expected = {name: content for name, content in results(runs).items() if not name.startswith("attribution")}
    assert results(tmp_path) == expected


def test_every_recorded_result_is_finished_and_says_where_it_comes_from():
    folders = [path for path in (ROOT / "validation" / "results").glob("*") if path.is_dir()]
    for record in itertools.chain.from_iterable(load_records([folder]) for folder in folders):
        provenance = record.content["provenance"]
        assert provenance["commit"]
        assert "with changes" not in provenance["commit"]
        assert provenance["device"]
        assert record.content["data"]["fingerprint"]


def test_the_readmes_tables_are_what_compare_prints_for_the_recorded_results():
    printed = validation("compare", str(ROOT / "validation" / "results" / "short"), "--markdown")
    assert printed.returncode == 0, printed.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert printed.stdout in readme, "run: python -m validation compare validation/results/short --markdown"
