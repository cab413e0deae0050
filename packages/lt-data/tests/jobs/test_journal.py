"""The journal: whatever a crash leaves of its last line, what was added before is there and nothing else."""

import json
from pathlib import Path

import pytest

from lt_data import DataError
from lt_data.preparation.journal import Journal, decode_journal, encode_record

RECORDS = [{"job": {"name": "naïve\n"}}, {"shard": 1, "sides": {}}, {"finished": "f" * 64}]


def test_cut_off_at_every_byte(fast_path: Path) -> None:
    content = b"".join(map(encode_record, RECORDS))
    ends = [0]
    for record in RECORDS:
        ends.append(ends[-1] + len(encode_record(record)))
    for size in range(len(content) + 1):
        whole = max(i for i, end in enumerate(ends) if end <= size)
        assert decode_journal(content[:size], "") == (RECORDS[:whole], ends[whole])
        path = fast_path / str(size)
        path.write_bytes(content[:size])
        journal = Journal(path)
        assert journal.records == RECORDS[:whole]
        journal.append({"next": size})
        journal.close()
        assert decode_journal(path.read_bytes(), "")[0] == [*RECORDS[:whole], {"next": size}]


def test_a_last_line_of_other_bytes_is_taken_away() -> None:
    content = b"".join(map(encode_record, RECORDS[:2]))
    for rest in (b"\0" * 40, b"\0" * 40 + b"\n", encode_record(RECORDS[2])[:-2] + b"\0\n"):
        assert decode_journal(content + rest, "") == (RECORDS[:2], len(content))


@pytest.mark.parametrize("line", [0, 1])
def test_damage_before_the_last_line_is_an_error(tmp_path: Path, line: int) -> None:
    lines = [encode_record(record) for record in RECORDS]
    for place in range(len(lines[line]) - 1):
        damaged = bytearray(lines[line])
        damaged[place] ^= 4
        content = b"".join([*lines[:line], bytes(damaged), *lines[line + 1 :]])
        with pytest.raises(DataError, match=r"journal: line \d is damaged; start over \(--no-resume\)"):
            decode_journal(content, "journal")
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        Journal(tmp_path / "journal")
    journal = Journal(tmp_path / "journal", ignore_damage=True)
    assert journal.records == []
    journal.close()


def test_a_line_is_a_hash_and_json() -> None:
    digest, _, text = encode_record({"a": "ü"}).partition(b" ")
    assert len(digest) == 16
    assert json.loads(text) == {"a": "ü"}
