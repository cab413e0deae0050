"""Records: lines and their regular expressions, JSON lines with torn ends, and rates with a fake clock."""

import doctest
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_trainer.errors import RunDirError
from lt_trainer.run_directory import jsonl as module
from lt_trainer.run_directory.jsonl import JsonlWriter, format_record, read_jsonl, record_to_dict
from lt_trainer.run_directory.records import (
    METRIC_DEFINITIONS,
    MetricsRecord,
    ValidationRecord,
)

VALUES: dict[str, Any] = {
    "step": 10,
    "loss": 3.2104567,
    "learning_rate": 1e-05,
    "grad_norm": 0.5,
    "batches_per_sec": 2.0,
    "samples_per_sec": 8.0,
    "tokens_per_sec": 32768.0,
    "flops_per_sec": 1.25e14,
    "mfu": 0.4,
    "memory_gib": 61.5,
    "valid_tokens": 1048000,
    "elapsed_s": 12.3456789,
}


def record(**changes: Any) -> MetricsRecord:
    return MetricsRecord(**{**VALUES, **changes})


def scraped(text: str) -> dict[str, float]:
    found = {}
    for definition in METRIC_DEFINITIONS:
        matches = re.findall(definition["Regex"], text)
        assert len(matches) == 1, (definition, matches)
        found[definition["Name"]] = float(matches[0])
    return found


def test_the_line_is_exactly_this() -> None:
    assert format_record(record()) == (
        "step=10 loss=3.21046 learning_rate=1e-05 grad_norm=0.5 batches_per_sec=2 samples_per_sec=8 "
        "tokens_per_sec=32768 flops_per_sec=1.25e+14 mfu=0.4 memory_gib=61.5 valid_tokens=1048000 elapsed_s=12.3457"
    )


def test_the_six_metrics_of_the_algorithm_are_scraped_from_it() -> None:
    assert scraped(format_record(record())) == {
        "batches_per_sec": 2.0,
        "flops_per_sec": 1.25e14,
        "loss": 3.21046,
        "samples_per_sec": 8.0,
        "mfu": 0.4,
        "tokens_per_sec": 32768.0,
    }


@pytest.mark.parametrize("value", [1e-05, 1.5e-07, 0.0, 1e20, math.inf, -math.inf, -2.5])
def test_unusual_numbers_are_scraped_whole(value: float) -> None:
    assert scraped(format_record(record(loss=value, mfu=value)))["loss"] == value


def test_nan_is_scraped() -> None:
    assert math.isnan(scraped(format_record(record(loss=math.nan)))["loss"])


@given(st.floats())
def test_any_loss_is_scraped_to_six_digits(value: float) -> None:
    got = scraped(format_record(record(loss=value)))["loss"]
    assert (math.isnan(value) and math.isnan(got)) or got == float(format(value, ".6g"))


def test_prefixes_of_a_launcher_do_not_matter() -> None:
    assert scraped("[default0]:" + format_record(record()))["loss"] == 3.21046


def test_a_validation_line_is_not_taken_for_a_training_loss() -> None:
    text = format_record(ValidationRecord(step=20, val_loss=3.25, val_tokens=4096, elapsed_s=1.0))
    assert text == "step=20 val_loss=3.25 val_tokens=4096 elapsed_s=1"
    assert all(re.search(definition["Regex"], text) is None for definition in METRIC_DEFINITIONS)


def test_the_definitions_fit_the_limits_of_the_service() -> None:
    assert len(METRIC_DEFINITIONS) == 6
    for definition in METRIC_DEFINITIONS:
        assert definition.keys() == {"Name", "Regex"}
        assert len(definition["Name"]) <= 255
        assert len(definition["Regex"]) <= 500
        assert re.compile(definition["Regex"]).groups == 1


def test_doctest() -> None:
    result = doctest.testmod(module)
    assert (result.attempted, result.failed) == (2, 0)


# ---- JSON lines ----


def test_json_lines_keep_every_digit_and_every_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = [record(loss=0.1 + 0.2), record(loss=math.inf, mfu=-math.inf)]
    with JsonlWriter(path) as sink:
        for one in written:
            sink.write(one)
    assert read_jsonl(path) == [record_to_dict(one) for one in written]
    assert list(json.loads(path.read_text().splitlines()[0])) == list(VALUES)
    assert json.loads(path.read_text().splitlines()[1])["loss"] == "inf"


def test_nan_is_a_string_in_json_and_a_number_again_when_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as sink:
        sink.write({"loss": math.nan, "note": "nan is not here"})
    assert path.read_text() == '{"loss": "nan", "note": "nan is not here"}\n'
    (read,) = read_jsonl(path)
    assert math.isnan(read["loss"])
    assert read["note"] == "nan is not here"


def test_each_line_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlWriter(path)
    sink.write({"step": 1})
    assert path.read_text() == '{"step": 1}\n'
    sink.close()


def test_a_torn_last_line_is_not_read_and_is_cut_before_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]
    with JsonlWriter(path) as sink:
        sink.write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 10000, b'{"a": 1}\n' + b"x" * 9000, b'{"a": 1}\n', b"\xff\xfe"])
def test_the_cut_keeps_exactly_the_finished_lines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    JsonlWriter(path).close()
    assert path.read_bytes() == content[: content.rfind(b"\n") + 1]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunDirError, match=rf"^{re.escape(str(path))}:2: not a JSON object \(.*\); remove the line$"):
        read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(RunDirError, match=r":1: not a JSON object .*; remove the line$"):
        read_jsonl(path)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"cannot read .*: No such file or directory; pass the path"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(RunDirError, match=r"cannot open .*: Is a directory; free space or fix its permissions"):
        JsonlWriter(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_clear_error() -> None:
    sink = JsonlWriter("/dev/full")
    with pytest.raises(RunDirError, match=r"^cannot write /dev/full: No space left on device; free space") as caught:
        sink.write({"step": 1})
    assert caught.value.exit_code == 64
    sink.close()  # quietly: a second error would hide the first
