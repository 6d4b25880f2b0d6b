"""What a run leaves on the disk, and how it goes on after damage."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch

from fedmask import RunDirectoryError
from fedmask.federated import ImageData, RunConfig, directory, load_data, simulate

from .kill_harness import results

CONFIG = RunConfig(clients=6, cohort=3, rounds=5, model="cnn", groups=8, seed=1, checkpoint_every=2, evaluate_every=2)


@pytest.fixture(scope="module")
def digits() -> ImageData:
    data = load_data("digits")
    return ImageData.from_arrays(
        "few digits", data.train_images[:120], data.train_labels[:120], data.test_images[:30], data.test_labels[:30]
    )


@pytest.fixture
def go(digits, tmp_path):
    """Run to the end in ``tmp_path/run``; with ``until``, stop by an error after that round is on the disk."""

    def go(config=CONFIG, until=None, name="run", **arguments):
        def stop(progress):
            if until is not None and progress.record is not None and progress.round == until:
                raise KeyboardInterrupt

        out = tmp_path / name
        with contextlib.suppress(KeyboardInterrupt):
            simulate(config, data=digits, out=out, workers=1, on_progress=stop, **arguments)
        return out

    return go


def strict(text: str):
    def refuse(token):
        raise AssertionError(f"{token} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_file_is_strict_json_with_the_promised_fields(go):
    out = go()
    assert set(results(out)) == {
        "config.json", "rounds.jsonl", "summary.json",
        "checkpoints/round-000004.pt", "checkpoints/round-000004.sha256",
        "checkpoints/round-000005.pt", "checkpoints/round-000005.sha256",
    }  # fmt: skip
    lines = [strict(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    promised = {
        "round",
        "recovery_factor",
        "recovery_factor_weighted",
        "signal",
        "noise",
        "accuracy",
        "clients",
        "counts",
    }
    assert all(promised <= set(line) for line in lines)
    assert [line["accuracy"] is not None for line in lines] == [False, True, False, True, True]
    blocks = strict((out / "config.json").read_text())["model"]["blocks"]
    for line in lines:
        assert len(line["mean_squared_norm"]) == len(line["squared_norm_of_mean"]) == len(blocks) == 8
        a, b, k = sum(line["mean_squared_norm"]), sum(line["squared_norm_of_mean"]), len(line["clients"])
        assert line["recovery_factor"] == pytest.approx(k * b / a)
        assert line["noise"] == pytest.approx((a - b) / (1 - 1 / k))
    assert strict((out / "summary.json").read_text())["rounds"] == 5
    assert set(strict((out / "provenance.json").read_text())["starts"][0]) >= {
        "versions",
        "commit",
        "device",
        "started",
    }
    assert {"train", "aggregate", "evaluate"} <= set(strict((out / "times.jsonl").read_text().splitlines()[0]))


@pytest.mark.parametrize("until", [1, 2, 3, 4])
def test_a_run_interrupted_after_any_round_ends_as_the_same_bytes(go, until):
    assert results(go(name="whole")) == results(go() if go(until=until) else None)


def test_a_finished_run_is_left_as_it_is(go):
    before = results(go())
    assert results(go()) == before


def test_a_partial_last_line_is_cut(go):
    whole = results(go(name="whole"))
    out = go(until=3)
    with (out / "rounds.jsonl").open("ab") as log:
        log.write(b'{"round": 4, "recovery_fac')
    assert results(go()) == whole


@pytest.mark.parametrize("damage", ["truncate", "flip", "no checksum", "empty", "left-over"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(go, damage):
    whole = results(go(name="whole"))
    out = go(until=4)
    newest = out / "checkpoints" / "round-000004.pt"
    content = bytearray(newest.read_bytes())
    if damage == "truncate":
        newest.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    elif damage == "no checksum":
        newest.with_suffix(".sha256").unlink()
    elif damage == "empty":
        newest.write_bytes(b"")
    else:
        (out / "checkpoints" / ".round-000006.pt.123.tmp").write_bytes(b"half")
    assert results(go()) == whole


def test_a_log_shorter_than_the_checkpoint_is_refused_not_guessed(go):
    out = go(until=4)
    lines = (out / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (out / "rounds.jsonl").write_bytes(b"".join(lines[:1]))
    with pytest.raises(RunDirectoryError, match="has 1 whole rounds but the checkpoint is of round 4"):
        go()


@pytest.mark.parametrize("damage", ["no JSON", "a round twice", "no object"])
def test_a_damaged_line_and_all_after_it_are_computed_again(go, damage):
    whole = results(go(name="whole"))
    out = go(until=4)
    lines = (out / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    damaged = {"no JSON": b"{half\n", "a round twice": lines[1], "no object": b"3\n"}[damage]
    (out / "rounds.jsonl").write_bytes(b"".join([*lines[:2], damaged, *lines[3:]]))
    assert results(go()) == whole


def test_one_process_at_a_time_has_a_directory(go):
    out = go(until=2)
    before = results(out)
    identity = json.loads((out / "config.json").read_text(encoding="utf-8"))
    with directory.RunDirectory(out, identity):
        with pytest.raises(RunDirectoryError, match="is in use by another process"):
            go()
        with pytest.raises(RunDirectoryError, match="is in use by another process"):
            go(overwrite=True)
    assert results(out) == before
    with pytest.raises(RunDirectoryError, match="another configuration"):
        directory.RunDirectory(out, {})
    go()  # an opening that failed has let it go


def test_a_finished_run_without_its_checkpoints_stays_finished(go, digits):
    out = go()
    shutil.rmtree(out / "checkpoints")
    before = results(out)
    result = simulate(CONFIG, data=digits, out=out, workers=1)
    assert (len(result.records), result.weights) == (5, {})
    assert results(out) == before
    assert result.summary == json.loads((out / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("content", ["[]", "null", '{"starts": 3}', '{"starts": null}', "half {"])
def test_a_damaged_provenance_does_not_stop_a_run(go, content):
    out = go(until=2)
    (out / "provenance.json").write_text(content, encoding="utf-8")
    go()
    assert len(json.loads((out / "provenance.json").read_text(encoding="utf-8"))["starts"]) == 1


def test_rounds_that_come_out_otherwise_than_before_are_reported(go, digits, tmp_path):
    out = go(until=3)
    log = out / "rounds.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], lines[2].replace('"round": 3', '"round": 3, "other": 1')]) + "\n")
    assert simulate(CONFIG, data=digits, out=out, workers=1).diverged == (3,)


def test_another_configuration_is_refused_with_the_difference_named(go):
    out = go()
    before = results(out)
    other = dataclasses.replace(CONFIG, learning_rate=0.1, rounds=7)
    with pytest.raises(
        RunDirectoryError, match=r"rounds is 5 there and 7 here; learning_rate is 0.01 there and 0.1 here"
    ):
        go(other)
    assert results(out) == before
    assert len((go(other, overwrite=True) / "rounds.jsonl").read_text().splitlines()) == 7


def test_other_data_is_another_configuration(go, digits):
    out = go()
    other = ImageData.from_arrays(
        "few digits", digits.train_images[::-1], digits.train_labels, digits.test_images, digits.test_labels
    )
    with pytest.raises(RunDirectoryError, match="data.fingerprint"):
        simulate(CONFIG, data=other, out=out, workers=1)


def test_an_overwriting_that_was_cut_short_can_be_repeated(go, monkeypatch):
    out = go()
    monkeypatch.setattr(directory.shutil, "rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    go(overwrite=True)
    monkeypatch.undo()
    assert (out / "config.json").exists()
    assert len(results(go(overwrite=True))) == 7


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_no_run_is_neither_used_nor_overwritten(go, tmp_path, overwrite):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(RunDirectoryError, match="thesis.txt|not empty"):
        go(overwrite=overwrite)
    assert (tmp_path / "run" / "thesis.txt").read_text() == "years of work"
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_checkpoint_loads_with_weights_only(go):
    state = torch.load(go() / "checkpoints" / "round-000005.pt", weights_only=True)
    assert state["round"] == 5
    assert set(state["parameters"]) == {name for name in state["parameters"] if isinstance(name, str)}
    assert state["parameters"]["head.bias"].shape == (10,)


class Crafted:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.mkdir, (str(self.sentinel),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("with_checksum", [False, True])
def test_a_crafted_checkpoint_executes_nothing(go, tmp_path, with_checksum):
    out = go(until=4)
    sentinel = tmp_path / "executed"
    content = pickle.dumps(Crafted(sentinel))
    newest = out / "checkpoints" / "round-000004.pt"
    newest.write_bytes(content)
    if with_checksum:
        newest.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())
        with pytest.raises(RunDirectoryError, match="is not a checkpoint of fedmask, and nothing of it was executed"):
            go()
    else:
        go()
    assert not sentinel.exists()
    pickle.loads(content)
    assert sentinel.exists(), "the crafted file would have shown itself"
