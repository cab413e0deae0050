"""What each section and the whole recipe refuse beyond limits of single fields: every contradiction, and its words."""

from typing import Any

import pytest

from lt_trainer.config.data_section import BucketOptions, DataOptions, SourceOptions, ValidationOptions
from lt_trainer.config.recipe import load
from lt_trainer.config.sections import (
    BatchOptions,
    CheckpointOptions,
    EvaluationOptions,
    LrScaleOptions,
    MetricsOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
    RampOptions,
    Recipe,
    RopeScalingOptions,
    RunOptions,
    ScheduleOptions,
)
from lt_trainer.data.training_data import data_event_fields
from lt_trainer.errors import RecipeError

STORE = {"data": {"store": "stores/train"}}
A = SourceOptions(store="a")
PHASED = SourceOptions(store="a", phase_weights=(1, 2))
RAMP = RampOptions(start=8, steps=5)


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 64
    assert "\n" not in str(caught.value)
    return str(caught.value)


REFUSED: list[tuple[type, dict[str, Any], str]] = [
    # limits of single fields are pydantic's; one of each kind shows its words
    (RunOptions, {"dir": ""}, "run.dir = '': "),
    (RunOptions, {"seed": 2**63}, "run.seed = 9223372036854775808: must be at most 9223372036854775807"),
    (ModelOptions, {"n_layers": 0}, "model.n_layers = 0: must be at least 1"),
    (OptimizerOptions, {"beta1": 1}, "optimizer.beta1 = 1: must be less than 1"),
    (OptimizerOptions, {"lr": float("nan")}, "optimizer.lr = nan: must be a finite number"),
    (
        DataOptions,
        {"packing": "bdf"},
        "data.packing = 'bdf': must be 'bfd', 'concat' or 'buckets'; did you mean 'bfd'?",
    ),
    (DataOptions, {"mixture": {"a": {}}}, "data.mixture.a.store is missing"),
    (DataOptions, {"mixture": {"a b": {"store": "a"}}}, "data.mixture.a b = 'a b': must have letters, digits"),
    (DataOptions, {"loader": "a.b"}, "data.loader = 'a.b': must be package.module:function"),
    (ModelOptions, {"n_layers": "3"}, "model.n_layers = '3': expected an integer"),
    (ModelOptions, {"n_layers": True}, "model.n_layers = True: expected an integer"),
    (CheckpointOptions, {"resume": 1}, "checkpoint.resume = 1: expected true or false"),
    # model
    (
        ModelOptions,
        {"n_heads": 7, "n_kv_heads": 7},
        "model.hidden_size = 768, model.n_heads = 7: the head size must be",
    ),
    (ModelOptions, {"n_kv_heads": 5}, "model.n_heads = 12, model.n_kv_heads = 5: n_heads must be a multiple of"),
    (ModelOptions, {"preset": "llama2-7b", "init_from": "x"}, "model.preset = 'llama2-7b', model.init_from = 'x': "),
    (ModelOptions, {"preset": "llama2-7"}, "model.preset = 'llama2-7': unknown preset; did you mean llama2-7b?"),
    (
        ModelOptions,
        {"resize_vocab": True},
        "model.resize_vocab = True: has no effect with init_from = ''; set init_from",
    ),
    (ModelOptions, {"init_config": "x"}, "model.init_config = 'x': has no effect with init_from = ''"),
    (ModelOptions, {"allow_tokenizer_mismatch": True}, "model.allow_tokenizer_mismatch = True: has no effect"),
    (RopeScalingOptions, {"factor": 8, "low_freq_factor": 4}, "model.rope_scaling.low_freq_factor = 4.0, "),
    (
        RopeScalingOptions,
        {"high_freq_factor": 5},
        "model.rope_scaling.high_freq_factor = 5.0: has no effect with factor",
    ),
    # data
    (
        DataOptions,
        {"store": "a", "synthetic": True},
        "data.store = 'a', data.synthetic = True: only one of these can be",
    ),
    (DataOptions, {"synthetic": True, "shuffle": False}, "data.shuffle = False: has no effect with data.synthetic"),
    (DataOptions, {"synthetic": True, "tokenizer": "x"}, "data.tokenizer = 'x': has no effect with data.synthetic"),
    (DataOptions, {"synthetic": True, "packing": "concat"}, "data.packing = 'concat': has no effect with data.synth"),
    (DataOptions, {"loader": "a:b", "prefetch": 3}, "data.prefetch = 3: has no effect with data.loader; remove it"),
    (
        DataOptions,
        {"store": "a", "loader_resume": "replay"},
        "data.loader_resume = 'replay': has no effect with loader",
    ),
    (
        DataOptions,
        {"store": "a", "min_seq_len": 128},
        "data.min_seq_len = 128: has no effect with packing = 'bfd'; set ",
    ),
    (
        DataOptions,
        {"store": "a", "packing": "buckets", "seq_len": 1000},
        "data.min_seq_len = 256, data.seq_len = 1000: must be seq_len divided by a power of two; set "
        "data.min_seq_len to one of 1000, 500, 250",
    ),
    (
        DataOptions,
        {"mixture": {"a": A}, "packing": "buckets"},
        "data.packing = 'buckets', data.mixture = ['a']: buckets",
    ),
    (
        DataOptions,
        {"store": "a", "bucket_weights": {"256": BucketOptions()}},
        "data.bucket_weights = ['256'], data.pack",
    ),
    (
        DataOptions,
        {"store": "a", "packing": "buckets", "seq_len": 512, "bucket_weights": {"128": BucketOptions()}},
        "data.bucket_weights = '128': no such row length; rows have 512, 256 positions",
    ),
    (DataOptions, {"mixture": {"a": A}, "phase_steps": (5,)}, "data.phase_steps = (5,): no weight changes at these"),
    (
        DataOptions,
        {"mixture": {"a": PHASED}, "phase_rows": (5,)},
        "data.mixture.a.phase_weights = (1.0, 2.0), data.phase_rows = (5,): needs a weight for each of the 1 later",
    ),
    (
        DataOptions,
        {"mixture": {"a": PHASED}, "phase_rows": (5, 5)},
        "data.phase_rows = (5, 5): phases must start after 0",
    ),
    (
        DataOptions,
        {"mixture": {"a": PHASED}, "phase_rows": (0, 5)},
        "data.phase_rows = (0, 5): phases must start after 0",
    ),
    (
        DataOptions,
        {"store": "a", "phase_rows": (5,), "phase_steps": (5,)},
        "data.phase_steps = (5,), data.phase_rows = ",
    ),
    # batch
    (RampOptions, {"steps": 5}, "batch.ramp.steps = 5: has no effect with start = 0; set start, or remove steps"),
    (
        RampOptions,
        {"start": 8},
        "batch.ramp.steps = 0, batch.ramp.tokens = 0: a ramp has a length in steps or in tokens",
    ),
    (
        BatchOptions,
        {"global_batch_size": 8, "ramp": RAMP},
        "batch.ramp.start = 8, batch.ramp.increment = 0, batch.glob",
    ),
    *(
        (
            BatchOptions,
            {
                "global_batch_size": 16,
                "ramp": RampOptions(start=start, increment=increment, steps=5),
                "micro_batch_size": n,
            },
            f"batch.ramp.start = {start}, batch.ramp.increment = {increment}, batch.global_batch_size = 16: {words}",
        )
        for start, increment, n, words in (
            (8, 3, 1, "equal levels must lead from start to batch.global_batch_size; use a divisor of 8"),
            (6, 0, 4, "every step must be a whole number of micro-batches of 4 rows; use multiples of 4"),
            (6, 8, 4, "every step must be a whole number of micro-batches"),
            (8, 2, 4, "every step must be a whole number of micro-batches"),
        )
    ),
    (
        BatchOptions,
        {"micro_batch_size": 6},
        "batch.global_batch_size = 256, batch.micro_batch_size = 6: the global batch",
    ),
    (
        BatchOptions,
        {"global_batch_size": 2},
        "batch.global_batch_size = 2, batch.micro_batch_size = 4: the global batch",
    ),
    # optimizer, schedule, parallel
    (OptimizerOptions, {"name": "muno"}, "optimizer.name = 'muno': unknown optimizer; did you mean 'muon'?"),
    (OptimizerOptions, {"momentum": 0.9}, "optimizer.momentum = 0.9: has no effect with optimizer.name = 'adamw'"),
    (OptimizerOptions, {"newton_schulz_dtype": "float32"}, "optimizer.newton_schulz_dtype = 'float32': has no effect"),
    (
        OptimizerOptions,
        {"decay_embeddings": True, "weight_decay": 0},
        "optimizer.decay_embeddings = True, optimizer.wei",
    ),
    (
        OptimizerOptions,
        {"moments_dtype": "bfloat16", "beta2": 0.999},
        "optimizer.beta2 = 0.999, optimizer.moments_dtype = 'bfloat16': a moment in bfloat16 that decays so slowly",
    ),
    (
        ScheduleOptions,
        {"max_steps": 100},
        "schedule.warmup_steps = 500, schedule.max_steps = 100: the warmup is longer",
    ),
    (ScheduleOptions, {"kind": "constant", "min_lr": 0}, "schedule.min_lr = 0.0: has no effect with kind = 'constant'"),
    (
        ScheduleOptions,
        {"decay_shape": "linear"},
        "schedule.decay_shape = 'linear': has no effect with kind = 'cosine'; ",
    ),
    (
        ScheduleOptions,
        {"kind": "linear", "decay_steps": 10},
        "schedule.decay_steps = 10: has no effect with kind = 'lin",
    ),
    (
        ScheduleOptions,
        {"kind": "wsd", "max_steps": 600, "decay_steps": 101},
        "schedule.decay_steps = 101, schedule.warmup_steps = 500, schedule.max_steps = 600: warmup and decay are",
    ),
    (ParallelOptions, {"sequence_parallel": True}, "parallel.sequence_parallel = True, parallel.tp = 1: has no effect"),
    # checkpoint, metrics, evaluation
    (CheckpointOptions, {"mirror_url": "bucket/x"}, "checkpoint.mirror_url = 'bucket/x': not the URL of a folder in a"),
    (CheckpointOptions, {"mirror_keep_last": 2}, "checkpoint.mirror_keep_last = 2: has no effect with mirror_url = ''"),
    (
        CheckpointOptions,
        {"mirror_url": "s3://b/c", "mirror_keep_every": 2},
        "checkpoint.mirror_keep_every = 2: has no effect with mirror_keep_last = 0",
    ),
    (MetricsOptions, {"sinks": ("wandb", "wandb")}, "metrics.sinks = ('wandb', 'wandb'): duplicate sink"),
    (MetricsOptions, {"profile_steps": 1, "profile_ranks": (1, 1)}, "metrics.profile_ranks = (1, 1): must be distinct"),
    (MetricsOptions, {"profile_steps": 1, "profile_ranks": (-1,)}, "metrics.profile_ranks = (-1,): must be distinct"),
    (MetricsOptions, {"profile_start_step": 5}, "metrics.profile_start_step = 5: has no effect with profile_steps = 0"),
    (EvaluationOptions, {"tasks": ("a", "a")}, "evaluation.tasks = ('a', 'a'): duplicate task"),
    (EvaluationOptions, {"limit": 5}, "evaluation.limit = 5: has no effect with tasks = ()"),
    (EvaluationOptions, {"interval": 5}, "evaluation.interval = 5: has no effect without evaluation.tasks"),
    # the whole recipe
    (
        Recipe,
        {"data": DataOptions(synthetic=True)},
        "model.vocab_size = 0, data.synthetic = True: data.synthetic needs a",
    ),
    (
        Recipe,
        {"data": DataOptions(store="a", packing="buckets"), "batch": BatchOptions(ramp=RampOptions(start=64, steps=9))},
        "batch.ramp.start = 64, data.packing = 'buckets': buckets do not support a batch ramp",
    ),
    (
        Recipe,
        {"optimizer": OptimizerOptions(lr=1e-4)},
        "schedule.min_lr = 0.0004, optimizer.lr = 0.0001: the final lear",
    ),
    (
        Recipe,
        {"metrics": MetricsOptions(validation_interval=5)},
        "metrics.validation_interval = 5, data.validation = '':",
    ),
    (
        Recipe,
        {"evaluation": EvaluationOptions(stores=True)},
        "evaluation.stores = True, data.validation = '': there is",
    ),
    (
        Recipe,
        {"model": ModelOptions(max_position_embeddings=2048)},
        "data.seq_len = 4096, model.max_position_embeddings",
    ),
    (
        Recipe,
        {
            "model": ModelOptions(tie_word_embeddings=True),
            "optimizer": OptimizerOptions(lr_scale=LrScaleOptions(head=2)),
        },
        "optimizer.lr_scale.head = 2.0, model.tie_word_embeddings = True: a tied head is the embedding",
    ),
    (
        Recipe,
        {"data": DataOptions(synthetic=True), "model": ModelOptions(vocab_size=9), "evaluation": {"tasks": ["a"]}},
        "evaluation.tasks = ('a',), data.synthetic = True: tasks are texts, and without a token store",
    ),
    (
        Recipe,
        {
            "data": DataOptions(store="a", validation_sets={"a": ValidationOptions(store="a")}),
            "evaluation": {"tasks": ["a"], "stores": True},
        },
        "evaluation.tasks = ('a',): a task and a validation set are both called 'a'",
    ),
]


