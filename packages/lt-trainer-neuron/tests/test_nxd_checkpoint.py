"""What the engine saves: NxD's kind of folder, a checkpoint of ours, and what the ranks hold, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from neuron_engine import neuron_engine

from lt_ckpt import (
    Checkpoint,
    CheckpointMetadata,
    begin_save,
    commit_save,
    open_source,
    verify,
    write_rank_files,
)
from lt_ckpt.dtypes import cast
from lt_ckpt.nxd.format import open_nxd
from lt_ckpt.source import Source
from lt_ckpt.torchfile.file import load_pt
from lt_model import ModelConfig, config_from_hf
from lt_test_helpers import layouts
from lt_trainer.checkpointing.pretrained import PretrainedWeights
from lt_trainer_neuron.engine import NeuronEngine

SEQ_LEN, ROWS, VOCAB = 16, 4, 62
TP2, TP4, PP2 = (f"parallel.{axis}" for axis in ("tp=2", "tp=4", "pp=2"))
GQA = ("engine.neuron.qkv_linear=true", "engine.neuron.kv_size_multiplier=2", "engine.neuron.fuse_qkv=true")
PLAIN = "engine.neuron.save_xser=false"
BF16, FP32 = "engine.neuron.cpu_dtype=bfloat16", "engine.neuron.cpu_dtype=float32"


def config(kv_heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB if kv_heads == 4 else 64,
        hidden_size=16,
        intermediate_size=24,
        n_heads=4,
        n_kv_heads=kv_heads,
        n_layers=3,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=tied,
    )


Boxes = list[tuple[str, str, tuple[int, ...], tuple[int, ...], bytes]]


def boxes(engine: NeuronEngine) -> Boxes:
    """What a rank holds by the model's names: group, name, offset, shape, bytes."""
    return [(s.group, s.name, s.offset, s.shape, s.bytes().tobytes()) for s in engine.iter_model_shards()]


