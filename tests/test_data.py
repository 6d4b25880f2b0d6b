"""Data sets from folders, archives, torchvision's CIFAR-10 and the embedded digits: read whole, or refused clearly."""

import bz2
import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import re
import socket
import struct
import sys
import tarfile
import time
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
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


GIF = (
    b"GIF89a\x01\x00\x01\x00\x80\x00\x00\xff\xff\xff\x00\x00\x00,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;"
)


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
        ({}, "is not laid out as .*; found no file"),
        ({"notes/a.txt": b"", "b.csv": b"", "c/d": b"", "e": b""}, r"found notes/a.txt, b.csv, c/d$"),
        ({"a.png": png(0)}, "found a.png"),
        ({"train/cat/0.png": png(0)}, "found train/cat/0.png"),
        (layout() | {"train/cat/0.png": b"no image"}, "train/cat/0.png is not an image"),
        (layout() | {"train/cat/0.png": png(0)[:60]}, "train/cat/0.png is not an image"),
        (layout() | {"train/cat/0.png": png(0, (5, 4))}, "all must have one size"),
        (layout() | {"train/cat/0.png": png(0).replace(b"IHDR", b"IHDX")}, "train/cat/0.png is not an image"),
        (layout() | {"train/cat/0.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n"}, "0.png is not an image"),
        (layout() | {"test/bird/0.png": png(0)}, "class 'bird' but no training images"),
        (layout() | {"other/train/cat/9.png": png(0)}, "below another folder than others"),
        (
            layout() | {"train/cat/0.png": GIF},
            "0.png is not an image that can be decoded .no PNG, JPEG, BMP, PPM or WebP",
        ),
        (layout() | {"Train/cat/0.png": png(0)}, "Train/cat/0.png in set.zip is there twice"),
        (layout() | {"train/b\nd/0.png": png(0)}, r"'train/b\\nd/0.png' in set.zip is of a class whose name"),
    ],
)
def test_a_wrong_layout_or_image_is_refused_and_leaves_no_cache(tmp_path, members, message):
    with pytest.raises(DataError, match=message):
        load_data(write(tmp_path / "set.zip", members))
    assert not list((tmp_path / "cache").rglob("*.npy"))


def outcome(path: Path) -> str:
    try:
        return load_data(path).fingerprint
    except DataError as error:
        return f"refused in {len(str(error).splitlines())} line"


ARCHIVES = ["set.zip", "set.tar", "set.tar.gz", "set.tar.xz", "set.tar.bz2"]


@pytest.mark.parametrize("name", ARCHIVES)
@given(share=st.floats(0, 1), bit=st.sampled_from([0, *(1 << i for i in range(8))]))
@example(share=1.0, bit=0)  # a compressed archive's last byte belongs to its checksum or size
@example(share=1.0, bit=1)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_a_cut_or_altered_archive_is_whole_or_refused_but_never_short(tmp_path, name, share, bit):
    """A download that broke off, or a bit that flipped: tarfile by itself takes both for the archive's end."""
    path = write(tmp_path / name, layout())
    whole, content = load_data(path).fingerprint, bytearray(path.read_bytes())
    at = int(share * (len(content) - 1))
    if bit and name == "set.zip":
        at = min(at, content.index(b"PK\x01\x02") - 1)  # a zip's directory has no checksum
    content[at] ^= bit
    path.write_bytes(content if bit else content[:at])
    assert outcome(path) in (whole, "refused in 1 line")


def test_a_pixel_altered_in_a_compressed_archive_is_noticed_by_the_archive_s_checksum(tmp_path):
    stream, colour = io.BytesIO(), bytes([17, 34, 51])
    Image.new("RGB", (4, 4), tuple(colour)).save(stream, "bmp")  # has no checksum of its own
    members = {f"{split}/a/0.bmp": stream.getvalue() for split in ("train", "test")}
    content = gzip.compress(write(tmp_path / "plain.tar", members).read_bytes(), compresslevel=0)
    (tmp_path / "set.tar.gz").write_bytes(content)
    assert load_data(tmp_path / "set.tar.gz").train_images.max() == 51
    (tmp_path / "set.tar.gz").write_bytes(content.replace(colour[::-1], bytes(3), 1))
    with pytest.raises(DataError, match="CRC check failed"):
        load_data(tmp_path / "set.tar.gz")


