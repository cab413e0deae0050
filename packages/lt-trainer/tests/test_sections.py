"""What each section and the whole recipe refuse: the full message of every contradiction."""

import dataclasses
from typing import Any

import pytest

from lt_trainer.config.recipe import load
from lt_trainer.config.sections.batch import BatchOptions, RampOptions
from lt_trainer.config.sections.checkpoint import CheckpointOptions
from lt_trainer.config.sections.data import BucketOptions, DataOptions, SourceOptions
from lt_trainer.config.sections.metrics import MetricsOptions
from lt_trainer.config.sections.model import ModelOptions, RopeScalingOptions
from lt_trainer.config.sections.optimizer import OptimizerOptions
from lt_trainer.config.sections.parallel import ParallelOptions
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.config.sections.run import RunOptions
from lt_trainer.config.sections.schedule import ScheduleOptions
from lt_trainer.data.training_data import data_event_fields
from lt_trainer.errors import RecipeError

STORE = {"data": {"store": "stores/train"}}


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 64
    return str(caught.value)


CHECKS = [
    (RunOptions, {"dir": ""}, "run.dir = '': must not be empty; set it to a directory, such as runs/run"),
    (RunOptions, {"seed": -1}, "run.seed = -1: must be in [0, 2**63); use a small integer such as 0"),
    (ModelOptions, {"vocab_size": -1}, "model.vocab_size = -1: must be at least 0; use 0 or more"),
    (ModelOptions, {"n_layers": 0}, "model.n_layers = 0: must be at least 1; use 1 or more"),
    (ModelOptions, {"norm_eps": 0}, "model.norm_eps = 0.0: must be greater than 0; the default is 1e-05"),
    (
        ModelOptions,
        {"n_heads": 7, "n_kv_heads": 7},
        "model.hidden_size = 768, model.n_heads = 7: the head size must be an even number; use a hidden size that "
        "is a multiple of 14, or another number of heads",
    ),
    (
        ModelOptions,
        {"n_kv_heads": 5},
        "model.n_heads = 12, model.n_kv_heads = 5: n_heads must be a multiple of n_kv_heads; set model.n_kv_heads "
        "(N_KV_HEADS) to a divisor of 12",
    ),
    (
        RopeScalingOptions,
        {"factor": 8, "low_freq_factor": 4},
        "model.rope_scaling.low_freq_factor = 4.0, model.rope_scaling.high_freq_factor = 4.0: must be 0 < "
        "low_freq_factor < high_freq_factor; Llama 3.1 uses 1 and 4",
    ),
    (
        RopeScalingOptions,
        {"high_freq_factor": 5},
        "model.rope_scaling.high_freq_factor = 5.0: has no effect when model.rope_scaling.factor is 1; set "
        "model.rope_scaling.factor (Llama 3.1 uses 8), or remove the section",
    ),
    (DataOptions, {"seq_len": 1}, "data.seq_len = 1: must be at least 2; use 2 or more"),
    (
        DataOptions,
        {"tokenizer": ""},
        "data.tokenizer = '': must not be empty; remove it to use the store's tokenizer",
    ),
    (
        DataOptions,
        {"store": "a", "synthetic": True},
        "data.store = 'a', data.synthetic = True: only one of these can be trained on; remove the others",
    ),
    (
        DataOptions,
        {"synthetic": True, "shuffle": False},
        "data.shuffle = False: has no effect with data.synthetic; remove it",
    ),
    (
        DataOptions,
        {"loader": "a:b", "prefetch": 3},
        "data.prefetch = 3: has no effect with data.loader; remove it",
    ),
    (
        DataOptions,
        {"store": "a", "loader_resume": "replay"},
        "data.loader_resume = 'replay': has no effect without data.loader; remove it",
    ),
    (
        DataOptions,
        {"store": "a", "min_seq_len": 128},
        "data.min_seq_len = 128: has no effect without data.packing = 'buckets'; remove it",
    ),
    (
        DataOptions,
        {"store": "a", "packing": "buckets", "seq_len": 1000},
        "data.min_seq_len = 256, data.seq_len = 1000: must be seq_len divided by a power of two; set "
        "data.min_seq_len to one of 1000, 500, 250",
    ),
    (
        DataOptions,
        {"mixture": {"a": SourceOptions(store="a")}, "packing": "buckets"},
        "data.packing = 'buckets', data.mixture = ['a']: buckets need a single store; set data.packing to bfd or "
        "concat, or train on a single data.store",
    ),
    (
        DataOptions,
        {"store": "a", "bucket_weights": {"256": BucketOptions()}},
        "data.bucket_weights = ['256'], data.packing = 'bfd': bucket_weights requires data.packing = 'buckets'; "
        "set data.packing",
    ),
    (
        DataOptions,
        {"store": "a", "packing": "buckets", "seq_len": 512, "bucket_weights": {"128": BucketOptions()}},
        "data.bucket_weights = '128': no such row length; rows have 512, 256 positions; write "
        "[data.bucket_weights.512] and the like",
    ),
    (
        DataOptions,
        {"mixture": {"a": SourceOptions()}},
        "data.mixture.a.store = '': must not be empty; set it to a token store",
    ),
    (
        DataOptions,
        {"mixture": {"a": SourceOptions(store="a", weight=-1)}},
        "data.mixture.a.weight = -1.0: must be at least 0; use 0 or more",
    ),
    (
        DataOptions,
        {"mixture": {"a": SourceOptions(store="a")}, "phase_steps": (5,)},
        "data.phase_steps = (5,): no weight changes at these phases; set phase_weights in [data.mixture.NAME] or "
        "[data.bucket_weights.LENGTH], or remove it",
    ),
    (
        DataOptions,
        {"mixture": {"a": SourceOptions(store="a", phase_weights=(1, 2))}, "phase_rows": (5,)},
        "data.mixture.a.phase_weights = (1.0, 2.0), data.phase_rows = (5,): needs a weight for each of the 1 later "
        "phases; set as many, or remove phase_weights to keep the weight",
    ),
    (
        DataOptions,
        {"mixture": {"a": SourceOptions(store="a", phase_weights=(1, 2))}, "phase_rows": (5, 5)},
        "data.phase_rows = (5, 5): phases must start after 0, in increasing order; sort them",
    ),
    (
        DataOptions,
        {"store": "a", "phase_rows": (5,), "phase_steps": (5,)},
        "data.phase_steps = (5,), data.phase_rows = (5,): phases are given in steps or in rows; remove one",
    ),
    (
        RampOptions,
        {"steps": 5},
        "batch.ramp.steps = 5: has no effect without batch.ramp.start; set batch.ramp.start, or remove it",
    ),
    (
        RampOptions,
        {"start": 8},
        "batch.ramp.steps = 0, batch.ramp.tokens = 0: a ramp has a length in steps or in tokens; set exactly one",
    ),
    (
        BatchOptions,
        {"global_batch_size": 8, "ramp": RampOptions(start=8, steps=5)},
        "batch.ramp.start = 8: must be less than batch.global_batch_size = 8; use a smaller one, or 0 for no ramp",
    ),
    (
        BatchOptions,
        {"global_batch_size": 16, "ramp": RampOptions(start=8, increment=3, steps=5), "micro_batch_size": 1},
        "batch.ramp.start = 8, batch.ramp.increment = 3: equal levels must lead from start to batch.global_batch_size "
        "= 16; "
        "use a divisor of 8",
    ),
    (
        BatchOptions,
        {"global_batch_size": 16, "ramp": RampOptions(start=6, steps=5)},
        "batch.ramp.start = 6, batch.ramp.increment = 0: every step must be a whole number of micro-batches of 4 rows; "
        "use multiples of 4",
    ),
    *(
        (
            BatchOptions,
            {"global_batch_size": 16, "ramp": RampOptions(start=start, increment=increment, steps=5)},
            f"batch.ramp.start = {start}, batch.ramp.increment = {increment}: every step must be a whole number of "
            "micro-batches of 4 rows; use multiples of 4",
        )
        for start, increment in ((6, 8), (8, 2))  # one of the two is enough
    ),
    (
        Recipe,
        {"data": DataOptions(synthetic=True)},
        "model.vocab_size = 0, data.synthetic = True: data.synthetic needs a vocabulary size; set model.vocab_size "
        "(VOCAB_SIZE)",
    ),
    (
        Recipe,
        {"data": DataOptions(store="a", packing="buckets"), "batch": BatchOptions(ramp=RampOptions(start=64, steps=9))},
        "batch.ramp.start = 64, data.packing = 'buckets': buckets do not support a batch ramp, since all rows of a "
        "step come from one bucket; remove batch.ramp, or set data.packing to bfd",
    ),
    (
        BatchOptions,
        {"global_batch_size": 256, "micro_batch_size": 6},
        "batch.global_batch_size = 256, batch.micro_batch_size = 6: the global batch must be a whole number of "
        "micro-batches; "
        "set batch.micro_batch_size (MICRO_BATCH_SIZE) to a divisor of 256 such as 4",
    ),
    (
        BatchOptions,
        {"global_batch_size": 2, "micro_batch_size": 4},
        "batch.global_batch_size = 2, batch.micro_batch_size = 4: the global batch must be a whole number of "
        "micro-batches; "
        "set batch.micro_batch_size (MICRO_BATCH_SIZE) to a divisor of 2 such as 2",
    ),
    (OptimizerOptions, {"lr": 0}, "optimizer.lr = 0.0: must be greater than 0; the default is 0.0016"),
    (OptimizerOptions, {"beta1": 1}, "optimizer.beta1 = 1.0: must be in [0, 1); the default is 0.9"),
    (OptimizerOptions, {"beta2": -0.1}, "optimizer.beta2 = -0.1: must be in [0, 1); the default is 0.95"),
    (OptimizerOptions, {"grad_clip": -1}, "optimizer.grad_clip = -1.0: must be at least 0; use 0 or more"),
    (OptimizerOptions, {"z_loss": -1}, "optimizer.z_loss = -1.0: must be at least 0; use 0 or more"),
    (
        OptimizerOptions,
        {"decay_embeddings": True, "weight_decay": 0},
        "optimizer.decay_embeddings = True, optimizer.weight_decay = 0.0: decay_embeddings has no effect without "
        "weight decay; set optimizer.weight_decay (WEIGHT_DECAY) above 0, or remove optimizer.decay_embeddings",
    ),
    (
        OptimizerOptions,
        {"moments_dtype": "bfloat16", "beta2": 0.999},
        "optimizer.beta2 = 0.999, optimizer.moments_dtype = 'bfloat16': a moment in bfloat16 that decays so slowly is "
        "rounded back to what it was; set optimizer.beta2 to at most 0.99609375, or optimizer.moments_dtype to float32",
    ),
    (
        ScheduleOptions,
        {"max_steps": 100},
        "schedule.warmup_steps = 500, schedule.max_steps = 100: the warmup is longer than the run; set "
        "schedule.warmup_steps (WARMUP_STEPS) to at most 100",
    ),
    (
        ScheduleOptions,
        {"kind": "constant", "min_lr": 0},
        "schedule.min_lr = 0.0, schedule.kind = 'constant': a constant schedule has no final learning rate; remove "
        "schedule.min_lr (MIN_LR), or set schedule.kind to cosine or linear",
    ),
    (
        ScheduleOptions,
        {"decay_shape": "linear"},
        "schedule.decay_shape = 'linear', schedule.kind = 'cosine': only the wsd schedule has it; remove "
        "schedule.decay_shape, or set schedule.kind to wsd",
    ),
    (
        ScheduleOptions,
        {"kind": "linear", "decay_steps": 10},
        "schedule.decay_steps = 10, schedule.kind = 'linear': only the wsd schedule has it; remove "
        "schedule.decay_steps, or set schedule.kind to wsd",
    ),
    (
        ScheduleOptions,
        {"kind": "wsd", "max_steps": 600, "decay_steps": 101},
        "schedule.decay_steps = 101, schedule.warmup_steps = 500, schedule.max_steps = 600: warmup and decay are "
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
        "schedule.min_lr = 0.0004, optimizer.lr = 0.0001: the final learning rate is above the peak; set "
        "schedule.min_lr (MIN_LR) to at most 0.0001; a tenth of it is typical",
    ),
    (
        Recipe,
        {"metrics": MetricsOptions(validation_interval=5)},
        "metrics.validation_interval = 5, data.validation = '': there is no validation data; set data.validation "
        "to a token store, or remove metrics.validation_interval",
    ),
    (
        Recipe,
        {"model": ModelOptions(max_position_embeddings=2048)},
        "data.seq_len = 4096, model.max_position_embeddings = 2048: rows are longer than the model's maximum "
        "context; set data.seq_len (SEQ_LEN) to at most 2048, or model.max_position_embeddings to 0",
    ),
]


