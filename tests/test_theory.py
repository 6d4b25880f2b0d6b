"""The theory as tests: one for each claim and level, and proof that each check can fail."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmask import FedmaskError
from theory.claims import CLAIMS
from theory.counterexamples import COUNTEREXAMPLES
from theory.registry import Context
from theory.sequences import Betting, sampled_mean_equals
from theory.verification import claim_named, derivation_text, markdown_table, results_json, verify

from .kill_harness import group_is_gone

SAMPLED = ("monte carlo", "network")
CHECKS = [(claim.id, level) for claim in CLAIMS for level in claim.checks]
EXACT = [(name, level) for name, level in CHECKS if level not in SAMPLED]


@pytest.fixture
def context(request):
    return Context(request.config.getoption("--fedmask-seed"))


def check(name: str, level: str):
    """Checks of many samples are slow under the tests' type checker; one of them always runs."""
    slow = level == "monte carlo" and name not in ("one-client", "estimators")
    return pytest.param(name, level, marks=[pytest.mark.slow] if slow else [], id=f"{name}-{level}")


@pytest.mark.parametrize(("name", "level"), [check(name, level) for name, level in CHECKS])
def test_the_claim_holds(context, name, level):
    claim = claim_named(name)
    outcome = claim.checks[level](claim.formula, context)
    print(outcome.found, outcome.samples)
    assert outcome.passed, outcome.found


class Drawn(Context):
    """A context whose exact instances are hypothesis's, so that it seeks and shrinks a failing one."""

    source = None

    def random(self, name):
        return self.source


@pytest.mark.parametrize("name", [name for name, level in CHECKS if level == "exhaustive"])
@settings(max_examples=3)
@given(source=st.randoms(use_true_random=False))
def test_the_claim_holds_on_instances_that_hypothesis_draws(name, source):
    context = Drawn(0)
    object.__setattr__(context, "source", source)
    outcome = claim_named(name).checks["exhaustive"](claim_named(name).formula, context)
    assert outcome.passed, outcome.found


@pytest.mark.parametrize("name", [claim.id for claim in CLAIMS])
def test_every_mutant_is_rejected_and_every_exact_level_rejects_one(context, name):
    claim = claim_named(name)
    rejected = {
        level: {mutant for mutant, formula in claim.mutants.items() if not claim.checks[level](formula, context).passed}
        for level in claim.checks
        if level not in SAMPLED
    }
    assert all(rejected.values())
    if "network" not in claim.checks:  # some mutants show on networks alone
        assert set().union(*rejected.values()) == set(claim.mutants)


@pytest.mark.slow
def test_every_mutant_is_rejected_and_every_level_rejects_one():
    done = theory("mutants")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(\d+) of \1 mutants rejected, seed \d+", done.stdout)


def test_there_are_enough_mutants_and_ids_are_unique():
    assert sum(len(claim.mutants) for claim in CLAIMS) >= 30
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert all(claim.mutants and claim.checks for claim in CLAIMS)


@pytest.mark.parametrize("example", COUNTEREXAMPLES, ids=[f"finding {e.finding}" for e in COUNTEREXAMPLES])
def test_each_finding_has_its_smallest_example(example):
    assert (example.loose() == example.true()) == example.identity
    assert claim_named(example.claim)


def test_every_finding_of_the_paper_has_an_example():
    assert [example.finding for example in COUNTEREXAMPLES] == list(range(1, 11))


# The confidence sequence itself.


@pytest.mark.parametrize("mean", [0.02, 0.3, 0.5])
def test_a_right_mean_is_rejected_no_more_often_than_alpha_at_any_time(rng, mean):
    alpha, runs = 0.1, 400
    rejected = 0
    for _ in range(runs):
        betting = Betting(np.array([mean]), alpha)
        for _ in range(8):  # looked at after every batch
            betting.add((rng.random(64) < mean).astype(float))
        rejected += bool(betting.excluded[0])
    # At a true rate of α a count above this comes about once in 10⁷ runs.
    assert rejected <= runs * alpha + 5.2 * np.sqrt(runs * alpha * (1 - alpha))


