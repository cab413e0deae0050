"""Sections of a recipe. Descriptions and units are what `lt train show --help`, the hyperparameters and the docs show.

Upper-case names (`hyperparameter`) are those of the Litespark training algorithm on SageMaker. The section `[data]` is
in `data_section`.
"""

import re
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.section import Section, default_of, flatten, option, suggest, unflatten
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from lt_data import BatchRamp
    from lt_model import LlamaConfig

WHOLE_VALIDATION = "validation"
"""Name of the results of data.validation, whose set has no name."""
MAX_INT = 2**63 - 1


class RunOptions(Section):
    """Run directory, seed and engine."""

    table = "run"

    dir: str = option("runs/run", "run directory: recipe, environment, metrics, checkpoints, logs", min_length=1)
    seed: int = option(0, "seed of the initial weights and the data order", ge=0, le=MAX_INT)
    engine: str = option("gpu", "engine: gpu (CUDA and CPU) or neuron (AWS Trainium)")
    gc_interval: int = option(
        50, "steps between garbage collections, the same on all ranks; 0 leaves it to Python", ge=0
    )


class RopeScalingOptions(Section):
    """`[model.rope_scaling]`: Llama-3.1 scaling of rotary wavelengths; a factor of 1 means none."""

    table = "model.rope_scaling"
    needs = (("low_freq_factor high_freq_factor original_max_position_embeddings", "factor"),)

    factor: float = option(1.0, "factor by which long wavelengths are scaled; 1 = none", ge=1)
    low_freq_factor: float = option(1.0, "wavelengths above original context / this are scaled fully", gt=0)
    high_freq_factor: float = option(4.0, "wavelengths below original context / this are not scaled", gt=0)
    original_max_position_embeddings: int = option(8192, "context length before scaling", unit="tokens", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            problem = "low_freq_factor must be below high_freq_factor"
            raise self.wrong("low_freq_factor high_freq_factor", problem, "Llama 3.1 uses 1 and 4")
        return self


class ModelOptions(Section):
    """Llama architecture and initial weights; missing fields take the values of `preset`."""

    table = "model"
    needs = (("init_config allow_tokenizer_mismatch resize_vocab", "init_from"),)

    preset: str = option("", "preset (see `lt model list`); fields that are given override it")
    vocab_size: int = option(
        0, "vocabulary size; must match the data; 0 = the data's", hyperparameter="VOCAB_SIZE", ge=0
    )
    hidden_size: int = option(768, "width of the residual stream", hyperparameter="HIDDEN_SIZE", ge=1)
    intermediate_size: int = option(
        2072, "width inside the feed-forward blocks", hyperparameter="INTERMEDIATE_SIZE", ge=1
    )
    n_heads: int = option(12, "attention heads", hyperparameter="N_HEADS", ge=1)
    n_kv_heads: int = option(12, "key and value heads", hyperparameter="N_KV_HEADS", ge=1)
    n_layers: int = option(12, "transformer blocks", hyperparameter="N_LAYERS", ge=1)
    max_position_embeddings: int = option(
        0, "maximum context length in the model's config; 0 = data.seq_len", unit="tokens", ge=0
    )
    rope_theta: float = option(10000.0, "base of the rotary wavelengths", gt=0)
    norm_eps: float = option(1e-5, "epsilon of the RMS norms", gt=0)
    tie_word_embeddings: bool = option(False, "share the matrix of input embedding and output head")
    rope_scaling: RopeScalingOptions = RopeScalingOptions()
    init_from: str = option(
        "", "pretrained model in any format of `lt ckpt`, or hf://org/name@revision; missing fields take its values"
    )
    init_config: str = option("", "config.json of init_from, if its format has none")
    allow_tokenizer_mismatch: bool = option(False, "allow data whose token ids differ from those of init_from")
    resize_vocab: bool = option(
        False, "resize the vocabulary to the data's: new rows are the mean of the others, surplus rows are dropped"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(preset := values.get("preset"), str) and preset:
            return unflatten(preset_values(preset) | flatten(values))
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % (2 * self.n_heads):
            remedy = f"use a hidden size that is a multiple of {2 * self.n_heads}, or another number of heads"
            raise self.wrong("hidden_size n_heads", "the head size must be an even number", remedy)
        if self.n_heads % self.n_kv_heads:
            remedy = f"set model.n_kv_heads to a divisor of {self.n_heads}"
            raise self.wrong("n_heads n_kv_heads", "n_heads must be a multiple of n_kv_heads", remedy)
        if self.preset and self.init_from:
            problem = "the pretrained model has its own architecture"
            raise self.wrong("preset init_from", problem, "remove one of the two")
        return self


def architecture_values(config: "LlamaConfig") -> dict[str, Any]:
    """Return the fields of `[model]` that describe `config`, by name within the section."""
    return flatten({name: value for name, value in config.to_dict().items() if value is not None})


def preset_values(name: str) -> dict[str, Any]:
    """Return the fields of `[model]` that a preset sets; the vocabulary stays the data's.

    Raises:
        RecipeError: there is no such preset.
    """
    from lt_model import PRESETS

    if name not in PRESETS:
        similar = suggest(name, PRESETS)
        remedy = f"{f'did you mean {similar}? ' if similar else ''}the presets are {', '.join(PRESETS)}"
        raise RecipeError("unknown preset", values={"preset": name}, remedy=remedy)
    values = architecture_values(PRESETS[name])
    del values["vocab_size"]
    return values


class RampOptions(Section):
    """`[batch.ramp]`: batch size ramp, from a small batch in equal increments to batch.global_batch_size."""

    table = "batch.ramp"
    needs = (("increment steps tokens", "start"),)

    start: int = option(0, "rows in the first step; 0 = no ramp", ge=0)
    increment: int = option(0, "rows added per level; 0 = the largest that fits", ge=0)
    steps: int = option(0, "steps until the full batch size", ge=0)
    tokens: int = option(0, "positions read until the full batch size, instead of steps", unit="tokens", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start and bool(self.steps) == bool(self.tokens):
            raise self.wrong("steps tokens", "a ramp has a length in steps or in tokens", "set exactly one")
        return self


class BatchOptions(Section):
    """Rows per step."""

    table = "batch"

    global_batch_size: int = option(256, "rows per step, over all devices", hyperparameter="GLOBAL_BATCH_SIZE", ge=1)
    micro_batch_size: int = option(4, "rows per forward and backward pass", hyperparameter="MICRO_BATCH_SIZE", ge=1)
    ramp: RampOptions = RampOptions()

    @model_validator(mode="after")
    def _check(self) -> Self:
        full, micro, ramp = self.global_batch_size, self.micro_batch_size, self.ramp
        if full % micro:
            example = next(size for size in range(min(micro, full), 0, -1) if full % size == 0)
            problem = "the global batch must be a whole number of micro-batches"
            remedy = f"set batch.micro_batch_size to a divisor of {full} such as {example}"
            raise self.wrong("global_batch_size micro_batch_size", problem, remedy)
        if ramp.start:
            shown = {"ramp.start": ramp.start, "ramp.increment": ramp.increment, "global_batch_size": full}
            if ramp.start >= full:
                raise RecipeError("a ramp starts below batch.global_batch_size", values=shown)
            if ramp.start % micro or self.ramp_increment % micro:
                problem = f"every step must be a whole number of micro-batches of {micro} rows"
                raise RecipeError(problem, values=shown, remedy=f"use multiples of {micro}")
            if (full - ramp.start) % self.ramp_increment:
                problem = "equal levels must lead from start to batch.global_batch_size"
                raise RecipeError(problem, values=shown, remedy=f"use a divisor of {full - ramp.start}")
        return self

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
        from lt_data import BatchRamp

        return BatchRamp(
            start=self.ramp.start,
            final=self.global_batch_size,
            increment=self.ramp_increment,
            steps=self.ramp.steps,
            rows=-(-self.ramp.tokens // seq_len),
        )


class LrScaleOptions(Section):
    """`[optimizer.lr_scale]`: factors of the learning rate by the role of a parameter."""

    table = "optimizer.lr_scale"

    embedding: float = option(1.0, "factor for the input embedding (and a tied head)", ge=0)
    head: float = option(1.0, "factor of the learning rate for the head", ge=0)
    norm: float = option(1.0, "factor of the learning rate for norms", ge=0)
    matrices: float = option(1.0, "factor of the learning rate for the matrices of the blocks", ge=0)


class OptimizerOptions(Section):
    """Optimizer options. Those that only some optimizers have are in `OptimizerSpec.options`."""

    table = "optimizer"

    name: str = option("adamw", f"optimizer: one of {', '.join(OPTIMIZERS)}")
    lr: float = option(1.6e-3, "peak learning rate", hyperparameter="LEARNING_RATE", gt=0)
    weight_decay: float = option(
        0.01, "decoupled weight decay; not applied to norms", hyperparameter="WEIGHT_DECAY", ge=0
    )
    beta1: float = option(0.9, "decay of the first moment", hyperparameter="BETA1", ge=0, lt=1)
    beta2: float = option(0.95, "decay of the second moment", hyperparameter="BETA2", ge=0, lt=1)
    eps: float = option(1e-8, "epsilon, added to the root of the second moment", gt=0)
    grad_clip: float = option(1.0, "maximum gradient norm; 0 = no clipping", hyperparameter="GRAD_CLIP", ge=0)
    decay_embeddings: bool = option(False, "apply weight decay to the input embedding too")
    moments_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "dtype of all moments; float32 means that of the master weights"
    )
    weights_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "dtype of the weights; bfloat16 has no master weights: updates are rounded stochastically"
    )
    momentum: float = option(0.95, "muon: decay of the momentum", ge=0, lt=1)
    nesterov: bool = option(True, "muon: Nesterov momentum")
    adjust_lr: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw",
        "muon: factor for a matrix of R rows and C columns: 0.2 sqrt(max(R, C)) (as AdamW), or sqrt(max(1, R / C))",
    )
    newton_schulz_steps: int = option(5, "muon: steps of the Newton-Schulz iteration", ge=1)
    newton_schulz_dtype: Literal["float32", "bfloat16"] = option(
        "bfloat16", "muon: dtype of the iteration; float32 means that of the master weights"
    )
    lr_scale: LrScaleOptions = LrScaleOptions()
    z_loss: float = option(0.0, "weight of logsumexp(logits)^2; 1e-4 is typical, 0 = off", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.decay_embeddings and not self.weight_decay:
            raise self.wrong("decay_embeddings weight_decay", "has no effect without weight decay", "remove it")
        spec = OPTIMIZERS.get(self.name)
        if spec is None:
            similar = suggest(self.name, OPTIMIZERS)
            remedy = f"did you mean {similar!r}?" if similar else f"use one of {', '.join(OPTIMIZERS)}"
            raise self.wrong("name", "unknown optimizer", remedy)
        for name in sorted(set().union(*(other.options for other in OPTIMIZERS.values())) - spec.options):
            if getattr(self, name) != default_of(type(self), name):
                raise self.wrong(name, f"has no effect with optimizer.name = {self.name!r}", "remove it")
        spec.check(self)
        return self


class ScheduleOptions(Section):
    """Learning rate over the steps; the formulas are in `lt_trainer.config.lr_schedule`."""

    table = "schedule"
    needs = (("decay_steps decay_shape", "kind", "wsd"), ("min_lr", "kind", "cosine", "linear", "wsd"))

    kind: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "decay of the learning rate after the warmup; wsd: only in the last decay_steps steps"
    )
    max_steps: int = option(10000, "steps of the run", hyperparameter="MAX_STEPS", ge=1, le=MAX_INT)
    warmup_steps: int = option(500, "steps until the peak learning rate", hyperparameter="WARMUP_STEPS", ge=0)
    min_lr: float = option(4e-4, "learning rate of the last step (cosine, linear, wsd)", hyperparameter="MIN_LR", ge=0)
    decay_steps: int = option(0, "steps of the wsd decay to min_lr; 0 = a tenth of max_steps", ge=0)
    decay_shape: Literal["1-sqrt", "linear"] = option("1-sqrt", "shape of the wsd decay: fast at first, or linear")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_steps > self.max_steps:
            remedy = f"set schedule.warmup_steps to at most {self.max_steps}"
            raise self.wrong("warmup_steps max_steps", "the warmup is longer than the run", remedy)
        if self.warmup_steps + self.decay_steps > self.max_steps:
            remedy = f"set schedule.decay_steps to at most {self.max_steps - self.warmup_steps}"
            problem = "warmup and decay are longer than the run"
            raise self.wrong("decay_steps warmup_steps max_steps", problem, remedy)
        return self


class ParallelOptions(Section):
    """Parallel degrees: world size = tp * pp * cp * dp_replicate * dp_shard."""

    table = "parallel"

    n_nodes: int = option(1, "nodes (machines)", hyperparameter="NUM_NODES", ge=1)
    tp: int = option(1, "tensor-parallel degree", ge=1)
    pp: int = option(1, "pipeline-parallel degree", ge=1)
    cp: int = option(1, "context-parallel degree", ge=1)
    dp_replicate: int = option(1, "model replicas, each sharded over dp_shard devices", ge=1)
    dp_shard: int = option(0, "devices that share weights and optimizer state; 0 = all remaining", ge=0)
    sequence_parallel: bool = option(False, "shard activations along the sequence between tensor-parallel blocks")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.tp == 1:
            remedy = "set parallel.tp above 1 or parallel.sequence_parallel to false"
            raise self.wrong("sequence_parallel tp", "has no effect without tensor parallelism", remedy)
        return self

    def data_parallel_size(self, world: int) -> int:
        """Return the number of data-parallel ranks, dp_replicate * dp_shard, out of `world` ranks.

        Raises:
            RecipeError: the degrees do not multiply to `world`.
        """
        model_ranks = self.tp * self.pp * self.cp
        fixed = model_ranks * self.dp_replicate * (self.dp_shard or 1)
        if world % fixed or (self.dp_shard and world != fixed):
            wanted = f"{fixed}" if self.dp_shard else f"a multiple of {fixed}"
            names = ("tp", "pp", "cp", "dp_replicate", "dp_shard")
            raise RecipeError(
                f"these degrees need {wanted} ranks, the run has {world}",
                values={f"parallel.{name}": getattr(self, name) for name in names},
                remedy=f"start {wanted} ranks, or change the degrees (dp_shard = 0 uses all remaining)",
            )
        return world // model_ranks


class CheckpointOptions(Section):
    """Checkpoint interval, retention and mirror."""

    table = "checkpoint"
    needs = (("mirror_keep_last", "mirror_url"), ("mirror_keep_every", "mirror_keep_last"))

    interval: int = option(
        1000, "steps between checkpoints; 0 = only at the end", hyperparameter="CHECKPOINT_INTERVAL", ge=0
    )
    keep_last: int = option(3, "number of newest checkpoints to keep", ge=1)
    keep_every: int = option(0, "also keep checkpoints whose step is a multiple of this; 0 = none, 1 = all", ge=0)
    async_save: bool = option(False, "write checkpoints in the background, from a copy in host memory")
    resume: bool = option(True, "resume from the newest valid checkpoint of the run directory or the mirror")
    mirror_url: str = option(
        "", "s3://bucket/folder for uploads in the background, from which a run resumes on an empty machine"
    )
    mirror_keep_last: int = option(0, "number of newest checkpoints to keep in the mirror; 0 = all", ge=0)
    mirror_keep_every: int = option(0, "also keep those whose step is a multiple of this; 0 = none", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mirror_url and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/[!-~]*)?", self.mirror_url):
            raise self.wrong("mirror_url", "not the URL of a folder in a bucket", "write it as s3://bucket/folder")
        return self


class MetricsOptions(Section):
    """Logging, validation and profiling."""

    table = "metrics"
    needs = (("profile_start_step profile_ranks", "profile_steps"),)

    log_interval: int = option(10, "steps between metrics records", ge=1)
    validation_interval: int = option(0, "steps between validations; 0 = only at the end; needs data.validation", ge=0)
    validation_tokens: int = option(
        0,
        "positions of each validation set that are evaluated, the same each time; -1 = all; 0 = all sets together a "
        "tenth of the positions trained on between validations",
        unit="tokens",
        ge=-1,
    )
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = option(
        (), "metrics sinks besides metrics.jsonl; each needs the extra of its name"
    )
    monitor_interval_s: float = option(
        10.0, "interval of the node monitor (CPU, memory, disk, GPUs); 0 = off", unit="s", ge=0
    )
    profile_steps: int = option(0, "steps traced by the torch profiler; 0 = none", ge=0)
    profile_start_step: int = option(11, "first traced step, counted from 1", ge=1)
    profile_ranks: tuple[int, ...] = option((0,), "ranks to profile")
    memory_snapshot_step: int = option(0, "step after which every rank writes a CUDA memory snapshot; 0 = never", ge=0)
    memory_snapshot_on_oom: bool = option(False, "write a CUDA memory snapshot when CUDA runs out of memory")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.sinks)) < len(self.sinks):
            raise self.wrong("sinks", "duplicate sink", "list each sink once")
        if len(set(self.profile_ranks)) < len(self.profile_ranks) or min(self.profile_ranks, default=-1) < 0:
            raise self.wrong("profile_ranks", "must be distinct ranks", "the default is [0]")
        return self


