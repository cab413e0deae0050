"""What a real run leaves for those who look: a trace of the steps asked for, samples, records and an event file."""

import gzip
import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lt_test_helpers.rank_processes import GPU_ENGINE, start_run
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.records import drop_superseded_records

OBSERVABILITY_OVERRIDES = (
    "metrics.sinks=tensorboard",
    "metrics.log_interval=2",
    "metrics.profile_steps=2",
    "metrics.profile_start_step=5",
    "metrics.profile_ranks=1",
    "metrics.monitor_interval_s=0.5",
    "engine.gpu.activation_checkpointing=full",
)


def test_two_ranks_that_are_stopped_and_go_on(prepared: Path, tmp_path: Path) -> None:
    sets = [text for value in OBSERVABILITY_OVERRIDES for text in ("--set", value)]
    for stop, codes in ((["--stop-after-step", "9"], [75, 75]), ([], [0, 0])):
        arguments = ["run", prepared / "run.toml", *stop, *sets]
        with start_run(arguments, ranks=2, cwd=tmp_path, preload=GPU_ENGINE) as started:
            started.end(codes)
    run = tmp_path / "run"

    (trace,) = (run / "profile").iterdir()
    assert trace.name == "steps-00000005-00000006-rank00001.json.gz"
    with gzip.open(trace, "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names
    assert any("gloo" in name or "all_reduce" in name for name in names)

    records = [record for record in drop_superseded_records(read_jsonl(run / "metrics.jsonl")) if "loss" in record]
    assert [record["step"] for record in records] == sorted({record["step"] for record in records})
    for record in records:
        assert 1.1 < record["hfu"] / record["mfu"] < 1.34
        assert record["forward_backward_s"] > 0
        assert record["optimizer_s"] > 0
    assert sum(record["checkpoint_s"] for record in records) > 0

    (path,) = (run / "monitor").iterdir()
    samples = read_jsonl(path)
    assert {"0", "1"} in [set(sample["ranks"]) for sample in samples]
    assert max(sample["ranks"].get("1", {}).get("rss_gib", 0) for sample in samples) > 0.05

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    assert [one.step for one in found.Scalars("train/loss")] == [record["step"] for record in records]
    assert "node0/rank1/rss_gib" in found.Tags()["scalars"]
    assert not (run / "flight").exists()
    assert not (run / "memory").exists()
