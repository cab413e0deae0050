"""Ranks on NxD's real source in its CPU mode: each trains the cases it is told and leaves what it saw in a file.

Arguments: folder for the results; JSON list of cases {"name", "kv_heads", "sets"}; the number of ranks.

The ranks are forks of one process, made when all is imported: importing torch-xla and NxD takes far more CPU time than
what is computed here. Nothing has run by then that a fork would lose: no thread, no device, no group.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import stand_ins
import torch

stand_ins.install()

from neuronx_distributed.parallel_layers import parallel_state  # noqa: E402
from neuronx_distributed.trainer import checkpoint as nxd_checkpoint  # noqa: E402

from lt_ckpt import CheckpointMetadata, begin_save, commit_save, write_rank_files  # noqa: E402
from lt_model import ModelConfig  # noqa: E402
from lt_test_helpers.layouts import step_batch  # noqa: E402
from lt_trainer.config.recipe import load  # noqa: E402
from lt_trainer.engine import StepBatch, World  # noqa: E402
from lt_trainer_neuron.engine import NeuronEngine  # noqa: E402
from lt_trainer_neuron.nxd.backend import NxdBackend  # noqa: E402
from lt_trainer_neuron.spec import SPEC  # noqa: E402

RATES = (0.0, 1e-3, 0.02)
ROWS, SEQ_LEN, VOCAB = 4, 16, 60
NUMPY = {"F32": np.float32, "F64": np.float64}


FIELDS = {
    8: {"family": "olmo2", "qk_norm": "full", "norm_place": "post", "qkv_bias": True, "o_bias": True},
    2: {"family": "qwen3", "qk_norm": "head", "head_dim": 6},
}


def model(kv_heads: int) -> ModelConfig:
    """The little model of a case: with biases and sums over all heads, or with copied heads and norms of each."""
    return ModelConfig(
        **FIELDS[kv_heads],
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        n_layers=2,
        n_heads=8,
        n_kv_heads=kv_heads,
        max_position_embeddings=SEQ_LEN,
    )


def batches() -> list[StepBatch]:
    """Global batches, [1, rows, T]."""
    rng = np.random.default_rng(5)
    found = []
    for _ in RATES:
        shape = (1, ROWS, SEQ_LEN)
        ids, labels = (rng.integers(0, VOCAB, shape, dtype=np.int32) for _ in range(2))
        labels[rng.random(shape) < 0.3] = -100
        cuts = rng.integers(1, SEQ_LEN, (1, ROWS, 1))
        documents = (np.arange(SEQ_LEN) >= cuts).astype(np.int32)
        found.append(
            step_batch(
                input_ids=ids,
                labels=labels,
                position_ids=(np.arange(SEQ_LEN) - documents * cuts).astype(np.int32),
                doc_ids=documents,
                valid_tokens=int((labels != -100).sum()),
            )
        )
    return found


def assert_nxd_loads(engine: NeuronEngine, backend: NxdBackend, config: ModelConfig, folder: Path) -> None:
    """Save as a run does, forget the layers' weights, and let NxD's own loader bring them back."""
    rank, world = engine.topology.rank, engine.topology.world_size
    folder.mkdir(exist_ok=True)
    tmp = Path(engine.control.broadcast(str(begin_save(folder, step=3, world_size=world)) if rank == 0 else ""))
    snapshot = engine.state()
    write_rank_files(tmp, rank=rank, shards=snapshot.shards, writer=snapshot.file_layout)
    engine.control.all_reduce_max(0)
    meta = CheckpointMetadata(
        step=3,
        scalars=snapshot.scalars,
        model=config.to_dict(),
        layout=snapshot.layout_metadata,
        optimizer=snapshot.optimizer,
    )
    saved = Path(engine.control.broadcast(str(commit_save(tmp, world_size=world, metadata=meta)) if rank == 0 else ""))
    before = {key: tensor.detach().clone() for key, tensor in backend.weights.items()}
    with torch.no_grad():
        for tensor in backend.weights.values():
            tensor.zero_()
    content = nxd_checkpoint.load_checkpoint(str(saved.parent), tag=saved.name, model=backend.stage, num_workers=8)
    for key, tensor in backend.weights.items():
        assert torch.equal(tensor, before[key]), key
    assert content is not None
    assert nxd_checkpoint.has_checkpoint(str(saved.parent))


def train(kv_heads: int, sets: list[str], folder: Path) -> dict[str, Any]:
    """Metrics of each step, the evaluated loss, and this rank's slices of the state."""
    world = World.from_env(os.environ)
    base = {
        "run": {"engine": "neuron"},
        "model": {"hidden_size": 32, "intermediate_size": 40, "n_heads": 8, "n_kv_heads": kv_heads, "n_layers": 2},
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        "optimizer": {"beta1": 0.8, "grad_clip": 0.3, "weight_decay": 0.1, "z_loss": 1e-3},
        "schedule": {"max_steps": 9, "warmup_steps": 1},
        "engine": {"neuron": {"num_neuroncores": world.local_size}},
    }
    engine = SPEC.open(load(base=base, overrides=sets).recipe, model(kv_heads), world)
    assert isinstance(engine, NeuronEngine)
    place, pendings = engine.topology, []
    mine = slice(place.dp_rank * ROWS // place.dp_size, (place.dp_rank + 1) * ROWS // place.dp_size)
    names = ("input_ids", "labels", "position_ids", "doc_ids")
    for batch, rate in zip(batches(), RATES, strict=True):
        arrays = {name: getattr(batch, name)[0, mine].reshape(-1, 1, SEQ_LEN) for name in names}
        part = step_batch(**arrays, valid_tokens=batch.valid_tokens)
        pendings.append(engine.step(part, rate))
    metrics = [(read.loss, read.grad_norm) for read in engine.fetch_metrics(pendings)]
    shards = []
    for shard in engine.iter_model_shards():
        values = shard.bytes().view(NUMPY[shard.dtype]).astype(float).tolist()
        shards.append(
            [shard.group, shard.name, list(shard.global_shape), list(shard.offset), list(shard.shape), values]
        )
    evaluated = engine.validate([part])
    loaded = ""
    if "engine.neuron.backend=cpu" in sets:
        engine.close()
    else:
        assert_nxd_loads(engine, engine.backend, model(kv_heads), folder)
        loaded = "exactly"
    return {"metrics": metrics, "evaluated": evaluated, "loaded": loaded, "shards": shards}


def rank_of(folder: Path, cases: list[dict[str, Any]]) -> None:
    """One rank's cases, one after the other."""
    found = {}
    for case in cases:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_kv_group()
        try:
            found[case["name"]] = train(case["kv_heads"], case["sets"], folder / case["name"])
        except BaseException as error:
            error.add_note(f"in the case {case['name']}, on rank {os.environ['RANK']}")
            raise
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def forked(folder: Path, cases: list[dict[str, Any]], rank: int) -> int:
    """The process id of a new rank."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        rank_of(folder, cases)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not go on as if it were the program
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, cases, size = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    running = {forked(folder, cases, rank) for rank in range(size)}
    failed = False
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and not failed:
            failed = True
            for other in running:  # they would wait for the one that failed
                os.kill(other, signal.SIGKILL)
    sys.exit(failed)
