"""Specs: a stage as plain values, and the files that nodes need of a launch.

Pure except for the working folder, and for reading the policy next to this file, which is sent to Slurm's nodes.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile

RECIPE, INDEX, ARRAY = "{recipe}", "{index}", "{array}"
"""Words of a command line that stand for the path of the resolved recipe, an element's index, the array's width."""


def with_python(argv: tuple[str, ...], python: str) -> list[str]:
    """Return the command line with a leading "python" replaced by an interpreter."""
    return [python, *argv[1:]] if argv[0] == "python" else list(argv)


def stage_spec(stage: Stage, pipeline: Pipeline, profile: Profile, *, python: str = "", **extra: Any) -> dict[str, Any]:
    """Return a stage as spec.json has it; a relative working folder is one of the launch command's own.

    Args:
        stage: the stage.
        pipeline: its pipeline; the array sizes of its predecessors are part of its dependencies.
        profile: source of the interpreter, the setup lines and the environment.
        python: interpreter; "" = the profile's.
        extra: additional values of the target.
    """
    job, interpreter = stage.job, python or profile.python
    return {
        "name": job.name,
        "argv": with_python(job.argv, interpreter),
        "bin": str(PurePosixPath(interpreter).parent) if "/" in interpreter else "",
        "setup": list(profile.setup),
        "env": {**profile.env, **job.env},
        "pass_env": list(job.pass_env),
        "cwd": str(Path.cwd() / job.cwd),
        "nodes": job.nodes,
        "procs_per_node": job.procs_per_node,
        "completion": job.completion,
        "run_dir": job.run_dir,
        "recipe": recipe_hash(job.recipe),
        "image": job.container.image,
        "grace_s": job.grace_period_s,
        "restart": job.restart.model_dump(),
        "array": stage.array,
        "after": [{"name": name, "array": pipeline.stage(name).array} for name in stage.after],
        "inputs": list(stage.inputs),
        "outputs": list(stage.outputs),
        **extra,
    }


def recipe_hash(recipe: str) -> str:
    """Return a hash of a recipe's values, without the comments that state their sources."""
    if not recipe:
        return ""
    return hashlib.sha256(json.dumps(tomllib.loads(recipe), sort_keys=True).encode()).hexdigest()


def launch_files(pipeline: Pipeline, specs: Mapping[str, Mapping[str, Any]], target: str) -> dict[str, str]:
    """Return the files that nodes need below `<out>/launch/` by name: specs, recipes, on Slurm the policy."""
    policy = Path(__file__).with_name("policy.py")
    files = {"policy.py": policy.read_text(encoding="utf-8")} if target == "slurm" else {}
    for stage in pipeline.stages:
        files[f"stages/{stage.name}/spec.json"] = json.dumps(specs[stage.name], indent=1, ensure_ascii=False) + "\n"
        if stage.job.recipe:
            files[f"stages/{stage.name}/recipe.toml"] = stage.job.recipe
    return files
