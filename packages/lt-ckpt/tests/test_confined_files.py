"""Links of a model's folder: within the folder, and from a snapshot of the hub's cache to its own model's blobs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lt_ckpt.cli import app
from lt_ckpt.confined_files import read_confined
from lt_ckpt.errors import CheckpointError

MODEL = "cache/models--org--name"


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("", "tokenizer.json"), ("", "deep/er/a.jinja"), ("deep", "er/a.jinja"), ("deep/er", "a.jinja")],
)
def test_a_snapshot_of_the_hubs_cache_leads_to_its_models_blobs(tmp_path, folder, name):
    snapshot = tmp_path / MODEL / "snapshots/0123abc" / folder
    link(snapshot / name, write(tmp_path / MODEL / "blobs/f00d", "{}"))
    assert read_confined(snapshot, name, 99) == b"{}"
    (tmp_path / "named").symlink_to(snapshot)
    assert read_confined(tmp_path / "named", name, 99) == b"{}"


def test_a_link_within_the_folder_is_followed(tmp_path):
    link(tmp_path / "model/tokenizer.json", write(tmp_path / "model/files/tokenizer.json", "{}"))
    assert read_confined(tmp_path / "model", "tokenizer.json", 99) == b"{}"


@pytest.mark.parametrize(
    ("folder", "target"),
    [
        ("model", "home/credentials.json"),
        ("snapshots/model", "home/credentials.json"),
        ("snapshots/model", "blobs/f00d"),
        ("data/snapshots/model", "home/credentials.json"),
        ("data/snapshots/model", "data/blobs/f00d"),
        ("cache/datasets--org--name/snapshots/0123abc", "cache/datasets--org--name/blobs/f00d"),
        (f"{MODEL}/snapshots/0123abc", "home/credentials.json"),
        (f"{MODEL}/snapshots/0123abc", f"{MODEL}/refs/main"),
        (f"{MODEL}/snapshots/0123abc", f"{MODEL}/blobs-of-others/f00d"),
        (f"{MODEL}/snapshots/0123abc", f"{MODEL}/snapshots/4567def/tokenizer.json"),
        (f"{MODEL}/snapshots/0123abc", "cache/models--org--other/blobs/f00d"),
        (f"{MODEL}/snapshots", f"{MODEL}/blobs/f00d"),
    ],
)
def test_a_link_to_anywhere_else_is_refused(tmp_path, folder, target):
    link(tmp_path / folder / "tokenizer.json", write(tmp_path / target, "secret"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a link to .*, outside of the model's folder"):
        read_confined(tmp_path / folder, "tokenizer.json", 99)


@pytest.mark.parametrize("linked", ["blobs", "blobs/f00d"])
def test_blobs_that_are_links_themselves_lead_nowhere_else(tmp_path, linked):
    secret = write(tmp_path / "home/f00d", "secret")
    link(tmp_path / MODEL / linked, secret if linked.endswith("f00d") else secret.parent)
    snapshot = tmp_path / MODEL / "snapshots/0123abc"
    link(snapshot / "tokenizer.json", tmp_path / MODEL / "blobs/f00d")
    with pytest.raises(CheckpointError, match="outside of the model's folder"):
        read_confined(snapshot, "tokenizer.json", 99)


def test_convert_copies_no_file_from_elsewhere(tmp_path, models):
    model = tmp_path / "data/snapshots/model"
    model.parent.mkdir(parents=True)
    models.make(model)
    secret = write(tmp_path / "data/home/credentials.json", json.dumps({"key": "SECRET"}))
    (model / "tokenizer_config.json").unlink(missing_ok=True)
    link(model / "tokenizer_config.json", secret)
    result = CliRunner().invoke(app, ["convert", str(model), str(tmp_path / "out"), "--to", "hf"])
    assert "is a link" in str(result.exception)
    assert not (tmp_path / "out").exists()
