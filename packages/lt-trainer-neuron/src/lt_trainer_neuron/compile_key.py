"""Compile keys: the values that determine a run's compiled graphs, recorded in the compile cache.

A graph is recompiled whenever a shape, an optimizer constant, a dtype, the parallel layout, a compiler flag or a
package version differs. `lt train precompile` records these values beside the graphs it compiles; a run compares its
own values with them before it occupies devices, so that hours of compilation do not start unnoticed. Values outside
the key (learning rate, steps, data, seed, output paths) can change freely.

Keys are stored in the cache, under `lt-compile-keys`; for a cache in a bucket, in that folder beside the run directory.

Cost: package metadata and one small file per key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_trainer.config.recipe import engine_options
from lt_trainer.config.sections import Recipe
from lt_trainer.files import write_atomic
from lt_trainer.toml import format_value
from lt_trainer_neuron.compile_cache import CompileCacheError, cache_url
from lt_trainer_neuron.options import NeuronOptions

if TYPE_CHECKING:
    from lt_model import ModelConfig


KEYS_FOLDER = "lt-compile-keys"
KEY_PACKAGES = ("libneuronxla", "lt-model", "lt-trainer-neuron", "neuronx-cc", "neuronx-distributed", "torch-neuronx")
KEY_OPTIONS = (
    "qkv_linear",
    "kv_size_multiplier",
    "fuse_qkv",
    "zero1",
    "precision",
    "nxd_grad_norm",
    "selective_checkpointing",
    "flash_attention",
    "graph_scope",
)
KEY_OPTIMIZER_FIELDS = (
    "name",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "grad_clip",
    "decay_embeddings",
    "moments_dtype",
    "z_loss",
)
KEY_VARIABLES = (
    "NEURON_CC_FLAGS",
    "NEURON_FUSE_SOFTMAX",
    "XLA_DISABLE_FUNCTIONALIZATION",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_BF16",
)


class NotCompiledError(CompileCacheError):
    """No graphs were precompiled for this recipe, and engine.neuron.compile_key is "error"."""


def compile_key(recipe: Recipe, model: ModelConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that determine the graphs, by dotted name.

    Args:
        recipe: recipe of the run.
        model: model configuration with the data's vocabulary size.
        environ: environment variables of a rank.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    parallel, cores = recipe.parallel, options.num_neuroncores * recipe.parallel.n_nodes
    key: dict[str, Any] = {f"model.{name}": value for name, value in model.to_dict().items()}
    key |= {
        "data.seq_len": recipe.data.seq_len,
        "data.document_mask": recipe.data.document_mask,
        "data.validation": bool(recipe.data.validation or recipe.data.validation_sets),
        "batch.micro_batch_size": recipe.batch.micro_batch_size,
        "batch.accumulation_steps": recipe.accumulation_steps(cores),
        "parallel.tp": parallel.tp,
        "parallel.pp": parallel.pp,
        "parallel.dp": parallel.data_parallel_size(cores),
        "parallel.sequence_parallel": parallel.sequence_parallel,
    }
    key |= {f"optimizer.{name}": getattr(recipe.optimizer, name) for name in KEY_OPTIMIZER_FIELDS}
    key |= {f"engine.neuron.{name}": value for name, value in vars(options).items() if name in KEY_OPTIONS}
    key |= {f"environment {name}": environ.get(name, "") for name in KEY_VARIABLES}
    key |= {f"version of {name}": _package_version(name) for name in KEY_PACKAGES}
    return json.loads(json.dumps(key, sort_keys=True))


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def keys_folder(recipe: Recipe, environ: Mapping[str, str]) -> Path:
    """Return the folder of the compile keys for a rank's cache."""
    url = cache_url(environ)
    if "://" in url and not url.startswith("file://"):
        return Path(recipe.run.dir).parent / KEYS_FOLDER
    return Path(url.removeprefix("file://")) / KEYS_FOLDER


def write_key(folder: Path, key: Mapping[str, Any]) -> Path:
    """Write a key and return its path; equal keys share one file.

    Raises:
        CompileCacheError: the folder cannot be written.
    """
    text = json.dumps({"format": 1, "key": dict(key)}, indent=1, sort_keys=True)
    path = folder / f"{hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text + "\n")
    except OSError as exc:
        raise CompileCacheError(f"cannot write the compile key to {folder}: {exc.strerror}") from exc
    return path


def read_keys(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded keys; empty if the folder does not exist.

    Raises:
        CompileCacheError: a key cannot be read or has another format version.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
            if record["format"] != 1:
                raise ValueError("another format version")
            found.append(dict(record["key"]))
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise CompileCacheError(f"cannot read the compile key {path}: {exc}; remove it, precompile again") from exc
    return found


def diff_keys(key: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the differences from the closest known key, as text; empty if the key is known."""
    differences_by_key = [
        [
            f"{name}: precompiled with {format_value(other.get(name))}, now {format_value(key.get(name))}"
            for name in sorted({*key, *other})
            if key.get(name) != other.get(name)
        ]
        for other in known
    ]
    return min(differences_by_key, key=len, default=["this cache has no precompiled graphs"])


def check_compiled(recipe: Recipe, model: ModelConfig, environ: Mapping[str, str]) -> str:
    """Compare a run with the precompiled keys; return a warning, or "" if its graphs are cached.

    Raises:
        NotCompiledError: no graphs were precompiled for this recipe, and engine.neuron.compile_key is "error".
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    if options.compile_key == "ignore" or environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "0") not in ("", "0"):
        return ""
    folder = keys_folder(recipe, environ)
    differences = diff_keys(compile_key(recipe, model, environ), read_keys(folder))
    if not differences:
        return ""
    shown = "; ".join(differences[:5]) + f"; and {len(differences) - 5} more" * (len(differences) > 5)
    message = (
        f"the graphs of this run are not in the compile cache {cache_url(environ)} ({shown}): its first steps will "
        "compile, which can take hours"
    )
    if options.compile_key == "error":
        raise NotCompiledError(
            f"{message}; run lt train precompile with this recipe first, or set engine.neuron.compile_key to warn"
        )
    return message
