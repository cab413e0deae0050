"""`lt-ckpt verify` finds every damage in every format; which formats can tell by themselves, which need `--against`.

The folders have no hash list, as those of other programs; with one, every damage is found (`test_hash_list.py`).

Damages: one bit, a cut, a missing file, two files swapped, one file in the place of another. What is found:

| | a bit of a tensor | cut, missing | swapped, doubled |
|---|---|---|---|
| lt | yes: hashes | yes | yes |
| dcp | yes: checksums | yes | yes: shapes, or `--against` |
| pt | yes: checksums | yes | there is one file |
| nxd, all kinds | yes: checksums | yes | copies on other ranks, or `--against` |
| hf | `--against` alone | yes | yes: the index |

With `--against` all are found in all formats, those in a config.json too. What is not found changes neither a tensor
nor the model (padding between records, fields that no reader looks at), and the tests make sure of that.
"""

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lt_ckpt import CheckpointError
from lt_ckpt.checksums import iter_checksum_errors
from lt_ckpt.cli import verify as command
from lt_ckpt.comparison import compare
from lt_ckpt.formats import open_source
from lt_ckpt.hash_list import HASH_LIST
from lt_model import ModelError, config_from_hf

NAMES = [
    "hf",
    "hf in shards",
    "lt",
    "dcp",
    "pt",
    "nxd",
    "nxd v1",
    "nxd gqa",
    "nxd in chunks",
    "nxd xser",
    "nxd xser v1",
]
CHECKED = [name for name in NAMES if not name.startswith("hf")]
"""Formats that carry checksums."""


@pytest.fixture(scope="module")
def made(memory, models):
    """The model, and name → what was made of it."""
    root = memory / "damage"
    model = models.make(root / "model")
    places = {name: models.output(model, root / name, name) for name in NAMES}
    for path in root.rglob(HASH_LIST):
        path.unlink()
    return model, places


def files_of(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())


def is_found(place: Path, model: Path, against: str = "") -> bool:
    """Whether the command refuses."""
    own = place.name.startswith(("hf", "lt"))
    try:
        command(str(place), None if own else model / "config.json", against)
    except (CheckpointError, ModelError):
        return True
    return False


