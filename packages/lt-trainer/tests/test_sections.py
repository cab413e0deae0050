"""What each section and the whole recipe refuse: the full message of every contradiction."""

from typing import Any

import pytest

from lt_trainer.errors import RecipeError
from lt_trainer.recipe import (
    BatchOptions,
    CheckpointOptions,
    DataOptions,
    MetricsOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
    Recipe,
    RopeScalingOptions,
    RunOptions,
    ScheduleOptions,
    load,
)

STORE = {"data": {"store": "stores/train"}}


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 64
    return str(caught.value)


CHECKS = [
    (RunOptions, {"out": ""}, "run.out = '': a run needs a directory; set run.out to one, such as runs/run"),
    (RunOptions, {"seed": -1}, "run.seed = -1: must lie in [0, 2**63); use a small whole number such as 0"),
    (ModelOptions, {"vocab_size": -1}, "model.vocab_size = -1: must be at least 0; use 0 or more"),
    (ModelOptions, {"n_layers": 0}, "model.n_layers = 0: must be at least 1; use 1 or more"),
    (ModelOptions, {"norm_eps": 0}, "model.norm_eps = 0.0: must be greater than 0; the default is 1e-05"),
    (
        ModelOptions,
        {"n_heads": 7, "n_kv_heads": 7},
        "model.hidden_size = 768, model.n_heads = 7: every head needs an even share of the hidden size; "
        "use a hidden size that is a multiple of 14, or another number of heads",
    ),
    (
        ModelOptions,
        {"n_kv_heads": 5},
        "model.n_heads = 12, model.n_kv_heads = 5: every key/value head must serve equally many attention heads; "
        "set model.n_kv_heads (N_KV_HEADS) to a divisor of 12",
    ),
    (
        RopeScalingOptions,
        {"factor": 8, "low_freq_factor": 4},
        "model.rope_scaling.low_freq_factor = 4.0, model.rope_scaling.high_freq_factor = 4.0: "
        "must hold 0 < low_freq_factor < high_freq_factor; Llama 3.1 uses 1 and 4",
    ),
    (
        RopeScalingOptions,
        {"high_freq_factor": 5},
        "model.rope_scaling.high_freq_factor = 5.0: has no effect when model.rope_scaling.factor is 1; "
        "set model.rope_scaling.factor (Llama 3.1 uses 8) or leave the section out",
    ),
    (DataOptions, {"seq_len": 1}, "data.seq_len = 1: must be at least 2; use 2 or more"),
    (
        DataOptions,
        {"tokenizer": ""},
        "data.tokenizer = '': the name is empty; leave it out to use the store's tokenizer",
    ),
    (
        BatchOptions,
        {"global_batch": 256, "micro_batch": 6},
        "batch.global_batch = 256, batch.micro_batch = 6: the global batch must be a whole number of micro-batches; "
        "set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of 256 such as 4",
    ),
    (
        BatchOptions,
        {"global_batch": 2, "micro_batch": 4},
        "batch.global_batch = 2, batch.micro_batch = 4: the global batch must be a whole number of micro-batches; "
        "set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of 2 such as 2",
    ),
    (OptimizerOptions, {"lr": 0}, "optimizer.lr = 0.0: must be greater than 0; the default is 0.0016"),
    (OptimizerOptions, {"beta1": 1}, "optimizer.beta1 = 1.0: must lie in [0, 1); the default is 0.9"),
    (OptimizerOptions, {"beta2": -0.1}, "optimizer.beta2 = -0.1: must lie in [0, 1); the default is 0.95"),
    (OptimizerOptions, {"grad_clip": -1}, "optimizer.grad_clip = -1.0: must be at least 0; use 0 or more"),
    (OptimizerOptions, {"z_loss": -1}, "optimizer.z_loss = -1.0: must be at least 0; use 0 or more"),
    (
        OptimizerOptions,
        {"decay_embeddings": True, "weight_decay": 0},
        "optimizer.decay_embeddings = True, optimizer.weight_decay = 0.0: without weight decay there is none for the "
        "embedding; set optimizer.weight_decay (WEIGHT_DECAY) above 0, or leave optimizer.decay_embeddings out",
    ),
    (
        OptimizerOptions,
        {"moments": "bfloat16", "beta2": 0.999},
        "optimizer.beta2 = 0.999, optimizer.moments = 'bfloat16': a moment in bfloat16 that decays so slowly is "
        "rounded back to what it was; set optimizer.beta2 to at most 0.99609375, or optimizer.moments to float32",
    ),
    (
        ScheduleOptions,
        {"max_steps": 100},
        "schedule.warmup_steps = 500, schedule.max_steps = 100: the warm-up is longer than the run; "
        "set schedule.warmup_steps (WARMUP_STEPS) to at most 100",
    ),
    (
        ScheduleOptions,
        {"kind": "constant", "min_lr": 0},
        "schedule.min_lr = 0.0, schedule.kind = 'constant': a constant schedule has no final learning rate; "
        "leave schedule.min_lr (MIN_LR) out, or set schedule.kind to cosine or linear",
    ),
    (
        ScheduleOptions,
        {"decay_shape": "linear"},
        "schedule.decay_shape = 'linear', schedule.kind = 'cosine': only a wsd schedule has it; "
        "leave schedule.decay_shape out, or set schedule.kind to wsd",
    ),
    (
        ScheduleOptions,
        {"kind": "linear", "decay_steps": 10},
        "schedule.decay_steps = 10, schedule.kind = 'linear': only a wsd schedule has it; "
        "leave schedule.decay_steps out, or set schedule.kind to wsd",
    ),
    (
        ScheduleOptions,
        {"kind": "wsd", "max_steps": 600, "decay_steps": 101},
        "schedule.decay_steps = 101, schedule.warmup_steps = 500, schedule.max_steps = 600: warm-up and decay are "
        "longer than the run; set schedule.decay_steps to at most 100",
    ),
    (
        ParallelOptions,
        {"sequence_parallel": True},
        "parallel.sequence_parallel = True, parallel.tp = 1: sequence parallelism has no effect without tensor "
        "parallelism; set parallel.tp above 1 or parallel.sequence_parallel to false",
    ),
    (CheckpointOptions, {"keep_last": 0}, "checkpoint.keep_last = 0: must be at least 1; use 1 or more"),
    (MetricsOptions, {"log_interval": 0}, "metrics.log_interval = 0: must be at least 1; use 1 or more"),
    (
        Recipe,
        {"optimizer": OptimizerOptions(lr=1e-4)},
        "schedule.min_lr = 0.0004, optimizer.lr = 0.0001: the final learning rate is above the highest one; "
        "set schedule.min_lr (MIN_LR) to at most 0.0001; a tenth of it is usual",
    ),
    (
        Recipe,
        {"metrics": MetricsOptions(eval_interval=5)},
        "metrics.eval_interval = 5, data.validation = '': there is nothing to evaluate on; "
        "set data.validation to a token store, or leave metrics.eval_interval out",
    ),
    (
        Recipe,
        {"model": ModelOptions(max_position_embeddings=2048)},
        "data.seq_len = 4096, model.max_position_embeddings = 2048: rows are longer than the longest context of the "
        "model; set data.seq_len (SEQ_LEN) to at most 2048, or model.max_position_embeddings to 0",
    ),
]


