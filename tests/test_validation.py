import subprocess
import sys

import pytest

from fedmask import FedmaskError
from validation.protocol import load_protocol, protocol_names
from validation.run import cliff, summary_table

from .kill_harness import results


def summaries(factors):
    cells = load_protocol("quick").cells
    steps = [1, 5, 5, 5]
    keys = ("recovery_factor_weighted", "signal", "noise", "accuracy", "share_below_one")
    empty = dict.fromkeys(keys, None) | {"median_over_last": 6}
    return [
        (cell, {**empty, "recovery_factor": factor, "local_steps": step})
        for cell, factor, step in zip(cells, factors, steps, strict=True)
    ]


def test_the_cliff_is_judged_at_like_steps_and_may_be_not_seen():
    assert cliff(summaries([8.0, 4.0, 3.0, 1.5])).startswith(
        "The cliff is seen: at 5 local steps the full batch recovers 4,"
    )
    assert cliff(summaries([8.0, 2.0, 3.0, 1.5])).startswith("The cliff is not seen")
    assert cliff(summaries([8.0, None, 3.0, 1.5])).startswith("The cliff cannot be judged")


def test_every_protocol_that_comes_with_the_kit_can_be_read():
    assert "quick" in protocol_names()
    for name in protocol_names():
        protocol = load_protocol(name, seeds=[4])
        slugs = [cell.slug for cell in protocol.cells]
        assert len(set(slugs)) == len(slugs)
        assert all(cell.config.seed == 4 for cell in protocol.cells)


def test_a_protocol_that_is_unknown_or_wrong_is_refused(tmp_path):
    with pytest.raises(FedmaskError, match="protocol 'nothing' is unknown; use one of paper, quick, short"):
        load_protocol("nothing")
    (tmp_path / "own.toml").write_text('name = "own"\n[defaults]\n[[cells]]\nname = "a"\ncolour = 1\n')
    with pytest.raises(FedmaskError, match="field 'colour' is unknown|is no protocol"):
        load_protocol(str(tmp_path / "own.toml"))
    (tmp_path / "own.toml").write_text("name = ")
    with pytest.raises(FedmaskError, match="is no protocol"):
        load_protocol(str(tmp_path / "own.toml"))


def test_undefined_values_are_dashes_in_the_table():
    table = summary_table(load_protocol("quick"), summaries([8.0, None, 3.0, 1.5]))
    assert list(table.columns[2].cells) == ["8", "–", "3", "1.5"]


@pytest.mark.slow
def test_the_main_job_runs_from_the_command_line_and_again_to_the_same_bytes(tmp_path):
    arguments = [sys.executable, "-m", "validation", "run", "quick", "--out", str(tmp_path / "quick"), "--quiet"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "The cliff is" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("│")]) == 4
    before = results(tmp_path / "quick")
    again = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert again.stdout == done.stdout
    assert results(tmp_path / "quick") == before
