"""Engine with another program's file format: save, retention, stop and resume work as with ours."""

from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest

from lt_ckpt import Checkpoint, CheckpointError, Shard, convert_checkpoint, find_latest_valid, open_source, verify
from lt_ckpt.formats import ConvertOptions
from lt_ckpt.nxd.format import open_nxd
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.rank_writer import NxdRankWriter, optimizer_state_keys
from lt_ckpt.source import TensorReader
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.engine import Snapshot
from lt_trainer.run_directory.jsonl import read_jsonl

CARRIER = "model.norm.weight"
"""The tensor whose place the fake engine's weights take."""


@pytest.fixture
def nxd_engine(fake_engine, recipe_base):
    """The fake engine, with its weights as one tensor of a Llama that it saves as files of NxD."""
    recipe_base["model"] |= {"hidden_size": 16, "intermediate_size": 24}
    real = fake_engine.open

    def open_engine(recipe, model, world):
        engine = real(recipe, model, world)
        cut = NxdOptions(xser=True)
        keys = optimizer_state_keys(model, cut, 0, 0)
        engine.state_bytes = lambda: sum(shard.n_bytes for shard in state(engine).shards)

        def state(self: Any) -> Snapshot:
            part = NxdRankWriter(
                config=model,
                options=cut,
                step=self.steps,
                param_group_settings=({"lr": 0.5},),
                param_group_keys=(keys,),
            )
            shards: list[Shard] = []
            for tensor in part.model_tensors():
                for group in ("weights", "exp_avg", "exp_avg_sq"):
                    carries = (group, tensor.key) == ("weights", CARRIER)
                    data = self.weights if carries else np.zeros(tensor.shape, "<f4")
                    shards.append(
                        Shard(
                            group=group,
                            name=tensor.key,
                            dtype="F64" if carries else "F32",
                            global_shape=tensor.shape,
                            offset=(0,) * len(tensor.shape),
                            shape=tensor.shape,
                            data=data.reshape(-1).view(np.uint8),
                        )
                    )
            return Snapshot(
                shards=shards,
                scalars={"optimizer_step": self.steps},
                file_layout=part,
                layout_metadata={"param_groups": [{"lr": 0.5}]},
            )

        def restore(self: Any, checkpoint: Checkpoint) -> None:
            self.weights = checkpoint.read("weights", CARRIER).view(np.float64).copy()
            self.steps = int(checkpoint.manifest.scalars["optimizer_step"])

        engine.state, engine.restore = MethodType(state, engine), MethodType(restore, engine)
        return engine

    fake_engine.open = open_engine
    return fake_engine


def start(base, *overrides: str, **options) -> int:
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def losses(base) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_jsonl(Path(base["run"]["dir"]) / "metrics.jsonl") if "loss" in r}


@pytest.mark.parametrize(
    "background", [pytest.param(False, marks=pytest.mark.slow), True], ids=["foreground", "background"]
)
def test_it_saves_keeps_stops_and_goes_on(recipe_base, nxd_engine, tmp_path, background) -> None:
    assert start(recipe_base) == 0
    whole = losses(recipe_base)
    recipe_base["run"]["dir"] = str(tmp_path / "stopped")
    overrides = [f"checkpoint.async_save={str(background).lower()}", "checkpoint.interval=3", "checkpoint.keep_last=2"]
    assert start(recipe_base, *overrides, stop_after_step=11) == 75
    root = tmp_path / "stopped" / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["step-00000009", "step-00000011"]
    assert start(recipe_base, *overrides) == 0
    assert losses(recipe_base) == whole
    assert sorted(path.name for path in root.iterdir()) == ["step-00000018", "step-00000020"]
    found, rejected = find_latest_valid(root)
    assert found is not None
    assert (found.step, rejected) == (20, [])
    assert found.manifest.layout["param_groups"] == [{"lr": 0.5}]
    for path in sorted(root.iterdir()):
        assert verify(path).is_ok
        assert {"checkpoint", "done", "model", "optim", "COMMIT"} <= {entry.name for entry in path.iterdir()}
    # What NxD's files hold is the engine's state at that step.
    config = found.manifest.model
    assert config["hidden_size"] == 16
    source = open_nxd(found.path, config=open_source(found.path).config)
    with TensorReader(source.root) as reader:
        held = reader.read(source.weights, CARRIER).view(np.float64)
    assert held.tobytes() == nxd_engine.opened[-1].weights.tobytes()


def test_the_rehearsal_asks_for_as_much_as_is_saved(recipe_base, nxd_engine, tmp_path) -> None:
    """Else the first checkpoint of a run would find the disk full."""
    assert start(recipe_base, "schedule.max_steps=1", "schedule.warmup_steps=0") == 0
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    groups = Checkpoint.open(path).manifest.tensors.values()
    records = [record for members in groups for record in members.values()]
    n_bytes = sum(record.slice_bytes(piece) for record in records for piece in record.slices)
    assert nxd_engine.opened[-1].state_bytes() == n_bytes


def test_a_flipped_bit_of_its_tensors_is_not_converted(recipe_base, nxd_engine, tmp_path) -> None:
    """Their files are hashed as wholes; on the way out each tensor is compared with its CRC."""
    assert start(recipe_base, "schedule.max_steps=1", "schedule.warmup_steps=0") == 0
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    convert_checkpoint(open_source(path), tmp_path / "good", ConvertOptions(format="hf"))
    piece = Checkpoint.open(path).manifest.tensors["weights"][CARRIER].slices[0]
    content = bytearray((path / piece.file).read_bytes())
    content[piece.byte_offset] ^= 1
    (path / piece.file).write_bytes(content)
    with pytest.raises(CheckpointError, match="differ from their checksum"):
        convert_checkpoint(open_source(path), tmp_path / "out", ConvertOptions(format="hf"))
    assert not (tmp_path / "out").exists()
