"""Files that are damaged or made to do harm: read as they are, or refused by an error of the user, never by another.

Valid checkpoints and Hugging Face folders are changed at random (bytes, pieces, numbers and texts of JSON, lengths),
and then opened, verified and compared.
"""

import random
import re
import shutil

import pytest

from lt_ckpt import Checkpoint, CheckpointError, begin_save, commit_save, open_source, verify, write_rank_files
from lt_ckpt.comparison import compare
from lt_ckpt.manifest import CheckpointMetadata, make_commit
from lt_model import ModelError

JUNK = [b"0", b"-1", b"9" * 30, b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"1.5", b'"../x"', b'"/etc/passwd"']
JUNK += [b'"a\\u0000"', b'"\\ud800"', b"[" * 3000]
VALUE = re.compile(rb'-?\d+|"[^"]*"|\[[^\[\]]*\]|null|true|false')
CHANGES = 60


def change_json(rng, raw):
    """Another value, or one from elsewhere, in place of a value or a key."""
    spans = [match.span() for match in VALUE.finditer(raw)]
    (begin, end), (b, e) = rng.choice(spans), rng.choice(spans)
    return raw[:begin] + rng.choice([*JUNK, raw[b:e]]) + raw[end:]


def changed(rng, path, raw):
    if rng.random() < 0.5 and path.suffix == ".safetensors":
        n_bytes = int.from_bytes(raw[:8], "little")
        header = change_json(rng, raw[8 : 8 + n_bytes])
        return len(header).to_bytes(8, "little") + header + raw[8 + n_bytes :]
    if rng.random() < 0.5 and path.suffix in (".json", ""):
        return change_json(rng, raw)
    place, n_bytes = rng.randrange(len(raw)), rng.randrange(1, 9)
    return rng.choice(
        [raw[:place], raw[:place] + rng.randbytes(n_bytes) + raw[place:], raw[:place] + raw[place + n_bytes :]]
    )


@pytest.mark.parametrize("name", ["hf", "hf in shards", "lt"])
def test_a_changed_file_is_refused_or_read(tmp_path, models, name):
    model = models.make(tmp_path / "model", n_layers=2)
    place = models.output(model, tmp_path / "out", name)
    (place / "SHA256SUMS").unlink(missing_ok=True)  # every change would differ from it, before it is looked at
    rng, files, refused = random.Random(name), sorted(path for path in place.rglob("*") if path.is_file()), 0
    for _ in range(CHANGES):
        path = rng.choice(files)
        raw = path.read_bytes()
        path.write_bytes(changed(rng, path, raw))
        try:
            for step in place.glob("step-*"):
                verify(step)
            list(compare(open_source(model), open_source(place)))
        except (CheckpointError, ModelError):
            refused += 1
        path.write_bytes(raw)
    assert all(item.is_equal for item in compare(open_source(model), open_source(place)))
    assert refused > CHANGES // 4


def test_a_forged_manifest_with_its_commit_is_refused_or_read(fast_path, toy):
    made = toy.save(fast_path, 3)
    raw, rng, results = (made / "manifest.json").read_bytes(), random.Random(0), set()
    for _ in range(150):
        forged = change_json(rng, raw)
        (made / "manifest.json").write_bytes(forged)
        (made / "COMMIT").write_bytes(make_commit(forged, 3))
        try:
            opened = Checkpoint.open(made)
            for group in opened.groups:
                for tensor in opened.names(group):
                    opened.read(group, tensor)
            results.add("read")
        except CheckpointError:
            results.add("refused")
    assert results == {"read", "refused"}


def test_a_changed_part_list_is_not_committed_or_is_whole(fast_path, toy):
    tmp = begin_save(fast_path / "begun", step=4, world_size=1)
    write_rank_files(tmp, rank=0, shards=toy.shards(toy.state(4), 0, 1))
    rng = random.Random(1)
    for i in range(60):
        root = fast_path / f"{i}"
        copy = root / tmp.name
        shutil.copytree(tmp, copy)
        part = copy / "part-00000.json"
        part.write_bytes(change_json(rng, part.read_bytes()))
        try:
            made = commit_save(copy, world_size=1, metadata=CheckpointMetadata(step=4), timeout_s=5)
        except CheckpointError:
            assert not (root / "step-00000004").exists()
        else:
            assert verify(made).is_ok
