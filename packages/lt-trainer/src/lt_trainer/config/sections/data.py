"""`[data]`: training and validation data."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least
from lt_trainer.errors import RecipeError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
FACTORY_PATTERN = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """`[data.validation_sets.NAME]`: another validation set."""

    store: str = option("", "token store; required")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """`[data.mixture.NAME]`: source of a mixture."""

    store: str = option("", "token store; required")
    weight: float = option(1.0, "relative share of the rows")
    phase_weights: tuple[float, ...] = option((), "weight in each later phase; empty = unchanged")
    max_epochs: int = option(0, "maximum number of epochs; 0 = unlimited")


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """`[data.bucket_weights.LENGTH]`: sampling weight of a row length."""

    weight: float = option(1.0, "relative share of the steps")
    phase_weights: tuple[float, ...] = option((), "weight in each later phase; empty = unchanged")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Training data (one of `store`, `mixture`, `synthetic` and `loader`), validation data and packing."""

    store: str = option("", "token store to train on, from `lt data prepare`")
    mixture: Mapping[str, SourceOptions] = field(default_factory=dict)
    synthetic: bool = option(False, "train on random ids, for benchmarks and trials; needs model.vocab_size")
    loader: str = option(
        "", "module:function that returns this rank's rows; needs model.vocab_size; see docs/guides/data.md"
    )
    loader_resume: Literal["error", "replay"] = option(
        "error", "resume with a loader without state: error, or read its rows again"
    )
    validation: str = option("", "token store for the validation loss")
    validation_sets: Mapping[str, ValidationOptions] = field(default_factory=dict)
    seq_len: int = option(4096, "positions per row", unit="tokens", hyperparameter="SEQ_LEN")
    packing: Literal["bfd", "concat", "buckets"] = option(
        "bfd",
        "best-fit rows of whole documents (bfd), documents concatenated and cut, or rows of several lengths",
        former_name="pack",
    )
    packs: str = option("", "folder for the packs of all stores; empty = in each store")
    min_seq_len: int = option(256, "positions of the shortest rows with buckets", unit="tokens", former_name="shortest")
    bucket_weights: Mapping[str, BucketOptions] = field(default_factory=dict)
    phase_steps: tuple[int, ...] = option((), "steps after which the weights of a mixture or of buckets change")
    phase_rows: tuple[int, ...] = option((), "the same in rows of the global sequence")
    document_mask: bool = option(True, "attention within documents only")
    shuffle: bool = option(True, "new random order of rows each epoch")
    prefetch: int = option(2, "steps prefetched by a thread; 0 = none; not used with a loader")
    tokenizer: str = option(
        "mindbeam-ai/Litespark",
        "name of the tokenizer; only compared with the store's own",
        hyperparameter="TOKENIZER",
    )

    def __post_init__(self) -> None:
        check_types(self, "data")
        require_at_least(self, "data", 2, "seq_len")
        require_at_least(self, "data", 1, "min_seq_len")
        require_at_least(self, "data", 0, "prefetch")
        if not self.tokenizer:
            raise field_error(self, "data", "tokenizer", "must not be empty", "remove it to use the store's tokenizer")
        for table in ("mixture", "validation_sets", "bucket_weights"):
            self._check_table(table)
        for table in ("mixture", "validation_sets"):
            for name, entry in getattr(self, table).items():
                if not entry.store:
                    problem, values = "must not be empty", {f"data.{table}.{name}.store": entry.store}
                    raise RecipeError(problem, values=values, remedy="set it to a token store")
        self._check_source_kind()
        self._check_weights()

    @property
    def source_kind(self) -> str:
        """The given one of store, mixture, synthetic and loader; "" for none."""
        return next((name for name in ("store", "mixture", "synthetic", "loader") if getattr(self, name)), "")

    def store_paths(self) -> dict[str, str]:
        """Return the path of each given store by field, those of the training rows first."""
        paths = {"data.store": self.store}
        paths |= {f"data.mixture.{name}.store": source.store for name, source in self.mixture.items()}
        paths |= {"data.validation": self.validation}
        paths |= {f"data.validation_sets.{name}.store": entry.store for name, entry in self.validation_sets.items()}
        return {field: path for field, path in paths.items() if path}

    def _check_table(self, table: str) -> None:
        """Check names and types of a table's sections, and sort them by name."""
        entries: Mapping[str, Any] = getattr(self, table)
        for name, entry in entries.items():
            if not NAME_PATTERN.fullmatch(name):
                raise RecipeError(
                    "invalid name: must have letters, digits, '_' and '-' and start with a letter or digit",
                    values={f"data.{table}": name},
                    remedy=f"rename [data.{table}.NAME]",
                )
            check_types(entry, f"data.{table}.{name}")
        object.__setattr__(self, table, {name: entries[name] for name in sorted(entries)})

    def _check_source_kind(self) -> None:
        given = [name for name in ("store", "mixture", "synthetic", "loader") if getattr(self, name)]
        if len(given) > 1:
            values = {f"data.{name}": getattr(self, name) for name in given}
            if self.mixture:
                values["data.mixture"] = list(self.mixture)
            raise RecipeError("only one of these can be trained on", values=values, remedy="remove the others")
        if self.loader and not FACTORY_PATTERN.fullmatch(self.loader):
            raise field_error(self, "data", "loader", "not a function name", "write it as package.module:function")
        has_effect = {
            "loader_resume": bool(self.loader),
            "min_seq_len": self.packing == "buckets",
            "shuffle": self.source_kind not in ("synthetic", "loader"),
            "prefetch": not self.loader,
            "tokenizer": self.source_kind not in ("synthetic", "loader"),
            "packing": self.source_kind not in ("synthetic", "loader") or bool(self.validation or self.validation_sets),
        }
        for name, used in has_effect.items():
            if not used and getattr(self, name) != getattr(DataOptions, name):
                reasons = {"loader_resume": "without data.loader", "min_seq_len": "without data.packing = 'buckets'"}
                raise field_error(
                    self,
                    "data",
                    name,
                    f"has no effect {reasons.get(name, f'with data.{self.source_kind}')}",
                    "remove it",
                )
        if self.packing == "buckets" and self.source_kind not in ("store", ""):
            values = {"data.packing": self.packing, f"data.{self.source_kind}": getattr(self, self.source_kind)}
            if self.mixture:
                values["data.mixture"] = list(self.mixture)
            remedy = "set data.packing to bfd or concat, or train on a single data.store"
            raise RecipeError("buckets need a single store", values=values, remedy=remedy)

    def _check_weights(self) -> None:
        if self.bucket_weights and self.packing != "buckets":
            values = {"data.bucket_weights": list(self.bucket_weights), "data.packing": self.packing}
            raise RecipeError(
                "bucket_weights requires data.packing = 'buckets'", values=values, remedy="set data.packing"
            )
        lengths = [str(length) for length in self.row_lengths]
        for name in self.bucket_weights:
            if name not in lengths:
                raise RecipeError(
                    f"no such row length; rows have {', '.join(lengths)} positions",
                    values={"data.bucket_weights": name},
                    remedy=f"write [data.bucket_weights.{lengths[0]}] and the like",
                )
        if self.phase_steps and self.phase_rows:
            names = "phase_steps phase_rows"
            raise field_error(self, "data", names, "phases are given in steps or in rows", "remove one")
        weighted: dict[str, Any] = {f"mixture.{name}": entry for name, entry in self.mixture.items()}
        weighted |= {f"bucket_weights.{name}": entry for name, entry in self.bucket_weights.items()}
        name = "phase_steps" if self.phase_steps else "phase_rows"
        starts = getattr(self, name)
        if starts and (starts[0] < 1 or list(starts) != sorted(set(starts))):
            raise field_error(self, "data", name, "phases must start after 0, in increasing order", "sort them")
        if starts and not any(entry.phase_weights for entry in weighted.values()):
            remedy = "set phase_weights in [data.mixture.NAME] or [data.bucket_weights.LENGTH], or remove it"
            raise field_error(self, "data", name, "no weight changes at these phases", remedy)
        for section, entry in weighted.items():
            for weight in (entry.weight, *entry.phase_weights):
                if weight < 0:
                    values = {f"data.{section}.weight": weight}
                    raise RecipeError("must be at least 0", values=values, remedy="use 0 or more")
            if entry.phase_weights and len(entry.phase_weights) != len(starts):
                raise RecipeError(
                    f"needs a weight for each of the {len(starts)} later phases",
                    values={f"data.{section}.phase_weights": entry.phase_weights, f"data.{name}": starts},
                    remedy="set as many, or remove phase_weights to keep the weight",
                )
            if getattr(entry, "max_epochs", 0) < 0:
                values = {f"data.{section}.max_epochs": entry.max_epochs}
                raise RecipeError("must be at least 0", values=values, remedy="use 0 or more")

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Row lengths, longest first; with buckets, seq_len halved down to min_seq_len."""
        lengths = [self.seq_len]
        while self.packing == "buckets" and lengths[-1] > self.min_seq_len and lengths[-1] % 2 == 0:
            lengths.append(lengths[-1] // 2)
        if self.packing == "buckets" and lengths[-1] != self.min_seq_len:
            problem = "must be seq_len divided by a power of two"
            remedy = f"set data.min_seq_len to one of {', '.join(map(str, lengths))}"
            raise field_error(self, "data", "min_seq_len seq_len", problem, remedy)
        return tuple(lengths)

    def weight_phases(self, rows_before: Callable[[int], int]) -> list[tuple[int, dict[str, float]]]:
        """Return the weights by name of each phase, with the row at which it starts.

        Args:
            rows_before: returns the rows read before a step (from 0).
        """
        table = self.mixture or self.bucket_weights
        starts = self.phase_rows or tuple(rows_before(step) for step in self.phase_steps)
        phases = [(0, {name: entry.weight for name, entry in table.items()})]
        for i, start in enumerate(starts):
            phases.append((start, {n: e.phase_weights[i] if e.phase_weights else e.weight for n, e in table.items()}))
        return phases
