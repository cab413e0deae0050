"""What `check` accepts and refuses on every mesh: the product of all meshes and changes is made here.

A change is something of a recipe that some meshes cannot run, with a rule that says which field each mesh must be
refused for. A refusal names that field with its value, and a remedy. Of the rest a seeded sample trains.
"""

import itertools
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lt_model import ModelConfig
from lt_test_helpers import layouts
from lt_test_helpers.meshes import CONTEXTS, DATA, DATA_RANKS, MAX_RANKS, PIPELINES, TENSORS
from lt_trainer.config.recipe import load
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer_gpu.spec import SPEC

SEQ_LEN, ROWS, VOCAB = 32, 8, 61
N_CHECKED = 9
"""Meshes that CI checks; all by `tools/slow.py`."""
MODEL = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 8, "n_kv_heads": 4, "n_layers": 5}


@dataclass(frozen=True)
class Mesh:
    """Keys of the axes."""

    pp: str
    cp: str
    tp: str
    dp: str

    @property
    def name(self) -> str:
        return "-".join(one for one in (self.pp, self.cp, self.tp, self.dp) if one) or "one"

    @property
    def ranks(self) -> int:
        return 2 ** sum(map(bool, (self.pp, self.cp, self.tp))) * DATA_RANKS[self.dp]

    @property
    def sets(self) -> tuple[str, ...]:
        return PIPELINES[self.pp] + CONTEXTS[self.cp] + TENSORS[self.tp] + DATA[self.dp]

    @property
    def shards(self) -> bool:
        return bool(self.cp or self.dp)


MESHES = {
    mesh.name: mesh
    for mesh in (Mesh(*keys) for keys in itertools.product(PIPELINES, CONTEXTS, TENSORS, DATA))
    if mesh.ranks <= MAX_RANKS
}

Rule = Callable[[Mesh], str]
"""Returns the field that a mesh is refused for; "" if it can run."""


def ramp(mesh: Mesh) -> tuple[str, ...]:
    """Batches that grow by one row of each data-parallel rank."""
    dp = DATA_RANKS[mesh.dp]
    return (f"batch.ramp.start={dp}", f"batch.ramp.increment={dp}", "batch.ramp.steps=1")


def rows_of(length: int) -> tuple[str, ...]:
    return (f"data.seq_len={length}",)


def divides(mesh: Mesh, length: int) -> bool:
    if mesh.cp:
        return length % 4 == 0  # two chunks for each of two ranks; with sequence parallelism too
    return mesh.tp != "sp" or length % 2 == 0


CHANGES: dict[str, tuple[tuple[str, ...] | Callable[[Mesh], tuple[str, ...]], Rule]] = {
    "none": ((), lambda mesh: ""),
    "rows-of-31": (rows_of(31), lambda mesh: "" if divides(mesh, 31) else "data.seq_len"),
    "rows-of-34": (rows_of(34), lambda mesh: "" if divides(mesh, 34) else "data.seq_len"),
    "ramp": (ramp, lambda mesh: "batch.ramp.start" if mesh.pp == "interleaved" else ""),
    "batch-for-half-the-ranks": (
        lambda mesh: (f"batch.global_batch_size={DATA_RANKS[mesh.dp] * 3 // 2}",),
        lambda mesh: "batch.global_batch_size" if mesh.pp == "interleaved" or DATA_RANKS[mesh.dp] > 1 else "",
    ),
    "attention-of-equal-lengths": (
        ("engine.gpu.attention=flash", "data.document_mask=false"),
        lambda mesh: "engine.gpu.attention" if mesh.cp else "",
    ),
    "attention-without-documents": (("engine.gpu.attention=flash",), lambda mesh: "engine.gpu.attention"),
    "kept-weights": (
        ("engine.gpu.reshard_after_forward=false",),
        lambda mesh: "" if mesh.shards else "engine.gpu.reshard_after_forward",
    ),
    "reduced-each": (
        ("engine.gpu.reduce_each_micro_batch=true",),
        lambda mesh: "" if mesh.shards else "engine.gpu.reduce_each_micro_batch",
    ),
    "bf16-weights-in-float64": (("optimizer.weights_dtype=bfloat16",), lambda mesh: "optimizer.weights_dtype"),
    "bf16-weights-reduced-each": (
        ("optimizer.weights_dtype=bfloat16", "engine.gpu.dtype=bfloat16", "engine.gpu.reduce_each_micro_batch=true"),
        lambda mesh: "engine.gpu.reduce_each_micro_batch",
    ),
    "bf16-weights": (("optimizer.weights_dtype=bfloat16", "engine.gpu.dtype=bfloat16"), lambda mesh: ""),
    "three-stages-per-rank": (
        ("engine.gpu.pipeline_stages_per_rank=3",),
        lambda mesh: "engine.gpu.pipeline_stages_per_rank",  # without a pipeline no effect, in one too few layers
    ),
    "offloaded-activations": (
        ("engine.gpu.activation_offload=true",),
        lambda mesh: "engine.gpu.activation_offload" if mesh.pp == "interleaved" else "",
    ),
    "offloaded-optimizer": (("engine.gpu.optimizer_offload=true",), lambda mesh: ""),
    "one-kv-head": (("model.n_kv_heads=1",), lambda mesh: "model.n_kv_heads" if mesh.tp else ""),
    "odd-feed-forward": (("model.intermediate_size=47",), lambda mesh: "model.intermediate_size" if mesh.tp else ""),
    "fp8": (
        ("engine.gpu.fp8=tensorwise", "engine.gpu.dtype=float32"),
        lambda mesh: "model.n_kv_heads" if mesh.tp else "",
    ),
    "fp8-short-rows": (
        ("engine.gpu.fp8=tensorwise", "engine.gpu.dtype=float32", *rows_of(16)),
        lambda mesh: "model.n_kv_heads" if mesh.tp else "data.seq_len" if mesh.cp else "",
    ),
    "another-world": (("parallel.dp_shard=3",), lambda mesh: "parallel.dp_shard"),
}


