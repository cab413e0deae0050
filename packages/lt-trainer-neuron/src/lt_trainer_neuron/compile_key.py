"""What decides the compiled graphs of a run, as values, and the record of them in the compile cache.

A graph is compiled again whenever a shape, a constant of the optimizer, a dtype, the layout, a compiler flag or a
version differs. `lt train precompile` notes these values beside the graphs that it made; a run compares its own with
them before it takes devices, so that hours of compiling do not begin unnoticed. What is not in the key (learning rate,
steps, data, seed, where things are saved) can change freely.

The record lies in the cache, under `lt-compile-keys`; for a cache in a bucket, in that folder beside the run directory.

Cost: package metadata and one small file per key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_trainer.recipe import Recipe, engine_options
from lt_trainer.rundir import write_whole
from lt_trainer_neuron.cache import CacheError, cache_url
from lt_trainer_neuron.options import NeuronOptions

if TYPE_CHECKING:
    from lt_model import LlamaConfig

__all__ = ["NotCompiledError", "compile_key", "differences", "keys_folder", "known_keys", "require_compiled", "write"]

FOLDER = "lt-compile-keys"
PACKAGES = ("libneuronxla", "lt-model", "lt-trainer-neuron", "neuronx-cc", "neuronx-distributed", "torch-neuronx")
OPTIONS = (
    "qkv_linear",
    "kv_replicator",
    "fuse_qkv",
    "zero1",
    "precision",
    "nxd_grad_norm",
    "selective_checkpointing",
    "flash_attention",
    "graph",
)
OPTIMIZER = ("weight_decay", "beta1", "beta2", "eps", "grad_clip", "decay_embeddings", "moments", "z_loss")
VARIABLES = (
    "NEURON_CC_FLAGS",
    "NEURON_FUSE_SOFTMAX",
    "XLA_DISABLE_FUNCTIONALIZATION",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_BF16",
)


class NotCompiledError(CacheError):
    """No graphs were made for this recipe, and it asks to be refused then."""


def compile_key(recipe: Recipe, model: LlamaConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """The values that decide the graphs, by dotted name.

    Args:
        recipe: of the run.
        model: with the vocabulary of the data.
        environ: the variables that a rank gets.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    parallel, cores = recipe.parallel, options.num_neuroncores * recipe.parallel.n_nodes
    key: dict[str, Any] = {f"model.{name}": value for name, value in model.to_dict().items()}
    key |= {
        "data.seq_len": recipe.data.seq_len,
        "data.document_mask": recipe.data.document_mask,
        "data.validation": bool(recipe.data.validation or recipe.data.validation_sets),
        "batch.micro_batch": recipe.batch.micro_batch,
        "micro-batches of an update": recipe.accumulation(cores),
        "parallel.tp": parallel.tp,
        "parallel.pp": parallel.pp,
        "data parallel ranks": parallel.data_parallel(cores),
        "parallel.sequence_parallel": parallel.sequence_parallel,
    }
    key |= {f"optimizer.{name}": getattr(recipe.optimizer, name) for name in OPTIMIZER}
    key |= {f"engine.neuron.{name}": value for name, value in vars(options).items() if name in OPTIONS}
    key |= {f"environment {name}": environ.get(name, "") for name in VARIABLES}
    key |= {f"version of {name}": _version(name) for name in PACKAGES}
    return json.loads(json.dumps(key, sort_keys=True))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def keys_folder(recipe: Recipe, environ: Mapping[str, str]) -> Path:
    """Where the keys of the cache lie that a rank will use."""
    url = cache_url(environ)
    if "://" in url and not url.startswith("file://"):
        return Path(recipe.run.out).parent / FOLDER
    return Path(url.removeprefix("file://")) / FOLDER


def write(folder: Path, key: Mapping[str, Any]) -> Path:
    """Note a key; the same key is noted once.

    Raises:
        CacheError: the folder cannot be written.
    """
    text = json.dumps({"format": 1, "key": dict(key)}, indent=1, sort_keys=True)
    path = folder / f"{hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as exc:
        raise CacheError(f"cannot note the compile key in {folder}: {exc.strerror}") from exc
    return path


def known_keys(folder: Path) -> list[dict[str, Any]]:
    """The keys that were noted, none where the folder is not there.

    Raises:
        CacheError: one cannot be read, or is no key of this version.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
        except (OSError, ValueError) as exc:
            raise CacheError(f"cannot read the compile key {path}: {exc}; remove it and precompile again") from exc
        if not isinstance(record, dict) or record.get("format") != 1 or not isinstance(record.get("key"), dict):
            raise CacheError(f"{path} is no compile key of this version; remove it and precompile again")
        found.append(record["key"])
    return found


def differences(key: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> list[str]:
    """How a key differs from the known one that is nearest to it, in words; empty where it is known."""
    each = [
        [
            f"{name}: precompiled with {one.get(name)!r}, now {key.get(name)!r}"
            for name in sorted({*key, *one})
            if key.get(name) != one.get(name)
        ]
        for one in known
    ]
    return min(each, key=len, default=["nothing was precompiled into this cache"])


def require_compiled(recipe: Recipe, model: LlamaConfig, environ: Mapping[str, str]) -> str:
    """Compare a run with what was precompiled; returns a warning, "" where there is nothing to warn of.

    Raises:
        NotCompiledError: no graphs were made for this recipe, and engine.neuron.compile_key says "refuse".
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    if options.compile_key == "ignore" or environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "0") not in ("", "0"):
        return ""
    folder = keys_folder(recipe, environ)
    found = differences(compile_key(recipe, model, environ), known_keys(folder))
    if not found:
        return ""
    shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    told = (
        f"the graphs of this run are not in the compile cache {cache_url(environ)} ({shown}): its first steps will "
        "compile, which can take hours"
    )
    if options.compile_key == "refuse":
        raise NotCompiledError(
            f"{told}; run lt train precompile with this recipe first, or set engine.neuron.compile_key to warn"
        )
    return told


def environment_of(recipe: Recipe) -> dict[str, str]:
    """This process's variables with those that a rank of this recipe gets."""
    from lt_trainer_neuron.environment import settings

    return os.environ | settings(recipe, os.environ)