class EvaluationOptions(Section):
    """Tasks and stores that are evaluated during a run, on the weights as the engine holds them."""

    table = "evaluation"
    needs = (("include_path limit", "tasks"),)

    tasks: tuple[str, ...] = option(
        (), "tasks, groups or tags of lm-evaluation-harness; needs the extra lt-trainer[eval]"
    )
    include_path: str = option("", "folder of further task files")
    stores: bool = option(False, "evaluate the validation sets by source file and document length")
    interval: int = option(0, "steps between evaluations; 0 = only at the end", ge=0)
    limit: int = option(0, "items of each task, the first ones; 0 = all", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.tasks)) < len(self.tasks):
            raise self.wrong("tasks", "duplicate task", "list each task once")
        if self.interval and not (self.tasks or self.stores):
            problem = "has no effect without evaluation.tasks"
            raise self.wrong("interval", problem, "set evaluation.tasks or evaluation.stores, or remove it")
        return self


class FaultToleranceOptions(Section):
    """Limits for skipped steps, rollbacks, hangs and stops."""

    table = "fault_tolerance"

    max_skipped_steps: int = option(
        10, "steps skipped as not finite before a rollback; counted anew at a checkpoint without any", ge=0
    )
    max_rollbacks: int = option(
        3, "rollbacks, each skipping the rows that led to it, before the run ends; per start", ge=0
    )
    hang_timeout_s: float = option(
        600.0, "time that ranks wait for a hanging or lost rank; then exit code 75", unit="s", gt=0
    )
    grace_period_s: float = option(120.0, "time for a stop, the current step and a save", unit="s", gt=0)

    @property
    def collective_timeout_s(self) -> float:
        """Timeout of the engine's collectives: above `hang_timeout_s`, so that the watchdog reports first."""
        return 1.5 * self.hang_timeout_s + 30


