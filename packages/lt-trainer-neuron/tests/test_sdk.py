"""Which Neuron SDK is installed: real package folders, the public placeholders among them; and the constraint files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lt_trainer_neuron.sdk import SDK_RELEASES, InstalledPackages, NotInstalledError, detect_packages, require_installed

ROOT = Path(__file__).parents[3]
PLACEHOLDERS = {"libneuronxla": "1.0", "neuronx-cc": "1.0.post1", "neuronx-distributed": "0.1", "torch-neuronx": "1.0"}
LOOK = (
    "import json; from lt_trainer_neuron.sdk import detect_packages; f = detect_packages(); "
    "print(json.dumps([dict(f.versions), f.is_functional, f.is_placeholder, f.sdk and f.sdk.release]))"
)


def site(folder: Path, versions: dict[str, str], *, init: str = "", layers: bool = False) -> Path:
    """A folder as pip leaves it, with neuronx_distributed in it."""
    for name, number in versions.items():
        info = folder / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    package = folder / "neuronx_distributed"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    if layers:
        (package / "parallel_layers").mkdir()
        (package / "parallel_layers" / "__init__.py").write_text("")
    return folder


def look(folder: Path) -> list[object]:
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); {LOOK}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_placeholders_of_the_public_index_are_told_from_the_real_thing(tmp_path: Path) -> None:
    assert look(site(tmp_path / "placeholder", PLACEHOLDERS)) == [PLACEHOLDERS, False, True, None]
    broken = site(tmp_path / "broken", PLACEHOLDERS, init="raise ImportError('not what you are looking for')")
    assert look(broken) == [PLACEHOLDERS, False, True, None]
    real = {name: f"{number}+0f1dac25" for name, number in SDK_RELEASES["2.28.1"].packages.items()}
    assert look(site(tmp_path / "real", real, layers=True)) == [dict(sorted(real.items())), True, False, "2.28.1"]


def test_versions_of_two_releases_are_of_none() -> None:
    mixed = dict(SDK_RELEASES["2.28.1"].packages) | {"neuronx-distributed": "0.18.27753"}
    assert detect_packages(mixed.get, lambda module: True).sdk is None
    assert detect_packages(SDK_RELEASES["2.29.1"].packages.get, lambda module: True).sdk is SDK_RELEASES["2.29.1"]
    assert detect_packages(lambda name: None, lambda module: False) == InstalledPackages(
        versions={}, is_functional=False, sdk=None
    )


def test_what_is_missing_is_said_with_the_command_that_installs_it() -> None:
    require_installed(InstalledPackages(versions={}, is_functional=True, sdk=None))
    with pytest.raises(NotInstalledError) as caught:
        require_installed(detect_packages(PLACEHOLDERS.get, lambda module: False))
    message = str(caught.value)
    assert "neuronx-distributed 0.1" in message
    assert "placeholders of the public package index" in message
    assert 'pip install "lt-trainer-neuron[neuron]" -c constraints/neuron-2.28.1.txt' in message
    assert "AWS Neuron pip repository" in message
    assert caught.value.exit_code == 64
    with pytest.raises(NotInstalledError, match="is not installed"):
        require_installed(InstalledPackages(versions={}, is_functional=False, sdk=None))


@pytest.mark.parametrize("release", SDK_RELEASES)
def test_the_constraint_files_pin_each_release(release: str) -> None:
    sdk = SDK_RELEASES[release]
    lines = (ROOT / sdk.constraints_file).read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins == dict(sdk.packages) | {"torch": "2.9.*", "torch-xla": "2.9.*"}
    assert f"-c {sdk.constraints_file}" in "\n".join(lines)
    assert not [line for line in lines if re.search("https?:", line)]


def test_there_is_a_constraint_file_for_each_release_and_no_other() -> None:
    assert {path.name for path in (ROOT / "constraints").iterdir()} == {
        f"neuron-{release}.txt" for release in SDK_RELEASES
    }
