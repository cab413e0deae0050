"""Supported AWS Neuron SDK releases, and detection of the installed packages.

torch 2.9 is the last version that trains with torch-xla, so these are the last releases that can train on trn1. On the
public package index the same names are placeholders of a few kilobytes: they install and import, but are empty. A
working installation is therefore detected by a module, `neuronx_distributed.parallel_layers`, not by a package name.

Cost: package metadata and the search for two modules; of the Neuron packages, only the `__init__` that contains the
searched module is imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType

from lt_trainer.errors import TrainerError

__all__ = [
    "LATEST_SDK_RELEASE",
    "SDK_RELEASES",
    "InstalledPackages",
    "NeuronSdk",
    "NotInstalledError",
    "detect_packages",
    "require_installed",
]

PROBE_MODULE = "neuronx_distributed.parallel_layers"


@dataclass(frozen=True, kw_only=True)
class NeuronSdk:
    """SDK release with its package versions."""

    release: str
    packages: Mapping[str, str]

    @property
    def constraints_file(self) -> str:
        """Constraints file of the release, relative to the repository root."""
        return f"constraints/neuron-{self.release}.txt"


def _sdk_release(release: str, **packages: str) -> NeuronSdk:
    named = {name.replace("_", "-"): found for name, found in packages.items()}
    return NeuronSdk(release=release, packages=MappingProxyType(named))


_RELEASES = (
    _sdk_release(
        "2.28.1",
        libneuronxla="2.2.15515.0",
        neuronx_cc="2.23.6484.0",
        neuronx_distributed="0.17.26814",
        nki="0.2.0",
        torch_neuronx="2.9.0.2.12.22436",
    ),
    _sdk_release(
        "2.29.1",
        libneuronxla="2.2.16408.0",
        neuronx_cc="2.24.8799.0",
        neuronx_distributed="0.18.27753",
        nki="0.3.0",
        torch_neuronx="2.9.0.2.13.26312",
    ),
)
SDK_RELEASES: Mapping[str, NeuronSdk] = MappingProxyType({sdk.release: sdk for sdk in _RELEASES})
"""By release, from AWS's release contents. AWS advises NxD users to stay on 2.28."""

LATEST_SDK_RELEASE = _RELEASES[-1].release


class NotInstalledError(TrainerError):
    """Neuron packages are missing, or are the placeholders of the public index."""


@dataclass(frozen=True, kw_only=True)
class InstalledPackages:
    """Installed Neuron packages.

    Attributes:
        versions: version by package, for installed packages only.
        is_functional: neuronx-distributed is the real package.
        sdk: release of these versions; None if they match no supported release.
    """

    versions: Mapping[str, str]
    is_functional: bool
    sdk: NeuronSdk | None

    @property
    def is_placeholder(self) -> bool:
        """True if neuronx-distributed is installed but a placeholder."""
        return "neuronx-distributed" in self.versions and not self.is_functional


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _has_module(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # raised if the package's own __init__ fails
        return False


def detect_packages(
    get_version: Callable[[str], str | None] = _package_version, has_module: Callable[[str], bool] = _has_module
) -> InstalledPackages:
    """Detect the installed Neuron packages.

    Args:
        get_version: returns the version of a package, None if it is missing.
        has_module: returns True if a module can be found.
    """
    names = sorted({name for sdk in SDK_RELEASES.values() for name in sdk.packages})
    versions = {name: found for name in names if (found := get_version(name)) is not None}
    public = {name: found.partition("+")[0] for name, found in versions.items()}
    sdk = next((sdk for sdk in SDK_RELEASES.values() if public and public.items() <= sdk.packages.items()), None)
    return InstalledPackages(versions=versions, is_functional=has_module(PROBE_MODULE), sdk=sdk)


def require_installed(found: InstalledPackages) -> None:
    """Raise unless the packages for training on Trainium are installed.

    Raises:
        NotInstalledError: with the command that installs it.
    """
    if found.is_functional:
        return
    command = f'pip install "lt-trainer-neuron[neuron]" -c {SDK_RELEASES["2.28.1"].constraints_file}'
    repository = "with the AWS Neuron pip repository as extra index (its address is on AWS's set-up page)"
    if found.is_placeholder:
        listed = ", ".join(f"{name} {number}" for name, number in found.versions.items())
        raise NotInstalledError(
            f"the installed neuronx-distributed has no {PROBE_MODULE}: these are placeholders of the public package "
            f"index ({listed}); uninstall them, then {command} {repository}"
        )
    raise NotInstalledError(
        f"neuronx-distributed is not installed, which trains on Trainium: {command} {repository}; to compare numbers "
        "on a CPU set engine.neuron.backend to cpu, to train on this machine set run.engine to gpu"
    )