class Recipe(Section):
    """Recipe of a training run, from `load`, or constructed from its sections in Python."""

    run: RunOptions = RunOptions()
    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    batch: BatchOptions = BatchOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    parallel: ParallelOptions = ParallelOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    metrics: MetricsOptions = MetricsOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    fault_tolerance: FaultToleranceOptions = FaultToleranceOptions()
    engine: dict[str, Any] = option({}, "options by engine: its section, or a raw table if it is not installed")

    @model_validator(mode="after")
    def _check(self) -> Self:
        data, model, tasks, kind = self.data, self.model, self.evaluation.tasks, self.data.source_kind
        has_no_store = kind in ("synthetic", "loader")
        if self.schedule.kind != "constant" and self.schedule.min_lr > self.optimizer.lr:
            remedy = f"set schedule.min_lr to at most {self.optimizer.lr!r}; a tenth of it is typical"
            raise self.wrong("schedule.min_lr optimizer.lr", "the final learning rate is above the peak", remedy)
        if model.tie_word_embeddings and self.optimizer.lr_scale.head != 1:
            names, remedy = "optimizer.lr_scale.head model.tie_word_embeddings", "set optimizer.lr_scale.embedding"
            raise self.wrong(names, "a tied head is the embedding, whose learning rate has its own factor", remedy)
        for name in ("metrics.validation_interval", "evaluation.stores"):
            if self.value(name) and not (data.validation or data.validation_sets):
                remedy = f"set data.validation to a token store, or remove {name}"
                raise self.wrong(f"{name} data.validation", "there is no validation data", remedy)
        same_names = {*tasks} & ({*data.validation_sets} or {WHOLE_VALIDATION})
        if self.evaluation.stores and same_names:
            problem = f"a task and a validation set are both called {min(same_names)!r}"
            raise self.wrong("evaluation.tasks", problem, "rename the task's file")
        if tasks and has_no_store and not data.store_paths():
            problem = "tasks are texts, and without a token store there is no tokenizer"
            raise self.wrong(
                f"evaluation.tasks data.{kind}", problem, "set data.validation, or remove evaluation.tasks"
            )
        if has_no_store and not model.vocab_size:
            problem, remedy = f"data.{kind} needs a vocabulary size", "set model.vocab_size (VOCAB_SIZE)"
            raise self.wrong(f"model.vocab_size data.{kind}", problem, remedy)
        if self.batch.ramp.start and data.packing == "buckets":
            problem = "buckets do not support a batch ramp, since all rows of a step come from one bucket"
            raise self.wrong("batch.ramp.start data.packing", problem, "remove batch.ramp, or set data.packing to bfd")
        if 0 < model.max_position_embeddings < data.seq_len:
            remedy = f"set data.seq_len to at most {model.max_position_embeddings}, or the maximum to 0"
            problem = "rows are longer than the model's maximum context"
            raise self.wrong("data.seq_len model.max_position_embeddings", problem, remedy)
        return self

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
        if batch.global_batch_size % rows:
            raise RecipeError(
                f"{ranks} data-parallel ranks need a multiple of {rows} rows",
                values={name: self.value(name) for name in ("batch.global_batch_size", "batch.micro_batch_size")},
                remedy=f"set batch.global_batch_size (GLOBAL_BATCH_SIZE) to a multiple of {rows}, or lower "
                "micro_batch_size",
            )
        if batch.step_size_divisor % rows:
            raise RecipeError(
                f"{ranks} data-parallel ranks need a multiple of {rows} rows in every step",
                values={"batch.ramp.start": batch.ramp.start, "batch.ramp.increment": batch.ramp_increment},
                remedy=f"set them to multiples of {rows}",
            )
        return batch.global_batch_size // rows
