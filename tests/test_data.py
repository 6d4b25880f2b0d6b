"""Data sets from folders, archives, torchvision's CIFAR-10 and the embedded digits: read whole, or refused clearly."""

import hashlib
import io
import os
import pickle
import socket
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedmask import DataError
from fedmask.federated import ImageData, data, load_data


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMASK_CACHE", str(tmp_path / "cache"))


def png(seed: int, size=(4, 4), mode="RGB") -> bytes:
    shape = (*size, 3) if mode == "RGB" else size
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels, mode).save(stream, "png")
    return stream.getvalue()


def layout(mode="RGB", test="test", root="") -> dict[str, bytes]:
    names = [
        f"{root}{split}/{label}/{i}.png" for split in ("train", test) for label in ("cat", "dog") for i in range(3)
    ]
    return {name: png(i, mode=mode) for i, name in enumerate(names)}


def write(path: Path, members: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    elif path.suffix == "":
        for name, content in members.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    else:
        with tarfile.open(path, f"w:{path.suffix.removeprefix('.').replace('tar', '')}") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["set.tar", "set.tar.xz", "set.tar.gz", "set.zip", "set"])
@pytest.mark.parametrize("root", ["", "pictures/", "./"])
def test_a_folder_and_every_archive_hold_the_same_images(tmp_path, name, root):
    members = layout(root=root)
    shuffled = dict(reversed(members.items()))
    loaded = load_data(write(tmp_path / name, shuffled))
    assert loaded.name == name
    assert loaded.classes == ("cat", "dog")
    assert loaded.train_labels.tolist() == loaded.test_labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = np.stack(
        [np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1) for content in members.values()]
    )
    assert np.array_equal(np.concatenate([loaded.train_images, loaded.test_images]), expected)
    assert loaded.fingerprint == load_data(write(tmp_path / "other.zip", layout())).fingerprint


def test_grey_images_have_one_channel_unless_another_is_coloured(tmp_path):
    grey = load_data(write(tmp_path / "grey.zip", layout(mode="L")))
    assert grey.train_images.shape == (6, 1, 4, 4)
    mixed = layout(mode="L") | {"train/cat/9.png": png(9)}
    loaded = load_data(write(tmp_path / "mixed.zip", mixed))
    assert loaded.train_images.shape == (7, 3, 4, 4)
    assert np.array_equal(loaded.train_images[0], np.repeat(grey.train_images[0], 3, axis=0))


def test_validation_images_stand_in_for_test_images(tmp_path):
    assert len(load_data(write(tmp_path / "set.zip", layout(test="val"))).test_labels) == 6


def test_other_files_are_passed_over(tmp_path):
    extra = {
        "README.txt": b"hello",
        "train/cat/.hidden.png": b"x",
        "__MACOSX/train/cat/1.png": b"x",
        "train/cat/notes.md": b"x",
    }
    loaded = load_data(write(tmp_path / "set.zip", layout() | extra))
    assert loaded.fingerprint == load_data(write(tmp_path / "set.tar", layout())).fingerprint


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "is not laid out as .*; found no image"),
        ({"a.png": png(0)}, "found a.png"),
        ({"train/cat/0.png": png(0)}, "found train/…"),
        (layout() | {"train/cat/0.png": b"no image"}, "train/cat/0.png is not an image"),
        (layout() | {"train/cat/0.png": png(0)[:60]}, "train/cat/0.png is not an image"),
        (layout() | {"train/cat/0.png": png(0, (5, 4))}, "all must have one size"),
        (layout() | {"test/bird/0.png": png(0)}, "class 'bird' but no training images"),
    ],
)
def test_a_wrong_layout_or_image_is_refused_and_leaves_no_cache(tmp_path, members, message):
    with pytest.raises(DataError, match=message):
        load_data(write(tmp_path / "set.zip", members))
    assert not list((tmp_path / "cache").rglob("*.npy"))


