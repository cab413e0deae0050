"""The nxd backend on NxD's real source, in NxD's own CPU mode over gloo, against one process of the cpu backend.

Needs torch-xla 2.9 and the source of neuronx-distributed 0.18: set LT_NXD_SOURCE to the folder that holds the package.
The packages of the Neuron SDK are replaced by inert stand-ins (`nxd_host/stand_ins.py`). What is shown: our calls fit
NxD's layers, groups and collectives; loss, norm, gradients (first moments) and weights are those of the cpu backend,
and NxD's own loader reads what a run saves.
What is not: anything that a compiler or a device does.
"""

import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SOURCE = os.environ.get("LT_NXD_SOURCE", "")
pytestmark = [
    pytest.mark.skipif(
        not Path(SOURCE, "neuronx_distributed", "parallel_layers").is_dir(),
        reason="LT_NXD_SOURCE does not name a folder with the source of neuronx_distributed",
    ),
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch-xla is not installed (extra xla-cpu)"),
]

HOST = Path(__file__).parent / "nxd_host"
MHA, GQA = 8, 2
TP2_DP2 = ["parallel.tp=2", "engine.neuron.zero1=true"]
TP4 = ["parallel.tp=4", "engine.neuron.qkv_linear=true", "engine.neuron.kv_replicator=2"]
CASES = [
    {"name": "mha-tp2-dp2-zero1", "kv_heads": MHA, "sets": TP2_DP2},
    {"name": "mha-tp2-dp2-bf16", "kv_heads": MHA, "sets": [*TP2_DP2, "engine.neuron.precision=fp32_master"]},
    {"name": "mha-tp2-dp2-replicated", "kv_heads": MHA, "sets": ["parallel.tp=2", "engine.neuron.zero1=false"]},
    {"name": "gqa-tp4-separate", "kv_heads": GQA, "sets": TP4},
    {
        "name": "gqa-tp4-fused",
        "kv_heads": GQA,
        "sets": [*TP4, "engine.neuron.fuse_qkv=true", "engine.neuron.save_xser=false"],
    },
]
ALONE = [
    {"name": str(kv_heads), "kv_heads": kv_heads, "sets": ["engine.neuron.backend=cpu"]} for kv_heads in (MHA, GQA)
]


def started(folder: Path, cases: list[dict[str, Any]], ranks: int) -> list[subprocess.Popen[bytes]]:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(HOST), SOURCE, os.environ.get("PYTHONPATH", ""))),
        "NXD_CPU_MODE": "1",
        "PJRT_DEVICE": "CPU",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, str(HOST / "worker.py"), str(folder), json.dumps(cases)]
    return [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=(folder / f"{rank}.err").open("wb"),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]


def results(folder: Path, processes: list[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            assert not failed, (folder / f"{failed[0]}.err").read_text()[-3000:]
            time.sleep(0.2)
        codes = [process.returncode for process in processes]
        assert codes == [0] * len(codes), (folder / f"{codes.index(max(codes))}.err").read_text()[-3000:]
    finally:
        for process in processes:  # the others of a rank that failed would wait for it
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(processes))]


def put_together(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Group and name → the whole tensor, of every rank's slices; a hole stays nan."""
    whole: dict[str, np.ndarray] = {}
    for rank in ranks:
        for group, name, shape, offset, extent, values in rank["shards"]:
            tensor = whole.setdefault(f"{group} {name}", np.full(shape, np.nan))
            box = tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))
            assert np.isnan(tensor[box]).all(), f"{group} of {name} is given twice"
            tensor[box] = np.array(values).reshape(extent)
    return whole


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What four ranks on NxD saw of every case, and one process of the cpu backend."""
    folder = tmp_path_factory.mktemp("nxd")
    alone = results(folder / "alone", started(folder / "alone", ALONE, 1))
    return results(folder / "four", started(folder / "four", CASES, 4)), alone[0]


FP32 = [case for case in CASES if "bf16" not in str(case["name"])]


@pytest.mark.parametrize("case", FP32, ids=lambda case: case["name"])
def test_fp32_gives_what_one_process_of_the_cpu_backend_gives(case: dict[str, Any], found: Any) -> None:
    four, alone = found
    ranks, wanted = [rank[case["name"]] for rank in four], alone[str(case["kv_heads"])]
    for rank in ranks:
        assert rank["loaded"] == "exactly"  # by NxD's own loader, from what a run saves
        for mine, theirs in zip(rank["metrics"], wanted["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=5e-6)
    # Evaluated rows are each rank's part of the last batch: with data parallelism all of them are counted.
    assert ranks[0]["evaluated"] == pytest.approx(ranks[-1]["evaluated"])
    mine, theirs = put_together(ranks), put_together([wanted])
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        apart = np.linalg.norm(mine[name] - tensor) / np.linalg.norm(tensor)
        assert apart < 1e-4, (name, apart)


def test_bf16_keeps_the_sum_of_input_gradients(found: Any) -> None:
    """At NxD's default `reduce_dtype` it is lost, and the first norm is far off."""
    four, alone = found
    for rank in four:
        for mine, theirs in zip(rank["mha-tp2-dp2-bf16"]["metrics"], alone[str(MHA)]["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=0.02)
