"""Supported AWS Neuron SDK releases, detection of the installed packages, and diagnosis of imports.

torch 2.9 is the last version that trains with torch-xla, so these are the last releases that can train on trn1. On the
public package index the same names are placeholders of a few kilobytes: they install and import, but are empty. The
real neuronx-distributed (NxD) is known by a folder, `parallel_layers`; that all it needs is there too, by importing it.

Cost: detection reads package metadata and looks for one folder; `require_installed` imports NxD, as a run does anyway.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from lt_trainer.errors import TrainerError

NXD_MODULE, NXD_FOLDER = "neuronx_distributed", "parallel_layers"
PLACEHOLDER_VERSIONS: Mapping[str, str] = MappingProxyType(
    {"libneuronxla": "1.0", "neuronx-cc": "1.0.post1", "neuronx-distributed": "0.1", "torch-neuronx": "1.0"}
)
"""Versions of the public index; each is a placeholder. A later one of neuronx-distributed is told by its files."""


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
    """Neuron packages are missing, are the placeholders of the public index, or cannot be imported."""


@dataclass(frozen=True, kw_only=True)
class InstalledPackages:
    """Installed Neuron packages.

    Attributes:
        versions: version by package, for installed packages only.
        has_nxd: neuronx-distributed is there, and is no placeholder.
        sdk: release of these versions; None if they match no supported release.
    """

    versions: Mapping[str, str]
    has_nxd: bool
    sdk: NeuronSdk | None

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the packages that are placeholders of the public index."""
        known = {name for name, number in self.versions.items() if PLACEHOLDER_VERSIONS.get(name) == number}
        empty = {"neuronx-distributed"} if "neuronx-distributed" in self.versions and not self.has_nxd else set()
        return tuple(sorted(known | empty))


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _has_nxd() -> bool:
    """Return True if neuronx-distributed has its layers; imports nothing."""
    spec = find_spec(NXD_MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / NXD_FOLDER).is_dir() for folder in folders or ())


def detect_packages(
    get_version: Callable[[str], str | None] = _package_version, has_nxd: Callable[[], bool] = _has_nxd
) -> InstalledPackages:
    """Detect the installed Neuron packages, without importing them.

    Args:
        get_version: returns the version of a package, None if it is missing.
        has_nxd: returns True if neuronx-distributed has its layers.
    """
    names = sorted({name for sdk in SDK_RELEASES.values() for name in sdk.packages})
    versions = {name: found for name in names if (found := get_version(name)) is not None}
    public = {name: found.partition("+")[0] for name, found in versions.items()}
    sdk = next((sdk for sdk in SDK_RELEASES.values() if public and public.items() <= sdk.packages.items()), None)
    return InstalledPackages(versions=versions, has_nxd=has_nxd(), sdk=sdk)


def require_installed(found: InstalledPackages) -> None:
    """Raise unless the packages for Trainium are installed and neuronx-distributed can be imported.

    Raises:
        NotInstalledError: with the cause, and the command that mends it.
    """
    sdk = found.sdk or SDK_RELEASES["2.28.1"]
    command = f'pip install "lt-trainer-neuron[neuron]" -c {sdk.constraints_file}'
    repository = "with the AWS Neuron pip repository as extra index (its address is on AWS's set-up page)"
    if found.placeholders:
        listed = ", ".join(f"{name} {found.versions[name]}" for name in found.placeholders)
        raise NotInstalledError(
            f"placeholders of the public package index are installed ({listed}): uninstall them, then {command} "
            f"{repository}"
        )
    if not found.has_nxd:
        raise NotInstalledError(
            f"neuronx-distributed is not installed, which trains on Trainium: {command} {repository}; to compare "
            "numbers on a CPU set engine.neuron.backend to cpu, to train on this machine set run.engine to gpu"
        )
    try:
        import_module(f"{NXD_MODULE}.{NXD_FOLDER}")
    except ImportError as exc:
        raise NotInstalledError(
            f"neuronx-distributed is installed and cannot be imported: {exc}; {_remedy(exc.name or '', sdk)}"
        ) from exc


def _remedy(module: str, sdk: NeuronSdk) -> str:
    """Return what to do where `module` cannot be imported; "" is a module that is not known."""
    package = module.partition(".")[0]
    if package and find_spec(package) is None:
        return f"install the missing module {package}: pip install {package} -c {sdk.constraints_file}"
    if package == "transformers":
        return (
            f"it works with the transformers of {sdk.constraints_file} and without any, not with "
            f"{_package_version(package)}: pip install {package} -c {sdk.constraints_file}, or uninstall {package}"
        )
    return f"install versions that belong together: -c {sdk.constraints_file}"
