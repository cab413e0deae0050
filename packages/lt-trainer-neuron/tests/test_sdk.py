"""What is said where the Neuron packages cannot be imported; and the constraint files."""

import re
import sys
import types
from pathlib import Path

import pytest

from lt_trainer_neuron.sdk import CONSTRAINTS, NotInstalledError, require_installed

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("init", "told"),
    [
        (None, "No module named 'neuronx_distributed'"),
        ("", r"No module named 'neuronx_distributed\.parallel_layers'"),  # the placeholder of the public index
        ("import a_module_of_its_own", "No module named 'a_module_of_its_own'"),
    ],
)
def test_what_keeps_nxd_from_being_imported_is_told_with_the_command_that_mends_it(
    init: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("neuronx_distributed")]:
        monkeypatch.delitem(sys.modules, name)
    if init is None:
        monkeypatch.setitem(sys.modules, "neuronx_distributed", None)
        told = "neuronx_distributed"
    else:
        (tmp_path / "neuronx_distributed").mkdir()
        (tmp_path / "neuronx_distributed" / "__init__.py").write_text(init)
        monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotInstalledError, match=told) as caught:
        require_installed()
    assert f'pip install "lt-trainer-neuron[neuron]" -c {CONSTRAINTS}' in str(caught.value)
    assert caught.value.exit_code == 64
    sys.modules.pop("neuronx_distributed", None)


def test_nothing_is_said_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("neuronx_distributed", "neuronx_distributed.parallel_layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    require_installed()


@pytest.mark.parametrize("path", sorted((ROOT / "constraints").iterdir()), ids=lambda path: path.stem)
def test_a_constraint_file_pins_each_package_and_names_no_index(path: Path) -> None:
    assert (ROOT / CONSTRAINTS).is_file()
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    neuron = {"libneuronxla", "neuronx-cc", "neuronx-distributed", "nki", "torch-neuronx"}
    assert set(pins) == neuron | {"torch", "torch-xla", "transformers"}
    assert (pins["torch"], pins["torch-xla"], pins["transformers"]) == ("2.9.*", "2.9.*", "4.51.*")
    assert f"-c constraints/{path.name}" in "\n".join(lines)
    assert not [line for line in lines if re.search("https?:", line)]