@pytest.mark.parametrize(("cls", "values", "message"), CHECKS)
def test_contradictions_name_fields_values_and_remedy(cls: type, values: dict[str, Any], message: str) -> None:
    assert message_of(cls, **values) == message


def test_load_adds_the_sources_to_the_same_messages() -> None:
    assert message_of(load, base=STORE, hyperparameters={"GLOBAL_BATCH_SIZE": "6"}) == (
        "batch.global_batch_size = 6 (hyperparameter GLOBAL_BATCH_SIZE), batch.micro_batch_size = 4 (default): "
        "the global batch must be a whole number of micro-batches; "
        "set batch.micro_batch_size (MICRO_BATCH_SIZE) to a divisor of 6 such as 3"
    )
    assert message_of(load, base=STORE, overrides=["optimizer.lr=1e-4"]).startswith(
        "schedule.min_lr = 0.0004 (default), optimizer.lr = 0.0001 (--set): the final learning rate"
    )


def test_a_constant_schedule_ignores_the_default_min_lr() -> None:
    resolved = load(base=STORE, overrides=["schedule.kind=constant", "optimizer.lr=1e-4"])
    assert resolved.recipe.schedule.min_lr == 4e-4


def test_data_parallel_and_accumulation() -> None:
    parallel = ParallelOptions(tp=2, pp=2, cp=2, dp_replicate=2)
    assert parallel.data_parallel_size(64) == 8
    assert Recipe(parallel=parallel).accumulation_steps(64) == 256 // (4 * 8)
    assert ParallelOptions(dp_shard=4, dp_replicate=2).data_parallel_size(8) == 8
    assert message_of(parallel.data_parallel_size, 24) == (
        "parallel.tp = 2, parallel.pp = 2, parallel.cp = 2, parallel.dp_replicate = 2, parallel.dp_shard = 0: "
        "these degrees need a multiple of 16 ranks, the run has 24; start a multiple of 16 ranks, or change the "
        "degrees (dp_shard = 0 uses all remaining)"
    )
    assert "these degrees need 4 ranks, the run has 8" in message_of(ParallelOptions(dp_shard=4).data_parallel_size, 8)
    ramped = Recipe(batch=BatchOptions(ramp=RampOptions(start=96, steps=9)))
    assert ramped.accumulation_steps(8) == 8
    assert message_of(ramped.accumulation_steps, 16) == (
        "batch.ramp.start = 96, batch.ramp.increment = 32, batch.micro_batch_size = 4: 16 data-parallel ranks need "
        "a multiple of 64 rows in every step; set them to multiples of 64"
    )
    assert message_of(Recipe().accumulation_steps, 48) == (
        "batch.global_batch_size = 256, batch.micro_batch_size = 4: 48 data-parallel ranks need a multiple of 192 "
        "rows; set batch.global_batch_size (GLOBAL_BATCH_SIZE) to a multiple of 192, or lower micro_batch_size"
    )