@pytest.mark.parametrize(("cls", "values", "message"), CHECKS)
def test_contradictions_name_fields_values_and_remedy(cls: type, values: dict[str, Any], message: str) -> None:
    assert message_of(cls, **values) == message


def test_load_adds_the_sources_to_the_same_messages() -> None:
    assert message_of(load, base=STORE, hyperparameters={"GLOBAL_BATCH_SIZE": "6"}) == (
        "batch.global_batch = 6 (hyperparameter GLOBAL_BATCH_SIZE), batch.micro_batch = 4 (default): "
        "the global batch must be a whole number of micro-batches; "
        "set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of 6 such as 3"
    )
    assert message_of(load, base=STORE, sets=["optimizer.lr=1e-4"]).startswith(
        "schedule.min_lr = 0.0004 (default), optimizer.lr = 0.0001 (--set): the final learning rate"
    )


def test_a_constant_schedule_ignores_the_default_min_lr() -> None:
    resolved = load(base=STORE, sets=["schedule.kind=constant", "optimizer.lr=1e-4"])
    assert resolved.recipe.schedule.min_lr == 4e-4


def test_data_parallel_and_accumulation() -> None:
    parallel = ParallelOptions(tp=2, pp=2, cp=2, dp_replicate=2)
    assert parallel.data_parallel(64) == 8
    assert Recipe(parallel=parallel).accumulation(64) == 256 // (4 * 8)
    assert ParallelOptions(dp_shard=4, dp_replicate=2).data_parallel(8) == 8
    assert message_of(parallel.data_parallel, 24) == (
        "parallel.tp = 2, parallel.pp = 2, parallel.cp = 2, parallel.dp_replicate = 2, parallel.dp_shard = 0: these "
        "degrees need a multiple of 16 ranks, and the run has 24; start a multiple of 16 ranks, or change the degrees "
        "(dp_shard = 0 takes what remains)"
    )
    assert "these degrees need 4 ranks, and the run has 8" in message_of(ParallelOptions(dp_shard=4).data_parallel, 8)
    assert message_of(Recipe().accumulation, 48) == (
        "batch.global_batch = 256, batch.micro_batch = 4: 48 data parallel ranks take 192 rows at a time, which does "
        "not divide the global batch; set batch.global_batch (GLOBAL_BATCH_SIZE) to a multiple of 192, "
        "or micro_batch lower"
    )
