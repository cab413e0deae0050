"""The sections of a recipe: frozen dataclasses whose fields say what they mean, in which unit, under which name.

Each section checks its own fields when it is made and raises `RecipeError`; what concerns several sections is checked
in `recipe.py`. An option that would have no effect is an error, because whoever wrote it expected one.

The upper-case names (`hp`) are the hyperparameters of the Litespark training algorithm on SageMaker.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option

__all__ = [
    "BatchOptions",
    "CheckpointOptions",
    "DataOptions",
    "GuardOptions",
    "MetricsOptions",
    "ModelOptions",
    "OptimizerOptions",
    "ParallelOptions",
    "RopeScalingOptions",
    "RunOptions",
    "ScheduleOptions",
    "above_zero",
    "at_least",
    "wrong",
]


def at_least(made: Any, section: str, low: float, *names: str) -> None:
    """Refuse the named fields of `made` when they are below `low`."""
    for name in names:
        if getattr(made, name) < low:
            raise wrong(made, section, name, f"must be at least {low}", f"use {low} or more")


def above_zero(made: Any, section: str, *names: str) -> None:
    """Refuse the named fields of `made` when they are not greater than zero."""
    for name in names:
        if getattr(made, name) <= 0:
            default = getattr(type(made), name)
            raise wrong(made, section, name, "must be greater than 0", f"the default is {default!r}")


def wrong(made: Any, section: str, names: str, problem: str, remedy: str) -> RecipeError:
    """An error about fields of one section, `names` separated by spaces."""
    return RecipeError(
        problem, values={f"{section}.{name}": getattr(made, name) for name in names.split()}, remedy=remedy
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where the run lives and what trains it."""

    out: str = option("runs/run", "run directory: recipe, environment, metrics, checkpoints, logs")
    seed: int = option(0, "seed of the initial weights and of the order of the data")
    engine: str = option("gpu", "engine that trains: gpu (CUDA and CPU) or neuron (AWS Trainium)")

    def __post_init__(self) -> None:
        check_types(self, "run")
        if not self.out:
            raise wrong(self, "run", "out", "a run needs a directory", "set run.out to one, such as runs/run")
        if not 0 <= self.seed < 2**63:
            raise wrong(self, "run", "seed", "must lie in [0, 2**63)", "use a small whole number such as 0")


