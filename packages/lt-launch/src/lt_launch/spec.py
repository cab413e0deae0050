"""What the agents on the nodes are given: a stage as plain values, and the agent's own files.

Pure but for reading the agent's source from beside this file.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile

__all__ = ["AGENT", "PYTHON", "agent_files", "launch_files", "spec", "with_python"]

VERSION = 1
PYTHON = "python"
AGENT = Path(__file__).with_name("agent")


def with_python(argv: tuple[str, ...], python: str) -> list[str]:
    """The command line with the word "python" in front replaced by an interpreter."""
    return [python, *argv[1:]] if argv[0] == PYTHON else list(argv)


def spec(
    stage: Stage, pipeline: Pipeline, profile: Profile, *, python: str = "", cwd: str = "", **more: Any
) -> dict[str, Any]:
    """A stage as the agent reads it from spec.json.

    Args:
        stage: the stage.
        pipeline: that it belongs to; widths of the stages before it are part of what it waits for.
        profile: for the interpreter, the lines before a command, and the environment.
        python: stands in for "python" when the profile names no interpreter; "" = python3.
        cwd: the working folder when the job names none.
        more: further values for the agent (link_timeout_s, lost_grace_s, show).
    """
    job, found = stage.job, profile.python_or(python or "python3")
    return {
        "version": VERSION,
        "name": job.name,
        "argv": with_python(job.argv, found),
        "bin": str(PurePosixPath(found).parent) if "/" in found else "",
        "setup": list(profile.setup),
        "env": {**profile.env, **job.env},
        "pass_env": list(job.pass_env),
        "cwd": job.cwd or cwd,
        "nodes": job.nodes,
        "procs_per_node": job.procs_per_node,
        "spawner": job.spawner,
        "completion": job.completion,
        "run_dir": job.run_dir,
        "recipe": _digest(job.recipe),
        "image": job.container.image,
        "grace_s": job.grace_s,
        "restart": asdict(job.restart),
        "array": stage.array,
        "after": [{"name": name, "array": pipeline.stage(name).array} for name in stage.after],
        "inputs": list(stage.inputs),
        "outputs": list(stage.outputs),
        **more,
    }


def _digest(recipe: str) -> str:
    """A hash of a recipe's values: comments say where each came from, and decide nothing."""
    if not recipe:
        return ""
    return hashlib.sha256(json.dumps(tomllib.loads(recipe), sort_keys=True).encode()).hexdigest()


def agent_files() -> dict[str, str]:
    """The agent's source by name, to stand in `<out>/launch/agent/`."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(AGENT.glob("*.py"))}


def launch_files(pipeline: Pipeline, specs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Everything that agents need below `<out>/launch/`, by name: themselves, specs, recipes."""
    files = {f"agent/{name}": text for name, text in agent_files().items()}
    for stage in pipeline.stages:
        files[f"stages/{stage.name}/spec.json"] = json.dumps(specs[stage.name], indent=1, ensure_ascii=False) + "\n"
        if stage.job.recipe:
            files[f"stages/{stage.name}/recipe.toml"] = stage.job.recipe
    return files
