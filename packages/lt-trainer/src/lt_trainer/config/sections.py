"""Recipe and its sections; `[model]`, `[data]` and `[optimizer]` have modules of their own.

Descriptions and units are what the hyperparameters and the docs show. Upper-case names (`hyperparameter`) are those of
the Litespark training algorithm on SageMaker.
"""

from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.model_section import ModelOptions
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.section import PathText, Section, default_of, option, suggest
from lt_trainer.config.usual_names import USUAL_NAMES
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import OPTIMIZERS
from lt_trainer.toml import format_value

if TYPE_CHECKING:
    from lt_data.streaming.ramp import BatchRamp

UNIQUE = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
WHOLE_VALIDATION = "validation"
"""Name of the results of data.validation, whose set has no name."""
MAX_INT = 2**63 - 1
DEFAULT_MAX_STEPS = 10_000
DERIVED_DEFAULTS = {
    "schedule.warmup_steps": "5 % of schedule.max_steps",
    "schedule.min_lr": "a quarter of optimizer.lr",
}
"""Rules of the defaults that follow from other fields, by dotted name."""
_S3_FOLDER = r"^(s3://[a-z0-9][a-z0-9.-]+(/[!-~]*)?)?$"
Ranks = tuple[Annotated[int, Field(ge=0)], ...]
Sink = Literal["tensorboard", "wandb", "trackio"]


class RunOptions(Section, table="run"):
    """Run directory, seed and engine."""

    dir: PathText = option("runs/run", "run directory: recipe, environment, metrics, checkpoints, logs", min_length=1)
    seed: int = option(0, "seed of the initial weights and the data order", ge=0, le=MAX_INT)
    engine: str = option("gpu", "engine: gpu (CUDA and CPU) or neuron (AWS Trainium)")
    gc_interval: int = option(50, "steps between garbage collections on all ranks; 0 leaves it to Python", ge=0)


class RampOptions(Section, table="batch.ramp"):
    """`[batch.ramp]`: batch size ramp, from a small batch in equal increments to batch.global_batch_size."""

    needs = (("increment steps tokens", "start"),)

    start: int = option(0, "rows in the first step; 0 = no ramp", ge=0)
    increment: int = option(0, "rows added per level; 0 = the largest that fits", ge=0)
    steps: int = option(0, "steps until the full batch size", ge=0)
    tokens: int = option(0, "positions read until the full batch size, instead of steps", unit="tokens", ge=0)

    def check(self) -> None:
        """Check that there is one length."""
        if self.start and bool(self.steps) == bool(self.tokens):
            raise self.wrong("steps tokens", "a ramp has a length in steps or in tokens", "set exactly one")


