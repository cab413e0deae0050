"""From what the service has put into the container to the recipe that every rank runs, and the checks before it.

    defaults < hyperparameters < LT_SET_nn variables < what only the container knows (paths, engine, grace time)

The tokenizer is the one in the channel `tokenizer`, else the store's own; both are files, nothing is downloaded. With a
channel the two must be the same, file by file: ids of one tokenizer mean nothing to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_launch.sagemaker.contract import Contract
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.instances import INSTANCES
from lt_launch.sagemaker.request import SET, VALIDATION_SET, channel_of

if TYPE_CHECKING:
    from lt_trainer.recipe import Resolved

__all__ = ["WINDOW_S", "check_tokenizer", "find_store", "processes", "resolve", "run_directory"]

WINDOW_S = 115.0
"""What processes have from SIGTERM until they are killed: the service kills everything after 120 s, and what went wrong
has to be written before."""
RUN_CHANNEL, RUN_FOLDER = "run", "run"
PROCESSES = "LT_PROCS_PER_NODE"


def resolve(contract: Contract, environ: Mapping[str, str]) -> Resolved:
    """The recipe of the job, with sources as errors name them.

    Raises:
        SageMakerError: a channel or the number of hosts does not fit; RecipeError and DataError from what they hold.
    """
    from lt_trainer.recipe import load

    if "train" not in contract.channels:
        raise SageMakerError(
            "there is no channel train; add a channel of that name with a token store made by lt data prepare"
        )
    store = find_store(contract.channels["train"], "train")
    sets = [environ[name] for name in sorted(name for name in environ if name.startswith(SET))]
    given = {name for name, _, _ in (text.partition("=") for text in sets)}
    kind = INSTANCES.get(contract.cluster.instance_type)
    base: dict[str, Any] = {
        "run": {"out": str(run_directory(contract)), "engine": kind.engine if kind else "gpu"},
        "data": {"store": str(store)},
        "guard": {"grace_s": WINDOW_S},
    }
    for channel, folder in contract.channels.items():
        _add_channel(base, channel, folder)
    for name in sorted(given):
        if channel_of(name) or name == "run.out":
            raise SageMakerError(f"{SET}: {name} is the container's to say; leave it out")
    hyperparameters = dict(contract.hyperparameters)
    if "tokenizer" in contract.channels:
        check_tokenizer(contract.channels["tokenizer"], store)
        hyperparameters.pop("TOKENIZER", None)  # a name; the files have been compared instead
    resolved = load(hyperparameters=hyperparameters, sets=sets, base=base, base_name="container")
    _check_nodes(contract, resolved)
    if resolved.recipe.guard.grace_s > WINDOW_S:
        raise SageMakerError(
            f"guard.grace_s = {resolved.recipe.guard.grace_s:g}: SageMaker kills everything 120 s after its signal; "
            f"set it to at most {WINDOW_S:g}, or leave it out"
        )
    return resolved


def _add_channel(base: dict[str, Any], channel: str, folder: Path) -> None:
    """What a channel means for the recipe; those that mean nothing to it are left to the code in the image."""
    if channel == "validation":
        base["data"]["validation"] = str(find_store(folder, channel))
    elif channel.startswith(VALIDATION_SET):
        store = {"store": str(find_store(folder, channel))}
        base["data"].setdefault("validation_sets", {})[channel.removeprefix(VALIDATION_SET)] = store
    elif channel == "init":
        base["model"] = {"init_from": str(folder)}


def run_directory(contract: Contract) -> Path:
    """Where the run lives: a writable file system where there is one (channel `run`), else the checkpoint folder."""
    shared = contract.channels.get(RUN_CHANNEL)
    if shared is not None:
        return shared
    if len(contract.cluster.hosts) > 1:
        raise SageMakerError(
            f"{len(contract.cluster.hosts)} hosts need one folder that all of them write checkpoints to, and "
            f"{contract.checkpoints} is each host's own; add a channel {RUN_CHANNEL} with a file system (EFS or FSx "
            "for Lustre, FileSystemAccessMode rw), or use one instance"
        )
    return contract.checkpoints / RUN_FOLDER


def find_store(channel: Path, name: str) -> Path:
    """The token store in a channel: the folder itself, or the only folder in it that is one.

    Raises:
        SageMakerError: there is none, or more than one.
    """
    if (channel / "manifest.json").exists():
        return channel
    found = sorted(path.parent for path in channel.glob("*/manifest.json"))
    if len(found) == 1:
        return found[0]
    there = ", ".join(sorted(path.name for path in channel.iterdir())[:10]) or "nothing"
    problem = "holds no token store" if not found else f"holds {len(found)} token stores"
    raise SageMakerError(
        f"channel {name} {problem} (there is {there}); point it to the folder with manifest.json that lt data prepare "
        "has made"
    )


def check_tokenizer(channel: Path, store: Path) -> None:
    """Refuse a tokenizer that is not the one that the store was made with.

    Raises:
        SageMakerError: the channel holds no tokenizer, or another one.
    """
    from lt_data import DataError, Tokenizer, TokenStore

    folder = channel
    if not (channel / "tokenizer.json").exists():
        below = sorted(path.parent for path in channel.rglob("tokenizer.json"))
        if len(below) != 1:
            raise SageMakerError(
                f"channel tokenizer holds {len(below)} files named tokenizer.json; point it to the folder of one "
                "tokenizer, or leave it out to use the store's own"
            )
        folder = below[0]
    try:
        given = Tokenizer.load(folder)
    except DataError as exc:
        raise SageMakerError(f"channel tokenizer: {exc}") from exc
    wanted = TokenStore.open(store).manifest.tokenizer
    if given.sha256 != wanted.sha256:
        raise SageMakerError(
            f"channel tokenizer (sha256 {given.sha256}) is not the tokenizer that {store} was made with "
            f"({wanted.name!r}, sha256 {wanted.sha256}); prepare the data with this tokenizer, or leave the channel "
            "out to use the store's own"
        )


def _check_nodes(contract: Contract, resolved: Resolved) -> None:
    hosts, nodes = len(contract.cluster.hosts), resolved.recipe.parallel.n_nodes
    if nodes == hosts or (hosts > 1 and not resolved.given("parallel.n_nodes")):
        return
    source = resolved.origins["parallel.n_nodes"]
    raise SageMakerError(
        f"NUM_NODES = {nodes} ({source}) and the job has {hosts} instance(s); make the two equal, or leave it out"
    )


def processes(contract: Contract, environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Processes on this host: LT_PROCS_PER_NODE, else the instance type's devices, else those found, else one.

    Raises:
        SageMakerError: the variable is no positive number.
    """
    asked = environ.get(PROCESSES, "")
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise SageMakerError(f"{PROCESSES} = {asked!r}: give the number of processes on each host, 1 or more")
        return int(asked)
    known = INSTANCES.get(contract.cluster.instance_type)
    if known:
        return known.devices
    gpus = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    return max(1, len(gpus))
