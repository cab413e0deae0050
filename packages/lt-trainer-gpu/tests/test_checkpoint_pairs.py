"""Checkpoints of each mesh taken over by each other mesh, in float64: the same bits, and the same loss after them.

Each mesh trains two steps, saves, and takes a third step. Then each mesh, with other initial weights, restores all
checkpoints one after the other, those of each mesh for AdamW and Muon, tied and untied, and takes that third step.

Two meshes take over each other's in CI (LT_SEED chooses others), all of them by `tools/slow.py`.
"""

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lt_ckpt import Checkpoint, OptimizerRecord
from lt_model import config_from_hf
from lt_test_helpers import layouts
from lt_test_helpers.layouts import StateSlice, assemble, copy_slices, rank_batch
from lt_trainer.config.model_section import architecture_values
from lt_trainer.config.section import unflatten
from lt_trainer_gpu.engine import GpuEngine

ROWS, N_MICRO, SEQ_LEN, VOCAB = 24, 2, 16, 61
MODEL = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 8, "n_kv_heads": 4, "n_layers": 5}
PP, CP, TP, EP = "parallel.pp=2", "parallel.cp=2", "parallel.tp=2", "parallel.ep=2"
SP, REPLICATED = "parallel.sequence_parallel=true", "parallel.dp_replicate=2"
INTERLEAVED = "engine.gpu.pipeline_stages_per_rank=2"
MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "fsdp": (2, ()),
    "fsdp3-uneven": (3, ()),
    "ddp": (2, (REPLICATED,)),
    "hsdp": (4, (REPLICATED,)),
    "tp": (2, (TP,)),
    "fsdp-tp-sp": (4, (TP, SP)),
    "cp": (2, (CP,)),
    "hsdp-cp": (4, (CP, REPLICATED)),
    "pp": (2, (PP,)),
    "pp4-fsdp": (8, ("parallel.pp=4",)),
    "pp-interleaved": (2, (PP, INTERLEAVED)),
    "pp-cp-tp-sp": (8, (PP, CP, TP, SP)),
}
EXPERTS = {
    **{"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 32, "intermediate_size": 48},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 5, "vocab_size": VOCAB},
}
EP_MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ep": (2, (EP,)),
    "ep-hsdp-pp": (8, (EP, REPLICATED, PP)),
    "ep-tp-sp": (4, (EP, TP, SP)),
    "ep4-more-ranks-than-experts": (8, ("parallel.ep=4", CP)),
}
ADAMW = OptimizerRecord(name="adamw", slots=("exp_avg", "exp_avg_sq"))
RECORDS = {"adamw": ADAMW, "adamw-bf16": ADAMW} | {
    name: OptimizerRecord(name="muon", slots=("momentum", "exp_avg", "exp_avg_sq")) for name in ("muon", "muon-experts")
}
STATES = [(optimizer, tied) for optimizer in RECORDS for tied in (False, True)]
N_SAMPLED = 2
RANDOM = random.Random(int(os.environ.get("LT_SEED", "20")))
SAMPLE = RANDOM.sample([name for name, (n, _) in MESHES.items() if n <= 4], N_SAMPLED)
SAMPLED_STATE = RANDOM.choice(STATES)


def open_engine(optimizer: str, tied: bool, sets: Sequence[str]) -> GpuEngine:
    name, _, variant = optimizer.partition("-")
    model, named = {**MODEL, "tie_word_embeddings": tied}, {"name": name, "weight_decay": 0.1}
    if variant == "bf16":
        named["moments_dtype"] = "bfloat16"
    if variant == "experts":  # their losses depend on the rows of a micro-step
        sets = (*sets, "moe.aux_loss=0")
        model = unflatten(architecture_values(config_from_hf(EXPERTS | {"tie_word_embeddings": tied})))
    return layouts.open_engine(*sets, model=model, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB, optimizer=named)


def micro_rows(engine: GpuEngine) -> int:
    """Rows of a micro-batch: few micro-batches on each mesh, since a little step takes the time of their number."""
    return ROWS // engine.topology.dp_size // N_MICRO


def batches() -> list[layouts.StepBatch]:
    return layouts.global_batches(3, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)


def save(optimizer: str, tied: bool, sets: Sequence[str], folder: str) -> tuple[str, list[StateSlice], list[float]]:
    """In a rank: path of the checkpoint, the state in it, the losses of all three steps."""
    engine = open_engine(optimizer, tied, sets)
    path, saved, _, losses = layouts.train_save_train(
        engine, batches(), folder, lambda: engine.state().shards, micro_rows(engine)
    )
    return path, saved, losses


def take_over(
    optimizer: str, tied: bool, sets: Sequence[str], paths: Mapping[str, str]
) -> dict[str, tuple[list[StateSlice], int, float]]:
    """In a rank: state, step count and loss of the third step after restoring each checkpoint."""
    engine, found = open_engine(optimizer, tied, ("run.seed=7", *sets)), {}
    third = rank_batch(batches()[2], engine, micro_rows(engine))
    for name, path in paths.items():
        engine.restore(Checkpoint.open(Path(path)))
        restored, steps = copy_slices(engine.state().shards), engine.state().scalars["optimizer_step"]
        (metrics,) = engine.fetch_metrics([engine.step(third, 1e-2)])
        found[name] = restored, int(steps), metrics.loss
    engine.close()
    return found


def prove(ranks, folder: Path, optimizer: str, tied: bool, names: Sequence[str]) -> None:
    saved = {}
    for name in names:
        n, sets = (MESHES | EP_MESHES)[name]
        saved[name] = ranks.run(save, optimizer, tied, sets, str(folder / name), ranks=n)
    paths = {name: found[0][0] for name, found in saved.items()}
    assert {Checkpoint.open(Path(path)).manifest.optimizer for path in paths.values()} == {RECORDS[optimizer]}
    states = {name: assemble([rank[1] for rank in found]) for name, found in saved.items()}
    for name in names:
        n, sets = (MESHES | EP_MESHES)[name]
        taken = ranks.run(take_over, optimizer, tied, sets, paths, ranks=n, timeout_s=300)
        for left, wanted in states.items():
            restored = assemble([rank[left][0] for rank in taken])
            assert restored.keys() == wanted.keys()
            differing = [key for key in wanted if wanted[key].tobytes() != restored[key].tobytes()]
            assert differing == [], f"{left} -> {name}"
            assert {rank[left][1] for rank in taken} == {2}
            assert [rank[left][2] for rank in taken] == [pytest.approx(saved[left][0][2][2], rel=1e-12)] * n


def test_sampled_meshes_take_over_each_others_checkpoints(ranks, tmp_path: Path) -> None:
    prove(ranks, tmp_path, *SAMPLED_STATE, SAMPLE)


@pytest.mark.parametrize(
    ("optimizer", "tied", "names"),
    [
        ("adamw", False, ("one", "hsdp-cp")),
        ("adamw-bf16", True, ("hsdp", "fsdp-tp-sp")),
        ("muon-experts", False, ("fsdp", "ep-tp-sp")),
    ],
)
def test_two_meshes_take_over_each_others_checkpoints(ranks, tmp_path: Path, optimizer: str, tied: bool, names) -> None:
    prove(ranks, tmp_path, optimizer, tied, names)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "tied"), STATES)
def test_every_mesh_takes_over_every_checkpoint(ranks, tmp_path: Path, optimizer: str, tied: bool) -> None:
    prove(ranks, tmp_path, optimizer, tied, list(MESHES | EP_MESHES if "experts" in optimizer else MESHES))
