"""Every training example resolves, plans on the devices that it names, and trains in a shrunk version with its layout.

The shrunk version keeps what an example is about: the layout, recomputation, where the model comes from. Sizes, steps
and devices are overridden, and the ranks are forks on the CPU.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lt_data import TokenStore, pack
from lt_model import n_parameters
from lt_test_helpers.pool import RankPool
from lt_test_helpers.run_files import read_losses
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.planning.devices import DEVICES
from lt_trainer.planning.plan import make_plan

EXAMPLES = Path(__file__).parents[1] / "examples"
SEQ_LEN = 64
SHRUNK_OVERRIDES = (
    "parallel.n_nodes=1",
    "batch.global_batch_size=8",
    "batch.micro_batch_size=1",
    "schedule.max_steps=2",
    "schedule.warmup_steps=1",
    "metrics.log_interval=1",
    f"data.seq_len={SEQ_LEN}",
    "engine.gpu.device=cpu",
    "engine.gpu.dtype=float32",
    "engine.gpu.attention=auto",
)
SMALL_MODEL_OVERRIDES = (
    "model.vocab_size=128",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "model.n_layers=2",
    "model.max_position_embeddings=0",
)
# Example: millions of parameters, nodes of the whole run, ranks of the shrunk one, and what shrinks its layout.
LAYOUTS: dict[str, tuple[float, int, int, tuple[str, ...]]] = {
    "litespark-default.toml": (134.8, 1, 1, ()),
    "smp-70b.toml": (68976.6, 8, 4, ("parallel.tp=2", "parallel.dp_replicate=2", "parallel.dp_shard=1")),
    "smp-70b-pp.toml": (68976.6, 8, 8, ("parallel.pp=2", "parallel.tp=2", "parallel.dp_shard=2")),
    "smp-70b-fp8.toml": (
        68976.6,
        8,
        4,
        # fp8 takes sizes that are multiples of 16 on every rank
        (
            "parallel.tp=2",
            "parallel.dp_replicate=2",
            "parallel.dp_shard=1",
            "model.hidden_size=64",
            "model.intermediate_size=64",
            "model.n_layers=3",
        ),
    ),
    "bench-7b/hsdp.toml": (6738.4, 4, 4, ("parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "bench-7b/tp.toml": (6738.4, 1, 4, ("parallel.tp=2",)),
    "bench-7b/checkpointing.toml": (6738.4, 1, 2, ()),
    "bench-7b/no-checkpointing.toml": (6738.4, 1, 2, ()),
    "bench-7b/colossalai.toml": (6738.4, 4, 2, ()),
    "bench-7b/gemini-offload.toml": (6738.4, 1, 2, ()),
}
FINE_TUNING_EXAMPLES = ("fine-tune-from-name.toml", "fine-tune-from-file.toml")


@pytest.fixture(scope="module")
def ranks() -> RankPool:
    return RankPool(8, preload=("lt_trainer.training.loop", "lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize"))


@pytest.fixture(scope="module")
def model(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little model of transformers, with the tokenizer of the data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    store = TokenStore(prepared / "train")
    pack(store, seq_len=SEQ_LEN)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=store.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    for name, data in store.tokenizer().files.items():
        (folder / name).write_bytes(data)
    return folder


def train_on_rank(example: str, sets: tuple[str, ...]) -> int:
    """One rank's training, in that rank; the exit code."""
    torch.set_num_threads(1)
    return run(load(EXAMPLES / example, overrides=list(sets)))


def test_the_examples_are_all_here() -> None:
    found = {str(path.relative_to(EXAMPLES)) for path in (*EXAMPLES.glob("*.toml"), *EXAMPLES.glob("bench-7b/*.toml"))}
    assert found == {*LAYOUTS, *FINE_TUNING_EXAMPLES}


def named_devices(example: str) -> tuple[str, int]:
    """Device and devices of a node in the `lt train plan` line of an example."""
    line = rf"#   lt train plan examples/{re.escape(example)} --devices (\d+) --device (\S+)\n"
    found = re.search(line, (EXAMPLES / example).read_text(encoding="utf-8"))
    assert found is not None, f"{example} names no devices"
    return found[2], int(found[1])


@pytest.mark.parametrize("example", LAYOUTS)
def test_an_example_resolves_and_fits_the_devices_that_it_names(example: str) -> None:
    millions, nodes, _, _ = LAYOUTS[example]
    device, devices = named_devices(example)
    plan = make_plan(load(EXAMPLES / example).recipe, device=DEVICES[device], devices=devices)
    assert n_parameters(plan.config) / 1e6 == pytest.approx(millions, abs=0.05)
    assert plan.layout.world_size == devices * nodes
    assert plan.fits
    assert plan.recipe.data.synthetic
    if example.startswith("bench-7b"):  # the benchmark that they follow has these cards
        assert device == ("l4" if "offload" in example else "l40s")


def test_small_gpus_need_the_offload_of_their_example() -> None:
    for offload in (True, False):
        sets = [f"engine.gpu.optimizer_offload={str(offload).lower()}"]
        recipe = load(EXAMPLES / "bench-7b/gemini-offload.toml", overrides=sets)
        assert make_plan(recipe.recipe, device=DEVICES["l4"], devices=4).fits == offload


@pytest.mark.parametrize("example", LAYOUTS)
def test_a_shrunk_example_trains(example: str, ranks: RankPool, tmp_path: Path) -> None:
    _, _, n_ranks, layout = LAYOUTS[example]
    sets = (*SHRUNK_OVERRIDES, *SMALL_MODEL_OVERRIDES, *layout, f"run.dir={tmp_path / 'run'}")
    assert ranks.run(train_on_rank, example, sets, ranks=n_ranks) == [0] * n_ranks
    found = read_losses(tmp_path / "run").values()
    assert len(found) == 2
    assert all(4 < loss < 6 for loss in found)  # random ids of 128: ln 128 = 4.85


@pytest.mark.parametrize("example", FINE_TUNING_EXAMPLES)
def test_an_example_starts_from_a_model(
    example: str, ranks: RankPool, model: Path, prepared: Path, tmp_path: Path, lt: Callable[..., str]
) -> None:
    given = (f"model.init_from={model}", f"data.store={prepared / 'train'}", f"run.dir={tmp_path / 'run'}")
    plan = make_plan(load(EXAMPLES / example, overrides=list(given)).recipe, device=DEVICES["h100"], devices=8)
    assert plan.fits
    assert plan.config.hidden_size == 32  # the model's own
    assert ranks.run(train_on_rank, example, (*SHRUNK_OVERRIDES, *given), ranks=1) == [0]
    assert len(read_losses(tmp_path / "run")) == 2
