import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmask import files
from fedmask.files import to_json, write_atomic


def test_numbers_of_numpy_and_undefined_ones_are_strict_json():
    value = {
        "x": np.float32(0.5),
        "n": np.int64(3),
        "bad": float("nan"),
        "worse": np.inf,
        "row": np.array([1.0, np.nan]),
        "t": (1, None),
    }
    assert to_json(value) == '{"x": 0.5, "n": 3, "bad": null, "worse": null, "row": [1.0, null], "t": [1, null]}'


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_whatever_is_written_is_read_back_by_a_strict_parser(value):
    def refuse(token):
        raise AssertionError(token)

    json.loads(to_json(value), parse_constant=refuse)


def test_what_json_has_no_form_for_is_refused():
    with pytest.raises(TypeError):
        to_json({"x": object()})


def test_text_is_utf8(tmp_path):
    files.write_json(tmp_path / "report.json", {"∇": "σ² of Łódź"})
    assert json.loads((tmp_path / "report.json").read_bytes().decode("utf-8")) == {"∇": "σ² of Łódź"}


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