def saved(model: ModelConfig, sets: tuple[str, ...], folder: str) -> tuple[str, Boxes, int]:
    """In a rank: two steps and a save; its path, what the rank held, and the bytes that it had announced."""
    engine = neuron_engine(model, *sets, rows=ROWS, seq_len=model.max_position_embeddings)
    rank, world = engine.topology.rank, engine.topology.world_size
    batches = layouts.global_batches(2, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    engine.fetch_metrics([engine.step(layouts.rank_batch(batch, engine, 1), 1e-2) for batch in batches])
    tmp = Path(engine.control.broadcast(str(begin_save(Path(folder), step=2, world_size=world)) if rank == 0 else ""))
    snapshot = engine.state()
    write_rank_files(tmp, rank=rank, shards=snapshot.shards, writer=snapshot.file_layout)
    engine.control.all_reduce_max(0)
    meta = CheckpointMetadata(
        step=2,
        scalars=snapshot.scalars,
        model=model.to_dict(),
        layout=snapshot.layout_metadata,
        optimizer=snapshot.optimizer,
    )
    path = str(commit_save(tmp, world_size=world, metadata=meta)) if rank == 0 else ""
    held, announced = boxes(engine), engine.state_bytes()
    engine.close()
    return path, held, announced


LAYOUTS = {
    "tp2-dp2-bf16-xser": (4, config(4, False), (TP2, BF16)),
    "tp4-gqa-fused-fp32-plain": (4, config(2, False), (TP4, *GQA, FP32, PLAIN)),
    "pp2-dp2-bf16-tied": (4, config(4, True), (PP2, BF16, PLAIN)),
    "dp2-without-zero1": (2, config(4, True), (FP32, PLAIN, "engine.neuron.zero1=false")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_folder_holds_what_the_ranks_hold_for_us_and_for_nxd(ranks, tmp_path, name: str) -> None:
    n, model, sets = LAYOUTS[name]
    found = ranks.run(saved, model, sets, str(tmp_path), ranks=n)
    path = Path(found[0][0])
    assert verify(path).is_ok
    checkpoint = Checkpoint.open(path)
    masters = BF16 in sets
    assert set(checkpoint.groups) == {"weights", "exp_avg", "exp_avg_sq", *(["cast_weights"] if masters else [])}
    for group, tensor, offset, shape, data in (box for rank in found for box in rank[1]):
        assert checkpoint.read(group, tensor, offset=offset, shape=shape).tobytes() == data, (group, tensor)
    for tensor in checkpoint.names("cast_weights") if masters else ():
        rounded = cast(checkpoint.read("weights", tensor), "F32", checkpoint.specs("cast_weights")[tensor].dtype)
        assert checkpoint.read("cast_weights", tensor).tobytes() == rounded.tobytes(), tensor
    if masters:  # norms are computed with in fp32, as NxD's are
        dtypes = {name: spec.dtype for name, spec in checkpoint.specs("cast_weights").items()}
        assert {name for name, dtype in dtypes.items() if dtype == "F32"} == {name for name in dtypes if "norm" in name}
    # The bytes that a rehearsal asks for: all that is not padding, copies included.
    records = [record for members in checkpoint.manifest.tensors.values() for record in members.values()]
    n_bytes = sum(record.slice_bytes(piece) for record in records for piece in (*record.slices, *record.replicas))
    assert sum(rank[2] for rank in found) == n_bytes
    # NxD's way: markers, its trees, and the same tensors by its layout.
    assert [(path / marker).read_bytes() for marker in ("checkpoint", "done")] == [b"1", b"1"]
    content = torch.load(path / "user_content.pt", weights_only=True)
    assert content["total_steps"] == 2
    assert torch.load(path / "scheduler.pt", weights_only=True)["last_epoch"] == 2
    zero1 = "engine.neuron.zero1=false" not in sets
    ours, theirs = open_source(path), open_nxd(path, config=open_source(path).config, optimizer=zero1)
    assert theirs.format_info["xser"] == (PLAIN not in sets)
    same = {"weights": "cast_weights" if masters else "weights"}
    same |= {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"} if zero1 else {}
    same |= {"master": "weights"} if masters else {}
    assert set(theirs.groups) == set(same)
    if zero1:
        assert (theirs.format_info["step"], theirs.format_info["dp"]) == (2, n // (4 if TP4 in sets else 2))
    for group, own in same.items():
        assert bytes_of(theirs, group) == bytes_of(ours, own), group
    if not zero1:
        tree = torch.load(path / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
        assert list(tree) == ["state", "param_groups"]
        assert [len(group["params"]) for group in tree["param_groups"]] == [1 + 3 * 6, 1 + 3 * 2]
        assert not list((path / "optim").glob("dp_rank_01*"))
    if PLAIN in sets:
        stored = load_pt(path / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
        assert any(name.endswith("weight_qkv") for name in stored) == (GQA[-1] in sets)
    norms = load_pt(path / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")["param_groups"][1]
    assert norms["weight_decay"] == 0.0


def bytes_of(source: Source, group: str) -> dict[str, bytes]:
    """A group's tensors; a tied head, which is the embedding, is left out."""
    assert source.config is not None
    tied = source.config["tie_word_embeddings"]
    names = [name for name in source.groups[group].specs if not (tied and name == "lm_head.weight")]
    return {name: source.read(name, group=group).tobytes() for name in names}


DATA = Path(__file__).parents[2] / "lt-ckpt" / "tests" / "data" / "nxd" / "llama3-gqa-tp4-pp2-kv2"


def started(model: ModelConfig, sets: tuple[str, ...], source: str) -> Boxes:
    """In a rank: an engine that starts from a model."""
    engine = neuron_engine(model, *sets, rows=ROWS, seq_len=model.max_position_embeddings)
    opened = open_source(source, config=DATA / "hf" / "config.json")
    pretrained = PretrainedWeights(source=opened, source_model=model, model=model)
    engine.load_weights(pretrained)
    held = [box for box in boxes(engine) if box[0] == "weights"]
    engine.close()
    return held


@pytest.mark.parametrize("kind", ["hf", "nxd-plain", "nxd-xser"])
def test_it_starts_from_nxds_files_and_from_hugging_faces_alike(ranks, kind: str) -> None:
    reference = open_source(DATA / "hf")
    model = config_from_hf(dict(reference.config or {}))
    sets = (TP2, PP2, FP32)
    found = ranks.run(started, model, sets, str(DATA / kind), ranks=4)
    seen: dict[str, int] = {}
    for _, name, offset, shape, data in (box for rank in found for box in rank):
        whole = cast(reference.read(name, (offset, shape)), "BF16", "F32")
        assert whole.tobytes() == data, name
        seen[name] = seen.get(name, 0) + int(np.prod(shape))
    assert seen == {name: int(np.prod(spec.shape)) for name, spec in reference.weights.specs.items()}
