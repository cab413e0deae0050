"""The nxd backend on NxD's real source, in NxD's own CPU mode over gloo, against one process of the cpu backend.

Needs torch-xla 2.9 and the source of neuronx-distributed 0.18: set LT_NXD_SOURCE to the folder that holds the package.
The packages of the Neuron SDK are replaced by inert stand-ins (`nxd_host/stand_ins.py`). What is shown: our calls fit
NxD's layers, groups and collectives; loss, norm, gradients (first moments) and weights are those of the cpu backend,
and NxD's own loader reads what a run saves.
What is not: anything that a compiler or a device does. `bf16_sr` is fp32 here (nothing makes it bf16 on a host), the
flash attention kernel has no CPU form, and gradients are handed to NxD's layers dense, as a device's are.
"""

import json
import os
import socket
import subprocess
import sys
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
DP2 = ["parallel.tp=2"]
TP4 = ["parallel.tp=4", "engine.neuron.qkv_linear=true", "engine.neuron.kv_size_multiplier=2"]
ONCE = ["parallel.tp=2", "engine.neuron.qkv_linear=true"]
SP = ["parallel.sequence_parallel=true"]
FUSED = ["engine.neuron.fuse_qkv=true", "engine.neuron.save_xser=false"]


def named(name: str, kv_heads: int, *sets: str) -> dict[str, Any]:
    return {"name": name, "kv_heads": kv_heads, "sets": sets}


CASES = [
    named("mha-tp2-dp2", MHA, *DP2),
    named("mha-tp2-dp2-replicated", MHA, *DP2, "engine.neuron.zero1=false"),
    named("mha-tp2-dp2-all-kept", MHA, *DP2, "engine.neuron.selective_checkpointing=false"),
    named("mha-tp2-dp2-downcast", MHA, *DP2, "engine.neuron.precision=downcast"),
    named("mha-tp2-dp2-bf16", MHA, *DP2, "engine.neuron.precision=fp32_master_weights"),
    named("mha-tp2-dp2-sequence", MHA, *DP2, *SP),
    named("mha-tp2-dp2-sequence-bf16", MHA, *DP2, *SP, "engine.neuron.precision=fp32_master_weights"),
    named("gqa-tp2-dp2-plain", GQA, *DP2),
    named("gqa-tp2-dp2-once", GQA, *ONCE),
    named("gqa-tp4-separate", GQA, *TP4),
    named("gqa-tp4-fused", GQA, *TP4, *FUSED),
    named("gqa-tp4-sequence", GQA, *TP4, *SP),
    named("gqa-tp4-sequence-fused", GQA, *TP4, *FUSED, *SP),
    named("mha-pp2-dp2", MHA, "parallel.pp=2"),
    named("mha-tp2-pp2", MHA, *DP2, "parallel.pp=2"),
    named("mha-tp2-pp2-sequence", MHA, *DP2, *SP, "parallel.pp=2"),
    named("mha-tp2-pp2-sequence-bf16", MHA, *DP2, *SP, "parallel.pp=2", "engine.neuron.precision=fp32_master_weights"),
]
ALONE = [named(str(kv_heads), kv_heads, "engine.neuron.backend=cpu") for kv_heads in (MHA, GQA)]


def results(folder: Path, cases: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What each rank saw of the cases."""
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
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, str(HOST / "worker.py"), str(folder), json.dumps(cases), str(ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


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
    return results(folder / "four", CASES, 4), results(folder / "alone", ALONE, 1)[0]


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


@pytest.mark.parametrize("case", [case for case in CASES if "bf16" in case["name"]], ids=lambda case: case["name"])
def test_bf16_keeps_the_sum_of_input_gradients(case: dict[str, Any], found: Any) -> None:
    """At NxD's default `reduce_dtype` it is lost without sequence parallelism, and the first norm is far off."""
    four, alone = found
    for rank in four:
        assert rank[case["name"]]["loaded"] == "exactly"
        for mine, theirs in zip(rank[case["name"]]["metrics"], alone[str(MHA)]["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=0.02)