class BatchOptions(Section, table="batch"):
    """Rows per step."""

    global_batch_size: int = option(256, "rows per step, over all devices", hyperparameter="GLOBAL_BATCH_SIZE", ge=1)
    micro_batch_size: int = option(4, "rows per forward and backward pass", hyperparameter="MICRO_BATCH_SIZE", ge=1)
    ramp: RampOptions = RampOptions()

    def check(self) -> None:
        """Check that all steps have a whole number of micro-batches, and the ramp equal levels."""
        full, micro, start, names = self.global_batch_size, self.micro_batch_size, self.ramp.start, "global_batch_size"
        if full % micro:
            remedy = f"set batch.micro_batch_size to a divisor of {full} such as {gcd(full, micro)}"
            problem = "the global batch must be a whole number of micro-batches"
            raise self.wrong(f"{names} micro_batch_size", problem, remedy)
        names = f"ramp.start ramp.increment {names}"
        if start >= full:
            raise self.wrong(names, "a ramp starts below batch.global_batch_size")
        if start % micro or self.ramp_increment % micro:
            raise self.wrong(names, f"every step must be a whole number of micro-batches of {micro} rows")
        if (full - start) % self.ramp_increment:
            problem = "equal levels must lead from start to batch.global_batch_size"
            raise self.wrong(names, problem, f"use a divisor of {full - start}")

    @property
    def ramp_increment(self) -> int:
        """Rows added per level of the ramp."""
        return self.ramp.increment or gcd(self.ramp.start, self.global_batch_size - self.ramp.start)

    @property
    def step_size_divisor(self) -> int:
        """Number of rows that divides the batch size of every step."""
        return gcd(self.ramp.start, self.ramp_increment) if self.ramp.start else self.global_batch_size

    def batch_ramp(self, seq_len: int) -> "BatchRamp | None":
        """Return the ramp; None without one.

        Args:
            seq_len: positions per row, to convert `batch.ramp.tokens`.
        """
        if not self.ramp.start:
            return None
        from lt_data.streaming.ramp import BatchRamp

        ramp, final, rows = self.ramp, self.global_batch_size, -(-self.ramp.tokens // seq_len)
        return BatchRamp(start=ramp.start, final=final, increment=self.ramp_increment, steps=ramp.steps, rows=rows)


def _default_warmup_steps(values: Mapping[str, Any]) -> int:
    """Return 5 % of the run, in steps: the nearest number, at least one."""
    max_steps = values.get("max_steps", DEFAULT_MAX_STEPS)
    return max(1, (max_steps + 10) // 20)


class ScheduleOptions(Section, table="schedule"):
    """Learning rate over the steps; the formulas are in `lt_trainer.config.lr_schedule`."""

    needs = (("decay_steps decay_shape", "kind", "wsd"), ("min_lr", "kind", "cosine", "linear", "wsd"))

    kind: Literal["cosine", "linear", "constant", "wsd"] = option("cosine", "decay of the learning rate")
    max_steps: int = option(
        DEFAULT_MAX_STEPS,
        "steps of the run",
        hyperparameter="MAX_STEPS",
        form='a number of steps such as 10000, or text such as "3 epochs"',
        ge=1,
        le=MAX_INT,
    )
    warmup_steps: int = option(
        _default_warmup_steps,
        "steps until the peak learning rate",
        hyperparameter="WARMUP_STEPS",
        form='a number of steps, or a share of the run such as "5%"',
        ge=0,
    )
    min_lr: float = option(4e-4, "learning rate of the last step", hyperparameter="MIN_LR", ge=0)
    decay_steps: int = option(0, "steps of the wsd decay to min_lr; 0 = a tenth of max_steps", ge=0)
    decay_shape: Literal["1-sqrt", "linear"] = option("1-sqrt", "shape of the wsd decay: fast at first, or linear")

    def check(self) -> None:
        """Check that the run has time for warmup and decay."""
        if self.warmup_steps + self.decay_steps > self.max_steps:
            names = "warmup_steps decay_steps max_steps" if self.decay_steps else "warmup_steps max_steps"
            raise self.wrong(names, "warmup and decay are longer than the run", "set shorter ones")


class ParallelOptions(Section, table="parallel"):
    """Parallel degrees: world size = tp * pp * cp * dp_replicate * dp_shard."""

    needs = (("sequence_parallel", "tp"),)

    n_nodes: int = option(1, "nodes (machines)", hyperparameter="NUM_NODES", ge=1)
    tp: int = option(1, "tensor-parallel degree", ge=1)
    pp: int = option(1, "pipeline-parallel degree", ge=1)
    cp: int = option(1, "context-parallel degree", ge=1)
    dp_replicate: int = option(1, "model replicas, each sharded over dp_shard devices", ge=1)
    dp_shard: int = option(0, "devices that share weights and optimizer state; 0 = all remaining", ge=0)
    ep: int = option(1, "expert-parallel degree, of the ranks of dp_shard, cp and tp: each has whole experts", ge=1)
    sequence_parallel: bool = option(False, "shard activations along the sequence between tensor-parallel blocks")

    def _start_line(self, ranks: int) -> str:
        """Return the command that starts this many ranks on one machine; "" for several machines."""
        if self.n_nodes > 1:
            return ""
        return f"on one machine by `lt train torchrun RUN.toml --nproc-per-node {ranks}`, "

    def data_parallel_size(self, world: int) -> int:
        """Return the number of data-parallel ranks, dp_replicate * dp_shard, out of `world` ranks.

        Raises:
            RecipeError: the degrees do not multiply to `world`.
        """
        model_ranks = self.tp * self.pp * self.cp
        fixed = model_ranks * self.dp_replicate * (self.dp_shard or 1)
        if world % fixed or (self.dp_shard and world != fixed):
            wanted = f"{fixed}" if self.dp_shard else f"a multiple of {fixed}"
            problem = f"these degrees need {wanted} ranks, the run has {world}"
            values = {
                f"parallel.{name}": getattr(self, name) for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard")
            }
            start = f"start {wanted} ranks, {self._start_line(fixed)}"
            remedy = f"{start}or change the degrees (dp_shard = 0 uses all remaining)"
            raise RecipeError(problem, values=values, remedy=remedy)
        return world // model_ranks


class MoeOptions(Section, table="moe"):
    """Losses that balance the load of a mixture of experts; a model without experts has none."""

    aux_loss: float = option(0.03, "weight of each layer's load-balancing loss; 0 = off", ge=0)
    sequence_aux_loss: float = option(0.0, "weight of the same within each row; DeepSeek-V3: 1e-4, 0 = off", ge=0)
    router_z_loss: float = option(0.0, "weight of logsumexp(router's logits)^2; 1e-3 is typical, 0 = off", ge=0)
    bias_update_rate: float = option(0.01, "move of a selection bias per step, where a model has one; 0 = off", ge=0)


class CheckpointOptions(Section, table="checkpoint"):
    """Checkpoint interval, retention and mirror."""

    needs = (("mirror_keep_last", "mirror_url"), ("mirror_keep_every", "mirror_keep_last"))

    interval: int = option(1000, "steps between saves; 0 = at the end", hyperparameter="CHECKPOINT_INTERVAL", ge=0)
    keep_last: int = option(3, "number of newest checkpoints to keep", ge=1)
    keep_every: int = option(0, "also keep checkpoints whose step is a multiple of this; 0 = none, 1 = all", ge=0)
    async_save: bool = option(False, "write checkpoints in the background, from a copy in host memory")
    resume: bool = option(True, "resume from the newest valid checkpoint of the run directory or the mirror")
    mirror_url: str = option(
        "",
        "s3://bucket/folder: uploads, from which a run also resumes",
        form="of the form s3://bucket/folder",
        pattern=_S3_FOLDER,
    )
    mirror_keep_last: int = option(0, "number of newest checkpoints to keep in the mirror; 0 = all", ge=0)
    mirror_keep_every: int = option(0, "also keep those whose step is a multiple of this; 0 = none", ge=0)


class MetricsOptions(Section, table="metrics"):
    """Logging, validation and profiling."""

    needs = (("profile_start_step profile_ranks", "profile_steps"),)

    log_interval: int = option(10, "steps between metrics records", ge=1)
    validation_interval: int = option(0, "steps between validations; 0 = only at the end; needs data.validation", ge=0)
    validation_tokens: int = option(0, "positions of each set; -1 = all; 0 = a tenth of the training", ge=-1)
    sinks: Annotated[tuple[Sink, ...], UNIQUE] = option((), "metrics sinks besides metrics.jsonl, each an extra")
    monitor_interval_s: float = option(10.0, "interval of the node monitor; 0 = off", unit="s", ge=0)
    profile_steps: int = option(0, "steps traced by the torch profiler; 0 = none", ge=0)
    profile_start_step: int = option(11, "first traced step, counted from 1", ge=1)
    profile_ranks: Annotated[Ranks, UNIQUE] = option((0,), "ranks to profile", min_length=1)
    memory_snapshot_step: int = option(0, "step after which every rank writes a CUDA memory snapshot; 0 = never", ge=0)
    memory_snapshot_on_oom: bool = option(False, "write a CUDA memory snapshot when CUDA runs out of memory")


class EvaluationOptions(Section, table="evaluation"):
    """Tasks and stores that are evaluated during a run, on the weights as the engine holds them."""

    needs = (("include_path limit", "tasks"),)

    tasks: Annotated[tuple[str, ...], UNIQUE] = option((), "tasks, groups or tags of lm-evaluation-harness")
    include_path: PathText = option("", "folder of further task files")
    stores: bool = option(False, "evaluate the validation sets by source file and document length")
    interval: int = option(0, "steps between evaluations; 0 = only at the end", ge=0)
    limit: int = option(0, "items of each task, the first ones; 0 = all", ge=0)

    def check(self) -> None:
        """Check that there is something to evaluate."""
        if self.interval and not (self.tasks or self.stores):
            raise self.wrong("interval", "has no effect without evaluation.tasks or evaluation.stores")


class FaultToleranceOptions(Section, table="fault_tolerance"):
    """Limits for skipped steps, rollbacks, hangs and stops."""

    max_skipped_steps: int = option(10, "steps skipped as not finite before a rollback, between two checkpoints", ge=0)
    max_rollbacks: int = option(3, "rollbacks, each skipping the rows that led to it; per start", ge=0)
    hang_timeout_s: float = option(600.0, "time that ranks wait for a hanging or lost one; then 75", unit="s", gt=0)
    grace_period_s: float = option(120.0, "time for a stop, the current step and a save", unit="s", gt=0)

    @property
    def collective_timeout_s(self) -> float:
        """Timeout of the engine's collectives: above `hang_timeout_s`, so that the watchdog reports first."""
        return 1.5 * self.hang_timeout_s + 30


class Recipe(Section):
    """Recipe of a training run, from `load`, or constructed from its sections in Python."""

    usual_names = USUAL_NAMES

    run: RunOptions = RunOptions()
    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    batch: BatchOptions = BatchOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    schedule: ScheduleOptions = Field(ScheduleOptions(), validate_default=True)
    parallel: ParallelOptions = ParallelOptions()
    moe: MoeOptions = MoeOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    metrics: MetricsOptions = MetricsOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    fault_tolerance: FaultToleranceOptions = FaultToleranceOptions()
    engine: dict[str, Any] = option({}, "options by engine: its section, or a raw table if it is not installed")

    @field_validator("schedule")
    @classmethod
    def _derive_min_lr(cls, schedule: ScheduleOptions, info: ValidationInfo) -> ScheduleOptions:
        """Set `min_lr`, where it has an effect and was not given, to a quarter of the peak learning rate."""
        optimizer = info.data.get("optimizer")  # None if it is wrong itself
        if optimizer is None or schedule.kind == "constant" or "min_lr" in schedule.model_fields_set:
            return schedule
        return schedule.model_copy(update={"min_lr": optimizer.lr / 4})

    @property
    def derived_defaults(self) -> dict[str, str]:
        """The entries of `DERIVED_DEFAULTS` that apply."""
        unused = {"schedule.min_lr"} if self.schedule.kind == "constant" else set()
        return {name: rule for name, rule in DERIVED_DEFAULTS.items() if name not in unused}

    def check(self) -> None:
        """Check what depends on several sections."""
        data, model, tasks, kind = self.data, self.model, self.evaluation.tasks, self.data.source_kind
        _check_optimizer(self.optimizer)
        has_store, has_validation = kind not in ("synthetic", "loader"), data.validation or data.validation_sets
        if self.schedule.kind != "constant" and self.schedule.min_lr > self.optimizer.lr:
            remedy = "a tenth of the peak is typical"
            raise self.wrong("schedule.min_lr optimizer.lr", "the final learning rate is above the peak", remedy)
        if model.tie_word_embeddings and self.optimizer.lr_scale.head != 1:
            names, remedy = "optimizer.lr_scale.head model.tie_word_embeddings", "set optimizer.lr_scale.embedding"
            raise self.wrong(names, "a tied head is the embedding, whose learning rate has its own factor", remedy)
        for name in ("metrics.validation_interval", "evaluation.stores"):
            if self.value(name) and not has_validation:
                remedy = f"set data.validation to a token store, or remove {name}"
                raise self.wrong(f"{name} data.validation", "there is no validation data", remedy)
        if self.evaluation.stores and {*tasks} & ({*data.validation_sets} or {WHOLE_VALIDATION}):
            raise self.wrong("evaluation.tasks", "a task and a validation set have the same name", "rename the task")
        if tasks and not has_store and not has_validation:
            problem = "tasks are texts, and without a token store there is no tokenizer"
            raise self.wrong(f"evaluation.tasks data.{kind}", problem, "set data.validation")
        is_pending = (model.config or model.init_from).startswith("hf://")  # the hub's file says it when a run opens
        if not has_store and not model.vocab_size and not is_pending:
            problem, remedy = f"data.{kind} needs a vocabulary size", "set model.vocab_size (VOCAB_SIZE)"
            raise self.wrong(f"model.vocab_size data.{kind}", problem, remedy)
        if 0 < model.max_position_embeddings < data.seq_len:
            problem = "rows are longer than the model's maximum context"
            raise self.wrong("data.seq_len model.max_position_embeddings", problem)

    def with_nodes(self, nodes: int) -> Self:
        """Return the recipe for another number of nodes."""
        return self.model_copy(update={"parallel": self.parallel.model_copy(update={"n_nodes": nodes})})

    def accumulation_steps(self, world: int) -> int:
        """Return the number of micro-batches per rank and step with `world` ranks.

        Raises:
            RecipeError: the degrees do not multiply to `world`, or the batch is not divisible.
        """
        ranks, batch = self.parallel.data_parallel_size(world), self.batch
        rows = batch.micro_batch_size * ranks
        if batch.step_size_divisor % rows:
            names = "batch.global_batch_size batch.micro_batch_size" + " batch.ramp.start" * bool(batch.ramp.start)
            problem = f"{ranks} data-parallel ranks need a multiple of {rows} rows in every step"
            raise self.wrong(names, problem, f"use multiples of {rows}, or lower micro_batch_size")
        return batch.global_batch_size // rows


def _check_optimizer(options: OptimizerOptions) -> None:
    """Check that the optimizer exists and has the options that are set."""
    if options.name not in OPTIMIZERS:
        similar = suggest(options.name, OPTIMIZERS)
        remedy = f"did you mean {format_value(similar)}?" if similar else f"use one of {', '.join(OPTIMIZERS)}"
        raise RecipeError("unknown optimizer", values={"optimizer.name": options.name}, remedy=remedy)
    spec = OPTIMIZERS[options.name]
    for name in sorted(set().union(*(other.options for other in OPTIMIZERS.values())) - spec.options):
        if (value := getattr(options, name)) != default_of(OptimizerOptions, name):
            problem = f"has no effect with optimizer.name = {format_value(spec.name)}"
            raise RecipeError(problem, values={f"optimizer.{name}": value}, remedy="remove it")
    spec.check(options)
