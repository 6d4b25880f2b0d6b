import pytest

from .kill_harness import command, kill_and_resume, results, run

SETTINGS = [
    "--clients",
    "10",
    "--cohort",
    "5",
    "--seed",
    "3",
    "--eval-every",
    "4",
    "--checkpoint-every",
    "2",
    "--mask",
    "independent",
    "--p",
    "0.7",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "workers", "rounds", "window"), [(10, "1", "150", (2.0, 6.0)), (2, "2", "60", (4.0, 9.0))]
)
def test_a_run_killed_at_random_moments_ends_as_the_same_bytes(tmp_path, rng, kills, workers, rounds, window):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    options = [*SETTINGS, "--rounds", rounds, "--batch-size", "16"]
    assert run(command(undisturbed, *options, "--workers", "2")).returncode == 0
    outcome = kill_and_resume(command(killed, *options, "--workers", workers), killed, kills, window, rng)
    print(f"killed {outcome.kills} times, at rounds {outcome.rounds_at_kills}")
    assert results(killed) == results(undisturbed)
    assert len(results(killed)) == 3 + 4  # config, rounds, summary; two checkpoints with their checksums
