"""Recipe of the ranks in a SageMaker container, resolved from the contract and checked.

    defaults < hyperparameters < LT_SET_nn variables < values known only in the container (paths, engine, grace period)

The tokenizer is the one in the channel `tokenizer`, else the store's own; both are files, nothing is downloaded. With a
channel the two must have identical files, since token ids are specific to a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_launch.devices import count_devices
from lt_launch.sagemaker.contract import GRACE_PERIOD_S, PROCS_PER_NODE_VARIABLE, RUN_CHANNEL, Contract, engine_of
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.recipe_rules import OVERRIDE_PREFIX
from lt_launch.sagemaker.request import VALIDATION_CHANNEL_PREFIX, channel_for_field

if TYPE_CHECKING:
    from lt_trainer.config.recipe import ResolvedRecipe

RUN_FOLDER = "run"


def resolve_recipe(contract: Contract, environ: Mapping[str, str]) -> ResolvedRecipe:
    """Return the resolved recipe of the job, with sources for error messages.

    Raises:
        SageMakerError: a channel or the number of hosts is invalid; RecipeError and DataError for their content.
    """
    from lt_trainer.config.recipe import load

    if "train" not in contract.channels:
        raise SageMakerError("channel train is missing; add it with a token store made by lt data prepare")
    store = find_store(contract.channels["train"], "train")
    sets = [environ[name] for name in sorted(name for name in environ if name.startswith(OVERRIDE_PREFIX))]
    override_names = {name for name, _, _ in (text.partition("=") for text in sets)}
    engine = engine_of(contract.cluster.instance_type)
    base: dict[str, Any] = {
        "run": {"dir": str(run_dir(contract)), "engine": engine},
        "data": {"store": str(store)},
        "fault_tolerance": {"grace_period_s": GRACE_PERIOD_S},
    }
    if engine == "neuron":
        base["engine"] = {"neuron": {"num_neuroncores": procs_per_node(contract, environ)}}
    for channel, folder in contract.channels.items():
        _add_channel(base, channel, folder)
    for name in sorted(override_names):
        if channel_for_field(name) or name == "run.dir":
            raise SageMakerError(f"{OVERRIDE_PREFIX}: {name} is set by the container; leave it out")
    hyperparameters = dict(contract.hyperparameters)
    if "tokenizer" in contract.channels:
        check_tokenizer(contract.channels["tokenizer"], store)
        hyperparameters.pop("TOKENIZER", None)  # a name only; the files have been compared
    resolved = load(hyperparameters=hyperparameters, overrides=sets, base=base, base_name="container")
    _check_nodes(contract, resolved)
    grace_s = resolved.recipe.fault_tolerance.grace_period_s
    if grace_s > GRACE_PERIOD_S:
        raise SageMakerError(
            f"fault_tolerance.grace_period_s = {grace_s:g}: SageMaker kills all processes 120 s after its signal; "
            f"set it to at most {GRACE_PERIOD_S:g}, or leave it out"
        )
    return resolved


def _add_channel(base: dict[str, Any], channel: str, folder: Path) -> None:
    """Add the recipe fields of a channel; other channels are for the code in the image."""
    if channel == "validation":
        base["data"]["validation"] = str(find_store(folder, channel))
    elif channel.startswith(VALIDATION_CHANNEL_PREFIX):
        store = {"store": str(find_store(folder, channel))}
        base["data"].setdefault("validation_sets", {})[channel.removeprefix(VALIDATION_CHANNEL_PREFIX)] = store
    elif channel == "init":
        base["model"] = {"init_from": str(folder)}


def run_dir(contract: Contract) -> Path:
    """Return the run directory: on a writable file system (channel `run`), else in the checkpoint folder."""
    shared = contract.channels.get(RUN_CHANNEL)
    if shared is not None:
        return shared
    if len(contract.cluster.hosts) > 1:
        raise SageMakerError(
            f"{len(contract.cluster.hosts)} hosts need one folder that all of them write checkpoints to, and "
            f"{contract.checkpoint_dir} is each host's own; add a channel {RUN_CHANNEL} with a file system (EFS or FSx "
            "for Lustre, FileSystemAccessMode rw), or use one instance"
        )
    return contract.checkpoint_dir / RUN_FOLDER


def find_store(channel: Path, name: str) -> Path:
    """Return the token store of a channel: the folder itself, or the only token store in it.

    Raises:
        SageMakerError: there is none, or more than one.
    """
    if (channel / "manifest.json").exists():
        return channel
    stores = sorted(path.parent for path in channel.glob("*/manifest.json"))
    if len(stores) == 1:
        return stores[0]
    contents = ", ".join(sorted(path.name for path in channel.iterdir())[:10]) or "nothing"
    problem = "holds no token store" if not stores else f"holds {len(stores)} token stores"
    raise SageMakerError(
        f"channel {name} {problem} (there is {contents}); point it to the folder with manifest.json "
        "made by lt data prepare"
    )


def check_tokenizer(channel: Path, store: Path) -> None:
    """Reject a tokenizer that differs from that of the store.

    Raises:
        SageMakerError: the channel has no tokenizer, or a different one.
    """
    from lt_data import DataError, Tokenizer, TokenStore

    folder = channel
    if not (channel / "tokenizer.json").exists():
        candidates = sorted(path.parent for path in channel.rglob("tokenizer.json"))
        if len(candidates) != 1:
            raise SageMakerError(
                f"channel tokenizer holds {len(candidates)} files named tokenizer.json; point it to the folder of one "
                "tokenizer, or leave it out to use the store's own"
            )
        folder = candidates[0]
    try:
        tokenizer = Tokenizer.load(folder)
    except DataError as exc:
        raise SageMakerError(f"channel tokenizer: {exc}") from exc
    store_tokenizer = TokenStore(store).manifest.tokenizer
    if tokenizer.sha256 != store_tokenizer.sha256:
        raise SageMakerError(
            f"channel tokenizer (sha256 {tokenizer.sha256}) is not the tokenizer that {store} was made with "
            f"({store_tokenizer.name!r}, sha256 {store_tokenizer.sha256}); prepare the data with this tokenizer, or "
            "leave the channel out to use the store's own"
        )


def _check_nodes(contract: Contract, resolved: ResolvedRecipe) -> None:
    hosts, nodes = len(contract.cluster.hosts), resolved.recipe.parallel.n_nodes
    if nodes == hosts or (hosts > 1 and not resolved.is_given("parallel.n_nodes")):
        return
    source = resolved.origins["parallel.n_nodes"]
    raise SageMakerError(
        f"NUM_NODES = {nodes} ({source}) and the job has {hosts} instance(s); make the two equal, or leave it out"
    )


def procs_per_node(contract: Contract, environ: Mapping[str, str], machine: Path = Path("/")) -> int:
    """Return the processes of this host: LT_PROCS_PER_NODE, else its device count, else one.

    Raises:
        SageMakerError: the variable is not a positive number.
    """
    requested = environ.get(PROCS_PER_NODE_VARIABLE, "")
    if requested:
        if not requested.isdigit() or int(requested) < 1:
            raise SageMakerError(
                f"{PROCS_PER_NODE_VARIABLE} = {requested!r}: give the number of processes on each host, 1 or more"
            )
        return int(requested)
    return max(1, count_devices(machine, environ))