def recipe_of(mesh: Mesh, change: str) -> Recipe:
    base = {
        "model": MODEL,
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        "schedule": {"max_steps": 2, "warmup_steps": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    sets = CHANGES[change][0]
    return load(base=base, overrides=(*mesh.sets, *(sets(mesh) if callable(sets) else sets))).recipe


RANDOM = random.Random(int(os.environ.get("LT_SEED", "20")))
SOME_MESHES = RANDOM.sample(list(MESHES), N_CHECKED)


@pytest.mark.parametrize(
    "names", [SOME_MESHES, pytest.param(list(MESHES), marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_each_mesh_is_accepted_or_refused_for_the_field_that_is_wrong(change: str, names: list[str]) -> None:
    for mesh in (MESHES[name] for name in names):
        field = CHANGES[change][1](mesh)
        recipe, world = recipe_of(mesh, change), World(size=mesh.ranks, local_size=mesh.ranks)
        if not field:
            SPEC.check(recipe, world)
            continue
        with pytest.raises(RecipeError) as caught:
            SPEC.check(recipe, world)
        assert field in caught.value.values, (mesh.name, str(caught.value))
        assert caught.value.remedy, mesh.name


def test_tensor_parallel_ranks_are_on_one_node() -> None:
    for mesh in MESHES.values():
        recipe = load(
            base={"data": {"store": "unused"}}, overrides=(*mesh.sets, f"parallel.n_nodes={mesh.ranks}")
        ).recipe
        world = World(size=mesh.ranks, local_size=1)
        if not mesh.tp:
            continue
        with pytest.raises(RecipeError, match=r"parallel.tp = 2: .* to a divisor of 1, the ranks of a node"):
            SPEC.check(recipe, world)


NEEDS_CUDA = {"attention-of-equal-lengths"}
RUNNABLE = [change for change in CHANGES if change not in NEEDS_CUDA]
ACCEPTED = [(mesh, change) for change in RUNNABLE for mesh in MESHES if not CHANGES[change][1](MESHES[mesh])]
SAMPLE = RANDOM.sample(ACCEPTED, math.ceil(len(ACCEPTED) / 8))


def train(name: str, change: str) -> tuple[list[float], int]:
    """In a rank: the losses of two steps."""
    mesh = MESHES[name]
    recipe, world = recipe_of(mesh, change), World.from_env(os.environ)
    SPEC.check(recipe, world)
    shape = {name: getattr(recipe.model, name) for name in MODEL}
    config = ModelConfig(vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=False, **shape)
    engine = SPEC.open(recipe, config, world)
    losses = []
    for _ in range(2):
        rows = recipe.batch.step_size_divisor
        (batch,) = layouts.global_batches(1, rows=rows, seq_len=recipe.data.seq_len, vocab=VOCAB)
        losses += engine.fetch_metrics([engine.step(layouts.rank_batch(batch, engine, 1), 1e-2)])
    engine.close()
    return [one.loss for one in losses], world.size


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "change"), SAMPLE)
def test_what_is_accepted_trains(ranks, mesh: str, change: str) -> None:
    """All ranks have the losses of one process with the same change, to the rounding of the narrowest dtype."""
    ((wanted, _),) = ranks.run(train, "one", change, ranks=1) if not CHANGES[change][1](MESHES["one"]) else [([], 0)]
    found = ranks.run(train, mesh, change, ranks=MESHES[mesh].ranks)
    assert all(losses == found[0][0] for losses, _ in found)
    assert all(math.isfinite(loss) for loss in found[0][0])
    if wanted and change != "ramp":  # whose rows depend on the mesh
        near = 5e-2 if change.startswith(("fp8", "bf16")) else 1e-12
        assert found[0][0] == pytest.approx(wanted, rel=near)
