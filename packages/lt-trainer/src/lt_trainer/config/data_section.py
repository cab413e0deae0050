"""The section `[data]`: training and validation data, mixtures, rows of several lengths."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lt_trainer.config.section import Section, default_of, option
from lt_trainer.errors import RecipeError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Weights = tuple[Annotated[float, Field(ge=0)], ...]
Starts = tuple[Annotated[int, Field(ge=1)], ...]
_SORTED = AfterValidator(lambda table: dict(sorted(table.items())))
SOURCE_KINDS = ("store", "mixture", "synthetic", "loader")


class ValidationOptions(Section):
    """`[data.validation_sets.NAME]`: another validation set."""

    store: str = Field(description="token store", min_length=1)


class BucketOptions(Section):
    """`[data.bucket_weights.LENGTH]`: sampling weight of a row length."""

    weight: float = option(1.0, "relative share of the rows of a mixture, or of the steps", ge=0)
    phase_weights: Weights = option((), "weight in each later phase; empty = unchanged")


class SourceOptions(BucketOptions):
    """`[data.mixture.NAME]`: source of a mixture."""

    store: str = Field(description="token store", min_length=1)
    max_epochs: int = option(0, "maximum number of epochs; 0 = unlimited", ge=0)


class DataOptions(Section, table="data"):
    """Training data (one of `store`, `mixture`, `synthetic` and `loader`), validation data and packing."""

    needs = (("loader_resume", "loader"), ("min_seq_len bucket_weights", "packing", "buckets"))

    store: str = option("", "token store to train on, from `lt data prepare`")
    mixture: Annotated[dict[Name, SourceOptions], _SORTED] = option({}, "token stores to mix, by name")
    synthetic: bool = option(False, "train on random ids, for benchmarks and trials; needs model.vocab_size")
    loader: str = option("", "module:function that returns this rank's rows", pattern=r"^(\w+(\.\w+)*:\w+(\.\w+)*)?$")
    loader_resume: Literal["error", "replay"] = option("error", "resume a loader without state: error, or read again")
    validation: str = option("", "token store for the validation loss")
    validation_sets: Annotated[dict[Name, ValidationOptions], _SORTED] = option({}, "other validation sets, by name")
    seq_len: int = option(4096, "positions per row", unit="tokens", hyperparameter="SEQ_LEN", ge=2)
    packing: Literal["bfd", "concat", "buckets"] = option("bfd", "whole documents, cut ones, rows of several lengths")
    packs: str = option("", "folder for the packs of all stores; empty = in each store")
    min_seq_len: int = option(256, "positions of the shortest rows with buckets", unit="tokens", ge=1)
    bucket_weights: Annotated[dict[Name, BucketOptions], _SORTED] = option({}, "weights by row length")
    phase_steps: Starts = option((), "steps after which the weights of a mixture or of buckets change")
    document_mask: bool = option(True, "attention within documents only")
    shuffle: bool = option(True, "new random order of rows each epoch")
    prefetch: int = option(2, "steps prefetched by a thread; 0 = none; not used with a loader", ge=0)
    tokenizer: str = option("mindbeam-ai/Litespark", "its name in the store", hyperparameter="TOKENIZER", min_length=1)

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
        phases = [(0, {name: entry.weight for name, entry in table.items()})]
        for i, step in enumerate(self.phase_steps):
            phases.append(
                (rows_before(step), {n: e.phase_weights[i] if e.phase_weights else e.weight for n, e in table.items()})
            )
        return phases

    def check(self) -> None:
        """Check that there is one kind of training rows, and the weights of its parts."""
        kind, lengths = self.source_kind, [str(length) for length in self.row_lengths]
        given = [name for name in SOURCE_KINDS if getattr(self, name)]
        if len(given) > 1:
            raise self.wrong(" ".join(given), "only one of these can be trained on", "remove the others")
        if kind in ("synthetic", "loader"):
            has_validation = self.validation or self.validation_sets
            unused = ["shuffle", "tokenizer"] + ["packing"] * (not has_validation) + ["prefetch"] * (kind == "loader")
            for name in unused:
                if getattr(self, name) != default_of(DataOptions, name):
                    raise self.wrong(name, f"has no effect with data.{kind}", "remove it")
        if self.packing == "buckets" and kind not in ("store", ""):
            raise self.wrong(f"packing {kind}", "buckets need a single store", "set data.packing to bfd or concat")
        if self.packing == "buckets" and lengths[-1] != str(self.min_seq_len):
            remedy = f"set data.min_seq_len to one of {', '.join(lengths)}"
            raise self.wrong("min_seq_len seq_len", "must be seq_len divided by a power of two", remedy)
        if self.bucket_weights.keys() - set(lengths):
            raise self.wrong("bucket_weights", f"rows have {', '.join(lengths)} positions")
        self._check_phases()

    def _check_phases(self) -> None:
        steps, weighted = self.phase_steps, self.mixture | self.bucket_weights
        if list(steps) != sorted(set(steps)):
            raise self.wrong("phase_steps", "phases must be in increasing order")
        if steps and not any(entry.phase_weights for entry in weighted.values()):
            raise self.wrong("phase_steps", "no weight changes at these phases", "set phase_weights")
        for name, entry in weighted.items():
            if entry.phase_weights and len(entry.phase_weights) != len(steps):
                field = f"{'mixture' if self.mixture else 'bucket_weights'}.{name}.phase_weights"
                values = {field: entry.phase_weights, "phase_steps": steps}
                raise RecipeError("needs one weight for each later phase", values=values)