def test_a_ramp_in_tokens_lasts_for_all_the_rows_that_hold_them() -> None:
    """65 positions are begun in the third row of 32."""
    batch = BatchOptions(global_batch_size=16, micro_batch_size=4, ramp=RampOptions(start=8, tokens=65))
    ramp = batch.batch_ramp(32)
    assert ramp is not None
    assert (ramp.start, ramp.final, ramp.increment, ramp.steps, ramp.rows) == (8, 16, 8, 0, 3)
    assert BatchOptions().batch_ramp(32) is None


def test_phases_in_steps_begin_with_the_rows_that_a_growing_batch_has_read() -> None:
    """Four steps of 8 rows, then 16 a step: step 6 begins with row 64, not with 96."""
    base = {
        "data": {"mixture": {"a": {"store": "a", "phase_weights": [3]}, "b": {"store": "b"}}, "phase_steps": [6]},
        "batch": {"global_batch_size": 16, "micro_batch_size": 4, "ramp": {"start": 8, "increment": 8, "steps": 4}},
    }
    phases = data_event_fields(load(base=base).recipe)["rows"]["phases"]
    assert phases == [
        {"from_row": 0, "weights": {"a": 1.0, "b": 1.0}},
        {"from_row": 64, "weights": {"a": 3.0, "b": 1.0}},
    ]


