"""What a recipe refuses beyond limits of single fields: every contradiction, its fields and its words."""

from typing import Any

import pytest

from lt_trainer.config.model_section import ModelOptions
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.recipe import from_dict, load, to_dict
from lt_trainer.config.section import leaves
from lt_trainer.config.sections import BatchOptions, ParallelOptions, RampOptions, Recipe, ScheduleOptions
from lt_trainer.config.usual_names import USUAL_NAMES
from lt_trainer.engine import engine_spec
from lt_trainer.errors import RecipeError

STORE = {"data": {"store": "stores/train"}}


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 64
    assert "\n" not in str(caught.value)
    return str(caught.value)


SYNTHETIC = "data.store= data.synthetic=true model.vocab_size=9"
ROPE = "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor"
MIX = "data.store= data.mixture.a.store=a"
PHASES = "data.mixture.a.phase_weights=[1,2]"
RAMP = "batch.ramp.start batch.ramp.increment batch.global_batch_size"
SETS = "data.validation_sets.a.store=a"
REFUSED = [
    # limits of single fields, and what has no effect, are one mechanism each; a few show its words
    ("data.packing=bdf", "data.packing", 'must be "bfd" or "concat"'),
    ("data.mixture.a/b.store=a", "data.mixture.a/b", "must be a name of"),
    # model
    ("model.n_heads=7 model.n_kv_heads=7", "model.hidden_size model.n_heads", "the head size must be an even number"),
    ("model.n_kv_heads=5", "model.n_heads model.n_kv_heads", "n_heads must be a multiple of n_kv_heads"),
    ("model.preset=llama2-7b model.init_from=x", "model.init_from", ""),
    ("model.resize_vocab=true", "model.resize_vocab", 'has no effect with init_from = ""; set init_from'),
    ("model.rope_scaling.factor=8 model.rope_scaling.low_freq_factor=4", ROPE, "must be below high_freq_factor"),
    # data
    ("data.synthetic=true model.vocab_size=9", "data.store data.synthetic", "only one of these can be trained on"),
    (f"{SYNTHETIC} data.shuffle=false", "data.shuffle", "has no effect with data.synthetic"),
    (f"{MIX} data.phase_steps=[5]", "data.phase_steps", "no weight changes at these phases"),
    (f"{MIX} {PHASES} data.phase_steps=[5]", "data.mixture.a.phase_weights data.phase_steps", "one weight for each"),
    (f"{MIX} {PHASES} data.phase_steps=[5,5]", "data.phase_steps", "in increasing order"),
    # batch
    ("batch.ramp.start=8", "batch.ramp.steps batch.ramp.tokens", "a ramp has a length in steps or in tokens"),
    ("batch.ramp.start=256 batch.ramp.steps=5", "batch.ramp.start", "a ramp starts below batch.global_batch_size"),
    ("batch.ramp.start=208 batch.ramp.increment=20 batch.ramp.steps=5", RAMP, "a divisor of 48"),
    ("batch.ramp.start=6 batch.ramp.steps=5", RAMP, "every step must be a whole number of micro-batches of 4 rows"),
    ("batch.micro_batch_size=6", "batch.global_batch_size batch.micro_batch_size", "a divisor of 256 such as 2"),
    # optimizer, schedule, parallel
    ("optimizer.momentum=0.9", "optimizer.momentum", 'has no effect with optimizer.name = "adamw"'),
    ("optimizer.decay_embeddings=true optimizer.weight_decay=0", "optimizer.decay_embeddings", "has no effect"),
    ("optimizer.moments_dtype=bfloat16 optimizer.beta2=0.999", "optimizer.beta2", "a moment in bfloat16 that decays"),
    ("schedule.max_steps=100 schedule.warmup_steps=101", "schedule.warmup_steps schedule.max_steps", "longer than the"),
    ("schedule.kind=wsd schedule.max_steps=600 schedule.decay_steps=571", "schedule.decay_steps", "are longer than"),
    # checkpoint, metrics, evaluation
    ("evaluation.interval=5", "evaluation.interval", "has no effect without evaluation.tasks"),
    # the whole recipe
    ("data.store= data.synthetic=true", "model.vocab_size data.synthetic", "needs a vocabulary size"),
    ("optimizer.lr=1e-4 schedule.min_lr=2e-4", "schedule.min_lr optimizer.lr", "the final learning rate is above the"),
    ("metrics.validation_interval=5", "metrics.validation_interval data.validation", "there is no validation data"),
    ("evaluation.stores=true", "evaluation.stores data.validation", "there is no validation data"),
    ("model.max_position_embeddings=2048", "data.seq_len model.max_position_embeddings", "rows are longer than"),
    ("model.tie_word_embeddings=true optimizer.lr_scale.head=2", "optimizer.lr_scale.head", "a tied head is the"),
    (f"{SETS} evaluation.tasks=a evaluation.stores=true", "evaluation.tasks", "have the same name"),
]


