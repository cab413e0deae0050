"""`[data]`: what is read, and how rows are made of it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
FACTORY = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """`[data.validation_sets.NAME]`: one more set to validate on."""

    store: str = option("", "token store; required")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """`[data.mixture.NAME]`: one source of a mixture."""

    store: str = option("", "token store; required")
    weight: float = option(1.0, "share of the rows, beside the other sources' weights")
    phase_weights: tuple[float, ...] = option((), "weight in each later phase; none: the same in all")
    max_epochs: int = option(0, "how often it may be read; 0 = as often as needed")


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """`[data.bucket_weights.LENGTH]`: how often rows of one length are read."""

    weight: float = option(1.0, "share of the steps, beside the other lengths' weights")
    phase_weights: tuple[float, ...] = option((), "weight in each later phase; none: the same in all")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is read, and how rows are made of it. One of `store`, `mixture`, `synthetic` and `loader` is given."""

    store: str = option("", "token store to train on, made by `lt data prepare`")
    mixture: Mapping[str, SourceOptions] = field(default_factory=dict)
    synthetic: bool = option(False, "train on rows of random ids, to measure and to try out; needs model.vocab_size")
    loader: str = option(
        "", "module:function that gives this rank's rows; needs model.vocab_size; see docs/guides/training-data.md"
    )
    loader_resume: Literal["refuse", "replay"] = option(
        "refuse", "how a run goes on with a loader that has no state: not at all, or by reading its rows again"
    )
    validation: str = option("", "token store for the validation loss")
    validation_sets: Mapping[str, ValidationOptions] = field(default_factory=dict)
    seq_len: int = option(4096, "positions in a row", unit="tokens", hp="SEQ_LEN")
    pack: Literal["bfd", "concat", "buckets"] = option(
        "bfd", "best-fit rows of whole documents, documents joined and cut, or rows of several lengths"
    )
    shortest: int = option(256, "positions in the shortest rows of buckets", unit="tokens")
    bucket_weights: Mapping[str, BucketOptions] = field(default_factory=dict)
    phase_steps: tuple[int, ...] = option((), "steps after which the weights of a mixture or of buckets change")
    phase_rows: tuple[int, ...] = option((), "likewise, counted in rows of the global sequence")
    document_mask: bool = option(True, "positions see only their own document")
    shuffle: bool = option(True, "rows in a new random order each epoch")
    prefetch: int = option(2, "steps whose rows are made ahead in a thread; 0 = none; a loader's never are")
    tokenizer: str = option(
        "mindbeam-ai/Litespark",
        "name of the tokenizer; the store carries its own, so this is only compared with it when it is given",
        hp="TOKENIZER",
    )

    def __post_init__(self) -> None:
        check_types(self, "data")
        at_least(self, "data", 2, "seq_len")
        at_least(self, "data", 1, "shortest")
        at_least(self, "data", 0, "prefetch")
        if not self.tokenizer:
            raise wrong(self, "data", "tokenizer", "the name is empty", "leave it out to use the store's tokenizer")
        for table in ("mixture", "validation_sets", "bucket_weights"):
            self._settle(table)
        for table in ("mixture", "validation_sets"):
            for name, entry in getattr(self, table).items():
                if not entry.store:
                    problem, values = "this section needs data", {f"data.{table}.{name}.store": entry.store}
                    raise RecipeError(problem, values=values, remedy="set it to a store")
        self._check_kind()
        self._check_weights()

    @property
    def kind(self) -> str:
        """Which of the fields that say what is read is given: store, mixture, synthetic or loader; "" for none."""
        return next((name for name in ("store", "mixture", "synthetic", "loader") if getattr(self, name)), "")

    def _settle(self, table: str) -> None:
        """Check the names and types of a table's sections, and put them into the order of their names."""
        entries: Mapping[str, Any] = getattr(self, table)
        for name, entry in entries.items():
            if not NAME.fullmatch(name):
                raise RecipeError(
                    "not a name: letters, digits, '_' and '-', the first a letter or a digit",
                    values={f"data.{table}": name},
                    remedy=f"write [data.{table}.NAME] with another name",
                )
            check_types(entry, f"data.{table}.{name}")
        object.__setattr__(self, table, {name: entries[name] for name in sorted(entries)})

    def _check_kind(self) -> None:
        given = [name for name in ("store", "mixture", "synthetic", "loader") if getattr(self, name)]
        if len(given) > 1:
            values = {f"data.{name}": getattr(self, name) for name in given}
            if self.mixture:
                values["data.mixture"] = list(self.mixture)
            raise RecipeError("only one of these can be trained on", values=values, remedy="leave the others out")
        if self.loader and not FACTORY.fullmatch(self.loader):
            raise wrong(self, "data", "loader", "not the name of a function", "write it as package.module:function")
        useless = {
            "loader_resume": bool(self.loader),
            "shortest": self.pack == "buckets",
            "shuffle": self.kind not in ("synthetic", "loader"),
            "prefetch": not self.loader,
            "tokenizer": self.kind not in ("synthetic", "loader"),
            "pack": self.kind not in ("synthetic", "loader") or bool(self.validation or self.validation_sets),
        }
        for name, used in useless.items():
            if not used and getattr(self, name) != getattr(DataOptions, name):
                because = {"loader_resume": "without data.loader", "shortest": "without data.pack = 'buckets'"}
                raise wrong(
                    self, "data", name, f"has no effect {because.get(name, f'with data.{self.kind}')}", "leave it out"
                )
        if self.pack == "buckets" and self.kind not in ("store", ""):
            values = {"data.pack": self.pack, f"data.{self.kind}": getattr(self, self.kind)}
            if self.mixture:
                values["data.mixture"] = list(self.mixture)
            remedy = "set data.pack to bfd or concat, or data.store to the one store to read in buckets"
            raise RecipeError("rows of several lengths come from one store", values=values, remedy=remedy)

    def _check_weights(self) -> None:
        if self.bucket_weights and self.pack != "buckets":
            values = {"data.bucket_weights": list(self.bucket_weights), "data.pack": self.pack}
            raise RecipeError("only buckets have lengths", values=values, remedy="set data.pack to buckets")
        lengths = [str(length) for length in self.row_lengths]
        for name in self.bucket_weights:
            if name not in lengths:
                raise RecipeError(
                    f"no such length of rows, which are {', '.join(lengths)} positions long",
                    values={"data.bucket_weights": name},
                    remedy=f"write [data.bucket_weights.{lengths[0]}] and the like",
                )
        if self.phase_steps and self.phase_rows:
            names = "phase_steps phase_rows"
            raise wrong(self, "data", names, "phases are counted in one of the two", "leave one out")
        weighted: dict[str, Any] = {f"mixture.{name}": entry for name, entry in self.mixture.items()}
        weighted |= {f"bucket_weights.{name}": entry for name, entry in self.bucket_weights.items()}
        name = "phase_steps" if self.phase_steps else "phase_rows"
        starts = getattr(self, name)
        if starts and (starts[0] < 1 or list(starts) != sorted(set(starts))):
            raise wrong(self, "data", name, "phases begin after 0, each later than the one before", "put them in order")
        if starts and not any(entry.phase_weights for entry in weighted.values()):
            remedy = "give phase_weights to [data.mixture.NAME] or [data.bucket_weights.LENGTH], or leave it out"
            raise wrong(self, "data", name, "no weight changes there", remedy)
        for section, entry in weighted.items():
            for weight in (entry.weight, *entry.phase_weights):
                if weight < 0:
                    values = {f"data.{section}.weight": weight}
                    raise RecipeError("a weight is 0 or more", values=values, remedy="use 0 for none")
            if entry.phase_weights and len(entry.phase_weights) != len(starts):
                raise RecipeError(
                    f"needs a weight for each of the {len(starts)} later phases",
                    values={f"data.{section}.phase_weights": entry.phase_weights, f"data.{name}": starts},
                    remedy="give as many, or leave phase_weights out to keep the weight",
                )
            if getattr(entry, "max_epochs", 0) < 0:
                values = {f"data.{section}.max_epochs": entry.max_epochs}
                raise RecipeError("must be at least 0", values=values, remedy="use 0 or more")

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The lengths that rows may have, longest first: with buckets seq_len, half of it, down to shortest."""
        lengths = [self.seq_len]
        while self.pack == "buckets" and lengths[-1] > self.shortest and lengths[-1] % 2 == 0:
            lengths.append(lengths[-1] // 2)
        if self.pack == "buckets" and lengths[-1] != self.shortest:
            problem = "the shortest rows are seq_len divided by a power of two"
            remedy = f"set data.shortest to one of {', '.join(map(str, lengths))}"
            raise wrong(self, "data", "shortest seq_len", problem, remedy)
        return tuple(lengths)

    def phases(self, rows_before: Callable[[int], int]) -> list[tuple[int, dict[str, float]]]:
        """The weights by name, and the row from which they hold.

        Args:
            rows_before: gives the rows that the steps before a step (from 0) read.
        """
        table = self.mixture or self.bucket_weights
        starts = self.phase_rows or tuple(rows_before(step) for step in self.phase_steps)
        found = [(0, {name: entry.weight for name, entry in table.items()})]
        for i, start in enumerate(starts):
            found.append((start, {n: e.phase_weights[i] if e.phase_weights else e.weight for n, e in table.items()}))
        return found
