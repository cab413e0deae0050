"""Damage that a rank finds while it restores: all ranks take the next older checkpoint, or none starts."""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lt_ckpt import Checkpoint, CheckpointMetadata, Shard, begin_save, commit_save, find_latest_valid, write_rank_files
from lt_ckpt.errors import CheckpointError
from lt_test_helpers.pool import RankPool
from lt_test_helpers.runs import events, start
from lt_trainer.checkpointing import checkpoints
from lt_trainer.control import Control
from lt_trainer.errors import RestoreError
from lt_trainer.resilience.rank_sync import read_on_all_ranks, run_on_rank0


@pytest.fixture
def unseen(monkeypatch) -> None:
    """Rank 0 sees no damage when it verifies: it comes later, or on the way to another rank."""
    blind = functools.partial(find_latest_valid, verify=False)
    monkeypatch.setattr(checkpoints, "find_latest_valid", blind)


def damage(folder: Path, name: str = "weights-*.safetensors") -> None:
    (file,) = folder.glob(name)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def test_the_other_ranks_leave_with_the_code_of_rank_0(monkeypatch) -> None:
    control = Control()
    monkeypatch.setattr(control, "broadcast", lambda value: ["", "S3 is away", 75])
    with pytest.raises(CheckpointError, match="S3 is away") as caught:
        run_on_rank0(control, False, str)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("verifies", [True, False])
def test_damage_leads_to_the_older_one(recipe_base, fake_engine, capsys, request, verifies: bool) -> None:
    if not verifies:
        request.getfixturevalue("unseen")
    assert start(recipe_base, stop_after_step=9) == 75
    folder = Path(recipe_base["run"]["dir"]) / "checkpoints"
    damage(folder / "step-00000009")
    assert start(recipe_base) == 0
    assert "step-00000009 is not used" in capsys.readouterr().out
    assert fake_engine.opened[-1].steps == 20
    assert [e["step"] for e in events(recipe_base, "resume")] == [6]
    assert [e["step"] for e in events(recipe_base, "data")] == [0, 6], "what is not read is not logged"


def test_without_another_the_run_ends_and_does_not_start_anew(recipe_base, fake_engine, unseen) -> None:
    assert start(recipe_base, stop_after_step=9) == 75
    for folder in (Path(recipe_base["run"]["dir"]) / "checkpoints").glob("step-*"):
        damage(folder)
    with pytest.raises(RestoreError, match="the bytes of tensor w have changed since the save"):
        start(recipe_base)


def test_a_rollback_leads_past_a_damaged_checkpoint_too(recipe_base, fake_engine, unseen, capsys) -> None:
    newest = Path(recipe_base["run"]["dir"]) / "checkpoints" / "step-00000012"
    fake_engine.on_step = lambda call: damage(newest) if call == 15 else None
    fake_engine.poison = lambda call, batch: call in (14, 15, 16)
    assert start(recipe_base, "fault_tolerance.max_skipped_steps=2") == 0
    out = capsys.readouterr().out
    assert f"{newest} is not used" in out
    assert "rollback from step 16 to step-00000006" in out


def test_experts_that_are_balanced_over_other_rows_are_a_line(recipe_base, fake_engine, capsys) -> None:
    recipe_base["model"] = {"preset": "tiny-30m-a9m"}
    for rows, step in ((4, 3), (2, 5), (2, 7)):
        assert start(recipe_base, f"batch.micro_batch_size={rows}", stop_after_step=step) == 75
    assert capsys.readouterr().out.count("balanced over the 2 rows of a pass on all ranks, before over 4\n") == 1


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pytest.importorskip("torch")
    return RankPool(2)


def save_rows(root: Path) -> Path:
    """Rows of a matrix on two ranks."""
    values = np.arange(64, dtype="<f4").reshape(8, 8)
    tmp = begin_save(root, step=1, world_size=2)
    for rank in range(2):
        part = values[4 * rank : 4 * rank + 4].reshape(-1).view(np.uint8)
        shard = Shard(
            group="weights", name="w", dtype="F32", global_shape=(8, 8), offset=(4 * rank, 0), shape=(4, 8), data=part
        )
        write_rank_files(tmp, rank=rank, shards=[shard])
    return commit_save(tmp, world_size=2, metadata=CheckpointMetadata(step=1))


def load_rows(path: str) -> str:
    """What a rank of an engine does; returns the error."""
    import torch
    import torch.distributed as dist

    from lt_trainer.torch import GlooControl, LocalShard, load_tensors

    dist.init_process_group("gloo")
    try:
        control, rank = GlooControl(30), dist.get_rank()
        local = torch.zeros(4, 8)
        shard = LocalShard(local=local, offset=(4 * rank, 0), shape=(8, 8))
        try:
            read_on_all_ranks(control, lambda: load_tensors(Checkpoint.open(path), {"weights": {"w": shard}}))
        except RestoreError as exc:
            return str(exc)
        assert local[0, 0] == 32 * rank
        return ""
    finally:
        dist.destroy_process_group()


def test_all_ranks_raise_where_one_finds_damage(pool: RankPool, tmp_path: Path) -> None:
    path = save_rows(tmp_path)
    assert pool.run(load_rows, str(path)) == ["", ""]
    file = path / "weights-00001.safetensors"
    damage(path, file.name)
    first, second = pool.run(load_rows, str(path))
    assert first.startswith(f"on another rank: {file}: ")
    assert second.startswith(f"{file}: ")