@pytest.mark.parametrize("name", ["set.zip", "set.tar.xz", "set.tar"])
def test_a_truncated_archive_is_refused(tmp_path, name):
    path = write(tmp_path / name, layout())
    # A plain archive is cut exactly between two members: 512 bytes of header and 512 of content each.
    path.write_bytes(path.read_bytes()[: 8 * 1024 if name == "set.tar" else path.stat().st_size // 2])
    with pytest.raises(DataError, match="cannot be read as an archive|not an image|not laid out"):
        load_data(path)


def test_an_archive_writes_nothing_outside_and_its_links_are_not_followed(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(1))
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in (
            {"../../train/cat/escaped.png": png(0), "/train/cat/absolute.png": png(0)} | layout()
        ).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("train/cat/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(link)
    before = {path for path in tmp_path.parent.rglob("*") if "cache" not in path.parts}
    loaded = load_data(path)
    assert {path for path in tmp_path.parent.rglob("*") if "cache" not in path.parts} == before
    assert not any(
        np.array_equal(image, np.asarray(Image.open(secret)).transpose(2, 0, 1)) for image in loaded.train_images[6:]
    )


@pytest.mark.parametrize(("limit", "value"), [("_MEMBER_BYTES", 10), ("_PIXELS", 10), ("_TOTAL_BYTES", 100)])
def test_bombs_are_refused(tmp_path, monkeypatch, limit, value):
    monkeypatch.setattr(data, limit, value)
    for name in ("set.zip", "set.tar", "set"):
        with pytest.raises(DataError, match="is not read|are not read|use a smaller set"):
            load_data(write(tmp_path / name, layout()))


def test_the_second_load_reads_the_cache_and_a_damaged_cache_is_decoded_again(tmp_path, monkeypatch):
    path = write(tmp_path / "set.zip", layout())
    first = load_data(path)
    images = np.array(first.train_images)  # the array itself is mapped from the file that is damaged below
    decode = data._decode
    monkeypatch.setattr(data, "_decode", lambda *_: pytest.fail("decoded again"))
    assert load_data(path).fingerprint == first.fingerprint
    monkeypatch.setattr(data, "_decode", decode)
    for damage in (lambda file: file.write_bytes(b"x"), lambda file: file.unlink(), _flip_last):
        (array,) = (tmp_path / "cache").rglob("train_images.npy")
        damage(array)
        again = load_data(path)
        assert again.fingerprint == first.fingerprint
        assert np.array_equal(again.train_images, images)


def _flip_last(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_changed_folder_is_another_data_set(tmp_path):
    folder = write(tmp_path / "set", layout())
    before = load_data(folder).fingerprint
    (folder / "train/cat/0.png").write_bytes(png(77))
    assert load_data(folder).fingerprint != before


@pytest.mark.parametrize("source", ["nowhere", "nowhere.tar.xz", "mnist"])
def test_an_unknown_source_is_refused_with_what_is_accepted(source):
    with pytest.raises(DataError, match=f"'{source}' does not exist; use digits, cifar10, or a folder or archive"):
        load_data(source)


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(DataError, match="is not an archive that can be read"):
        load_data(tmp_path / "data.csv")


def test_digits_are_embedded():
    digits = load_data("digits")
    assert digits.train_images.shape == (1438, 1, 8, 8)
    assert digits.test_images.shape == (359, 1, 8, 8)
    assert digits.train_images.max() == 255
    assert np.bincount(digits.test_labels).min() > 20


def arrays(**changes):
    x, y = np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 1, 2, 1])
    return {"name": "mine", "train_images": x, "train_labels": y, "test_images": x, "test_labels": y} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": np.zeros((4, 1, 2, 2))}, "train images have type float64"),
        ({"train_images": np.zeros((4, 2, 2), np.uint8)}, r"shape \(4, 2, 2\)"),
        ({"test_images": np.zeros((4, 1, 2, 3), np.uint8)}, "all must have one shape"),
        ({"test_labels": np.array([0, 1])}, "one integer for each of 4 images"),
        ({"train_labels": np.array([0.0, 1, 2, 1])}, "train labels have type float64"),
        ({"train_labels": np.array([0, 1, -2, 1])}, "train labels hold -2"),
        ({"classes": ["a", "b"]}, "label 2 was given with 2 classes"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        ImageData.from_arrays(**arrays(**changes))


def test_tensors_go_in_too():
    tensors = {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in arrays().items()
    }
    assert ImageData.from_arrays(**tensors).fingerprint == ImageData.from_arrays(**arrays()).fingerprint


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_channel_statistics_are_those_of_the_pixels(seed, channels):
    x = np.random.default_rng(seed).integers(0, 256, (5, channels, 3, 2), dtype=np.uint8)
    x[:, 0] = 7
    one = ImageData.from_arrays("x", x, np.zeros(5, int), x, np.zeros(5, int))
    assert one.channel_mean == pytest.approx((x / 255).mean(axis=(0, 2, 3)))
    expected = (x / 255).std(axis=(0, 2, 3))
    assert one.channel_std == pytest.approx(np.where(expected > 1e-9, expected, 1), abs=1e-9)
    assert one.channel_std[0] == 1


# CIFAR-10 as torchvision has it, small: the real loader on a made archive whose checksums torchvision is told.


def cifar_batch(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    return pickle.dumps({"data": rng.integers(0, 256, (4, 3072), dtype=np.uint8), "labels": [0, 1, 2, 3]})


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch", "batches.meta"]
    content = {name: cifar_batch(i) for i, name in enumerate(names)}
    content["batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")})
    root = tmp_path / "cifar"
    root.mkdir()
    archive = write(root / "cifar-10-python.tar.gz", {f"cifar-10-batches-py/{name}": c for name, c in content.items()})

    def md5(b):
        return hashlib.md5(b).hexdigest()

    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive.read_bytes()))
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5(content[name])] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5(content["test_batch"])]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5(content["batches.meta"])})
    return root


