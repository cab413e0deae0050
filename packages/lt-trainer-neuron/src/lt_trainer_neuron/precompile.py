"""Ahead-of-time compilation of a recipe's graphs (`lt train precompile`), with a compile key.

    neuron_parallel_compile torchrun ... -m lt_trainer_neuron.graph_extraction RUN.toml ...

runs a few steps of the recipe without computing anything, collects their graphs and compiles them in parallel. The
options are those of the run by construction: it is the same recipe, resolved in the same way. When all graphs have
compiled, the compile key is recorded (`compile_key.py`), by which a run checks that its graphs exist.

On several nodes the command runs on each, with torchrun's options for several nodes; separate caches per node need
that anyway, and with a shared cache later nodes find the compiled graphs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lt_trainer.config.recipe import ResolvedRecipe, engine_options, model_config
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.planning.plan import vocab_size_and_source
from lt_trainer_neuron.checks import check_model, check_recipe
from lt_trainer_neuron.compile_cache import CompileCacheError, cache_url, local_cache_folder, scan_cache
from lt_trainer_neuron.compile_key import compile_key, keys_folder, write_key
from lt_trainer_neuron.environment import check_environment, neuron_env
from lt_trainer_neuron.options import SECTION, NeuronOptions
from lt_trainer_neuron.sdk import require_installed

PARALLEL_COMPILE_TOOL = "neuron_parallel_compile"


class CompileFailedError(CompileCacheError):
    """Failure to collect or compile graphs."""


def build_command(
    tool: str, nproc_per_node: int, torchrun_options: Sequence[str], extraction_arguments: Sequence[str]
) -> list[str]:
    """Return the command line of the compilation.

    Args:
        tool: path of neuron_parallel_compile.
        nproc_per_node: processes on this machine.
        torchrun_options: additional torchrun options; if empty, --standalone.
        extraction_arguments: arguments of `lt_trainer_neuron.graph_extraction`.
    """
    launch = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", str(nproc_per_node)]
    rank = ["--no-python", sys.executable, "-P", "-u", "-m", "lt_trainer_neuron.graph_extraction"]
    return [tool, *launch, *(torchrun_options or ["--standalone"]), *rank, *extraction_arguments]


def precompile(
    resolved: ResolvedRecipe,
    *,
    nproc_per_node: int,
    torchrun_options: Sequence[str],
    extraction_arguments: Sequence[str],
) -> Path:
    """Collect and compile the graphs; return the compile key's file.

    Args:
        resolved: resolved recipe of the run.
        nproc_per_node: processes on this machine.
        torchrun_options: additional torchrun options.
        extraction_arguments: arguments of `lt_trainer_neuron.graph_extraction`, for the same recipe.

    Raises:
        RecipeError: the recipe cannot run on Trainium.
        NotInstalledError: the Neuron packages are missing.
        CompileFailedError: a graph could not be collected or compiled; no key is written.
    """
    recipe = resolved.recipe
    neuron = engine_options(recipe, "neuron", NeuronOptions)
    if recipe.run.engine != "neuron" or neuron.backend != "nxd":
        raise RecipeError(
            "only graphs for Trainium can be precompiled",
            values={"run.engine": recipe.run.engine, f"{SECTION}.backend": neuron.backend},
            remedy="set run.engine to neuron and engine.neuron.backend to nxd",
        )
    environ = os.environ | neuron_env(recipe, os.environ)
    try:
        check_recipe(recipe, World())
        check_environment(recipe, environ)
        model = model_config(recipe, vocab_size_and_source(recipe)[0])
        check_model(recipe, model)
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc
    require_installed()
    tool = shutil.which(PARALLEL_COMPILE_TOOL, path=str(Path(sys.executable).parent)) or shutil.which(
        PARALLEL_COMPILE_TOOL
    )
    if tool is None:
        raise CompileFailedError(
            f"{PARALLEL_COMPILE_TOOL} is not on the PATH; torch-neuronx installs it in the environment's bin folder"
        )
    done = subprocess.run(
        build_command(tool, nproc_per_node, torchrun_options, extraction_arguments), env=environ, check=False
    )
    if done.returncode:
        raise CompileFailedError(
            f"{PARALLEL_COMPILE_TOOL} exited with {done.returncode}; see its output above; no compile key was written"
        )
    url = cache_url(environ)
    if "://" not in url or url.startswith("file://"):
        failed = [entry for entry in scan_cache(local_cache_folder(url)) if entry.state == "failed"]
        if failed:
            raise CompileFailedError(
                f"{len(failed)} graphs in {url} failed to compile, the first: "
                f"{failed[0].error_message or failed[0].path}; list them with lt train neuron-cache list --failed, "
                "remove them with lt train neuron-cache clean, and try again"
            )
    return write_key(keys_folder(recipe, environ), compile_key(recipe, model, environ))
