"""`dtype = "auto"` on CPUs: bfloat16 where all of them multiply it in hardware, and as before where a run goes on."""

from pathlib import Path

import pytest

from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.torch import cpu_multiplies_bfloat16
from lt_trainer_gpu import computation


@pytest.mark.parametrize(
    ("flags", "has"),
    [("fpu avx512f avx512_bf16 vnni", True), ("amx_tile amx_bf16", True), ("avx512f avx512bw avx512_vnni", False)],
)
def test_a_cpu_is_known_by_its_flags(tmp_path: Path, flags: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n\n")
    assert cpu_multiplies_bfloat16(tmp_path / "cpuinfo") == has
    assert not cpu_multiplies_bfloat16(tmp_path / "absent")


def started(folder: str, fast: tuple[bool, ...], stop_after_step: int, dtype: str) -> int:
    """In a rank: one start of a run, on a CPU that has bfloat16 products or not."""
    import torch.distributed as dist

    computation.cpu_multiplies_bfloat16 = lambda: fast[dist.get_rank()]
    base = {
        "run": {"dir": folder},
        "model": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2},
        "data": {"synthetic": True, "seq_len": 16},
        "batch": {"global_batch_size": 4, "micro_batch_size": 2},
        "schedule": {"max_steps": 4, "warmup_steps": 1},
        "checkpoint": {"interval": 2},
        "engine": {"gpu": {"device": "cpu", "dtype": dtype}},
    }
    return run(load(base=base, overrides=["model.n_layers=2"]), stop_after_step=stop_after_step)


def told(folder: Path) -> list[str]:
    """Dtypes that the starts of a run have recorded."""
    events = read_jsonl(folder / "events.jsonl")
    return [one["resolved"]["engine.gpu.dtype"] for one in events if one["event"] == "start"]


@pytest.mark.parametrize("ranks_have", [(True,), (False,), (True, True), (False, True), (True, False)])
def test_all_ranks_take_one_dtype_and_a_run_keeps_it(ranks, tmp_path: Path, ranks_have: tuple[bool, ...]) -> None:
    n, dtype = len(ranks_have), "bfloat16" if all(ranks_have) else "float32"
    assert ranks.run(started, str(tmp_path / "run"), ranks_have, 2, "auto", ranks=n) == [75] * n
    others = tuple(not has for has in ranks_have)
    assert ranks.run(started, str(tmp_path / "run"), others, 0, "auto", ranks=n) == [0] * n
    assert told(tmp_path / "run") == [dtype] * 2
    log = (tmp_path / "run" / "logs" / "rank00000.log").read_text()
    first = "as all CPUs have" if all(ranks_have) else "as not all CPUs have"
    assert f"engine.gpu.dtype = auto: {dtype}, {first} products in bfloat16 (AVX512-BF16 or AMX)" in log
    slow = dtype == "bfloat16"
    assert f"engine.gpu.dtype = auto: {dtype}, as at the run's last start{', which is slow here' * slow}\n" in log
