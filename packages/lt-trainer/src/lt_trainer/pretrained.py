"""A model to start from: `model.init_from` names one; its configuration is the architecture, its weights are the start.

Any format that lt-ckpt reads will do, and a model on a Hugging Face hub. When the recipe is loaded, the fields of
`[model]` that nobody gave are read off the model's configuration (of a hub, that one file is fetched); or off the
newest checkpoint of the run directory, if there is one, for then the run goes on from there and the model is read no
more. When the run starts anew, each rank reads the slices that it holds, block by block, and casts them to the master
dtype; a hub's branch is resolved once, so that all ranks read the same commit.

A vocabulary that grows (`model.resize_vocab`) gets rows that are the mean of the others, so that a new token starts as
likely as an average one (J. Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021); one that
shrinks loses its last rows. What the ids mean is compared by the tokenizer that lies with the model.

Memory: a block of rows and its cast, a few MiB. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_ckpt import Checkpoint, CheckpointError, Source, config_of, list_steps, open_source
from lt_ckpt.dtypes import cast
from lt_ckpt.hub.model import Address
from lt_ckpt.source import Reader
from lt_model import LlamaConfig, ModelError
from lt_trainer.errors import RecipeError
from lt_trainer.together import all_patiently, patiently

if TYPE_CHECKING:
    from lt_trainer.control import Control
    from lt_trainer.sections import ModelOptions

HUB = "hf://"
BLOCK_BYTES = 2**24
FREE = ("rope_theta", "rope_scaling", "max_position_embeddings")
"""What a recipe may choose otherwise than the model: a longer context is trained by changing just these."""
RESIZED = ("model.embed_tokens.weight", "lm_head.weight")


def architecture(options: Mapping[str, Any], out: Path, resume: bool) -> tuple[LlamaConfig, str]:
    """The architecture for a recipe that starts from a model, and where it was read.

    Args:
        options: The values of `[model]` that were given, by field name.
        out: The run directory.
        resume: Whether the run would go on from a checkpoint there.

    Raises:
        RecipeError: there is no such model, or it is no Llama.
    """
    if resume:
        for _, path in list_steps(out / "checkpoints"):  # newest first
            try:
                return LlamaConfig.from_dict(Checkpoint.open(path).manifest.model), str(path)
            except CheckpointError:
                continue  # damaged: the start says so, and looks at the one before
    address = options["init_from"]
    with _about(address):
        return LlamaConfig.from_hf(dict(config_of(address, config=options.get("init_config") or None))), address


@contextmanager
def _about(address: str) -> Iterator[None]:
    """A context in which errors of lt-ckpt and lt-model become errors of `model.init_from`."""
    try:
        yield
    except (CheckpointError, ModelError) as exc:
        raise RecipeError(str(exc), values={"model.init_from": address}) from exc


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model that is open for reading, as the weights of this run's model; a context that closes its files.

    Attributes:
        source: Where the weights lie.
        found: The source's own architecture.
        model: The run's.
        go_on: Called at every block, for whoever waits.
    """

    source: Source
    found: LlamaConfig
    model: LlamaConfig
    go_on: Callable[[], None] = lambda: None
    _reader: Reader = field(init=False)
    _means: dict[str, np.ndarray] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reader", Reader(self.source.root))

    @property
    def about(self) -> dict[str, Any]:
        """What the run's record should say about the model: format, and of a hub's the commit."""
        return {"format": self.source.format, **self.source.about}

    def describe(self) -> str:
        """A sentence for whoever watches the run."""
        revision = self.source.about.get("revision")
        place = f"{self.source.about['hub']} at commit {revision}" if revision else str(self.source.path)
        here, there = self.model.vocab_size, self.found.vocab_size
        grown = f"; its vocabulary of {there} ids becomes one of {here}" if here != there else ""
        unlike = [f"{name} {getattr(self.found, name)} -> {getattr(self.model, name)}" for name in FREE]
        free = [text for text, name in zip(unlike, FREE, strict=True) if _differ(self, name)]
        changed = f"; changed by the recipe: {', '.join(free)}" if free else ""
        return f"starting from the weights of {place} ({self.source.format}){grown}{changed}"

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> Iterator[np.ndarray]:
        """A slice of a parameter, in blocks of rows.

        Args:
            name: The parameter's Hugging Face name.
            offset: Where the slice begins.
            shape: Its shape.
            dtype: Safetensors code to cast to: F32 or F64.

        Yields:
            The elements of one block after the other, as bytes (uint8) in C order.

        Raises:
            RecipeError: the source cannot be read.
        """
        if not prod(shape):
            return
        first, rows = (offset[0], shape[0]) if shape else (0, 1)
        step = max(1, BLOCK_BYTES // (8 * max(1, prod(shape[1:]))))
        n_old = self.found.vocab_size if name in RESIZED else first + rows
        for start in range(first, first + rows, step):
            end = min(start + step, first + rows)
            if start < n_old:
                box = ((start, *offset[1:]), (min(end, n_old) - start, *shape[1:])) if shape else ((), ())
                yield self._cast(name, box, dtype)
            if end > n_old:
                mean = self._mean(name)[offset[1] : offset[1] + shape[1]]
                n_new = end - max(start, n_old)
                yield np.tile(mean, n_new).astype("<f8" if dtype == "F64" else "<f4").view(np.uint8)

    def _cast(self, name: str, box: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> np.ndarray:
        self.go_on()
        weights = self.source.weights
        with _about(str(self.source.path)):
            return cast(self._reader.read(weights, name, box), weights.specs[name].dtype, dtype)

    def _mean(self, name: str) -> np.ndarray:
        """The mean row of a matrix, summed in float64."""
        if name not in self._means:
            n_rows, width = self.source.weights.specs[name].shape
            step = max(1, BLOCK_BYTES // (8 * width))
            total = np.zeros(width)
            for start in range(0, n_rows, step):
                box = ((start, 0), (min(step, n_rows - start), width))
                total += self._cast(name, box, "F64").view("<f8").reshape(-1, width).sum(axis=0)
            self._means[name] = total / n_rows
        return self._means[name]

    def close(self) -> None:
        """Close the source's files."""
        self._reader.close()

    def __enter__(self) -> Pretrained:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _differ(pretrained: Pretrained, name: str) -> bool:
    return getattr(pretrained.found, name) != getattr(pretrained.model, name)


def open_pretrained(
    options: ModelOptions,
    model: LlamaConfig,
    tokenizer_files: Mapping[str, bytes],
    control: Control,
    rank: int,
    go_on: Callable[[], None],
) -> Pretrained:
    """Open `model.init_from`, on every rank; a model of a hub is fetched by whoever has not got it yet.

    Args:
        options: The recipe's `[model]`.
        model: The model that is to be trained.
        tokenizer_files: Of the data, by name.
        control: How ranks agree on a hub's commit, and wait for each other.
        rank: This rank.
        go_on: Called while there is something to wait for.

    Raises:
        RecipeError: (on every rank) the model cannot be had, is another one than the recipe says, or its tokenizer
            gives ids another meaning than the data's.
    """
    opened: list[Source] = []

    def fetch(address: str) -> str:
        with _about(options.init_from):
            opened[:] = [open_source(address, config=options.init_config or None)]
        return address

    def fetch_first() -> str:
        fetch(options.init_from)
        if not options.init_from.startswith(HUB):
            return options.init_from
        return str(replace(Address.parse(options.init_from), revision=str(opened[0].about["revision"])))

    address = patiently(control, rank == 0, fetch_first, go_on, 5.0)
    all_patiently(control, lambda: fetch(address), go_on, 5.0)
    (source,) = opened
    assert source.config is not None, "open_source refuses what has no configuration and is given none"
    with _about(options.init_from):
        found = LlamaConfig.from_hf(dict(source.config))
    _check_same(options, found, model)
    if not options.init_any_tokenizer:
        _check_tokenizer(options, source.small, tokenizer_files, model.vocab_size)
    return Pretrained(source=source, found=found, model=model, go_on=go_on)


def _check_same(options: ModelOptions, found: LlamaConfig, model: LlamaConfig) -> None:
    """Refuse a recipe that describes another model than the one that it starts from."""
    theirs, ours = found.to_dict(), model.to_dict()
    skip = {*FREE, "vocab_size"} if options.resize_vocab else {*FREE}
    differs = {f"model.{name}": ours[name] for name in ours if name not in skip and ours[name] != theirs[name]}
    if differs:
        there = ", ".join(f"{name} = {theirs[name]!r}" for name in (key.removeprefix("model.") for key in differs))
        raise RecipeError(
            f"the model of model.init_from = {options.init_from!r} has {there}",
            values=differs,
            remedy="leave these fields out, to take the model's"
            + ("" if "model.vocab_size" not in differs else "; model.resize_vocab changes the vocabulary"),
        )


def _check_tokenizer(
    options: ModelOptions, theirs: Mapping[str, bytes], ours: Mapping[str, bytes], vocab_size: int
) -> None:
    """Refuse data whose ids stand for other tokens than the model has learnt."""
    name = "tokenizer.json"
    if name not in theirs or name not in ours:
        return
    learnt, used = _tokens(theirs[name]), _tokens(ours[name])
    differ = [token for token in sorted(used.keys() & learnt.keys()) if used[token] != learnt[token]]
    unknown = len(used.keys() - learnt.keys())
    if differ or (unknown and not options.resize_vocab):
        shown = f"id {differ[0]} is {used[differ[0]]!r} in the data and {learnt[differ[0]]!r} there" if differ else ""
        more = f"{unknown} ids of the data are not in its tokenizer" if unknown else ""
        raise RecipeError(
            f"the data was made with another tokenizer than the model's: {', '.join(filter(None, (shown, more)))}",
            values={"model.init_from": options.init_from},
            remedy="prepare the data with the model's own tokenizer (lt data prepare --tokenizer), or, where that is "
            "meant, set model.init_any_tokenizer (or model.resize_vocab for tokens that were added)",
        )


def _tokens(tokenizer: bytes) -> dict[int, str]:
    """Id → token of a tokenizer.json: BPE and WordPiece keep a map, Unigram a list."""
    table = json.loads(tokenizer)
    vocab = table.get("model", {}).get("vocab", {})
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    found = {int(i): str(token) for token, i in pairs}
    return found | {int(added["id"]): str(added["content"]) for added in table.get("added_tokens", [])}