@pytest.mark.parametrize(("sets", "fields", "words"), REFUSED)
def test_a_contradiction_names_fields_and_sources(sets: str, fields: str, words: str) -> None:
    message = message_of(load, base=STORE, overrides=sets.split())
    given = {one.partition("=")[0] for one in sets.split()}
    assert words in message
    assert all(name in message for name in fields.split())
    assert "(--set)" in message or not given & {*fields.split()}


WORDS = [
    ("optimizer.learning_rate=1", "did you mean optimizer.lr?"),
    ("checkpoint.every=10", "did you mean checkpoint.interval?"),
    ("checkpoint.save_steps=10", "did you mean checkpoint.interval?"),
    ("data.path=foo", "did you mean data.store?"),
    ("model.name=llama", "did you mean model.preset?"),
    ("model.n_embd=64", "did you mean model.hidden_size?"),
    ("data.pack=bfd", "did you mean data.packing?"),
    ("parallel.tensor_parallel=2", "did you mean parallel.tp?"),
    ("optimizer.betas=0.9,0.95", "did you mean optimizer.beta1 and optimizer.beta2?"),
    ("train.bf16=true", "did you mean engine.gpu.dtype?"),
    ("num_train_epochs=3", 'did you mean schedule.max_steps = "3 epochs"?'),
    ("data.every=10", "unknown field; there are data.store, data.synthetic"),
    ("metrics.interval=5", "did you mean metrics.log_interval?"),
    ("optimiser.lr=5", "optimiser.lr = 5 (--set): unknown field; did you mean optimizer.lr?"),
    ("batch.gradient_accumulation_steps=4", "it follows: batch.global_batch_size / (batch.micro_batch_size x data-"),
    ("zzz=1", "zzz = 1 (--set): unknown field; there are batch, checkpoint, data, engine, evaluation, fault_tolerance"),
    ("engine.device=cpu", 'engine.device = "cpu" (--set): unknown field; did you mean engine.gpu.device?'),
    ("run.engine=cpu", 'lt has "gpu", which runs on NVIDIA and AMD GPUs and on CPUs, and "neuron" for AWS Trainium'),
    ("schedule.max_steps=10k", '"10k" (--set): must be a number of steps such as 10000, or text such as "3 epochs"'),
    ('schedule.max_steps="three epochs"', 'steps such as 10000, or text such as "3 epochs"'),
    ("schedule.warmup_steps=1e", 'must be a number of steps, or a share of the run such as "5%"'),
    ("engine=5", "engine = 5 (--set): not a value but a section"),
    ("run.seed=1e30", "run.seed = 1e+30 (--set): must be a smaller integer"),
    ("optimizer.lr=-1", "optimizer.lr = -1 (--set): must be greater than 0"),
    ("data.shuffle=yep", 'data.shuffle = "yep" (--set): must be true or false'),
    ("engine.gpu.compile=yes", 'engine.gpu.compile = "yes" (--set): must be "auto", true or false'),
    (
        "checkpoint.mirror_url=(file)",
        'checkpoint.mirror_url = "(file)" (--set): must be of the form s3://bucket/folder',
    ),
    ("data.loader=1 x", 'data.loader = "1 x" (--set): must be of the form module:function'),
    ("data.mixture.a/b.store=x", "must be a name of letters, digits, - and _"),
    ("evaluation.tasks=nosuch evaluation.stores=true", 'evaluation.stores = true (--set), data.validation = ""'),
    ("metrics.profile_ranks=[]", "must have at least 1 item"),
    ("model.n_kv_heads=5", "n_heads must be a multiple of n_kv_heads; set model.n_kv_heads to 1, 2, 3, 4, 6 or 12"),
    ("model.preset=llama3-9b", 'unknown preset; did you mean "llama3-8b"? `lt model list` shows all presets'),
]


