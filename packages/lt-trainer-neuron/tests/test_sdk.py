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
    "import json, sys; from lt_trainer_neuron.sdk import detect_packages; f = detect_packages(); "
    "print(json.dumps([dict(f.versions), f.has_nxd, list(f.placeholders), f.sdk and f.sdk.release, "
    "'neuronx_distributed' in sys.modules]))"
)
REQUIRE = """
from lt_trainer_neuron.sdk import NotInstalledError, detect_packages, require_installed
try:
    require_installed(detect_packages())
except NotInstalledError as error:
    print(error)
"""
NXD_INIT = """
import tenacity
try:
    import transformers
except ImportError:
    transformers = None
if transformers is not None:
    from transformers.utils.fx import HFTracer
"""
"""What NxD 0.17 and 0.18 import of packages that may be missing or too new."""


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


def ask(folder: Path, program: str) -> str:
    """What a program prints that has the folder alone before lt's own packages."""
    hidden = [name for name in ("tenacity", "transformers") if not list(folder.glob(f"{name}*"))]
    hide = "".join(f"sys.modules[{name!r}] = None\n" for name in hidden)
    given = f"import sys; sys.path.insert(0, {str(folder)!r})\n{hide}{program}"
    return subprocess.run([sys.executable, "-c", given], capture_output=True, text=True, check=True).stdout


def test_the_placeholders_of_the_public_index_are_told_from_the_real_thing(tmp_path: Path) -> None:
    """Nothing is imported, so an `__init__` that fails does not matter."""
    names = sorted(PLACEHOLDERS)
    placeholder = site(tmp_path / "placeholder", PLACEHOLDERS, init="raise ImportError('not what you are looking for')")
    assert json.loads(ask(placeholder, LOOK)) == [PLACEHOLDERS, False, names, None, False]
    real = {name: f"{number}+0f1dac25" for name, number in SDK_RELEASES["2.28.1"].packages.items()}
    broken = site(tmp_path / "real", real, init="raise ImportError", layers=True)
    assert json.loads(ask(broken, LOOK)) == [dict(sorted(real.items())), True, [], "2.28.1", False]
    mixed = {"neuronx-distributed": "0.17.26814", "torch-neuronx": "1.0"}
    assert json.loads(ask(site(tmp_path / "mixed", mixed, layers=True), LOOK))[2] == ["torch-neuronx"]


@pytest.mark.parametrize(
    ("present", "told"),
    [
        ({"tenacity": "", "transformers": ""}, []),
        ({"tenacity": ""}, []),
        (
            {"tenacity": "", "transformers": "5.23.0"},
            [
                "No module named 'transformers.utils.fx'",
                "not with 5.23.0",
                "pip install transformers -c constraints/neuron",
            ],
        ),
        (
            {},
            ["tenacity", "install the missing module tenacity: pip install tenacity -c constraints/neuron-2.28.1.txt"],
        ),
    ],
    ids=["transformers-4", "no-transformers", "transformers-5", "no-tenacity"],
)
def test_what_keeps_nxd_from_being_imported_is_told_as_it_is(
    present: dict[str, str], told: list[str], tmp_path: Path
) -> None:
    folder = site(tmp_path / "site", dict(SDK_RELEASES["2.28.1"].packages), init=NXD_INIT, layers=True)
    if "tenacity" in present:
        (folder / "tenacity.py").touch()
    if "transformers" in present:
        version = present["transformers"]
        (folder / "transformers" / "utils").mkdir(parents=True)
        for module in ("__init__", "utils/__init__", *(() if version else ("utils/fx",))):
            (folder / "transformers" / f"{module}.py").write_text("HFTracer = object\n")
        info = folder / f"transformers-{version or '4.51.3'}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version or '4.51.3'}\n")
    said = ask(folder, REQUIRE)
    assert "placeholder" not in said
    assert [words for words in told if words not in said] == []
    assert bool(said) == bool(told), said


def test_versions_of_two_releases_are_of_none() -> None:
    mixed = dict(SDK_RELEASES["2.28.1"].packages) | {"neuronx-distributed": "0.18.27753"}
    assert detect_packages(mixed.get, lambda: True).sdk is None
    assert detect_packages(SDK_RELEASES["2.29.1"].packages.get, lambda: True).sdk is SDK_RELEASES["2.29.1"]
    assert detect_packages(lambda name: None, lambda: False) == InstalledPackages(versions={}, has_nxd=False, sdk=None)


def test_what_is_missing_is_said_with_the_command_that_installs_it() -> None:
    with pytest.raises(NotInstalledError) as caught:
        require_installed(detect_packages(PLACEHOLDERS.get, lambda: False))
    message = str(caught.value)
    assert "neuronx-distributed 0.1" in message
    assert "placeholders of the public package index" in message
    assert 'pip install "lt-trainer-neuron[neuron]" -c constraints/neuron-2.28.1.txt' in message
    assert "AWS Neuron pip repository" in message
    assert caught.value.exit_code == 64
    with pytest.raises(NotInstalledError, match="is not installed"):
        require_installed(InstalledPackages(versions={}, has_nxd=False, sdk=None))


@pytest.mark.parametrize("release", SDK_RELEASES)
def test_the_constraint_files_pin_each_release(release: str) -> None:
    sdk = SDK_RELEASES[release]
    lines = (ROOT / sdk.constraints_file).read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins == dict(sdk.packages) | {"torch": "2.9.*", "torch-xla": "2.9.*", "transformers": "4.51.*"}
    assert f"-c {sdk.constraints_file}" in "\n".join(lines)
    assert not [line for line in lines if re.search("https?:", line)]


def test_there_is_a_constraint_file_for_each_release_and_no_other() -> None:
    assert {path.name for path in (ROOT / "constraints").iterdir()} == {
        f"neuron-{release}.txt" for release in SDK_RELEASES
    }
