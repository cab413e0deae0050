"""A journal whose lines are whole and whose records are wrong: one error with the remedy, or the same store."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, prepare
from lt_data.preparation.journal import decode_journal, encode_record


def _interrupt(journal: Path, go_on: Callable[[], object]) -> list[dict[str, Any]]:
    """Run a job until its journal has two shards."""
    with pytest.raises(KeyboardInterrupt):
        go_on()
    records = decode_journal(journal.read_bytes(), "")[0]
    assert len(records) > 1
    return records


def _wrong_values(value: Any) -> Iterator[Any]:
    """Yield values that cannot stand for this one."""
    yield None
    yield "x" if not isinstance(value, str) else 7
    if isinstance(value, int):
        yield -value - 1
        yield value + 1000
    if isinstance(value, dict):
        yield {}
        yield {**value, "more": 1}
        for name, inner in value.items():
            yield {key: item for key, item in value.items() if key != name}
            for wrong in _wrong_values(inner):
                yield {**value, name: wrong}
    if isinstance(value, list):
        yield []
        for i, inner in enumerate(value):
            for wrong in _wrong_values(inner):
                yield [*value[:i], wrong, *value[i + 1 :]]


def _check(building: Path, records: list[dict[str, Any]], go_on: Callable[[], object]) -> list[str]:
    """Resume with each wrong record; return the errors."""
    kept = building.with_name("kept")
    shutil.copytree(building, kept)
    messages: list[str] = []
    for number, record in ((0, records[0]), (len(records) - 1, records[-1])):
        for wrong in _wrong_values(record):
            shutil.rmtree(building, ignore_errors=True)
            shutil.rmtree(building.with_suffix(""), ignore_errors=True)
            shutil.copytree(kept, building)
            changed = [*records[:number], wrong, *records[number + 1 :]]
            (building / "journal").write_bytes(b"".join(map(encode_record, changed)))
            try:
                go_on()
            except DataError as exc:
                messages.append(str(exc))
    return messages


@pytest.mark.usefixtures("small_batches")
def test_records_of_prepare(fast_path: Path, corpus: Path, options: dict[str, Any]) -> None:
    out = fast_path / "store"

    def stop(_done: int, _total: int, _unit: str) -> None:
        journal = fast_path / "store.building/journal"
        if journal.read_bytes().count(b"\n") > 2:
            raise KeyboardInterrupt

    records = _interrupt(
        fast_path / "store.building/journal", lambda: prepare([corpus], out=out, progress=stop, **options)
    )
    messages = _check(fast_path / "store.building", records, lambda: prepare([corpus], out=out, **options))
    assert len(messages) > 60
    assert [message for message in messages if "(--no-resume)" not in message] == []
