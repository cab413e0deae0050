"""Command lines and variables of the processes of one node; pure.

A stage that trains by a recipe is one `lt train torchrun` per node. Of another stage each process is started as it is,
with the variables that torchrun sets, so that whatever runs under torchrun runs here, and without torch. Rank order is
the order of the nodes as they were given: rank = node * processes per node + process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lt_launch.policy import Place

RECIPE, INDEX, ARRAY = "{recipe}", "{index}", "{array}"
"""Words of a command line that stand for the path of the resolved recipe, an element's index, the array's width."""
TRAIN = ("-P", "-m", "lt_trainer", "run")
"""What follows the interpreter in the command of a stage that trains by a recipe."""


def ranks_of(spec: Mapping[str, Any], node: int) -> list[int]:
    """Return the ranks of a node."""
    procs = int(spec["procs_per_node"])
    return list(range(node * procs, (node + 1) * procs))


def node_commands(
    spec: Mapping[str, Any],
    place: Place,
    number: int,
    node: int,
    master: tuple[str, int | str],
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Return the commands of a node, as `Node.start` takes them.

    Args:
        spec: the stage.
        place: its folder.
        number: number of the attempt.
        node: index of the node.
        master: address of the first node and a free port there; a word for it in what is only shown.
        env: further variables.
    """
    argv, ranks = _argv(spec, place), ranks_of(spec, node)
    training = is_training(spec)
    argv = with_setup(spec, torchrun_argv(argv, spec, node, master) if training else argv)
    common = {"argv": argv, "defaults": _defaults(spec), "bin": spec.get("bin") or "", "cwd": spec.get("cwd") or ""}
    base = {**(spec.get("env") or {}), **(env or {}), **_variables(spec, place, number)}
    if training:
        folder = str(place.attempt(number))
        return [{**common, "ranks": ranks, "env": {**base, "LT_EXIT_CODES": f"{folder}/notes", "LT_RANK_LOGS": folder}}]
    return [{**common, "ranks": [rank], "env": {**base, **_identity(spec, node, rank, master)}} for rank in ranks]


def is_training(spec: Mapping[str, Any]) -> bool:
    """Return True if a stage trains by a recipe."""
    return bool(spec.get("recipe")) and tuple(spec["argv"][1:5]) == TRAIN


def torchrun_argv(argv: list[str], spec: Mapping[str, Any], node: int, master: tuple[str, int | str]) -> list[str]:
    """Return `lt train torchrun` for the command of one rank.

    On one node, too, the address is given: torchrun would ask for that of the host's name, which need not have one.
    """
    python, recipe = argv[0], argv[5]
    words = [python, "-P", "-m", "lt_trainer", "torchrun", recipe, "--nproc-per-node", str(spec["procs_per_node"])]
    words += [*argv[6:], "--", f"--nnodes={spec['nodes']}", f"--node-rank={node}", "--rdzv-backend=static"]
    return [*words, f"--master-addr={master[0]}", f"--master-port={master[1]}"]


def with_setup(spec: Mapping[str, Any], argv: list[str]) -> list[str]:
    """Return a command line behind the lines of set-up, in the same shell."""
    setup = spec.get("setup") or []
    return ["bash", "-c", "\n".join([*setup, 'exec "$@"']), "lt-launch", *argv] if setup else argv


def _argv(spec: Mapping[str, Any], place: Place) -> list[str]:
    words: dict[str, str] = {RECIPE: str(place.stage / "recipe.toml")}
    if place.index is not None:
        words.update({INDEX: str(place.index), ARRAY: str(spec.get("array") or 0)})
    given: list[str] = spec["argv"]
    return [words.get(word, word) for word in given]


def _defaults(spec: Mapping[str, Any]) -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", **({"OMP_NUM_THREADS": "1"} if int(spec["procs_per_node"]) > 1 else {})}


def _variables(spec: Mapping[str, Any], place: Place, number: int) -> dict[str, str]:
    """Return what every process has; by the run's id a rank knows that who started it waits for it."""
    found = {"LT_ATTEMPT": str(number), "TORCHELASTIC_RUN_ID": f"{spec.get('name') or place.stage.name}-{number}"}
    if place.index is not None:
        found |= {"LT_ARRAY_INDEX": str(place.index), "LT_ARRAY_SIZE": str(spec.get("array") or 0)}
    return found


def _identity(spec: Mapping[str, Any], node: int, rank: int, master: tuple[str, int | str]) -> dict[str, str]:
    procs = int(spec["procs_per_node"])
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(int(spec["nodes"]) * procs),
        "LOCAL_RANK": str(rank - node * procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }
