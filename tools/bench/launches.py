"""What a step asks of a GPU, in lt and in torchtitan, counted without one on the null CUDA device of lt's tests.

    uv run python tools/bench/launches.py       # the table of docs/benchmarks/launches.txt; minutes

Both run their own code on a library that takes CUDA's place, computes nothing and writes down what it is asked for
(packages/lt-trainer-gpu/tests/nullcuda). The counts are exact and repeat; the host's time is that of Python and torch.
Shapes: Llama 3.2 1B and Qwen3-30B-A3B of a few layers, rows of 2048 random ids, one in a micro-batch; bfloat16 with
fp32 weights, fused AdamW, clipping, no recomputation, torch's flash attention. Of four steps the third counts: a log
ends the others of torchtitan, which begins its statistics of memory anew. With expert parallelism it does not run here:
it takes the rows of each rank from the device, which knows none, where lt is told of equal ones in place of its wait.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HELPERS = str(ROOT / "tests/helpers")
sys.path[:0] = [str(ROOT / "packages/lt-trainer-gpu/tests/nullcuda"), HELPERS]

# ruff: noqa: E402
from null_device.build import build  # pyright: ignore[reportMissingImports]
from null_device.ranks import Job  # pyright: ignore[reportMissingImports]
from null_device.server import NullDeviceServer  # pyright: ignore[reportMissingImports]
from null_device.trace import Part, read_log  # pyright: ignore[reportMissingImports]
from train import TITAN_REQUIREMENTS, create_environment

from lt_model.presets import preset

SEQ_LEN, N_STEPS = 2048, 4
COMPILE, TP, MOE = {"compile": True}, {"tp": 2}, {"family": "qwen3", "flavor": "30B-A3B", "n_layers": 2}
CASES = {
    "eager": (1, {}),
    "eager, CUDA graphs": (1, {"cuda_graphs": True}),
    "compiled": (1, COMPILE),
    "compiled, documents": (1, COMPILE | {"documents": True}),
    "4 micro-batches": (1, {"micro_batches": 4}),
    "fsdp": (2, {}),
    "fsdp, compiled": (2, COMPILE),
    "fsdp, 4 micro-batches": (2, {"micro_batches": 4}),
    "tp": (2, TP),
    "tp, compiled": (2, TP | COMPILE),
    "experts": (1, MOE),
    "experts, fsdp": (2, MOE),
    "experts, ep": (2, MOE | {"ep": 2}),
}
"""Case → ranks, and fields of torchtitan's job, which lt's follows."""


def run_lt(server: NullDeviceServer, folder: Path, ranks: int, fields: dict[str, Any]) -> str:
    """Return the row of a case in lt."""
    name = "qwen3-30b-a3b" if "family" in fields else "llama3.2-1b"
    config = preset(name, n_layers=fields.get("n_layers", 4), max_position_embeddings=SEQ_LEN)
    shape = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del shape["max_position_embeddings"]
    tp, documents = fields.get("tp", 1), fields.get("documents", False)
    sets = [f"engine.gpu.{name}={json.dumps(fields.get(name, False))}" for name in ("compile", "cuda_graphs")]
    sets += [f"parallel.tp={tp}", f"parallel.sequence_parallel={json.dumps(tp > 1)}"]
    sets += [f"parallel.ep={fields.get('ep', 1)}"]
    sets += [] if documents else ["engine.gpu.attention=flash", "data.document_mask=false"]
    job = Job(
        folder=str(folder),
        ranks=ranks,
        vocab_size=shape.pop("vocab_size"),
        model=tuple(shape.items()),
        row_lengths=(SEQ_LEN,) * N_STEPS,
        rows=ranks // tp * fields.get("micro_batches", 1),
        overrides=tuple(sets),
        one_document=() if documents else tuple(range(N_STEPS)),
    )
    result = server.run(job)[0]
    return describe(read_log(folder / "0.log")["step 2"], result.peak_bytes[2], min(result.seconds))


def run_torchtitan(python: str, device: dict[str, str], folder: Path, ranks: int, fields: dict[str, Any]) -> str:
    """Return the row of a case in torchtitan."""
    job = json.dumps({"out": str(folder), "seq_len": SEQ_LEN, "steps": N_STEPS} | fields)
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(Path(__file__).with_name("titan_worker.py")), job]
    env = os.environ | device | {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])
    found = json.loads((folder / "0.json").read_text())
    return describe(read_log(folder / "0.log")["step 2"], found["peak_bytes"][2], min(found["seconds"]))


def describe(step: Part, peak_bytes: int, seconds: float) -> str:
    """Return the columns: launches, products and Triton's of them, waits, collectives, MiB, peak in GiB, host ms."""
    collectives, n_bytes = step.of("nccl"), 0
    for text in collectives:
        operation, dtype, count, communicator = text.split()
        ranks = len(step.communicators[communicator].ranks)
        shards = ranks if operation.startswith(("all_gather", "reduce_scatter")) else 1
        n_bytes += int(count) * shards * int("".join(filter(str.isdigit, dtype))) // 8
    columns = [step.launches, len(step.of("product")), step.triton_launches, len(step.waits), len(collectives)]
    columns += [round(n_bytes / 2**20), f"{peak_bytes / 2**30:.3f}", f"{seconds * 1e3:.0f}"]
    return " | ".join(map(str, columns))


def main() -> None:
    """Count, and print the table's rows; arguments choose cases by their beginning."""
    with tempfile.TemporaryDirectory(prefix="lt-launches-") as name:
        device, python = build(Path(name)), create_environment(Path(name, "env"), TITAN_REQUIREMENTS)
        os.environ["PYTHONPATH"] = HELPERS  # for the server's ranks
        server, folders = NullDeviceServer(device), iter(lambda: Path(tempfile.mkdtemp(dir=name)), None)
        for case, (ranks, fields) in CASES.items():
            if not case.startswith(tuple(sys.argv[1:] or CASES)):
                continue
            print(f"| {case} | lt | {run_lt(server, next(folders), ranks, fields)} |", flush=True)
            peers = {"torchtitan": {}, "the same, loss in one piece": {"whole_loss": True}}
            for peer, more in peers.items() if "ep" not in fields else ():
                row = run_torchtitan(python, device, next(folders), ranks, fields | more)
                print(f"| | {peer} | {row} |", flush=True)
        server.close()


if __name__ == "__main__":
    main()