@pytest.mark.parametrize("name", ["set.tar", "set.tar.gz", "set.tar.xz", "set.tar.bz2"])
def test_a_tar_that_ends_between_two_members_is_refused(tmp_path, name):
    whole = write(tmp_path / "whole.tar", layout()).read_bytes()
    end = max(i for i in range(0, len(whole), 512) if whole[i : i + 5] == b"test/")
    for stop in (end, end + 100):  # at the last header's start, and within it
        cut = whole[:stop]
        (tmp_path / name).write_bytes(compressed(name, cut))
        with pytest.raises(DataError, match="is it whole"):
            load_data(tmp_path / name)


def compressed(name: str, content: bytes) -> bytes:
    return {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".tar": bytes}[Path(name).suffix](content)


@pytest.mark.parametrize("name", ["train/cat/0.png", "notes.txt"])
@pytest.mark.parametrize("size", [-512, -1024, -1536, -2048, 2**33])
def test_a_tar_member_that_lies_about_its_size_is_refused(tmp_path, name, size):
    path = tmp_path / "set.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("first"))
        info = tarfile.TarInfo(name)
        info.pax_headers = {"size": str(size)}  # -1536 leads back to this very header, for ever
        archive.addfile(info)
    with pytest.raises(DataError):
        load_data(path)


