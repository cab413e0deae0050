"""What is said where the Neuron packages cannot be imported; and the constraint files."""

import re
import sys
from pathlib import Path

import pytest

from lt_trainer_neuron.sdk import CONSTRAINTS, NotInstalledError, require_installed

ROOT = Path(__file__).parents[3]


def test_a_placeholder_of_the_public_index_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("neuronx_distributed")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "neuronx_distributed").mkdir()
    (tmp_path / "neuronx_distributed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotInstalledError, match=rf"parallel_layers.*\[neuron\]\" -c {CONSTRAINTS}"):
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