@pytest.fixture
def no_network(monkeypatch):
    def blocked(*_, **__):
        raise OSError("the network is blocked")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)


def test_cifar10_runs_offline_when_its_archive_is_in_place(cifar, no_network):
    for _ in range(2):
        loaded = load_data("cifar10", data_dir=cifar)
        assert loaded.train_images.shape == (20, 3, 32, 32)
        assert loaded.test_labels.tolist() == [0, 1, 2, 3]
        assert loaded.classes == tuple("abcdefghij")
        first = pickle.loads(cifar_batch(0))["data"][0].reshape(3, 32, 32)
        assert np.array_equal(loaded.train_images[0], first)


def test_cifar10_that_is_absent_and_cannot_be_had_says_what_to_do(tmp_path, no_network):
    with pytest.raises(
        DataError, match="could not be downloaded .*put cifar-10-python.tar.gz into a folder .* --data-dir"
    ):
        load_data("cifar10", data_dir=tmp_path / "nothing")
    assert socket.getdefaulttimeout() is None


class Crafted:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.mkdir, (str(self.sentinel),)


@pytest.mark.parametrize("victim", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_tampered_cifar10_batch_executes_nothing(cifar, tmp_path, no_network, victim):
    load_data("cifar10", data_dir=cifar)
    sentinel = tmp_path / "executed"
    content = pickle.dumps(Crafted(sentinel))
    (cifar / "cifar-10-batches-py" / victim).write_bytes(content)
    (cifar / "cifar-10-python.tar.gz").unlink()
    with pytest.raises(DataError):
        load_data("cifar10", data_dir=cifar)
    assert not sentinel.exists()
    pickle.loads(content)
    assert sentinel.exists(), "the crafted batch would have shown itself"


@pytest.mark.skipif("FEDMASK_CIFAR10" not in os.environ, reason="FEDMASK_CIFAR10 names no archive of real images")
def test_real_cifar10_images_load():
    loaded = load_data(os.environ["FEDMASK_CIFAR10"])
    assert loaded.train_images.shape == (50_000, 3, 32, 32)
    assert np.bincount(loaded.train_labels).tolist() == [5000] * 10
