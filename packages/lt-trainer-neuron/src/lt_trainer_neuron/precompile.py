"""`lt train precompile`: all graphs of a recipe compiled before it trains, and a note of what they were made for.

    neuron_parallel_compile torchrun ... -m lt_trainer_neuron.extract RUN.toml ...

runs a few steps of the recipe without computing anything, collects their graphs and compiles them side by side. The
options are those of the run, by construction: it is the same recipe, resolved in the same way. When all have compiled,
the compile key is noted (`compile_key.py`), with which a run knows that its graphs are there.

On several nodes the command runs on each, with torchrun's options for them; a cache of its own on each node needs that
anyway, and on a shared one whoever comes second finds the work done.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.planning.plan import vocabulary
from lt_trainer.recipe import Resolved, engine_options, llama_config
from lt_trainer_neuron.cache import CacheError, cache_url, local_cache, scan
from lt_trainer_neuron.checks import check, check_model
from lt_trainer_neuron.compile_key import compile_key, environment_of, keys_folder, write
from lt_trainer_neuron.environment import check_environment
from lt_trainer_neuron.options import SECTION, NeuronOptions
from lt_trainer_neuron.sdk import installed, require

__all__ = ["TOOL", "CompileFailedError", "command", "precompile"]

TOOL = "neuron_parallel_compile"


class CompileFailedError(CacheError):
    """Graphs that could not be collected or compiled."""


def command(tool: str, ranks: int, options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The command line.

    Args:
        tool: path of neuron_parallel_compile.
        ranks: processes on this machine.
        options: more options of torchrun; without any, this machine is all.
        arguments: of `lt_trainer_neuron.extract`.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [tool, *launch, *(options or ["--standalone"]), "-m", "lt_trainer_neuron.extract", *arguments]


def precompile(resolved: Resolved, *, ranks: int, options: Sequence[str], arguments: Sequence[str]) -> Path:
    """Collect and compile the graphs; returns the file of the compile key.

    Args:
        resolved: the recipe of the run.
        ranks: processes on this machine.
        options: of torchrun.
        arguments: of `lt_trainer_neuron.extract`, which name the same recipe.

    Raises:
        RecipeError: the recipe would not run on Trainium.
        NotInstalledError: the Neuron packages are not there.
        CompileFailedError: a graph could not be collected or compiled; no key is noted.
    """
    recipe = resolved.recipe
    neuron = engine_options(recipe, "neuron", NeuronOptions)
    if recipe.run.engine != "neuron" or neuron.backend != "nxd":
        raise RecipeError(
            "only graphs for Trainium are compiled beforehand",
            values={"run.engine": recipe.run.engine, f"{SECTION}.backend": neuron.backend},
            remedy="set run.engine to neuron and engine.neuron.backend to nxd",
        )
    environ = environment_of(recipe)
    try:
        check(recipe, World())
        check_environment(recipe, environ)
        model = llama_config(recipe, vocabulary(recipe)[0])
        check_model(recipe, model)
    except RecipeError as exc:
        raise exc.located(resolved.origins) from exc
    require(installed())
    tool = shutil.which(TOOL, path=str(Path(sys.executable).parent)) or shutil.which(TOOL)
    if tool is None:
        raise CompileFailedError(f"{TOOL} is not on the PATH: it comes with torch-neuronx, in the environment's bin")
    done = subprocess.run(command(tool, ranks, options, arguments), env=environ, check=False)
    if done.returncode:
        raise CompileFailedError(f"{TOOL} ended with {done.returncode}; see its output above; no compile key was noted")
    url = cache_url(environ)
    if "://" not in url or url.startswith("file://"):
        failed = [entry for entry in scan(local_cache(url)) if entry.state == "failed"]
        if failed:
            raise CompileFailedError(
                f"{len(failed)} graphs in {url} have failed to compile, the first: {failed[0].told or failed[0].path}; "
                "look with lt train neuron-cache failed, take them out with lt train neuron-cache clean, and try again"
            )
    return write(keys_folder(recipe, environ), compile_key(recipe, model, environ))