def is_the_same(place: Path, model: Path) -> bool:
    own = place.name.startswith(("hf", "lt"))
    opened = open_source(place, config=None if own else model)
    original = open_source(model)
    same = config_from_hf(dict(opened.config or {})) == config_from_hf(dict(original.config or {}))
    return same and all(c.is_equal for c in compare(original, opened))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_damage_is_found_or_changes_nothing(made, name, data):
    model, places = made
    place = places[name]
    files = files_of(place)
    path = data.draw(st.sampled_from(files))
    raw = path.read_bytes()
    if not raw:
        return
    others = [p for p in files if p != path and p.suffix == path.suffix and p.read_bytes() != raw]
    kinds = ["flip", "flip", "flip", "cut", "missing", *(["swap", "double"] if others else [])]
    how = data.draw(st.sampled_from(kinds))
    before = {path: raw}
    if how == "flip":
        damaged = bytearray(raw)
        damaged[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(damaged)
    elif how == "cut":
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    elif how == "missing":
        path.unlink()
    else:
        other = data.draw(st.sampled_from(others))
        before[other] = other.read_bytes()
        path.write_bytes(before[other])
        if how == "swap":
            other.write_bytes(raw)
    try:
        found = is_found(place, model, str(model))
        if name == "lt":
            assert found, (how, path)
        assert found or is_the_same(place, model), (how, path)
        if how != "flip" and path.suffix not in ("", ".json"):  # markers and info files say nothing about tensors
            assert found or ".info" in path.name, (how, path)
    finally:
        for path, content in before.items():
            path.write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_of_any_tensor(made, name):
    """A bit in each of fifteen places of tensors: found without `--against` wherever there are checksums."""
    model, places = made
    place = places[name]
    own = place.name.startswith(("hf", "lt"))
    opened = open_source(place, config=None if own else model)
    rng = random.Random(name)
    held = [(tensor, p) for tensor, found in opened.weights.locations.items() for p in found]
    assert not is_found(place, model, str(model))
    for tensor, stored in rng.sample(held, min(15, len(held))):
        path = opened.root / stored.file
        raw = path.read_bytes()
        begin = first_byte(opened, tensor, stored)
        damaged = bytearray(raw)
        damaged[begin + rng.randrange(2)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert is_found(place, model) == (name in CHECKED), (tensor, stored)
            assert is_found(place, model, str(model))
        finally:
            path.write_bytes(raw)


def first_byte(opened, tensor: str, stored) -> int:
    """Where the first element of a stored piece lies in its file, found by asking the planner."""
    from lt_ckpt.copy_plan import plan_copies

    [copy] = plan_copies([((stored.offset, stored.shape), [stored], 2, tensor)])
    return copy.first_byte


@pytest.mark.parametrize("name", ["nxd", "nxd gqa", "nxd xser", "nxd v1"])
def test_ranks_that_changed_places_are_found_against_the_source(made, tmp_path, name):
    """By themselves such files are whole: two ranks hold shares of one shape. Only what they were made of tells."""
    model, places = made
    place = shutil.copytree(places[name], tmp_path / "nxd")
    paths = [path for path in files_of(place) if "tp_rank_00_pp_rank_00" in str(path.relative_to(place))]
    for path in paths:
        twin = Path(str(path).replace("tp_rank_00", "tp_rank_01"))
        first, second = path.read_bytes(), twin.read_bytes()
        path.write_bytes(second)
        twin.write_bytes(first)
    assert is_found(place, model, str(model))
    problems = [c.name for c in compare(open_source(model), open_source(place, config=model)) if not c.is_equal]
    assert "model.embed_tokens.weight" in problems
    assert "model.norm.weight" not in problems


def test_a_file_of_torch_is_checked_whatever_it_is_called(made, tmp_path):
    model, places = made
    path = tmp_path / "pytorch_model.bin"
    shutil.copy(places["pt"], path)
    opened = open_source(path, config=model)
    assert list(iter_checksum_errors(opened)) == []
    stored = opened.weights.locations["model.norm.weight"][0]
    raw = bytearray(path.read_bytes())
    raw[stored.byte_offset] ^= 1
    path.write_bytes(raw)
    assert len(list(iter_checksum_errors(opened))) == 1
    with pytest.raises(CheckpointError, match="1 problems"):
        command(str(path), model / "config.json")


def test_a_reference_that_points_to_another_tensor_is_found(made, tmp_path):
    """One bit makes of k_proj's number that of v_proj, of the same shape: the reference file's checksum tells."""
    from unittest import mock

    from lt_ckpt.torchfile.file import load_pt
    from lt_ckpt.torchfile.stored_zip import StoredZip

    model, places = made
    place = shutil.copytree(places["nxd xser"], tmp_path / "nxd")
    path = place / "step_3" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    key = "model.layers.0.input_layernorm.weight"
    tree = load_pt(path)
    number = tree[key].tid
    raw = path.read_bytes()
    for at in (i for i in range(len(raw)) if raw[i] == number and raw[i - 1] == ord("K")):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with mock.patch.object(StoredZip, "has_checksums", new=False):
            if load_pt(path)[key].tid == number ^ 1:
                break
    else:
        pytest.fail("no such number in the file")
    assert is_found(place, model)


def test_what_can_be_told_without_a_hash(made, tmp_path, capsys):
    """The command says what it could not look at."""
    model, places = made
    command(str(places["hf in shards"]))
    assert "its files have no checksums" in capsys.readouterr().out
    command(str(places["pt"]), model / "config.json")
    assert "every file has checksums" in capsys.readouterr().out
