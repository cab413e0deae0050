"""Every value of every option of `[engine.gpu]` on a CPU: it trains two steps, or is refused before the first one.

A refusal names the option with its value, and a remedy. Rows hold several documents, as with any text.
"""

import re
import typing
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from lt_model import ModelConfig
from lt_trainer.engine import World
from lt_trainer_gpu.options import GpuOptions
from lt_trainer_gpu.spec import SPEC

BUDGET = ("compile=true", "activation_checkpointing=memory_budget")
OTHERS: dict[str, tuple[str, ...]] = {
    "fp8_skipped_blocks": ("fp8=rowwise", "fp8_skipped_blocks=0"),
    "activation_memory_budget": (*BUDGET, "activation_memory_budget=0.3"),
    "pad_vocab_to_multiple_of": ("pad_vocab_to_multiple_of=48",),
    "loss_chunk_tokens": ("loss_chunk_tokens=5",),
    "pipeline_stages_per_rank": ("pipeline_stages_per_rank=2",),
}
"""Options that are numbers, each with a value that means something and what it requires."""
REFUSED = {
    *(f"attention={name}" for name in ("cudnn", "flash", "varlen", "flex", "flash-attn")),
    *("activation_checkpointing=memory_budget", "pipeline_stages_per_rank=2"),
    *("reshard_after_forward=false", "reduce_each_micro_batch=true", "cuda_graphs=true"),
}
"""What one process on a CPU cannot run; of devices, it depends on the machine."""


def changes() -> Iterator[tuple[str, ...]]:
    """Every value of every option, with what it requires."""
    hints = typing.get_type_hints(GpuOptions)
    for name in GpuOptions.__annotations__:
        choices = (True, False) if hints[name] is bool else typing.get_args(hints[name])
        if not choices:
            yield OTHERS[name]
        for value in choices:
            needed = ("compile=auto",) if value == "memory_budget" else ()
            yield (*needed, f"{name}={str(value).lower() if isinstance(value, bool) else value}")


def is_compiled(change: tuple[str, ...]) -> bool:
    return "compile=true" in change


@pytest.fixture
def undo_global_settings() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=",".join(change), marks=[pytest.mark.slow] if is_compiled(change) else [])
        for change in changes()
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces
@pytest.mark.usefixtures("undo_global_settings")
def test_a_value_trains_or_is_refused_before_the_first_step(
    recipe: Callable, batches: Callable, change: tuple[str, ...]
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "n_heads": 4, "n_kv_heads": 2, "n_layers": 4}
    sets = [f"model.{name}={value}" for name, value in shape.items()] + ["data.seq_len=32", "engine.gpu.dtype=float32"]
    made = recipe(*sets, *(f"engine.gpu.{one}" for one in change))
    config = ModelConfig(vocab_size=64, max_position_embeddings=64, tie_word_embeddings=False, **shape)
    engine = None
    try:
        SPEC.check(made, World())
        engine = SPEC.open(made, config, World())
        steps = [engine.step(batch, 1e-3) for batch in batches(2, n_micro=1, micro_batch_size=2)]
        losses = [one.loss for one in engine.fetch_metrics(steps)]
    except ValueError as error:
        refused = error
    else:
        refused = None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    name, _, value = change[-1].partition("=")
    assert (refused is not None) == (change[-1] in REFUSED) or name == "device", str(refused)
    if refused is None:
        assert all(0 < loss < 10 for loss in losses)
        return
    assert engine is None, f"refused after the engine was opened: {refused}"
    assert re.search(rf"engine\.gpu\.{name} = \"?{value}\"?[ ,:]", str(refused), re.IGNORECASE), str(refused)
    assert refused.exit_code == 64