def test_a_tar_header_too_long_for_the_memory_is_refused(tmp_path):
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2**20 + 1
    (tmp_path / "set.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + b"a" * (2**20 + 511) + bytes(1024))
    with pytest.raises(DataError, match="a header of 1048577 bytes"):
        load_data(tmp_path / "set.tar")


def test_a_zip_member_is_unpacked_no_further_than_its_size_says(tmp_path):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/cat/0.png", bytes(2**26))
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", 2**26), struct.pack("<I", 2**10)))
    tracemalloc.start()
    with pytest.raises(DataError, match="cannot be read"):
        load_data(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def test_a_zip_member_that_is_encrypted_or_compressed_without_bounds_is_refused(tmp_path):
    path = tmp_path / "set.zip"
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("train/cat/0.png", bytes(2**20))
        with pytest.raises(DataError, match="neither stored nor deflated"):
            load_data(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/cat/0.png", bytes(2**20))
    honest = path.read_bytes()
    encrypted = bytearray(honest)
    encrypted[honest.index(b"PK\x01\x02") + 8] |= 1
    encrypted[6] |= 1
    path.write_bytes(encrypted)
    with pytest.raises(DataError, match="cannot be read .*encrypted"):
        load_data(path)


def test_a_tar_writes_nothing_and_its_links_and_devices_are_passed_over(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(1234))
    path = write(tmp_path / "evil.tar", {"../../train/cat/escaped.png": png(0)} | layout())
    with tarfile.open(path, "a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
            info = tarfile.TarInfo(f"train/cat/odd{kind.decode()}.png")
            info.type, info.linkname = kind, str(secret) if kind == tarfile.SYMTYPE else "train/cat/0.png"
            archive.addfile(info)
    before = outside_cache(tmp_path)
    loaded = load_data(path)
    assert outside_cache(tmp_path) == before
    assert loaded.fingerprint == load_data(write(tmp_path / "clean.zip", layout())).fingerprint


def test_a_zip_writes_nothing_and_its_links_are_passed_over(tmp_path):
    path = write(tmp_path / "evil.zip", {"../../train/cat/escaped.png": png(0)} | layout())
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("train/cat/link.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/hostname")
    before = outside_cache(tmp_path)
    loaded = load_data(path)
    assert outside_cache(tmp_path) == before
    assert loaded.fingerprint == load_data(write(tmp_path / "clean.tar", layout())).fingerprint


def outside_cache(folder: Path) -> set[Path]:
    return {path for path in folder.parent.rglob("*") if "cache" not in path.parts}


def test_names_from_an_archive_never_name_files_of_the_cache(tmp_path):
    load_data(write(tmp_path / "set.zip", layout(root="meta.json/")))
    assert {file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()} == {
        "meta.json", "train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy",
    }  # fmt: skip


def test_a_folder_may_link_to_folders_and_files_but_not_to_nothing(tmp_path):
    real = write(tmp_path / "real", layout())
    linked = tmp_path / "linked"
    (linked / "test").mkdir(parents=True)
    (linked / "train").symlink_to(real / "train")
    (linked / "test/cat").symlink_to(real / "test/cat")
    (linked / "test/dog").mkdir()
    for file in (real / "test/dog").iterdir():
        (linked / "test/dog" / file.name).symlink_to(file)
    for circle in ("circle", "other-circle"):  # walked without end, these would be 2⁴⁰ folders
        (linked / "test/dog" / circle).symlink_to(linked / "test/dog")
    assert load_data(linked).fingerprint == load_data(real).fingerprint
    (real / "test/dog/0.png").unlink()
    with pytest.raises(DataError, match="dog/0.png"):
        load_data(linked)


def test_images_of_more_than_eight_bits_are_refused_rather_than_clipped(tmp_path):
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(stream, "png")
    with pytest.raises(DataError, match="more than 8 bits a channel"):
        load_data(write(tmp_path / "set.zip", layout() | {"train/cat/0.png": stream.getvalue()}))


@pytest.mark.parametrize("kind", ["png", "jpeg", "bmp", "ppm", "webp"])
def test_every_kind_of_image_is_read_whatever_the_case_of_its_suffix(tmp_path, kind):
    stream = io.BytesIO()
    Image.new("P" if kind in ("png", "bmp") else "RGB", (4, 4)).save(stream, kind)
    members = {f"{split}/a/{i}.{kind.upper()}": stream.getvalue() for split in ("train", "test") for i in range(2)}
    loaded = load_data(write(tmp_path / "set.zip", members))
    assert loaded.image_shape == (3, 4, 4)
    assert loaded.channels == 3
    assert loaded.number_of_classes == 1


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


@pytest.mark.parametrize(
    "meta",
    [
        "",
        "[]",
        {"classes": None},
        {"classes": ["cat"]},
        {"classes": ["cat", "cow"]},
        {"fingerprint": "0" * 64},
        {"version": 0},
    ],
)
def test_a_cache_whose_description_is_wrong_is_decoded_again(tmp_path, meta):
    path = write(tmp_path / "set.zip", layout())
    first = load_data(path)
    (file,) = (tmp_path / "cache").rglob("meta.json")
    right = json.loads(file.read_text())
    assert set(right) == {"name", "classes", "fingerprint", "version"}
    file.write_text(meta if isinstance(meta, str) else json.dumps(right | meta))
    again = load_data(path)
    assert (again.classes, again.fingerprint) == (first.classes, first.fingerprint)
    assert json.loads(file.read_text()) == right


def test_a_cached_array_that_would_be_unpickled_is_not(tmp_path):
    path = write(tmp_path / "set.zip", layout())
    load_data(path)
    (array,) = (tmp_path / "cache").rglob("train_labels.npy")
    np.save(array, np.array([Crafted(tmp_path / "executed")], dtype=object), allow_pickle=True)
    assert load_data(path).train_labels.dtype == np.int64
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("damage", [False, True])
def test_many_that_decode_at_once_agree_and_leave_one_cache(tmp_path, damage):
    path = write(tmp_path / "set.zip", layout())
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            loaded = list(pool.map(lambda _: load_data(path), range(8)))
            assert len({images.fingerprint for images in loaded}) == 1
            assert all(np.array_equal(images.train_images, loaded[0].train_images) for images in loaded)
            (folder,) = (tmp_path / "cache/datasets").iterdir()
            assert data._read_cache(folder, "set.zip") is not None
            if damage:
                (folder / "meta.json").unlink()


def test_a_cache_that_another_process_has_finished_is_kept(tmp_path):
    first, second = (load_data(write(tmp_path / f"{i}.zip", layout() | {"train/cat/9.png": png(i)})) for i in (1, 2))
    folder = tmp_path / "cache/datasets/contested"
    data._write_cache(folder, first)
    data._write_cache(folder, second)
    kept = data._read_cache(folder, "1.zip")
    assert kept is not None
    assert kept.fingerprint == first.fingerprint
    assert len(list(folder.parent.iterdir())) == 3


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    path = write(tmp_path / "set.zip", layout())
    cached = load_data(path).fingerprint
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("FEDMASK_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be cached"):
        assert load_data(path).fingerprint == cached


def test_what_is_loaded_is_mapped_read_only(tmp_path):
    loaded = load_data(write(tmp_path / "set.zip", layout()))
    assert isinstance(loaded.train_images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        loaded.train_images[0] = 0


@pytest.mark.parametrize("name", ["set.zip", "[red].zip", "[/].tar"])
def test_progress_is_shown_on_standard_error_only_when_asked_for(tmp_path, capsys, name):
    path = write(tmp_path / name.replace("/", "_"), layout())
    load_data(path)
    assert capsys.readouterr() == ("", "")
    write(path, layout() | {"train/cat/7.png": png(7)})
    load_data(path, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"decoding {path.name}" in err


def test_a_relative_path_is_known_by_its_folder_s_name(tmp_path, monkeypatch):
    write(tmp_path / "pictures", layout())
    monkeypatch.chdir(tmp_path / "pictures")
    assert load_data(".").name == "pictures"


def test_a_changed_folder_is_another_data_set(tmp_path):
    folder = write(tmp_path / "set", layout())
    before = load_data(folder).fingerprint
    (folder / "train/cat/0.png").write_bytes(png(77))
    assert load_data(folder).fingerprint != before


@pytest.mark.parametrize("source", ["nowhere", "nowhere.tar.xz", "mnist", "", "x" * 5000, "a\0b", "two\nlines"])
def test_an_unknown_source_is_refused_with_what_is_accepted(source):
    accepted = re.escape(f"{source!r} does not exist; use digits, cifar10, or a folder or archive")
    with pytest.raises(DataError, match=accepted):
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
    from sklearn.datasets import load_digits

    pixels, fifth = load_digits(), slice(4, None, 5)
    assert np.array_equal(digits.test_labels, pixels.target[fifth])
    assert np.allclose(digits.test_images[:, 0] * (16 / 255), pixels.images[fifth], atol=0.04)


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
        ({"train_labels": np.array([0, 1, 2, 10**12])}, "train labels hold 1000000000000, with 65536 classes"),
        ({"train_labels": np.array([True] * 4)}, "train labels have type bool"),
        ({"train_images": np.zeros((0, 1, 2, 2), np.uint8), "train_labels": np.zeros(0, int)}, "not empty"),
        ({"train_images": [[1, 2], [3]]}, "train_images is not an array"),
        ({"classes": ["a", "b"]}, "train labels hold 2, with 2 classes"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        ImageData.from_arrays(**arrays(**changes))


def test_a_data_set_that_does_not_fit_cannot_be_made_at_all():
    good = ImageData.from_arrays(**arrays())
    with pytest.raises(DataError, match="test labels hold 9, with 3 classes"):
        dataclasses.replace(good, test_labels=np.full(4, 9))
    with pytest.raises(DataError, match="train labels have type int32"):
        dataclasses.replace(good, train_labels=good.train_labels.astype(np.int32))


@given(st.data())
def test_the_fingerprint_knows_every_pixel_label_shape_and_class(draw):
    rng = np.random.default_rng(draw.draw(st.integers(0, 99)))
    x = {split: rng.integers(0, 256, (3, 2, 4, 3), dtype=np.uint8) for split in ("train", "test")}
    y = {split: rng.integers(0, 3, 3) for split in ("train", "test")}

    def fingerprint(classes=("a", "b", "c"), name="x"):
        return ImageData.from_arrays(name, x["train"], y["train"], x["test"], y["test"], classes).fingerprint

    before = fingerprint()
    assert fingerprint(name="y") == before
    assert fingerprint(("a", "b", "d")) != before
    split = draw.draw(st.sampled_from(["train", "test"]))
    change = draw.draw(st.sampled_from(["pixel", "label", "shape", "order in memory"]))
    if change == "pixel":
        x[split].flat[draw.draw(st.integers(0, x[split].size - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    elif change == "label":
        y[split][draw.draw(st.integers(0, 2))] += 1
        assert fingerprint(("a", "b", "c", "d")) != fingerprint(("a", "b", "c", "e"))
        y[split] %= 3
    elif change == "shape":
        x = {split: images.reshape(3, 2, 3, 4) for split, images in x.items()}
    else:
        x[split] = np.asfortranarray(x[split])
    assert (fingerprint() == before) == (change == "order in memory")


@given(st.integers(0, 255), st.integers(1, 50))
def test_a_constant_channel_has_its_value_as_mean_and_a_deviation_of_one(value, samples):
    x = np.full((samples, 1, 3, 5), value, np.uint8)
    constant = ImageData.from_arrays("x", x, np.zeros(samples, int), x, np.zeros(samples, int))
    assert constant.channel_std.tolist() == [1.0]
    assert constant.channel_mean.tolist() == [value / 255]


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


def extract(root: Path) -> Path:
    with tarfile.open(root / "cifar-10-python.tar.gz") as archive:
        archive.extractall(root, filter="data")
    return root / "cifar-10-batches-py"


@pytest.mark.parametrize("extracted", [False, True])
def test_cifar10_runs_offline_when_its_archive_or_its_files_are_in_place(cifar, no_network, extracted):
    if extracted:
        extract(cifar)
        (cifar / "cifar-10-python.tar.gz").unlink()
    before = set(cifar.rglob("*"))
    loaded = load_data("cifar10", data_dir=cifar)
    assert set(cifar.rglob("*")) == before, "a read-only folder must do"
    assert loaded.train_images.shape == (20, 3, 32, 32)
    assert loaded.train_labels.tolist() == [0, 1, 2, 3] * 5
    assert loaded.test_labels.tolist() == [0, 1, 2, 3]
    assert loaded.classes == tuple("abcdefghij")
    batches = [pickle.loads(cifar_batch(i))["data"].reshape(4, 3, 32, 32) for i in range(6)]
    assert np.array_equal(np.concatenate([loaded.train_images, loaded.test_images]), np.concatenate(batches))
    from torchvision.datasets import CIFAR10

    theirs = CIFAR10(cifar, train=True, download=not extracted)
    assert np.array_equal(loaded.train_images.transpose(0, 2, 3, 1), theirs.data)
    assert loaded.train_labels.tolist() == theirs.targets


def test_cifar10_that_is_absent_and_cannot_be_had_says_what_to_do(tmp_path, no_network):
    with pytest.raises(
        DataError, match="could not be downloaded .*put cifar-10-python.tar.gz into a folder .* --data-dir"
    ):
        load_data("cifar10", data_dir=tmp_path / "nothing")
    assert socket.getdefaulttimeout() is None


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch, cifar):
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(data, "_DOWNLOAD_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.getsockname()[1]}/cifar-10-python.tar.gz")
        start = time.monotonic()
        with pytest.raises(DataError, match="could not be downloaded .*timed out"):
            load_data("cifar10", data_dir=tmp_path / "nothing")
    assert time.monotonic() - start < 5
    assert list((tmp_path / "nothing").iterdir()) == []


@pytest.mark.parametrize("fault", ["none", "wrong", "interrupted"])
def test_a_download_is_in_place_whole_or_not_at_all(tmp_path, monkeypatch, cifar, capsys, fault):
    from torchvision.datasets import utils

    content = (cifar / "cifar-10-python.tar.gz").read_bytes()

    def retrieve(url, filename, **_):
        print("bar", file=sys.stderr)
        Path(filename).write_bytes(content if fault == "none" else content[:99])
        if fault == "interrupted":
            raise OSError("connection reset")

    monkeypatch.setattr(utils, "_get_redirect_url", lambda url, **_: url)
    monkeypatch.setattr(utils, "_urlretrieve", retrieve)
    root = tmp_path / "new"
    root.mkdir()
    (root / "cifar-10-python.tar.gz").write_bytes(b"what was left of an earlier download")
    before = (root / "cifar-10-python.tar.gz").read_bytes()
    if fault == "none":
        assert load_data("cifar10", data_dir=root).train_images.shape == (20, 3, 32, 32)
    else:
        with pytest.raises(DataError, match="could not be downloaded"):
            load_data("cifar10", data_dir=root)
    assert (root / "cifar-10-python.tar.gz").read_bytes() == (content if fault == "none" else before)
    assert [file.name for file in root.iterdir()] == ["cifar-10-python.tar.gz"]
    assert capsys.readouterr().err == ""


class Crafted:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.mkdir, (str(self.sentinel),)


VICTIMS = ["data_batch_3", "test_batch", "batches.meta"]


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("where", ["folder", "archive", "folder beside an archive"])
def test_a_tampered_cifar10_batch_executes_nothing(cifar, tmp_path, no_network, victim, where):
    sentinel = tmp_path / "executed"
    crafted = pickle.dumps(Crafted(sentinel))
    folder = extract(cifar)
    (folder / victim).write_bytes(crafted)
    if where == "archive":
        files = {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
        write(cifar / "cifar-10-python.tar.gz", files)
    if where == "folder":
        (cifar / "cifar-10-python.tar.gz").unlink()
    if where == "folder beside an archive":
        assert load_data("cifar10", data_dir=cifar).train_images.shape == (20, 3, 32, 32)
    else:
        with pytest.raises(DataError, match="is not whole in"):
            load_data("cifar10", data_dir=cifar)
    assert not sentinel.exists()
    pickle.loads(crafted)
    assert sentinel.exists(), "the crafted batch would have shown itself"


def test_cifar10_files_changed_after_they_were_checked_are_not_unpickled(cifar, tmp_path, monkeypatch):
    folder, check = extract(cifar), data._intact

    def check_and_tamper(*arguments):
        files = check(*arguments)
        for file in folder.iterdir():
            file.write_bytes(pickle.dumps(Crafted(tmp_path / "executed")))
        return files

    monkeypatch.setattr(data, "_intact", check_and_tamper)
    assert load_data("cifar10", data_dir=cifar).train_images.shape == (20, 3, 32, 32)
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif("FEDMASK_CIFAR10" not in os.environ, reason="FEDMASK_CIFAR10 names no archive of real images")
def test_real_cifar10_images_load():
    loaded = load_data(os.environ["FEDMASK_CIFAR10"])
    assert loaded.train_images.shape == (50_000, 3, 32, 32)
    assert np.bincount(loaded.train_labels).tolist() == [5000] * 10
