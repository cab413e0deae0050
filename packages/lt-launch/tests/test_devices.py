"""Devices of a machine: GPUs, else NeuronCores, as far as the environment shows them."""

from pathlib import Path

import pytest

from lt_launch.devices import count_devices


def machine(root: Path, devices: list[str], cores: int = 0) -> Path:
    (root / "dev").mkdir()
    for name in devices:
        (root / "dev" / name).touch()
        if cores:
            folder = root / "sys" / "class" / "neuron_device" / name
            folder.mkdir(parents=True)
            (folder / "core_count").write_text(f"{cores}\n")
    return root


NEURON = ["neuron0", "neuron1", "neuron2", "neuron10", "neuron_ctl"]


@pytest.mark.parametrize(
    ("devices", "cores", "environ", "expected"),
    [
        ([], 0, {}, 0),
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], 0, {}, 2),
        (["nvidia0", "nvidia1"], 0, {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (["nvidia0", "nvidia1"], 0, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (NEURON[:4], 2, {}, 8),
        (NEURON, 0, {}, 8),
        (NEURON[:4], 8, {}, 16),
        (NEURON, 0, {"NEURON_RT_VISIBLE_CORES": "0-3,6"}, 5),
        (NEURON, 0, {"NEURON_RT_NUM_CORES": "3"}, 3),
    ],
)
def test_devices(tmp_path: Path, devices: list[str], cores: int, environ: dict[str, str], expected: int) -> None:
    assert count_devices(machine(tmp_path, devices, cores), environ) == expected
