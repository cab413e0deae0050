"""Recipe of the ranks in a SageMaker container, resolved from the contract and checked.

    defaults < hyperparameters < LT_SET_nn variables < values known only in the container (paths, engine, grace period)

The tokenizer is the one in the channel `tokenizer`, else the store's own; both are files, nothing is downloaded. With a
channel the two must have identical files, since token ids are specific to a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_launch.errors import LaunchError
from lt_launch.look import count_devices
from lt_launch.sagemaker.contract import GRACE_PERIOD_S, RUN_CHANNEL, Contract, engine_of
from lt_launch.sagemaker.request import OVERRIDE_PREFIX, VALIDATION_CHANNEL_PREFIX, channel_for_field

if TYPE_CHECKING:
    from lt_trainer.config.recipe import ResolvedRecipe


def resolve_recipe(contract: Contract, environ: Mapping[str, str]) -> ResolvedRecipe:
    """Return the resolved recipe of the job, with sources for error messages.

    Raises:
        LaunchError: a channel or the number of hosts is invalid; RecipeError and DataError for their content.
    """
    from lt_trainer.config.recipe import load

    if "train" not in contract.channels:
        raise LaunchError("channel train is missing; add it with a token store made by lt data prepare")
    store = find_store(contract.channels["train"], "train")
    overrides = [environ[name] for name in sorted(environ) if name.startswith(OVERRIDE_PREFIX)]
    for name in {text.partition("=")[0] for text in overrides}:
        if channel_for_field(name) or name == "run.dir":
            raise LaunchError(f"{OVERRIDE_PREFIX}: {name} is set by the container; leave it out")
    engine = engine_of(contract.instance_type)
    base: dict[str, Any] = {
        "run": {"dir": str(run_dir(contract)), "engine": engine},
        "data": {"store": str(store)},
        "fault_tolerance": {"grace_period_s": GRACE_PERIOD_S},
    }
    if engine == "neuron":
        base["engine"] = {"neuron": {"num_neuroncores": procs_per_node(environ)}}
    for channel, folder in contract.channels.items():  # others are for the code in the image
        if channel == "validation":
            base["data"]["validation"] = str(find_store(folder, channel))
        elif channel.startswith(VALIDATION_CHANNEL_PREFIX):
            one = {"store": str(find_store(folder, channel))}
            base["data"].setdefault("validation_sets", {})[channel.removeprefix(VALIDATION_CHANNEL_PREFIX)] = one
        elif channel == "init":
            base["model"] = {"init_from": str(folder)}
    hyperparameters = dict(contract.hyperparameters)
    if "tokenizer" in contract.channels:
        _check_tokenizer(contract.channels["tokenizer"], store)
        hyperparameters.pop("TOKENIZER", None)  # a name only; the files have been compared
    resolved = load(hyperparameters=hyperparameters, overrides=overrides, base=base, base_name="container")
    hosts, nodes = len(contract.hosts), resolved.recipe.parallel.n_nodes
    if nodes != hosts and (hosts == 1 or resolved.is_given("parallel.n_nodes")):
        source = resolved.origins["parallel.n_nodes"]
        raise LaunchError(
            f"NUM_NODES = {nodes} ({source}) and the job has {hosts} instance(s); make the two equal, or leave it out"
        )
    grace_s = resolved.recipe.fault_tolerance.grace_period_s
    if grace_s > GRACE_PERIOD_S:
        raise LaunchError(
            f"fault_tolerance.grace_period_s = {grace_s:g}: SageMaker kills all processes 120 s after its signal; "
            f"set it to at most {GRACE_PERIOD_S:g}, or leave it out"
        )
    return resolved


def run_dir(contract: Contract) -> Path:
    """Return the run directory: on a writable file system (channel `run`), else in the checkpoint folder."""
    if RUN_CHANNEL in contract.channels:
        return contract.channels[RUN_CHANNEL]
    if len(contract.hosts) > 1:
        raise LaunchError(
            f"{len(contract.hosts)} hosts need one folder that all of them write checkpoints to, and "
            f"{contract.checkpoint_dir} is each host's own; add a channel {RUN_CHANNEL} with a file system (EFS or FSx "
            "for Lustre, FileSystemAccessMode rw), or use one instance"
        )
    return contract.checkpoint_dir / "run"


def find_store(channel: Path, name: str) -> Path:
    """Return the token store of a channel: the folder itself, or the only token store in it.

    Raises:
        LaunchError: there is none, or more than one.
    """
    return _find_folder(channel, name, "manifest.json", "the token store made by lt data prepare")


def _find_folder(channel: Path, name: str, file: str, what: str) -> Path:
    """Return the folder with a file: the channel itself, or the only one below it."""
    if (channel / file).exists():
        return channel
    found = sorted(path.parent for path in channel.glob(f"*/{file}"))
    if len(found) == 1:
        return found[0]
    contents = ", ".join(sorted(path.name for path in channel.iterdir())[:10]) or "nothing"
    raise LaunchError(f"channel {name} holds {len(found)} files named {file} (there is {contents}); point it to {what}")


def _check_tokenizer(channel: Path, store: Path) -> None:
    """Reject a tokenizer that differs from that of the store."""
    from lt_data import DataError, Tokenizer, TokenStore

    folder = _find_folder(
        channel, "tokenizer", "tokenizer.json", "one tokenizer, or leave it out: the store has its own"
    )
    try:
        tokenizer = Tokenizer.load(folder)
    except DataError as exc:
        raise LaunchError(f"channel tokenizer: {exc}") from exc
    own = TokenStore(store).manifest.tokenizer
    if tokenizer.sha256 != own.sha256:
        raise LaunchError(
            f"channel tokenizer (sha256 {tokenizer.sha256}) is not the tokenizer that {store} was made with "
            f"({own.name!r}, sha256 {own.sha256}); prepare the data with this tokenizer, or leave the channel "
            "out to use the store's own"
        )


def procs_per_node(environ: Mapping[str, str], machine: Path = Path("/")) -> int:
    """Return the processes of this host: LT_PROCS_PER_NODE, else its device count, else one.

    Raises:
        LaunchError: the variable is not a positive number.
    """
    requested = environ.get("LT_PROCS_PER_NODE", "")
    if requested and not (requested.isdigit() and int(requested)):
        raise LaunchError(f"LT_PROCS_PER_NODE = {requested!r}: give the number of processes on each host, 1 or more")
    return int(requested or 0) or max(1, count_devices(machine, environ))