def test_wrong_means_are_rejected_and_right_ones_pass_within_the_tolerance(rng):
    def draw(count):
        return rng.beta(2, 3, count) * 4

    arguments = {"bounds": (0.0, 4.0), "tolerance": 0.1, "alpha": 1e-8}
    right = sampled_mean_equals(draw, 1.6, **arguments)
    assert right.equal
    assert -0.1 <= right.interval[0] <= 0 <= right.interval[1] <= 0.1
    for wrong in (1.45, 1.75, 0.0, 5.0):
        assert not sampled_mean_equals(draw, wrong, **arguments).equal
    assert not sampled_mean_equals(draw, 1.6, **arguments | {"tolerance": 1e-9}, most=1000).equal


def test_an_observation_outside_its_bounds_is_refused():
    with pytest.raises(ValueError, match="outside"):
        Betting(np.array([0.5]), 0.1).add(np.array([1.5]))


def test_a_seed_replays_a_check_to_the_same_samples():
    one, other = (list(verify(5, only=["estimators"], workers=1)) for _ in range(2))
    assert one == other


# The command line.


def theory(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "theory", *arguments], capture_output=True, text=True, timeout=400)


def test_json_is_strict_and_has_the_promised_shape():
    done = theory("--json", "--only", "fedexp", "--only", "below-one", "--seed", "1", "--workers", "1")
    assert done.returncode == 0
    report = json.loads(done.stdout, parse_constant=lambda token: pytest.fail(token))
    assert [claim["id"] for claim in report["claims"]] == ["below-one", "fedexp"]
    assert report["claims"][0]["levels"]["symbolic"]["verdict"] == "pass"


def test_a_failing_claim_exits_with_1_and_says_how_to_replay_it(monkeypatch):
    from typer.testing import CliRunner

    from theory import __main__ as main
    from theory import verification

    broken = {**vars(claim_named("fedexp")), "formula": claim_named("fedexp").mutants["K_c·Δ_S"]}
    claims = tuple(type(claim)(**broken) if claim.id == "fedexp" else claim for claim in CLAIMS)
    monkeypatch.setattr(verification, "CLAIMS", claims)
    done = CliRunner().invoke(main.app, ["--only", "fedexp", "--seed", "7", "--workers", "1"])
    assert done.exit_code == 1
    assert "python -m theory --only fedexp --level 'symbolic' --seed 7" in done.output


def test_a_derivation_is_printed_readably_and_as_latex():
    text = derivation_text(claim_named("independent-masks"))
    assert "Second moment" in text
    assert re.search(r"Their difference\n\s+0", text)
    assert r"\frac" in derivation_text(claim_named("independent-masks"), latex=True)
    with pytest.raises(FedmaskError, match="claim 'nothing' is unknown; the claims are one-client"):
        claim_named("nothing")


@pytest.mark.parametrize("claim", [c for c in CLAIMS if "symbolic" in c.checks], ids=lambda claim: claim.id)
def test_a_claim_that_is_proved_shows_its_proof(claim):
    assert claim.derivation is not None
    assert "\n1. " in derivation_text(claim)


def test_results_of_some_levels_only_are_reported_alone():
    report = results_json(list(verify(1, only=["fedexp"], levels=["symbolic"], workers=1)), 1)
    assert list(report["claims"][0]["levels"]) == ["symbolic"]


def test_the_readmes_table_of_claims_is_current():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert markdown_table() in readme, "run: python -m theory table"


@pytest.mark.slow
def test_killed_it_leaves_no_processes_behind():
    command = [sys.executable, "-m", "theory", "alarms", "--seeds", "9", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=12)
    process.kill()
    process.wait()
    assert group_is_gone(process.pid, seconds=20)


@pytest.mark.slow
def test_a_seed_without_alarms_is_reported_as_it_ends():
    done = theory("alarms", "--seeds", "1", "--seed", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = sum("monte carlo" in claim.checks for claim in CLAIMS)
    assert f"seed 5: 0 of {checks} alarms" in done.stdout
    assert f"0 false alarms in {checks} sampled checks" in done.stdout


@pytest.mark.slow
def test_the_whole_report_passes():
    done = theory()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(\d+) of \1 checks pass, seed \d+", done.stdout)
