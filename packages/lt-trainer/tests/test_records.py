"""Records: lines and their regular expressions, JSON lines with torn ends, and which steps count."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_trainer.errors import RunDirError
from lt_trainer.run_directory.jsonl import JsonlWriter, format_record, read_jsonl
from lt_trainer.run_directory.records import METRIC_DEFINITIONS, drop_superseded_records

RECORD: dict[str, Any] = {"step": 10, "loss": 3.2104567, "batches_per_sec": 2.0, "samples_per_sec": 8.0}
RECORD |= {"tokens_per_sec": 32768.0, "flops_per_sec": 1.25e14, "mfu": 0.4, "elapsed_s": 12.3456789}


def scraped(text: str) -> dict[str, float]:
    found = {}
    for definition in METRIC_DEFINITIONS:
        matches = re.findall(definition["Regex"], text)
        assert len(matches) == 1, (definition, matches)
        found[definition["Name"]] = float(matches[0])
    return found


def test_the_six_metrics_of_the_algorithm_are_scraped_from_a_line() -> None:
    line = format_record(RECORD)
    assert line == (
        "step=10 loss=3.21046 batches_per_sec=2 samples_per_sec=8 tokens_per_sec=32768 flops_per_sec=1.25e+14 mfu=0.4 "
        "elapsed_s=12.3457"
    )
    wanted = {name: value for name, value in RECORD.items() if name not in ("step", "elapsed_s")}
    assert scraped("[default0]:" + line) == wanted | {"loss": 3.21046}
    validation = format_record({"step": 20, "val_loss": 3.25, "val_tokens": 4096, "elapsed_s": 1.0})
    for definition in METRIC_DEFINITIONS:  # in the service's limits
        assert re.search(definition["Regex"], validation) is None
        assert (definition.keys(), len(definition["Regex"]) <= 500) == ({"Name", "Regex"}, True)


@given(st.floats())
def test_any_loss_is_scraped_to_six_digits(value: float) -> None:
    got = scraped(format_record(RECORD | {"loss": value}))["loss"]
    assert (math.isnan(value) and math.isnan(got)) or got == float(format(value, ".6g"))


def test_json_lines_keep_every_digit_and_every_number_as_soon_as_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    written = {"loss": 0.1 + 0.2, "mfu": -math.inf, "inner": [{"x": math.inf}], "note": "nan is not here"}
    with JsonlWriter(path) as sink:
        sink.write(written)
        assert read_jsonl(path) == [written]
        assert json.loads(path.read_text())["inner"] == [{"x": "inf"}]
        sink.write({"loss": math.nan})
        assert math.isnan(read_jsonl(path)[1]["loss"])


@pytest.mark.parametrize("content", ["", "\n", "x" * 10000, '{"a": 1}\n' + "x" * 9000, '{"a": 1}\n{"a": 2}\n'])
def test_a_torn_last_line_is_not_read_and_is_cut_before_more_is_written(tmp_path: Path, content: str) -> None:
    path, kept = tmp_path / "metrics.jsonl", content[: content.rfind("\n") + 1]
    path.write_text(content)
    if kept != "\n":
        assert read_jsonl(path) == [json.loads(line) for line in kept.splitlines()]
    with JsonlWriter(path) as sink:
        sink.write({"step": 3})
    assert path.read_text() == kept + '{"step": 3}\n'


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for content, line in (('{"step": 1}\n{"st\n{"step": 3}\n', 2), ("[1]\n", 1)):
        path.write_text(content)
        with pytest.raises(RunDirError, match=rf"^{re.escape(str(path))}:{line}: not a JSON object \(.*\); remove the"):
            read_jsonl(path)
    if Path("/dev/full").exists():
        sink = JsonlWriter("/dev/full")
        with pytest.raises(RunDirError, match=r"^cannot write /dev/full: No space left on device; free space") as full:
            sink.write({"step": 1})
        assert full.value.exit_code == 64
        sink.close()  # quietly: a second error would hide the first


def test_steps_that_are_done_again_take_the_place_of_the_first() -> None:
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "val_loss": 0.2}, {"step": 3, "loss": 3.0}]
    again = [{"step": 2, "loss": 2.5}, {"step": 2, "val_loss": 0.25}, {"step": 2, "val_loss": 0.75, "val_set": "code"}]
    assert drop_superseded_records([*rows, *again]) == [rows[0], *again]
