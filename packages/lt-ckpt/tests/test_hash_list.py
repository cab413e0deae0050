"""Folders that a conversion wrote have a list of their files' hashes; every way out and `verify` compare with it."""

import hashlib
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from lt_ckpt import CheckpointError, laid_out_files, open_source, output_hashes
from lt_ckpt.checksums import check_undamaged, describe_checksums, iter_damages
from lt_ckpt.hash_list import HASH_LIST, parse_hash_list

FOLDERS = ["hf", "hf in shards", "dcp", "nxd", "nxd v1", "nxd gqa", "nxd xser", "nxd xser v1"]


@pytest.fixture(scope="module")
def made(memory, models) -> dict[str, Path]:
    """Name → the folder with the list; written in small blocks, whose files are hashed in small steps."""
    model = models.make(memory / "hash-list" / "model")
    (model / "tokenizer.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laid_out_files, "BLOCK_BYTES", 400)
        patch.setattr(output_hashes, "STEP_BYTES", 1)
        outputs = {name: models.output(model, memory / "hash-list" / name, name) for name in FOLDERS}
    return {name: next(path.rglob(HASH_LIST)).parent for name, path in outputs.items()}


def files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != HASH_LIST)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_written_folder_has_the_hash_of_each_file(made, name):
    folder = made[name]
    listed = parse_hash_list((folder / HASH_LIST).read_bytes(), "")
    assert listed == {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files_of(folder)}
    done = subprocess.run(["sha256sum", "--strict", "-c", HASH_LIST], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(iter_damages(open_source(folder)))
    assert f"every file has checksums ({HASH_LIST} lists {len(listed)} files)" in describe_checksums(
        open_source(folder)
    )


def damages_of(folder: Path) -> list[str]:
    """What `verify` says, also while opening."""
    try:
        return list(iter_damages(open_source(folder)))
    except CheckpointError as exc:
        return [str(exc)]


@pytest.mark.parametrize("name", FOLDERS)
def test_every_damage_of_a_listed_folder_is_found(made, name, fast_path):
    """A bit in any place, a cut, a deletion, an exchange, an added file: of tensors, padding and model files alike."""
    folder = shutil.copytree(made[name], fast_path / "x")
    rng = random.Random(name)
    contents = {file: (folder / file).read_bytes() for file in files_of(folder)}
    for file in rng.sample(sorted(contents), min(5, len(contents))):
        path, raw = folder / file, contents[file]
        flipped = bytearray(raw)
        flipped[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        for damaged in (bytes(flipped), raw[: rng.randrange(len(raw))], raw + b"\0", None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            assert damages_of(folder), (file, damaged and len(damaged))
            with pytest.raises(CheckpointError):  # as every conversion does first
                check_undamaged(open_source(folder))
            path.write_bytes(raw)
    pairs = [(a, b) for a in contents for b in contents if a < b and contents[a] != contents[b]]
    for a, b in rng.sample(pairs, min(4, len(pairs))):
        (folder / a).write_bytes(contents[b])
        (folder / b).write_bytes(contents[a])
        assert damages_of(folder), (a, b)
        (folder / a).write_bytes(contents[a])
        (folder / b).write_bytes(contents[b])
    assert not damages_of(folder)
    (folder / "chat_template.jinja").write_text("added")
    assert any(f"chat_template.jinja: is not in {HASH_LIST}" in text for text in damages_of(folder))


def test_a_changed_config_is_named_with_what_to_do(made, fast_path):
    folder = shutil.copytree(made["hf"], fast_path / "hf")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: .* replace its line by the output of `sha256sum config"):
        open_source(folder)
    assert open_source(folder, config=folder / "config.json").config["eos_token_id"] == 7  # type: ignore[index]
    lines = [line for line in (folder / HASH_LIST).read_text().splitlines() if not line.endswith("  config.json")]
    new = subprocess.run(["sha256sum", "config.json"], cwd=folder, capture_output=True, text=True, check=True)
    (folder / HASH_LIST).write_text("\n".join([*lines, new.stdout]))
    assert not list(iter_damages(open_source(folder)))


HEX = "0" * 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "line 1 is not"),
        (f"{HEX}  a".encode(), "its last line is cut"),
        (f"{HEX}  a/../../b\n".encode(), "line 1: .* leads out of its folder"),
        (f"{HEX}  a\n{HEX}  ./a\n".encode(), "line 2 is not"),
        (f"{HEX[1:]}  a\n".encode(), "line 1 is not"),
        (f"{HEX}  a\n\n".encode(), "line 2 is not"),
        (f"{HEX}  a\0b\n".encode(), "is no file name"),
    ],
)
def test_a_malformed_list_is_refused(text, problem):
    with pytest.raises(CheckpointError, match=problem):
        parse_hash_list(text, "list")
