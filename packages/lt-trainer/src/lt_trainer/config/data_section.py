"""The section `[data]`: training and validation data, mixtures."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lt_trainer.config.section import PathText, Section, default_of, option
from lt_trainer.errors import RecipeError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Weights = tuple[Annotated[float, Field(ge=0)], ...]
Starts = tuple[Annotated[int, Field(ge=1)], ...]
_SORTED = AfterValidator(lambda table: dict(sorted(table.items())))
SOURCE_KINDS = ("store", "mixture", "synthetic", "loader")


class ValidationOptions(Section):
    """`[data.validation_sets.NAME]`: another validation set."""

    store: PathText = Field(description="token store", min_length=1)


class SourceOptions(Section):
    """`[data.mixture.NAME]`: source of a mixture."""

    weight: float = option(1.0, "relative share of the rows", ge=0)
    phase_weights: Weights = option((), "weight in each later phase; empty = unchanged")
    store: PathText = Field(description="token store", min_length=1)
    max_epochs: int = option(0, "maximum number of epochs; 0 = unlimited", ge=0)


class DataOptions(Section, table="data"):
    """Training data (one of `store`, `mixture`, `synthetic` and `loader`), validation data and packing."""

    needs = (("loader_resume", "loader"),)

    store: PathText = option("", "token store to train on, from `lt data prepare`")
    mixture: Annotated[dict[Name, SourceOptions], _SORTED] = option({}, "token stores to mix, by name")
    synthetic: bool = option(False, "train on random ids, for benchmarks and trials; needs model.vocab_size")
    loader: str = option(
        "",
        "module:function that returns this rank's rows",
        form="of the form module:function",
        pattern=r"^(\w+(\.\w+)*:\w+(\.\w+)*)?$",
    )
    loader_resume: Literal["error", "replay"] = option("error", "resume a loader without state: error, or read again")
    validation: PathText = option("", "token store for the validation loss")
    validation_sets: Annotated[dict[Name, ValidationOptions], _SORTED] = option({}, "other validation sets, by name")
    seq_len: int = option(4096, "positions per row", unit="tokens", hyperparameter="SEQ_LEN", ge=2)
    packing: Literal["bfd", "concat"] = option("bfd", "whole documents, or cut ones")
    packs: PathText = option("", "folder for the packs of all stores; empty = in each store")
    phase_steps: Starts = option((), "steps after which the weights of a mixture change")
    document_mask: bool = option(True, "attention within documents only")
    shuffle: bool = option(True, "new random order of rows each epoch")
    prefetch: int = option(2, "steps prefetched by a thread; 0 = none; not used with a loader", ge=0)
    tokenizer: PathText = option(
        "mindbeam-ai/Litespark", "its name in the store", hyperparameter="TOKENIZER", min_length=1
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

    def weight_phases(self, rows_before: Callable[[int], int]) -> list[tuple[int, dict[str, float]]]:
        """Return the weights by name of each phase, with the row at which it starts.

        Args:
            rows_before: returns the rows read before a step (from 0).
        """
        table = self.mixture
        phases = [(0, {name: entry.weight for name, entry in table.items()})]
        for i, step in enumerate(self.phase_steps):
            phases.append(
                (rows_before(step), {n: e.phase_weights[i] if e.phase_weights else e.weight for n, e in table.items()})
            )
        return phases

    def check(self) -> None:
        """Check that there is one kind of training rows, and the weights of its parts."""
        kind = self.source_kind
        given = [name for name in SOURCE_KINDS if getattr(self, name)]
        if len(given) > 1:
            raise self.wrong(" ".join(given), "only one of these can be trained on", "remove the others")
        if kind in ("synthetic", "loader"):
            has_validation = self.validation or self.validation_sets
            unused = ["shuffle", "tokenizer"] + ["packing"] * (not has_validation) + ["prefetch"] * (kind == "loader")
            for name in unused:
                if getattr(self, name) != default_of(DataOptions, name):
                    raise self.wrong(name, f"has no effect with data.{kind}", "remove it")
        self._check_phases()

    def _check_phases(self) -> None:
        steps = self.phase_steps
        if list(steps) != sorted(set(steps)):
            raise self.wrong("phase_steps", "phases must be in increasing order")
        if steps and not any(entry.phase_weights for entry in self.mixture.values()):
            raise self.wrong("phase_steps", "no weight changes at these phases", "set phase_weights")
        for name, entry in self.mixture.items():
            if entry.phase_weights and len(entry.phase_weights) != len(steps):
                values = {f"mixture.{name}.phase_weights": entry.phase_weights, "phase_steps": steps}
                raise RecipeError("needs one weight for each later phase", values=values)
