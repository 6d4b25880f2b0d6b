"""The command line as a person meets it."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from fedmask import cli

from .kill_harness import command, results

SMALL = ["--clients", "4", "--cohort", "2", "--rounds", "2", "--batch-size", "full", "--workers", "1"]


@pytest.fixture
def fedmask(monkeypatch, capsys):
    """Call the command line in this process; returns (exit status, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedmask", *arguments])
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        out, error = capsys.readouterr()
        return status, out, error

    return call


@pytest.fixture
def simulate(fedmask, tmp_path):
    return lambda name, *options: fedmask("simulate", "--out", str(tmp_path / name), *SMALL, *options)


def test_simulate_prints_a_table_and_a_closing_line(simulate):
    status, out, error = simulate("run", "--seed", "0")
    assert status == 0
    assert "1/Δ_S" in out
    assert re.search(r"2 rounds in .*run: accuracy [\d.]+ %, median over the last 1: 1/Δ_S [\d.]+", out)
    assert "round 2/2" in error


def test_quiet_prints_the_closing_line_alone(simulate):
    status, out, error = simulate("run", "--seed", "0", "--quiet")
    assert (status, error) == (0, "")
    assert len(out.splitlines()) == 1


def test_seed_0_is_a_seed_and_an_unseeded_run_prints_the_one_it_chose(simulate, tmp_path):
    simulate("one", "--seed", "0")
    simulate("two", "--seed", "0")
    assert results(tmp_path / "one") == results(tmp_path / "two")
    assert json.loads((tmp_path / "one" / "config.json").read_text())["config"]["seed"] == 0
    printed = re.search(r"seed (\d+)", simulate("three")[2])
    assert printed is not None
    assert json.loads((tmp_path / "three" / "config.json").read_text())["config"]["seed"] == int(printed[1])
    before = results(tmp_path / "three")
    assert f"seed {printed[1]}" in simulate("three")[2]  # the same command goes on with the seed of the run
    assert results(tmp_path / "three") == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "some"], "--batch-size is 'some'; use a whole number, or full"),
        (["--data", "nowhere.tar"], "data 'nowhere.tar' does not exist; use digits, cifar10, or a folder or archive"),
        (["--cohort", "9"], "cohort is 9, more than the 4 clients"),
        (["--mask", "independent", "--p", "0"], "p is 0.0, and kept blocks are scaled by 1/p"),
        (["--device", "tpu"], "device 'tpu' is not supported; use cpu or cuda"),
        (["--workers", "0"], "0 workers were asked for"),
        (["--seed", "-1"], "seed is -1"),
        (["--groups", "5"], "groups is 5; it must divide"),
        (["--clients", "2000"], "1438 samples cannot give each of 2000 clients 1"),
    ],
)
def test_an_error_is_one_line_and_a_nonzero_exit_and_leaves_nothing(simulate, tmp_path, options, message):
    status, _, error = simulate("run", "--seed", "0", "--quiet", *options)
    assert status == 2
    assert len(error.strip().splitlines()) == 1
    assert message in error
    assert not (tmp_path / "run").exists()


def test_another_configuration_on_a_run_is_refused_unless_overwritten(simulate):
    assert simulate("run", "--seed", "0")[0] == 0
    status, _, error = simulate("run", "--seed", "1")
    assert status == 2
    assert "seed is 0 there and 1 here" in error
    assert simulate("run", "--seed", "1", "--overwrite")[0] == 0


def test_the_version_is_printed(fedmask):
    assert fedmask("--version")[1].startswith("fedmask 0.")


def test_an_interrupt_says_how_to_go_on(tmp_path):
    arguments = command(tmp_path / "run", *SMALL, "--rounds", "3000", "--seed", "0")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "rounds.jsonl").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in error
    assert "Traceback" not in error


def test_help_teaches_and_an_old_encoding_does_not_stop_it():
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "fedmask", "simulate", "--help"], capture_output=True, env=environment, timeout=60
    )
    text = done.stdout.decode("utf-8")
    assert done.returncode == 0
    for word in ("--batch-size", "--alpha", "same command goes on", "Dirichlet", "--control", "default: 0.01", "Δ_S"):
        assert word in text
