"""Settings that `lt train tune` tries: what changes the speed of a run, and not what it learns.

The global batch, sequence length, dtypes and degrees of parallelism stay the recipe's. Candidates are every micro-batch
that divides a rank's part of the global batch, the recomputation modes, compiled or not, and the tokens whose logits
exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.planning.layout import engine_table

CHECKPOINTING_MODES = ("none", "selective", "full")
"""By memory, the most first."""
LOSS_CHUNK_TOKENS = (256, 1024, 4096, 16384)
"""Tried beside the recipe's value, as far as a micro-batch has more tokens."""


@dataclass(frozen=True, kw_only=True)
class TunedSetting:
    """One candidate."""

    micro_batch_size: int
    activation_checkpointing: str
    compile: str | bool
    loss_chunk_tokens: int = 0

    def to_overrides(self) -> dict[str, Any]:
        """Return the recipe fields, by dotted name."""
        return {
            "batch.micro_batch_size": self.micro_batch_size,
            "engine.gpu.activation_checkpointing": self.activation_checkpointing,
            "engine.gpu.compile": self.compile,
            "engine.gpu.loss_chunk_tokens": self.loss_chunk_tokens,
        }

    def to_set_options(self) -> list[str]:
        """Return the fields as values of `--set`."""
        return [f"{name}={_format(value)}" for name, value in self.to_overrides().items()]

    @classmethod
    def from_overrides(cls, overrides: dict[str, Any]) -> TunedSetting:
        """Return the setting of `to_overrides`.

        Raises:
            ValueError: it is none.
        """
        values = {name.rpartition(".")[2]: value for name, value in overrides.items()}
        kinds = {"micro_batch_size": int, "activation_checkpointing": str, "compile": str | bool}
        kinds |= {"loss_chunk_tokens": int} if "loss_chunk_tokens" in values else {}
        if values.keys() != kinds.keys() or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise ValueError("its setting is not one that tuning tries")
        return cls(**values)

    def needs_no_less_than(self, other: TunedSetting) -> bool:
        """Return True if this setting needs at least the memory of `other`.

        It has as many rows and recomputes no more.
        """
        rank = CHECKPOINTING_MODES.index
        return (
            self.compile == other.compile
            and self.loss_chunk_tokens == other.loss_chunk_tokens
            and self.micro_batch_size >= other.micro_batch_size
            and rank(self.activation_checkpointing) <= rank(other.activation_checkpointing)
        )


TUNED_FIELDS = tuple(TunedSetting(micro_batch_size=1, activation_checkpointing="none", compile="auto").to_overrides())


@dataclass(frozen=True, kw_only=True)
class SettingGrid:
    """All candidates of a recipe, and the one to begin with."""

    micro_batch_sizes: Sequence[int]
    """Ascending."""
    modes: Sequence[str]
    compile: Sequence[str | bool]
    start: TunedSetting
    tokens_per_row: int = 0
    """Positions of a row on a rank; 0: chunks of the loss are not tried."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, world_size: int) -> SettingGrid:
        """Return the candidates of a recipe on a number of ranks; the first is the recipe itself.

        Raises:
            RecipeError: run.engine is not "gpu", or the recipe lets the compiler choose what is recomputed.
        """
        options = engine_table(recipe)
        mode = options.get("activation_checkpointing", CHECKPOINTING_MODES[0])
        if mode not in CHECKPOINTING_MODES:
            raise RecipeError(
                "tuning tries none, selective and full",
                values={"engine.gpu.activation_checkpointing": mode},
                remedy="tune with --set engine.gpu.activation_checkpointing=none",
            )
        rows = recipe.batch.micro_batch_size * recipe.accumulation_steps(world_size)
        compiled = options.get("compile", "auto")
        is_eager = compiled == "auto" and options.get("device", "auto") == "cpu"  # there auto does not compile
        start = TunedSetting(
            micro_batch_size=recipe.batch.micro_batch_size,
            activation_checkpointing=mode,
            compile=compiled,
            loss_chunk_tokens=options.get("loss_chunk_tokens", 0),
        )
        others = () if is_eager else (False,) if compiled in ("auto", True) else (True,)
        return cls(
            micro_batch_sizes=[size for size in range(1, rows + 1) if rows % size == 0],
            modes=CHECKPOINTING_MODES,
            compile=(compiled, *others),
            start=start,
            tokens_per_row=recipe.data.seq_len // recipe.parallel.cp,
        )

    def lines(self) -> Iterator[TunedSetting]:
        """Yield one setting for each mode and each choice of compile, the start's first."""
        for compiled in self.compile:
            for mode in (self.start.activation_checkpointing, *self.modes):
                if mode == self.start.activation_checkpointing and compiled == self.start.compile:
                    continue
                yield replace(self.start, activation_checkpointing=mode, compile=compiled)

    def loss_chunks(self, setting: TunedSetting) -> Iterator[TunedSetting]:
        """Yield the setting with each other size of the loss's chunks."""
        for tokens in LOSS_CHUNK_TOKENS:
            if tokens < setting.micro_batch_size * self.tokens_per_row and tokens != setting.loss_chunk_tokens:
                yield replace(setting, loss_chunk_tokens=tokens)

    def neighbor(self, setting: TunedSetting, step: int) -> TunedSetting | None:
        """Return the setting with the next larger (`step` 1) or smaller (-1) micro-batch, or None."""
        index = self.micro_batch_sizes.index(setting.micro_batch_size) + step
        if not 0 <= index < len(self.micro_batch_sizes):
            return None
        return replace(setting, micro_batch_size=self.micro_batch_sizes[index])


def _format(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
