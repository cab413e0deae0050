"""The format of checkpoints, as committed: a later version reads it, with the same values."""

import json
from pathlib import Path

from lt_ckpt import Checkpoint, OptimizerRecord, find_latest_valid, verify

GOLDEN = Path(__file__).parent / "data" / "v2"


def test_version_2_is_read(toy):
    found, rejected = find_latest_valid(GOLDEN)
    assert found is not None
    assert rejected == []
    assert verify(found.path).is_ok
    toy.check(found, seed=42)
    assert found.manifest.scalars == {"lr": 0.1}
    assert found.manifest.optimizer == OptimizerRecord(name="sgd", slots=("exp_avg",))
    assert found.manifest.data == {"row": 336}
    assert found.tokenizer_files() == {"tokenizer.json": b"{}"}


def test_version_2_is_what_is_written(tmp_path, toy):
    """Apart from the time, the owner and the token, a save of the same state is the same, byte for byte."""
    here, there = toy.save(tmp_path, 42), GOLDEN / "step-00000042"
    assert sorted(path.name for path in here.iterdir()) == sorted(path.name for path in there.iterdir())
    for path in there.glob("*.safetensors"):
        assert (here / path.name).read_bytes() == path.read_bytes()
    ours, theirs = (json.loads((folder / "manifest.json").read_bytes()) for folder in (here, there))
    assert ours["tensors"] == theirs["tensors"]
    assert ours.keys() == theirs.keys()
    assert Checkpoint.open(here).manifest.tensors == Checkpoint.open(there).manifest.tensors
