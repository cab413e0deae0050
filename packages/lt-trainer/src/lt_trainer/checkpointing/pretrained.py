"""Pretrained model as the start of a run: `model.init_from`.

Supports every format of lt-ckpt, and models on a Hugging Face hub. When the recipe is loaded, missing fields of
`[model]` are read from the model's config (from a hub, only that file is downloaded), or from the newest checkpoint of
the run directory if there is one: then the run resumes, and the model is not read. At a fresh start, each rank reads
its own slices block by block, casts them to the master dtype and notes tensors with NaN or infinity, which end all
ranks when all have read. Before, rank 0 compares the files with their checksums where the format has some, because
ranks read parts of what a checksum covers; a hub's branch, or the newest valid checkpoint of a run, is resolved once,
so that all ranks read the same.

A vocabulary that grows (`model.resize_vocab`) gets rows that are the mean of the others, so that a new token is
initially as likely as an average one (J. Hewitt, "Initializing New Word Embeddings for Pretrained Language Models",
2021); one that shrinks drops its last rows. Token ids are compared by the tokenizer files of the model.

Memory: a block of rows and its cast, a few MiB. Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from lt_ckpt import CheckpointError, Source, open_source
from lt_ckpt.checksums import check_undamaged
from lt_ckpt.dtypes import cast
from lt_ckpt.hub.address import Address
from lt_data import Tokenizer
from lt_data.tokenizing.files import MODEL_FILE
from lt_model import ModelConfig, config_from_hf
from lt_trainer.config.model_section import ModelOptions
from lt_trainer.control import Control
from lt_trainer.errors import RecipeError, as_recipe_error
from lt_trainer.resilience.rank_sync import run_on_all_ranks, run_with_keepalive
from lt_trainer.toml import format_value

HUB_PREFIX = "hf://"
BLOCK_BYTES = 2**24
KEEPALIVE_S = 5.0
OVERRIDABLE_FIELDS = ("rope_theta", "rope_scaling", "sliding_window", "max_position_embeddings")
"""Fields that a recipe may change, for example to train a longer context: rope in the layers with full attention, the
window in those that have one. Without a window no layer is listed as sliding."""
NOT_IN_WEIGHTS = ("init_std", "init_residual")
"""Fields of initial weights, of which a pretrained model has none: one that is given must be the model's."""
VOCAB_PARAMETERS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(kw_only=True)
class PretrainedWeights:
    """Weights of a pretrained model, read as those of this run's model; a context that closes the files.

    Attributes:
        source: Source of the weights.
        source_model: Architecture of the source.
        model: Architecture of the run.
        heartbeat: Called for every block.
        not_finite: Names of the tensors read so far that have NaN or infinity.
    """

    source: Source
    source_model: ModelConfig
    model: ModelConfig
    heartbeat: Callable[[], None] = lambda: None
    not_finite: set[str] = field(default_factory=set, init=False)
    _means: dict[str, np.ndarray] = field(default_factory=dict, init=False)

    def describe(self) -> str:
        """Return a sentence for the log."""
        info, old, new = self.source.format_info, self.source_model.to_dict(), self.model.to_dict()
        place = f"{info['hub']} at commit {info['revision']}" if info.get("revision") else str(self.source.path)
        names = [name for name in ("vocab_size", *OVERRIDABLE_FIELDS) if old.get(name) != new.get(name)]
        changes = [f"{name} {old.get(name, 0)} -> {new.get(name, 0)}" for name in names]
        start = f"starting from the weights of {place} ({self.source.format})"
        return "; ".join([start, *changes, *self.source.fallbacks])

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> Iterator[np.ndarray]:
        """Read a slice of a parameter, in blocks of rows.

        Args:
            name: Hugging Face name of the parameter.
            offset: Offset of the slice.
            shape: Shape of the slice.
            dtype: Safetensors code of the dtype to cast to: F32 or F64.

        Yields:
            Elements of one block after another, as bytes (uint8) in C order.

        Raises:
            RecipeError: the source cannot be read.
        """
        if not prod(shape):
            return
        first, rows = (offset[0], shape[0]) if shape else (0, 1)
        step = max(1, BLOCK_BYTES // (8 * max(1, prod(shape[1:]))))
        n_old = self.source_model.vocab_size if name in VOCAB_PARAMETERS else first + rows
        for start in range(first, first + rows, step):
            end = min(start + step, first + rows)
            if start < n_old:
                box = ((start, *offset[1:]), (min(end, n_old) - start, *shape[1:])) if shape else ((), ())
                yield self._read_box(name, box, dtype).view(np.uint8)
            if end > n_old:
                mean = self._mean(name)[offset[1] : offset[1] + shape[1]]
                yield np.tile(mean, end - max(start, n_old)).astype("<f8" if dtype == "F64" else "<f4").view(np.uint8)

    def _read_box(self, name: str, box: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> np.ndarray:
        self.heartbeat()
        weights = self.source.weights
        with as_recipe_error(str(self.source.path)):
            data = cast(self.source.read(name, box), weights.specs[name].dtype, dtype)
        values = data.view("<f8" if dtype == "F64" else "<f4")
        if not np.isfinite(values).all():
            self.not_finite.add(name)
        return values

    def _mean(self, name: str) -> np.ndarray:
        """Return the mean row of a matrix, summed in float64."""
        if name not in self._means:
            n_rows, width = self.source.weights.specs[name].shape
            step = max(1, BLOCK_BYTES // (8 * width))
            total = np.zeros(width)
            for start in range(0, n_rows, step):
                box = ((start, 0), (min(step, n_rows - start), width))
                total += self._read_box(name, box, "F64").reshape(-1, width).sum(axis=0)
            self._means[name] = total / n_rows
        return self._means[name]

    def check_finite(self, control: Control) -> None:
        """Check what all ranks have read; collective.

        Raises:
            RecipeError: (on every rank) a tensor has NaN or infinity, in the model or as the dtype read.
        """
        names = sorted({name for names in control.all_gather(sorted(self.not_finite)) for name in names})
        if names:
            raise RecipeError(
                f"weights are NaN or infinite in {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more tensors" if len(names) > 3 else ""),
                values={"model.init_from": str(self.source.path)},
                remedy="train from an earlier checkpoint of that model",
            )


def open_pretrained(
    options: ModelOptions,
    model: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    control: Control,
    rank: int,
    heartbeat: Callable[[], None],
    *,
    verifies: bool = True,
) -> PretrainedWeights:
    """Open `model.init_from` on every rank; a hub model is downloaded where it is not cached.

    Args:
        options: `[model]` of the recipe.
        model: Architecture to train.
        tokenizer_files: Tokenizer files of the data, by name.
        control: Control collectives, to agree on a hub's commit.
        rank: This rank.
        heartbeat: Called while waiting.
        verifies: Whether this rank hashes a hub model's files; one of each machine does.

    Raises:
        RecipeError: (on every rank) the model cannot be opened, has another architecture than the recipe, or its
            tokenizer differs from the data's.
    """
    address = options.init_from

    def open_at(place: str, *, verify: bool = True) -> Source:
        with as_recipe_error(address):
            return open_source(place, config=options.init_config or None, verify=verify)

    def resolve() -> str:
        source = open_at(address)
        fallbacks.extend(source.fallbacks)
        if address.startswith(HUB_PREFIX):
            return str(replace(Address.parse(address), revision=str(source.format_info["revision"])))
        if source.format != "lt" or source.path == Path(address):  # a run's was verified by opening it
            try:
                check_undamaged(source)
            except CheckpointError as exc:
                raise RecipeError(
                    f"the model of model.init_from is damaged: {exc}",
                    values={"model.init_from": address},
                    remedy="take another copy of it",
                ) from exc
        return str(source.path) if source.format == "lt" else address

    fallbacks: list[str] = []
    resolved = run_with_keepalive(control, rank == 0, resolve, heartbeat, KEEPALIVE_S)
    opened: list[Source] = []
    run_on_all_ranks(
        control, lambda: opened.append(open_at(resolved, verify=verifies and rank != 0)), heartbeat, KEEPALIVE_S
    )
    source = replace(opened[0], fallbacks=tuple(fallbacks))
    assert source.config is not None, "open_source requires a config"
    with as_recipe_error(address):
        source_model = config_from_hf(dict(source.config))
    _check_architecture(options, source_model, model)
    if not options.allow_tokenizer_mismatch:
        _check_tokenizer(options, source.aux_files, tokenizer_files)
    return PretrainedWeights(source=source, source_model=source_model, model=model, heartbeat=heartbeat)


def _check_architecture(options: ModelOptions, source_model: ModelConfig, model: ModelConfig) -> None:
    """Raise RecipeError if the recipe describes another architecture than the pretrained model's."""
    expected, actual = source_model.to_dict(), model.to_dict()
    skipped = {*OVERRIDABLE_FIELDS, *(("vocab_size",) if options.resize_vocab else ())}
    skipped |= set(NOT_IN_WEIGHTS) - options.model_fields_set
    skipped |= {"layers"} if model.sliding_window != source_model.sliding_window else set()
    both = dict.fromkeys((*actual, *expected))
    names = [name for name in both if name not in skipped and actual.get(name) != expected.get(name)]
    if names:
        has = ", ".join(f"{name} = {format_value(expected.get(name, getattr(source_model, name)))}" for name in names)
        also = "; model.resize_vocab resizes the vocabulary" if "vocab_size" in names else ""
        raise RecipeError(
            f"the model of model.init_from = {format_value(options.init_from)} has {has}",
            values={f"model.{name}": actual.get(name) for name in names},
            remedy=f"remove these fields to use the model's{also}",
        )


def _check_tokenizer(options: ModelOptions, model_files: Mapping[str, bytes], data_files: Mapping[str, bytes]) -> None:
    """Raise RecipeError if token ids of the data have another meaning than in the model."""
    if MODEL_FILE not in model_files or MODEL_FILE not in data_files:
        return
    theirs, ours = (
        Tokenizer.from_bytes(files, name=name).tokens_by_id()
        for files, name in ((model_files, options.init_from), (data_files, "the data's"))
    )
    differing = sorted(i for i in ours if ours[i] != theirs.get(i, ours[i] if options.resize_vocab else None))
    if differing:
        i = differing[0]
        theirs_i = format_value(theirs[i]) if i in theirs else "no token"
        raise RecipeError(
            f"the data was prepared with another tokenizer than the model's: {len(differing)} ids differ, first {i}, "
            f"{format_value(ours[i])} in the data and {theirs_i} in the model",
            values={"model.init_from": options.init_from},
            remedy="prepare the data with the model's tokenizer (lt data prepare --tokenizer), or, if intended, set "
            "model.allow_tokenizer_mismatch (or model.resize_vocab for added tokens)",
        )