def test_the_final_learning_rate_may_be_the_highest_and_not_more() -> None:
    made = load(base=STORE, overrides=["optimizer.lr=1e-3", "schedule.min_lr=1e-3"]).recipe
    assert made.schedule.min_lr == made.optimizer.lr
    told = message_of(load, base=STORE, overrides=["optimizer.lr=1e-3", "schedule.min_lr=1.001e-3"])
    assert "the final learning rate is above the peak" in told


def fields_of_sections() -> list[Any]:
    """Return each field of each section of the recipe that takes a number, a text or a truth."""
    sections = [
        field for field in dataclasses.fields(Recipe) if dataclasses.is_dataclass(getattr(Recipe(), field.name))
    ]
    return [
        pytest.param(field.name, type(getattr(Recipe(), field.name)), inner.name, id=f"{field.name}.{inner.name}")
        for field in sections
        for inner in dataclasses.fields(type(getattr(Recipe(), field.name)))
        if isinstance(getattr(getattr(Recipe(), field.name), inner.name), int | float | str)
    ]


@pytest.mark.parametrize(("section", "cls", "field"), fields_of_sections())
def test_a_value_of_another_type_is_refused_by_name(section: str, cls: type, field: str) -> None:
    """By whoever makes a section in Python, too: a comparison with it would be a traceback, or pass by accident."""
    assert message_of(cls, **{field: {"a": 1}}).startswith(f"{section}.{field} = {{'a': 1}}: ")