@pytest.mark.parametrize(("sets", "words"), WORDS)
def test_the_words_of_an_error(sets: str, words: str) -> None:
    pytest.importorskip("lt_trainer_gpu")
    overrides = [sets] if '"' in sets or "loader" in sets else sets.split()
    message = message_of(load, base=STORE, overrides=overrides)
    assert words in message
    assert not any(word in message for word in ("True", "False", "^", "{", "('"))


def test_usual_names_lead_to_fields() -> None:
    known = leaves(Recipe) | leaves(engine_spec("gpu").options, "engine.gpu.")
    targets = " and ".join(USUAL_NAMES.values()).replace(' = "3 epochs"', "").split(" and ")
    assert {*targets} <= {*known}
    assert not any(name in known for name in USUAL_NAMES)


@pytest.mark.parametrize("name", ["schedule.max_steps", "batch.global_batch_size", "checkpoint.interval"])
def test_a_number_of_a_set_is_read_as_in_toml(name: str) -> None:
    resolved = load(base=STORE, overrides=[f"{name}=1.2e4", "batch.micro_batch_size=1"])
    assert repr(resolved.recipe.value(name)) == "12000"


def test_sections_made_in_python_are_checked_and_named() -> None:
    assert message_of(ModelOptions, n_layers=0) == "model.n_layers = 0: must be at least 1"
    assert message_of(ModelOptions, n_layers=None) == "model.n_layers = null: must be a valid integer"
    assert message_of(RampOptions, steps=5).startswith("batch.ramp.steps = 5: has no effect with start = 0")


def test_the_default_beside_what_is_given_has_no_source() -> None:
    assert message_of(load, base=STORE, hyperparameters={"GLOBAL_BATCH_SIZE": "6"}) == (
        "batch.global_batch_size = 6 (hyperparameter GLOBAL_BATCH_SIZE), batch.micro_batch_size = 4: the global batch "
        "must be a whole number of micro-batches; set batch.micro_batch_size to a divisor of 6 such as 2"
    )


def test_what_is_not_refused() -> None:
    assert load(base=STORE, overrides=["schedule.kind=constant", "optimizer.lr=1e-4"]).recipe.schedule.min_lr == 4e-4
    load(base=STORE, overrides=["optimizer.lr=1e-3", "schedule.min_lr=1e-3"])
    twice = load(base=STORE, overrides=["metrics.sinks=wandb,wandb"]).recipe
    assert twice.metrics.sinks == ("wandb",)


def test_warmup_and_final_learning_rate_follow_the_run_unless_they_are_given() -> None:
    shown = load(base=STORE, overrides=["optimizer.lr=3e-4", "schedule.max_steps=100"])
    assert (shown.recipe.schedule.warmup_steps, shown.recipe.schedule.min_lr) == (5, 7.5e-5)
    assert {shown.origins[f"schedule.{name}"] for name in ("warmup_steps", "min_lr")} == {
        "default: 5 % of schedule.max_steps",
        "default: a quarter of optimizer.lr",
    }
    assert not shown.is_given("schedule.min_lr")
    by_name = load(base=STORE, hyperparameters={"LEARNING_RATE": "3e-4", "MAX_STEPS": "100"}).recipe
    made = Recipe(optimizer=OptimizerOptions(lr=3e-4), schedule=ScheduleOptions(max_steps=100))
    assert by_name.schedule == made.schedule == shown.recipe.schedule
    assert from_dict(to_dict(made)).schedule == made.schedule
    assert [ScheduleOptions(max_steps=steps).warmup_steps for steps in (1, 9, 29, 30, 10_000)] == [1, 1, 1, 2, 500]
    assert Recipe().schedule.min_lr == 4e-4
    recorded = {"schedule": {"max_steps": 2000, "warmup_steps": 500, "min_lr": 4e-4}, **STORE}
    assert from_dict(recorded).schedule.warmup_steps == 500
    constant = load(base=STORE, overrides=["schedule.kind=constant", "optimizer.lr=1e-4"])
    assert from_dict(to_dict(constant.recipe)) == constant.recipe


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
    recipe = load(base=base).recipe
    phases = recipe.data.weight_phases(recipe.batch.batch_ramp(recipe.data.seq_len).rows_before)
    assert phases == [(0, {"a": 1.0, "b": 1.0}), (64, {"a": 3.0, "b": 1.0})]
