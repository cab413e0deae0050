"""The section `[data]`: training and validation data, mixtures, rows of several lengths."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lt_trainer.config.section import Section, default_of, option
from lt_trainer.errors import RecipeError


def _checked(pattern: str, problem: str) -> AfterValidator:
    def check(text: str) -> str:
        if text and not re.fullmatch(pattern, text):
            raise ValueError(problem)
        return text

    return AfterValidator(check)


Name = Annotated[
    str,
    Field(min_length=1),
    _checked(r"[A-Za-z0-9][A-Za-z0-9_-]*", "must have letters, digits, '_' and '-' and start with a letter or digit"),
]
Function = Annotated[str, _checked(r"\w+(\.\w+)*:\w+(\.\w+)*", "must be package.module:function")]
_SORTED = AfterValidator(lambda table: dict(sorted(table.items())))
SOURCE_KINDS = ("store", "mixture", "synthetic", "loader")


class ValidationOptions(Section):
    """`[data.validation_sets.NAME]`: another validation set."""

    store: str = Field(description="token store", min_length=1)


class BucketOptions(Section):
    """`[data.bucket_weights.LENGTH]`: sampling weight of a row length."""

    weight: float = option(1.0, "relative share of the steps", ge=0)
    phase_weights: tuple[Annotated[float, Field(ge=0)], ...] = option(
        (), "weight in each later phase; empty = unchanged"
    )


class SourceOptions(Section):
    """`[data.mixture.NAME]`: source of a mixture."""

    store: str = Field(description="token store", min_length=1)
    weight: float = option(1.0, "relative share of the rows", ge=0)
    phase_weights: tuple[Annotated[float, Field(ge=0)], ...] = option(
        (), "weight in each later phase; empty = unchanged"
    )
    max_epochs: int = option(0, "maximum number of epochs; 0 = unlimited", ge=0)


class DataOptions(Section):
    """Training data (one of `store`, `mixture`, `synthetic` and `loader`), validation data and packing."""

    table = "data"
    needs = (("loader_resume", "loader"), ("min_seq_len", "packing", "buckets"))

    store: str = option("", "token store to train on, from `lt data prepare`")
    mixture: Annotated[dict[Name, SourceOptions], _SORTED] = option({}, "token stores to mix, by name")
    synthetic: bool = option(False, "train on random ids, for benchmarks and trials; needs model.vocab_size")
    loader: Function = option(
        "",
        "module:function that returns this rank's rows; needs model.vocab_size; see docs/guides/data.md",
    )
    loader_resume: Literal["error", "replay"] = option(
        "error", "resume with a loader without state: error, or read its rows again"
    )
    validation: str = option("", "token store for the validation loss")
    validation_sets: Annotated[dict[Name, ValidationOptions], _SORTED] = option({}, "other validation sets, by name")
    seq_len: int = option(4096, "positions per row", unit="tokens", hyperparameter="SEQ_LEN", ge=2)
    packing: Literal["bfd", "concat", "buckets"] = option(
        "bfd", "best-fit rows of whole documents (bfd), documents concatenated and cut, or rows of several lengths"
    )
    packs: str = option("", "folder for the packs of all stores; empty = in each store")
    min_seq_len: int = option(256, "positions of the shortest rows with buckets", unit="tokens", ge=1)
    bucket_weights: Annotated[dict[Name, BucketOptions], _SORTED] = option({}, "weights by row length")
    phase_steps: tuple[int, ...] = option((), "steps after which the weights of a mixture or of buckets change")
    phase_rows: tuple[int, ...] = option((), "the same in rows of the global sequence")
    document_mask: bool = option(True, "attention within documents only")
    shuffle: bool = option(True, "new random order of rows each epoch")
    prefetch: int = option(2, "steps prefetched by a thread; 0 = none; not used with a loader", ge=0)
    tokenizer: str = option(
        "mindbeam-ai/Litespark",
        "name of the tokenizer; only compared with the store's own",
        hyperparameter="TOKENIZER",
        min_length=1,
    )

    @property
    def source_kind(self) -> str:
        """The given one of store, mixture, synthetic and loader; "" for none."""
        return next((name for name in SOURCE_KINDS if getattr(self, name)), "")

    def store_paths(self) -> dict[str, str]:
        """Return the path of each given store by field, those of the training rows first."""
        paths = {"data.store": self.store}
        paths |= {f"data.mixture.{name}.store": source.store for name, source in self.mixture.items()}
        paths |= {"data.validation": self.validation}
        paths |= {f"data.validation_sets.{name}.store": entry.store for name, entry in self.validation_sets.items()}
        return {field: path for field, path in paths.items() if path}

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Row lengths, longest first; with buckets, seq_len halved down to min_seq_len."""
        lengths = [self.seq_len]
        while self.packing == "buckets" and lengths[-1] > self.min_seq_len and lengths[-1] % 2 == 0:
            lengths.append(lengths[-1] // 2)
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

    def _shown(self, *names: str) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, dict) else value for name, value in values.items()}

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        kind = self.source_kind
        given = [name for name in SOURCE_KINDS if getattr(self, name)]
        if len(given) > 1:
            values = self._shown(*given)
            raise RecipeError("only one of these can be trained on", values=values, remedy="remove the others")
        if kind in ("synthetic", "loader"):
            has_validation = self.validation or self.validation_sets
            unused = ["shuffle", "tokenizer"] + ["packing"] * (not has_validation) + ["prefetch"] * (kind == "loader")
            for name in unused:
                if getattr(self, name) != default_of(DataOptions, name):
                    raise self.wrong(name, f"has no effect with data.{kind}", "remove it")
        if self.packing == "buckets" and kind not in ("store", ""):
            remedy = "set data.packing to bfd or concat, or train on a single data.store"
            raise RecipeError("buckets need a single store", values=self._shown("packing", kind), remedy=remedy)
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        lengths = [str(length) for length in self.row_lengths]
        if self.packing == "buckets" and lengths[-1] != str(self.min_seq_len):
            remedy = f"set data.min_seq_len to one of {', '.join(lengths)}"
            raise self.wrong("min_seq_len seq_len", "must be seq_len divided by a power of two", remedy)
        if self.bucket_weights and self.packing != "buckets":
            values = self._shown("bucket_weights", "packing")
            raise RecipeError("bucket_weights requires data.packing = 'buckets'", values=values)
        if unknown := [name for name in self.bucket_weights if name not in lengths]:
            problem = f"no such row length; rows have {', '.join(lengths)} positions"
            raise RecipeError(problem, values={"bucket_weights": unknown[0]})
        name = "phase_steps" if self.phase_steps else "phase_rows"
        starts = getattr(self, name)
        if self.phase_steps and self.phase_rows:
            raise self.wrong("phase_steps phase_rows", "phases are given in steps or in rows", "remove one")
        if starts and (starts[0] < 1 or list(starts) != sorted(set(starts))):
            raise self.wrong(name, "phases must start after 0, in increasing order", "sort them")
        weighted = {f"mixture.{key}": entry for key, entry in self.mixture.items()}
        weighted |= {f"bucket_weights.{key}": entry for key, entry in self.bucket_weights.items()}
        if starts and not any(entry.phase_weights for entry in weighted.values()):
            remedy = "set phase_weights in [data.mixture.NAME] or [data.bucket_weights.LENGTH], or remove it"
            raise self.wrong(name, "no weight changes at these phases", remedy)
        for section, entry in weighted.items():
            if entry.phase_weights and len(entry.phase_weights) != len(starts):
                raise RecipeError(
                    f"needs a weight for each of the {len(starts)} later phases",
                    values={f"{section}.phase_weights": entry.phase_weights, name: starts},
                    remedy="set as many, or remove phase_weights to keep the weight",
                )
        return self