@pytest.mark.parametrize(("cls", "values", "message"), REFUSED)
def test_a_contradiction_names_fields_values_and_remedy(cls: type, values: dict[str, Any], message: str) -> None:
    assert message_of(cls, **values).startswith(message)


def test_the_sources_are_added_to_the_same_message() -> None:
    assert message_of(load, base=STORE, hyperparameters={"GLOBAL_BATCH_SIZE": "6"}) == (
        "batch.global_batch_size = 6 (hyperparameter GLOBAL_BATCH_SIZE), batch.micro_batch_size = 4: the global batch "
        "must be a whole number of micro-batches; set batch.micro_batch_size to a divisor of 6 such as 3"
    )


def test_a_constant_schedule_ignores_the_default_min_lr() -> None:
    resolved = load(base=STORE, overrides=["schedule.kind=constant", "optimizer.lr=1e-4"])
    assert resolved.recipe.schedule.min_lr == 4e-4


def test_data_parallel_and_accumulation() -> None:
    parallel = ParallelOptions(tp=2, pp=2, cp=2, dp_replicate=2)
    assert parallel.data_parallel_size(64) == 8
    assert Recipe(parallel=parallel).accumulation_steps(64) == 256 // (4 * 8)
    assert ParallelOptions(dp_shard=4, dp_replicate=2).data_parallel_size(8) == 8
    assert message_of(parallel.data_parallel_size, 24).startswith(
        "parallel.tp = 2, parallel.pp = 2, parallel.cp = 2, parallel.dp_replicate = 2, parallel.dp_shard = 0: "
        "these degrees need a multiple of 16 ranks, the run has 24"
    )
    assert "these degrees need 4 ranks, the run has 8" in message_of(ParallelOptions(dp_shard=4).data_parallel_size, 8)
    ramped = Recipe(batch=BatchOptions(ramp=RampOptions(start=96, steps=9)))
    assert ramped.accumulation_steps(8) == 8
    assert "16 data-parallel ranks need a multiple of 64 rows in every step" in message_of(
        ramped.accumulation_steps, 16
    )
    assert "48 data-parallel ranks need a multiple of 192 rows" in message_of(Recipe().accumulation_steps, 48)
    assert Recipe().with_nodes(3).parallel.n_nodes == 3


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
