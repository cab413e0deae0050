"""The releases of the AWS Neuron SDK that this engine is made for, and whether one of them is installed here.

Training with torch-xla ends with torch 2.9, so these are the last releases that can train on trn1. On the public
package index the same names are placeholders of a few kilobytes: they install and import, and have nothing in them. A
working installation is therefore known by a module inside, `neuronx_distributed.parallel_layers`, not by a name.

Cost: package metadata and the search for two modules; nothing of Neuron is imported, but the package's own `__init__`
where the module inside it is looked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType

from lt_trainer.errors import TrainerError

__all__ = ["NEWEST", "SDKS", "Installed", "NotInstalledError", "Sdk", "installed", "require"]

PROBE = "neuronx_distributed.parallel_layers"


@dataclass(frozen=True, kw_only=True)
class Sdk:
    """One release: the versions that belong together, by package."""

    release: str
    packages: Mapping[str, str]

    @property
    def constraints(self) -> str:
        """The file that pins them, from the repository's root."""
        return f"constraints/neuron-{self.release}.txt"


def _sdk(release: str, **packages: str) -> Sdk:
    named = {name.replace("_", "-"): found for name, found in packages.items()}
    return Sdk(release=release, packages=MappingProxyType(named))


_TABLE = (
    _sdk(
        "2.28.1",
        libneuronxla="2.2.15515.0",
        neuronx_cc="2.23.6484.0",
        neuronx_distributed="0.17.26814",
        nki="0.2.0",
        torch_neuronx="2.9.0.2.12.22436",
    ),
    _sdk(
        "2.29.1",
        libneuronxla="2.2.16408.0",
        neuronx_cc="2.24.8799.0",
        neuronx_distributed="0.18.27753",
        nki="0.3.0",
        torch_neuronx="2.9.0.2.13.26312",
    ),
)
SDKS: Mapping[str, Sdk] = MappingProxyType({sdk.release: sdk for sdk in _TABLE})
"""By release, from AWS's list of the contents of each release. AWS advises users of NxD to stay on 2.28."""

NEWEST = _TABLE[-1].release


class NotInstalledError(TrainerError):
    """The Neuron packages are missing, or are the placeholders of the public index."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What is installed here.

    Attributes:
        versions: by package, those that are there.
        works: whether neuronx-distributed is the real one.
        sdk: the release that these versions belong to; None where they are of no one release that is known.
    """

    versions: Mapping[str, str]
    works: bool
    sdk: Sdk | None

    @property
    def placeholder(self) -> bool:
        """Whether neuronx-distributed is there and does not work."""
        return "neuronx-distributed" in self.versions and not self.works


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # what a package raises whose own __init__ cannot be run
        return False


def installed(
    version_of: Callable[[str], str | None] = _version, has_module: Callable[[str], bool] = _there
) -> Installed:
    """Look at what is installed.

    Args:
        version_of: the version of a package, None where it is not there.
        has_module: whether a module can be found.
    """
    names = sorted({name for sdk in SDKS.values() for name in sdk.packages})
    versions = {name: found for name in names if (found := version_of(name)) is not None}
    public = {name: found.partition("+")[0] for name, found in versions.items()}
    sdk = next((sdk for sdk in SDKS.values() if public and public.items() <= sdk.packages.items()), None)
    return Installed(versions=versions, works=has_module(PROBE), sdk=sdk)


def require(found: Installed) -> None:
    """Say what is missing to train on Trainium.

    Raises:
        NotInstalledError: with the command that installs it.
    """
    if found.works:
        return
    command = f'pip install "lt-trainer-neuron[neuron]" -c {SDKS["2.28.1"].constraints}'
    repository = "with the AWS Neuron pip repository as extra index (its address is on AWS's set-up page)"
    if found.placeholder:
        listed = ", ".join(f"{name} {number}" for name, number in found.versions.items())
        raise NotInstalledError(
            f"the installed neuronx-distributed has no {PROBE}: these are placeholders of the public package index "
            f"({listed}); uninstall them, then {command} {repository}"
        )
    raise NotInstalledError(
        f"neuronx-distributed is not installed, which trains on Trainium: {command} {repository}; to compare numbers "
        "on a CPU set engine.neuron.backend to cpu, to train on this machine set run.engine to gpu"
    )