@dataclass(frozen=True, kw_only=True)
class RopeScalingOptions:
    """The Llama-3.1 rule that stretches rotary wavelengths; a factor of 1 means no stretching."""

    factor: float = option(1.0, "how much long wavelengths are stretched; 1 = not at all")
    low_freq_factor: float = option(1.0, "wavelengths above original context / this are stretched in full")
    high_freq_factor: float = option(4.0, "wavelengths below original context / this stay as they are")
    original_max_position_embeddings: int = option(8192, "original context, before stretching", unit="tokens")

    def __post_init__(self) -> None:
        section = "model.rope_scaling"
        check_types(self, section)
        at_least(self, section, 1, "factor", "original_max_position_embeddings")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            names, problem = "low_freq_factor high_freq_factor", "must hold 0 < low_freq_factor < high_freq_factor"
            raise wrong(self, section, names, problem, "Llama 3.1 uses 1 and 4")
        others = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        changed = [name for name in others if getattr(self, name) != getattr(RopeScalingOptions, name)]
        if self.factor == 1 and changed:
            problem = "has no effect when model.rope_scaling.factor is 1"
            remedy = "set model.rope_scaling.factor (Llama 3.1 uses 8) or leave the section out"
            raise wrong(self, section, " ".join(changed), problem, remedy)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The Llama to train. In a recipe file, fields that are not written take the values of `preset`, if given."""

    preset: str = option("", "name of a preset (see `lt model list`); fields given beside it win")
    vocab_size: int = option(0, "vocabulary size; must agree with the data; 0 = the data's", hp="VOCAB_SIZE")
    hidden_size: int = option(768, "width of the residual stream", hp="HIDDEN_SIZE")
    intermediate_size: int = option(2072, "width inside the feed-forward blocks", hp="INTERMEDIATE_SIZE")
    n_heads: int = option(12, "attention heads", hp="N_HEADS")
    n_kv_heads: int = option(12, "key and value heads", hp="N_KV_HEADS")
    n_layers: int = option(12, "transformer blocks", hp="N_LAYERS")
    max_position_embeddings: int = option(0, "longest context the model claims; 0 = data.seq_len", unit="tokens")
    rope_theta: float = option(10000.0, "base of the rotary wavelengths")
    norm_eps: float = option(1e-5, "epsilon of the RMS norms")
    tie_word_embeddings: bool = option(False, "one matrix for input embedding and output head")
    rope_scaling: RopeScalingOptions = field(default_factory=RopeScalingOptions)

    def __post_init__(self) -> None:
        check_types(self, "model")
        at_least(self, "model", 0, "vocab_size", "max_position_embeddings")
        at_least(self, "model", 1, "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers")
        above_zero(self, "model", "rope_theta", "norm_eps")
        if self.hidden_size % (2 * self.n_heads):
            problem = "every head needs an even share of the hidden size"
            remedy = f"use a hidden size that is a multiple of {2 * self.n_heads}, or another number of heads"
            raise wrong(self, "model", "hidden_size n_heads", problem, remedy)
        if self.n_heads % self.n_kv_heads:
            problem = "every key/value head must serve equally many attention heads"
            remedy = f"set model.n_kv_heads (N_KV_HEADS) to a divisor of {self.n_heads}"
            raise wrong(self, "model", "n_heads n_kv_heads", problem, remedy)
        self._check_preset_was_used()

    def _check_preset_was_used(self) -> None:
        """Only `load` fills in a preset; made by hand, its name alone would silently train the default shape."""
        if not self.preset:
            return
        from lt_model import PRESETS

        shape = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers")
        config = PRESETS.get(self.preset)
        if config is None:
            raise wrong(self, "model", "preset", "unknown preset", f"the presets are {', '.join(PRESETS)}")
        untouched = all(getattr(self, name) == getattr(ModelOptions, name) for name in shape)
        if untouched and any(getattr(self, name) != getattr(config, name) for name in shape):
            remedy = 'make the recipe with load(base={"model": {"preset": ...}}), or leave the preset out'
            raise wrong(self, "model", "preset", "the preset has no effect: every size is the default one", remedy)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is read, and how rows are made of it."""

    store: str = option("", "token store to train on, made by `lt data prepare`; required")
    validation: str = option("", "token store for the validation loss")
    seq_len: int = option(4096, "positions in a row", unit="tokens", hp="SEQ_LEN")
    pack: Literal["bfd", "concat"] = option("bfd", "best-fit rows of whole documents, or documents joined and cut")
    document_mask: bool = option(True, "positions see only their own document")
    shuffle: bool = option(True, "rows in a new random order each epoch")
    tokenizer: str = option(
        "mindbeam-ai/Litespark",
        "name of the tokenizer; the store carries its own, so this is only compared with it when it is given",
        hp="TOKENIZER",
    )

    def __post_init__(self) -> None:
        check_types(self, "data")
        at_least(self, "data", 2, "seq_len")
        if not self.tokenizer:
            raise wrong(self, "data", "tokenizer", "the name is empty", "leave it out to use the store's tokenizer")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How many rows make one update."""

    global_batch: int = option(256, "rows in one update, over all devices", hp="GLOBAL_BATCH_SIZE")
    micro_batch: int = option(4, "rows in one forward and backward pass", hp="MICRO_BATCH_SIZE")

    def __post_init__(self) -> None:
        check_types(self, "batch")
        at_least(self, "batch", 1, "global_batch", "micro_batch")
        if self.global_batch % self.micro_batch:
            below = range(min(self.micro_batch, self.global_batch), 0, -1)
            fitting = next(size for size in below if self.global_batch % size == 0)
            problem = "the global batch must be a whole number of micro-batches"
            remedy = f"set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of {self.global_batch} such as {fitting}"
            raise wrong(self, "batch", "global_batch micro_batch", problem, remedy)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW."""

    lr: float = option(1.6e-3, "highest learning rate", hp="LEARNING_RATE")
    weight_decay: float = option(0.01, "decoupled weight decay; norms and embeddings have none", hp="WEIGHT_DECAY")
    beta1: float = option(0.9, "decay of the first moment", hp="BETA1")
    beta2: float = option(0.95, "decay of the second moment", hp="BETA2")
    eps: float = option(1e-8, "added to the root of the second moment")
    grad_clip: float = option(1.0, "largest norm of the gradient; 0 = no clipping", hp="GRAD_CLIP")

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        at_least(self, "optimizer", 0, "weight_decay", "grad_clip")
        above_zero(self, "optimizer", "lr", "eps")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                default = getattr(OptimizerOptions, name)
                raise wrong(self, "optimizer", name, "must lie in [0, 1)", f"the default is {default!r}")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Learning rate over the steps; the formula is in `lt_trainer.schedule`."""

    kind: Literal["cosine", "linear", "constant"] = option("cosine", "how the learning rate falls after the warm-up")
    max_steps: int = option(10000, "updates in the whole run", hp="MAX_STEPS")
    warmup_steps: int = option(500, "updates until the highest learning rate", hp="WARMUP_STEPS")
    min_lr: float = option(4e-4, "learning rate of the last update (cosine, linear)", hp="MIN_LR")

    def __post_init__(self) -> None:
        check_types(self, "schedule")
        at_least(self, "schedule", 1, "max_steps")
        at_least(self, "schedule", 0, "warmup_steps", "min_lr")
        if self.warmup_steps > self.max_steps:
            remedy = f"set schedule.warmup_steps (WARMUP_STEPS) to at most {self.max_steps}"
            raise wrong(self, "schedule", "warmup_steps max_steps", "the warm-up is longer than the run", remedy)
        if self.kind == "constant" and self.min_lr != ScheduleOptions.min_lr:
            remedy = "leave schedule.min_lr (MIN_LR) out, or set schedule.kind to cosine or linear"
            raise wrong(self, "schedule", "min_lr kind", "a constant schedule has no final learning rate", remedy)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the devices share the work: world = tp * pp * cp * dp_replicate * dp_shard."""

    n_nodes: int = option(1, "nodes (machines) of the run", hp="NUM_NODES")
    tp: int = option(1, "tensor parallel degree")
    pp: int = option(1, "pipeline parallel degree")
    cp: int = option(1, "context parallel degree")
    dp_replicate: int = option(1, "replicas of the model, each of them sharded over dp_shard devices")
    dp_shard: int = option(0, "devices that share one copy of weights and optimizer state; 0 = all that remain")
    sequence_parallel: bool = option(False, "split activations along the sequence between tensor parallel blocks")

    def __post_init__(self) -> None:
        check_types(self, "parallel")
        at_least(self, "parallel", 1, "n_nodes", "tp", "pp", "cp", "dp_replicate")
        at_least(self, "parallel", 0, "dp_shard")
        if self.sequence_parallel and self.tp == 1:
            problem = "sequence parallelism has no effect without tensor parallelism"
            remedy = "set parallel.tp above 1 or parallel.sequence_parallel to false"
            raise wrong(self, "parallel", "sequence_parallel tp", problem, remedy)

    def data_parallel(self, world: int) -> int:
        """Ranks that read different rows, out of `world` ranks: dp_replicate * dp_shard.

        Raises:
            RecipeError: the degrees do not make up `world`.
        """
        model_ranks = self.tp * self.pp * self.cp
        fixed = model_ranks * self.dp_replicate * (self.dp_shard or 1)
        if world % fixed or (self.dp_shard and world != fixed):
            wanted = f"{fixed}" if self.dp_shard else f"a multiple of {fixed}"
            problem = f"these degrees need {wanted} ranks, and the run has {world}"
            remedy = f"start {wanted} ranks, or change the degrees (dp_shard = 0 takes what remains)"
            raise wrong(self, "parallel", "tp pp cp dp_replicate dp_shard", problem, remedy)
        return world // model_ranks


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When the state of the run is saved and how much of it is kept."""

    interval: int = option(
        1000, "updates between checkpoints; 0 = only at the end and when stopped", hp="CHECKPOINT_INTERVAL"
    )
    keep_last: int = option(3, "newest checkpoints to keep")
    keep_every: int = option(0, "also keep checkpoints whose step is a multiple of this; 0 = none, 1 = all")
    background: bool = option(
        False, "train on while a checkpoint is written; takes memory on the host for one more copy of the state"
    )
    resume: bool = option(True, "go on from the newest valid checkpoint of the run directory, or of the mirror")
    mirror: str = option(
        "",
        "s3://bucket/folder that gets every checkpoint in the background, and from which a run goes on on an empty "
        "machine; credentials and endpoint from where boto3 looks for them",
    )
    mirror_keep_last: int = option(0, "newest checkpoints to keep in the mirror; 0 = all")
    mirror_keep_every: int = option(0, "also keep checkpoints in the mirror whose step is a multiple of this; 0 = none")

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        at_least(self, "checkpoint", 0, "interval", "keep_every", "mirror_keep_last", "mirror_keep_every")
        at_least(self, "checkpoint", 1, "keep_last")
        self._check_mirror()

    def _check_mirror(self) -> None:
        if self.mirror:
            from lt_ckpt import CheckpointError
            from lt_ckpt.s3.address import split

            try:
                split(self.mirror)
            except CheckpointError as exc:
                problem = "is not the address of a folder in a bucket"
                raise wrong(self, "checkpoint", "mirror", problem, "write it as s3://bucket/folder") from exc
        for name, needed in (("mirror_keep_last", "mirror"), ("mirror_keep_every", "mirror_keep_last")):
            if getattr(self, name) and not getattr(self, needed):
                problem = f"has no effect without checkpoint.{needed}"
                raise wrong(self, "checkpoint", name, problem, f"set checkpoint.{needed}, or leave it out")


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What is reported how often."""

    log_interval: int = option(10, "updates between lines of metrics")
    eval_interval: int = option(0, "updates between validation losses; 0 = only at the end; needs data.validation")

    def __post_init__(self) -> None:
        check_types(self, "metrics")
        at_least(self, "metrics", 1, "log_interval")
        at_least(self, "metrics", 0, "eval_interval")


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """What the run does when something goes wrong."""

    max_skipped: int = option(
        10,
        "updates skipped, because their loss or gradient norm is not finite, before the run goes back to its newest "
        "checkpoint; counted anew when two checkpoints have none between them",
    )
    max_rewinds: int = option(
        3, "times that one start of the run goes back to a checkpoint, past the rows that led there, before it ends"
    )
    timeout_s: float = option(
        600.0, "how long ranks wait for one that hangs or is gone before the run ends with exit code 75", unit="s"
    )
    grace_s: float = option(
        120.0, "how long a stop may take before the ranks are killed: the update under way and a save", unit="s"
    )

    def __post_init__(self) -> None:
        check_types(self, "guard")
        at_least(self, "guard", 0, "max_skipped", "max_rewinds")
        above_zero(self, "guard", "timeout_s", "grace_s")

    @property
    def collective_timeout_s(self) -> float:
        """What engines give their collectives: more than `timeout_s`, for the watchdog can say who is missing."""
        return 1.5 * self.timeout_s + 30
