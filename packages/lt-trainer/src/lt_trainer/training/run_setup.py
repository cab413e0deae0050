"""Checked setup of a run: recipe, ranks, engine spec, data and model, before any device is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lt_ckpt import find_latest_valid
from lt_data import Tokenizer
from lt_trainer.checkpointing.checkpoint_manager import CheckpointManager
from lt_trainer.config.recipe import ResolvedRecipe, llama_config, to_dict
from lt_trainer.config.sections import Recipe
from lt_trainer.data.training_data import STORES, TrainingData, open_data
from lt_trainer.engine import Engine, EngineSpec, World, engine_spec
from lt_trainer.errors import RecipeError
from lt_trainer.evaluation.encoding import PairEncoder
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError
from lt_trainer.evaluation.tasks import EncodedTask, find_tasks
from lt_trainer.observability.run_logger import ComputeCost
from lt_trainer.observability.setup import check_metrics_options

if TYPE_CHECKING:
    from lt_model import LlamaConfig

FLOPS_CONVENTION = "full"
"""6 FLOPs per parameter and token plus full attention, as in torchtitan and NeMo."""


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """Recipe that passed all checks that need no device, with its ranks, engine spec, data and model."""

    recipe: Recipe
    world: World
    spec: EngineSpec
    data: TrainingData
    model: LlamaConfig
    tasks: tuple[EncodedTask, ...] = ()
    """Tasks of `[evaluation]`."""

    @classmethod
    def create(cls, resolved: ResolvedRecipe, environ: Mapping[str, str]) -> RunSetup:
        """Check a recipe against the ranks, the engine and the data.

        Raises:
            RecipeError: a field does not fit; names field, value, source and remedy.
            DataError: a store cannot be read.
        """
        recipe, world = resolved.recipe, World.from_env(environ)
        spec = engine_spec(recipe.run.engine)
        try:
            spec.check(recipe, world)
            _require_capabilities(recipe, spec)
            _require_boto3(recipe)
            check_metrics_options(recipe, spec, world)
            data = open_data(recipe, read=_stores_read(recipe))
            model = llama_config(recipe, data.vocab_size)
            tasks = _open_tasks(recipe, data)
        except RecipeError as exc:
            raise exc.with_origins(resolved.origins) from exc
        return cls(recipe=recipe, world=world, spec=spec, data=data, model=model, tasks=tasks)

    @property
    def folder(self) -> Path:
        """Path of the run directory."""
        return Path(self.recipe.run.dir)

    def set_environment(self) -> None:
        """Set the environment variables that the engine's libraries read; those that are set are kept."""
        os.environ.update(self.spec.env(self.recipe))

    def open_engine(self) -> Engine:
        """Open the devices, after setting the environment variables that the engine's libraries read."""
        self.set_environment()
        return self.spec.open(self.recipe, self.model, self.world)

    def checkpoint_manager(
        self, root: Path, protected: Callable[[], AbstractContextManager[Collection[Path]]] = lambda: nullcontext(())
    ) -> CheckpointManager:
        """Return the manager of this run's checkpoints in a folder.

        Args:
            root: folder of the checkpoints.
            protected: context with the checkpoints that retention must not delete.
        """
        return CheckpointManager(
            root=root,
            recipe=self.recipe,
            model=self.model,
            tokenizer_files=self.data.tokenizer_files,
            recipe_values=to_dict(self.recipe),
            protected=protected,
        )


def compute_cost(recipe: Recipe, model: LlamaConfig, engine: Engine) -> ComputeCost:
    """Return tokens and FLOPs per row."""
    from lt_model import flops_per_token
    from lt_model.costs import attention_flops_per_token

    seq_len = recipe.data.seq_len
    return ComputeCost(
        micro_batch_size=recipe.batch.micro_batch_size,
        seq_len=seq_len,
        flops_per_token=flops_per_token(model, seq_len, FLOPS_CONVENTION),
        flops_by_length={n: flops_per_token(model, n, FLOPS_CONVENTION) for n in recipe.data.row_lengths[1:]},
        attention_flops=attention_flops_per_token(model, 1, FLOPS_CONVENTION),
        recomputed_flops_per_token=engine.recomputed_flops_per_token,
    )


def _stores_read(recipe: Recipe) -> dict[str, str]:
    """Return the fingerprints of the stores that the newest checkpoint has read, by field."""
    checkpoints = Path(recipe.run.dir) / "checkpoints"
    if not checkpoints.is_dir():  # a new run, or a folder that cannot be one: who opens it says so
        return {}
    newest, _ = find_latest_valid(checkpoints, verify=False)
    return {} if newest is None else dict((newest.manifest.data or {}).get(STORES, {}))


def _require_capabilities(recipe: Recipe, spec: EngineSpec) -> None:
    if recipe.data.document_mask and "document_mask" not in spec.capabilities:
        raise RecipeError(
            f"the {spec.name} engine does not support document masks",
            values={"data.document_mask": recipe.data.document_mask},
            remedy="set data.document_mask to false, or choose another engine with run.engine",
        )


def evaluation_shape(recipe: Recipe) -> BatchShape:
    """Return the shape of the batches of an evaluation: that of a micro-batch."""
    return BatchShape(
        micro_batch_size=recipe.batch.micro_batch_size,
        seq_len=recipe.data.seq_len,
        document_mask=recipe.data.document_mask,
    )


def _open_tasks(recipe: Recipe, data: TrainingData) -> tuple[EncodedTask, ...]:
    """Read and encode the tasks of `[evaluation]`."""
    options = recipe.evaluation
    if not options.tasks:
        return ()
    try:
        tasks = find_tasks(options.tasks, options.tasks_dir, limit=options.limit)
        encoder = PairEncoder(Tokenizer.from_bytes(data.tokenizer_files))
        return tuple(EncodedTask.encode(task, encoder, evaluation_shape(recipe)) for task in tasks)
    except EvaluationError as exc:
        raise RecipeError(str(exc), values={"evaluation.tasks": options.tasks}) from exc


def _require_boto3(recipe: Recipe) -> None:
    if recipe.checkpoint.mirror_url and find_spec("boto3") is None:
        raise RecipeError(
            "a mirror needs boto3, which is not installed",
            values={"checkpoint.mirror_url": recipe.checkpoint.mirror_url},
            remedy="pip install 'lt-trainer[s3]', or remove checkpoint.mirror_url",
        )
