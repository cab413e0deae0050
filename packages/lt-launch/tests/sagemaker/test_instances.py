"""Tables of instance types against EC2's own description, as moto ships it."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lt_launch.sagemaker.constraints import load_model_shapes
from lt_launch.sagemaker.instances import INSTANCE_TYPES, LOCAL_STORAGE_GB


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """EC2's description by SageMaker's name, of the types that SageMaker trains on; retired types are not in it."""
    spec = find_spec("moto")
    assert spec is not None
    assert spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "ec2" / "resources" / "instance_types.json.gz"
    types = json.loads(gzip.decompress(file.read_bytes()))
    names = load_model_shapes()["TrainingInstanceType"]["enum"]
    found = {name: types[name.removeprefix("ml.")] for name in names if name.removeprefix("ml.") in types}
    assert len(found) > 200
    return found


def test_local_disks_are_those_of_ec2(described: dict[str, Any]) -> None:
    disks = {
        name: one["InstanceStorageInfo"]["TotalSizeInGB"]
        for name, one in described.items()
        if one.get("InstanceStorageInfo")
    }
    assert {name: size for name, size in LOCAL_STORAGE_GB.items() if name in described} == disks


def test_devices_are_those_of_ec2(described: dict[str, Any]) -> None:
    def devices(one: dict[str, Any]) -> int:
        gpus = sum(gpu["Count"] for gpu in one.get("GpuInfo", {}).get("Gpus", ()))
        chips = one.get("NeuronInfo", {}).get("NeuronDevices", ())
        return gpus or sum(chip["Count"] * chip["CoreInfo"]["Count"] for chip in chips)

    known = {name: one.max_processes for name, one in INSTANCE_TYPES.items() if name in described}
    assert known == {name: devices(one) for name, one in described.items() if devices(one)}
    for name, one in described.items():
        if devices(one):
            assert INSTANCE_TYPES[name].engine == ("gpu" if one.get("GpuInfo") else "neuron"), name


def test_every_table_is_of_types_that_sagemaker_trains_on() -> None:
    names = load_model_shapes()["TrainingInstanceType"]["enum"]
    assert set(INSTANCE_TYPES) | set(LOCAL_STORAGE_GB) <= set(names)
