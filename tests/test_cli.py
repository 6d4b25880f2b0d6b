"""The command line as a person meets it."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from .kill_harness import command, results, run

SMALL = ["--clients", "4", "--cohort", "2", "--rounds", "2", "--batch-size", "full", "--workers", "1"]


def test_simulate_prints_a_table_and_a_closing_line(tmp_path):
    done = subprocess.run(
        [*command(tmp_path / "run", *SMALL, "--seed", "0")[: -len(SMALL) - 3], *SMALL, "--seed", "0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1/Δ_S" in done.stdout
    assert re.search(r"2 rounds in .*run: accuracy [\d.]+ %, median over the last 1: 1/Δ_S [\d.]+", done.stdout)
    assert "round 2/2" in done.stderr


def test_seed_0_is_a_seed_and_an_unseeded_run_prints_the_one_it_chose(tmp_path):
    for name in ("one", "two"):
        assert run(command(tmp_path / name, *SMALL, "--seed", "0")).returncode == 0
    assert results(tmp_path / "one") == results(tmp_path / "two")
    assert json.loads((tmp_path / "one" / "config.json").read_text())["config"]["seed"] == 0
    loud = [argument for argument in command(tmp_path / "three", *SMALL) if argument != "--quiet"]
    first = run(loud)
    printed = int(re.search(r"seed (\d+)", first.stderr)[1])
    assert json.loads((tmp_path / "three" / "config.json").read_text())["config"]["seed"] == printed
    before = results(tmp_path / "three")
    assert f"seed {printed}" in run(loud).stderr  # the same command goes on with the seed of the run
    assert results(tmp_path / "three") == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "some"], "--batch-size is 'some'; use a whole number, or full"),
        (["--data", "nowhere.tar"], "data 'nowhere.tar' does not exist; use digits, cifar10, or a folder or archive"),
        (["--cohort", "9"], "cohort is 9, more than the 4 clients"),
        (["--mask", "independent", "--p", "0"], "p is 0.0, and kept blocks are scaled by 1/p"),
        (["--device", "cuda:7"], "no CUDA device|does not exist"),
        (["--workers", "0"], "0 workers were asked for"),
        (["--seed", "-1"], "seed is -1"),
        (["--groups", "5"], "groups is 5; it must divide"),
        (["--clients", "2000"], "1438 samples cannot give each of 2000 clients 1"),
    ],
)
def test_an_error_is_one_line_and_a_nonzero_exit(tmp_path, options, message):
    done = run(command(tmp_path / "run", *SMALL, "--seed", "0", *options))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert re.search(message if "|" in message else re.escape(message), done.stderr)
    assert not (tmp_path / "run").exists()


def test_another_configuration_on_a_run_is_refused(tmp_path):
    assert run(command(tmp_path / "run", *SMALL, "--seed", "0")).returncode == 0
    done = run(command(tmp_path / "run", *SMALL, "--seed", "1"))
    assert done.returncode == 2
    assert "seed is 0 there and 1 here" in done.stderr
    assert run(command(tmp_path / "run", *SMALL, "--seed", "1", "--overwrite")).returncode == 0


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
    for word in ("--batch-size", "--alpha", "same command goes on", "Dirichlet", "--control", "default: 0.01"):
        assert word in text
    assert b"simulate" in subprocess.run([sys.executable, "-m", "fedmask"], capture_output=True, timeout=60).stdout
