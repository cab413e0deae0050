"""No byte with a wrong checksum leaves a source: each way out of each format, for every group of tensors.

A damage is a flipped bit among a tensor's bytes. The way out must refuse it or, where it does not touch what is passed
on, give the output of the undamaged source, bit for bit.
"""

import json
import os
import random
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    Shard,
    begin_save,
    commit_save,
    find_latest_valid,
    write_rank_files,
)
from lt_ckpt.cli import verify as verify_command
from lt_ckpt.copy_plan import StoredSlice, plan_copies
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.hash_list import HASH_LIST
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.zero1_reshard import reshard_optimizer
from lt_ckpt.read_verification import MAX_PARKED_BYTES, ReadVerifier, StoredChecksum
from lt_ckpt.records import TORCH_ADAMW
from lt_ckpt.source import Source, TensorReader
from lt_ckpt.torchfile.crc import combine_crc32
from lt_ckpt.torchfile.file import load_pt
from lt_model import param_specs

DAMAGES = int(os.environ.get("LT_DAMAGES", "1000"))
"""Damages per format and group in the slow set."""
SEED = int(os.environ.get("LT_SEED", "0"))
GROUPS = ("weights", *TORCH_ADAMW.slots)


# --- sources -------------------------------------------------------------------------------------------------------


def save_sharded(root: Path, config: Any, *, world: int = 2) -> Path:
    """A training checkpoint of several ranks: rows of some matrices, columns of others."""
    rng = np.random.default_rng(0)
    state = {
        (group, p.name): rng.standard_normal(p.shape).astype("<f4") for group in GROUPS for p in param_specs(config)
    }
    tmp = begin_save(root, step=3, world_size=world)
    for rank in range(world):
        shards = []
        for (group, name), array in state.items():
            dim = 1 if array.ndim == 2 and "down" in name else 0
            part = np.ascontiguousarray(np.array_split(array, world, axis=dim)[rank])
            offset = [0] * array.ndim
            offset[dim] = sum(a.shape[dim] for a in np.array_split(array, world, axis=dim)[:rank])
            shard = Shard(
                group=group,
                name=name,
                dtype="F32",
                global_shape=array.shape,
                offset=tuple(offset),
                shape=part.shape,
                data=part.reshape(-1).view(np.uint8),
            )
            shards.append(shard)
        write_rank_files(tmp, rank=rank, shards=shards)
    settings = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "initial_lr": 0.1, "weight_decay": 0.1}
    metadata = CheckpointMetadata(
        step=3, model=config.to_dict(), optimizer=TORCH_ADAMW, layout={"param_groups": [settings]}
    )
    return commit_save(tmp, world_size=world, metadata=metadata)


def write_meta(source: Source, folder: Path) -> None:
    from lt_ckpt.meta_llama.names import dialect_key
    from lt_ckpt.torchfile.file import write_pt

    folder.mkdir()
    with TensorReader(source.root) as reader:
        tree = {
            dialect_key(name, "meta"): reader.read(source.weights, name).view("<f4").reshape(spec.shape)
            for name, spec in source.weights.specs.items()
        }
    write_pt(folder / "consolidated.00.pth", tree)
    params = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 8, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps({**params, "vocab_size": 32}), encoding="utf-8")


def write_dcp(source: Source, folder: Path) -> None:
    """Weights and Adam's moments as torch writes them."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import FileSystemWriter, save

    with TensorReader(source.root) as reader:
        state = {
            (name if kind == "weights" else f"optimizer.state.{name}.{kind}"): torch.from_numpy(
                reader.read(group, name).view("<f4").reshape(group.specs[name].shape).copy()
            )
            for kind, group in source.groups.items()
            for name in group.specs
        }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(state, storage_writer=FileSystemWriter(folder))


@dataclass(frozen=True)
class Case:
    """A source on disk."""

    name: str
    path: Path
    config: Path | None
    damaged: Path
    """The same as a copy, to damage."""
    expected: dict[str, Any] = field(default_factory=dict)
    """Way out → what comes of the undamaged copy."""

    def open(self, path: Path) -> Source:
        more = {"optimizer": None} if self.name.startswith("nxd") else {}
        return open_source(path, config=self.config, **more)


@pytest.fixture(scope="module")
def cases(memory, models) -> dict[str, Case]:
    root = memory / "verified"
    run = root / "run" / "checkpoints"
    config = models.config(n_layers=2, tie_word_embeddings=False)
    step = save_sharded(run, config)
    lt = open_source(step)
    hf_config = root / "config.json"
    hf_config.write_text(json.dumps(lt.config), encoding="utf-8")
    made: dict[str, Path] = {"lt": step}

    def convert_to(name: str, **options: Any) -> None:
        made[name] = convert_checkpoint(lt, root / name, ConvertOptions(**options))

    convert_to("nxd", format="nxd", nxd=NxdOptions(tp=2, pp=2), dp=3)
    convert_to("nxd xser", format="nxd", nxd=NxdOptions(xser=True, tag="step_3"), dp=2)
    convert_to("nxd v1", format="nxd", nxd=NxdOptions(tp=2, layout="v1", qkv="gqa_fused"))
    convert_to("pt.pt", format="pt")
    write_meta(lt, root / "meta")
    write_dcp(lt, root / "dcp")
    for path in root.rglob(HASH_LIST):
        path.unlink()  # checksums of the formats themselves
    convert_to("hf listed", format="hf", max_shard_bytes=4000)
    convert_to("dcp listed", format="dcp")
    convert_to("nxd listed", format="nxd", nxd=NxdOptions(tp=2), dp=2)
    made |= {"meta": root / "meta", "dcp": root / "dcp"}
    (root / "damaged").mkdir()
    found = {}
    for name, path in made.items():
        copy = root / "damaged" / (path.name if path.is_file() else name) / (path.name if name == "lt" else "")
        (shutil.copy if path.is_file() else shutil.copytree)(path, copy)
        found[name] = Case(name, path, None if name in ("lt", "meta", "hf listed") else hf_config, copy)
    return found


# --- ways out ------------------------------------------------------------------------------------------------------


def tensor_bytes(source: Source) -> dict[tuple[str, str], bytes]:
    with TensorReader(source.root) as reader:
        return {
            (kind, name): reader.read(group, name).tobytes()
            for kind, group in source.groups.items()
            for name in group.specs
        }


def export(case: Case, path: Path, out: Path) -> Any:
    convert_checkpoint(case.open(path), out, ConvertOptions(format="hf"))
    return tensor_bytes(open_source(out))


def convert_weights(case: Case, path: Path, out: Path) -> Any:
    source = case.open(path)
    options = ConvertOptions(format="pt", dtype="BF16")
    convert_checkpoint(replace(source, groups={"weights": source.weights}), out, options)
    return tensor_bytes(open_source(out, config=case.config or write_config(source, out)))


def write_config(source: Source, out: Path) -> Path:
    path = out.with_name("config-of-it.json")
    path.write_text(json.dumps(source.config), encoding="utf-8")
    return path


def convert_all(case: Case, path: Path, out: Path) -> Any:
    return tensor_bytes(open_source(convert_checkpoint(case.open(path), out, ConvertOptions(format="lt"))))


def convert_to_nxd(case: Case, path: Path, out: Path) -> Any:
    source = case.open(path)
    dp = 2 if "param_groups" in source.format_info else 0
    options = ConvertOptions(format="nxd", nxd=NxdOptions(tp=2, qkv="gqa_fused"), dp=dp)
    convert_checkpoint(source, out, options)
    return tensor_bytes(open_source(out, config=case.config or write_config(source, out), optimizer=None))


def resplit(case: Case, path: Path, out: Path) -> Any:
    reshard_optimizer(path, out, dp=1, config=json.loads(case.config.read_text(encoding="utf-8")))  # type: ignore[union-attr]
    return {p.name: [t.tobytes() for t in trees(p)] for p in sorted((out / "optim").glob("*.pt"))}


def trees(path: Path) -> Iterator[np.ndarray]:
    from lt_ckpt.torchfile.file import iter_tensors

    raw = path.read_bytes()
    leaves = [tensor.stored_array for _, tensor in iter_tensors(load_pt(path))]
    if leaves:
        for array in leaves:
            yield np.frombuffer(raw, np.uint8, array.spec.n_bytes, array.byte_offset)
    else:
        for tensor in sorted(path.with_name(f"{path.name}.tensors").glob("*.pt")):
            yield from trees(tensor)


def verify_all(case: Case, path: Path, out: Path) -> Any:
    verify_command(str(path), case.config)


def restore(case: Case, path: Path, out: Path) -> Any:
    """What a run does that resumes: the newest valid checkpoint, read by ranks of another layout."""
    found, _ = find_latest_valid(path.parent)
    if found is None:
        raise CheckpointError("no valid checkpoint")
    return read_all(found)


def read_named(case: Case, path: Path, out: Path) -> Any:
    """What reads whole tensors of a named folder, without any verification before."""
    return read_all(Checkpoint.open(path))


def read_all(checkpoint: Checkpoint) -> dict[tuple[str, str], bytes]:
    names = [(group, name) for group in GROUPS for name in checkpoint.names(group)]
    return {name: checkpoint.read(*name).tobytes() for name in names}


WAYS: dict[str, dict[Callable[[Case, Path, Path], Any], tuple[str, ...]]] = {
    "lt": dict.fromkeys((verify_all, convert_all, convert_to_nxd, restore, read_named), GROUPS)
    | dict.fromkeys((export, convert_weights), ("weights",)),
    "nxd": dict.fromkeys((verify_all, convert_all, convert_to_nxd), (*GROUPS, "master"))
    | {resplit: ("exp_avg", "exp_avg_sq", "master"), export: ("weights",)},
    "dcp": dict.fromkeys((verify_all, convert_all), GROUPS) | dict.fromkeys((export, convert_weights), ("weights",)),
    "else": dict.fromkeys((verify_all, convert_all, export, convert_weights, convert_to_nxd), ("weights",)),
}
"""Format → ways out, and the groups of tensors that each passes on."""
WAYS["nxd xser"] = WAYS["nxd listed"] = WAYS["nxd"]
FORMATS = dict.fromkeys(("lt", "dcp"), GROUPS) | dict.fromkeys(("nxd", "nxd xser", "nxd listed"), (*GROUPS, "master"))
FORMATS |= dict.fromkeys(("nxd v1", "pt.pt", "meta", "hf listed", "dcp listed"), ("weights",))
"""Format → its groups of tensors."""


# --- damages -------------------------------------------------------------------------------------------------------


def places(source: Source, kind: str) -> list[tuple[str, int, int]]:
    """The runs of a group's tensors in the files, with replicas: (file, begin, bytes)."""
    group, found = source.groups[kind], []
    for name, spec in group.specs.items():
        for stored in (*group.locations[name], *group.replicas.get(name, ())):
            found.append(place_of(stored, item_bytes(spec.dtype)))
    return found


def place_of(stored: StoredSlice, item: int) -> tuple[str, int, int]:
    """The stored slice's first row."""
    [copy] = plan_copies([((stored.offset, stored.shape), [stored], item, "")])
    rows, columns = (stored.shape[0], stored.shape[1]) if len(stored.shape) == 2 else (1, stored.shape[0])
    whole = copy.stored_shape[-1] == columns
    return stored.file, copy.first_byte, (rows if whole else 1) * columns * item


def try_damages(case: Case, kind: str, n: int, tmp: Path, seed: int) -> Counter[str]:
    """Damage the copy n times, each taken out by one of the ways; return how it ended.

    Each tenth way does not pass the damaged group on.
    """
    ways = WAYS.get(case.name, WAYS["else"])
    rng = random.Random(f"{case.name} {kind} {seed}")
    spots = places(case.open(case.path), kind)
    expected = case.expected
    results: Counter[str] = Counter()
    root, tmp = case.open(case.damaged).root, tmp / case.name / kind
    tmp.mkdir(parents=True)
    concerned = [way for way, kinds in ways.items() if kind in kinds]
    others = [way for way in ways if way not in concerned]
    for i in range(n):
        way = others[i // 10 % len(others)] if others and i % 10 == 9 else concerned[i % len(concerned)]
        if way.__name__ not in expected:
            expected[way.__name__] = way(case, case.damaged, tmp / f"{way.__name__}-good")
        file, begin, n_bytes = rng.choice(spots)
        at, bit = begin + rng.randrange(n_bytes), 1 << rng.randrange(8)
        with (root / file).open("r+b") as opened:
            opened.seek(at)
            [value] = opened.read(1)
            opened.seek(at)
            opened.write(bytes([value ^ bit]))
            opened.flush()
            try:
                out = tmp / f"{way.__name__}-{i}"
                output = way(case, case.damaged, out)
            except CheckpointError:
                results["refused"] += 1
                assert not any(out.rglob("*")), (way, file, at)
            else:
                assert output == expected[way.__name__], (way.__name__, file, at)
                assert way is not verify_all, (file, at)
                # A replica that is not read, for example, though its group is passed on.
                results["harmless" if kind in ways[way] else "equal"] += 1
                shutil.rmtree(out, ignore_errors=True)
                out.unlink(missing_ok=True)
            finally:
                opened.seek(at)
                opened.write(bytes([value]))
    return results


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_byte_is_refused_or_not_passed_on(cases, name, fast_path, capsys):
    """A seeded sample; all damages are in the slow set."""
    for kind in FORMATS[name]:
        n = 3 if name.startswith("nxd") else len(WAYS.get(name, WAYS["else"]))
        results = try_damages(cases[name], kind, n, fast_path, SEED)
        assert results["refused"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_thousand_damages_of_each_format_and_group(cases, fast_path, capsys, name):
    """NxD's are spread over its layouts; those with a file per tensor take the longest."""
    parts = {"nxd": 0.7, "nxd xser": 0.3, "nxd v1": 0.3, "nxd listed": 0.3}
    for kind in FORMATS[name]:
        n = int(DAMAGES * parts.get(name, 1))
        begin = time.monotonic()
        results = try_damages(cases[name], kind, n, fast_path, SEED + 1)
        with capsys.disabled():
            sys.stdout.write(f"{name} {kind}: {dict(results)} in {time.monotonic() - begin:.0f} s\n")
        assert results["refused"] > n // 2
        assert results["harmless"] < n // 10


# --- what the commands say -----------------------------------------------------------------------------------------


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs a command; returns its exit code, output and errors."""
    from lt_ckpt.__main__ import main as entry

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lt-ckpt", *map(str, arguments)])
        code = entry()
        out, err = capsys.readouterr()
        return code, out, err

    return run


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def first_place(source: Source, kind: str) -> tuple[Path, int]:
    file, begin, _ = places(source, kind)[0]
    return source.root / file, begin


@pytest.mark.parametrize("name", ["nxd", "nxd xser"])
def test_verify_and_inspect_know_the_optimizer_state_of_nxd(cases, fast_path, main, name):
    case = cases[name]
    place = shutil.copytree(case.path, fast_path / "nxd")
    code, out, _ = main("inspect", place, "--config", case.config)
    assert code == 0
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        assert f"{kind:<11} 21 tensors" in out
    assert "checksums   every file has checksums" in out
    assert main("verify", place, "--config", case.config, "--optimizer", "--against", cases["lt"].path)[0] == 0
    [file] = place.rglob("optim/dp_rank_01_tp_rank_00_pp_rank_00.pt")
    raw = file.read_bytes()
    file.unlink()
    code, out, err = main("verify", place, "--config", case.config)
    assert code
    assert "/optim/dp_rank_0" in err
    file.write_bytes(raw)
    path, at = first_place(case.open(place), "exp_avg")
    flip(path, at)
    code, out, _ = main("verify", place, "--config", case.config)
    assert code
    assert path.name in out
    flip(path, at)
    shutil.rmtree(next(place.rglob("optim")))
    assert main("verify", place, "--config", case.config)[0] == 0
    code, _, err = main("verify", place, "--config", case.config, "--optimizer")
    assert code
    assert "has no optimizer state" in err


def test_a_flipped_bit_of_a_reference_file_is_found(cases, fast_path):
    """The pickle is compared with its CRC when it is read, so no number of a param group changes unseen."""
    case = cases["nxd"]
    place = shutil.copytree(case.path, fast_path / "nxd")
    file = place / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    at = file.read_bytes().index(b"weight_decay")
    flip(file, at + len("weight_decay") + 6)
    with pytest.raises(CheckpointError, match=r"record 'data\.pkl' differ"):
        case.open(place)


def test_a_named_step_is_refused_and_a_run_says_which_step_it_takes(cases, fast_path, main):
    run = fast_path / "run" / "checkpoints"
    step = shutil.copytree(cases["lt"].path, run / cases["lt"].path.name)
    older = shutil.copytree(convert_older(cases["lt"], fast_path), run / "step-00000001")
    path, at = first_place(open_source(step), "weights")
    flip(path, at)
    for command in (("export", step, "--out"), ("convert", step, "--to", "pt")):
        code, _, err = main(*command, fast_path / "named.pt")
        assert code, command
        assert "differ from their checksum" in err
        assert not (fast_path / "named.pt").exists()
    for command in (("export", run, "--out"), ("convert", run.parent, "--to", "pt")):
        code, out, err = main(*command, fast_path / command[0])
        assert code == 0
        assert f"taking {older} instead of {step}: " in err
        assert "have changed since they were written" in err
        assert "every file has checksums" in out
    assert open_source(run.parent).fallbacks


def convert_older(case: Case, folder: Path) -> Path:
    source = open_source(case.path)
    older = replace(source, format_info={**source.format_info, "step": 1})
    return convert_checkpoint(older, folder / "older", ConvertOptions(format="lt"))


def test_formats_without_checksums_are_named(cases, models, fast_path, main):
    torch = pytest.importorskip("torch")
    from torch.serialization import set_crc32_options

    hf = models.make(fast_path / "hf")
    for command in (("inspect", hf), ("verify", hf), ("convert", hf, fast_path / "x.pt", "--to", "pt")):
        code, out, _ = main(*command)
        assert code == 0
        assert "its files have no checksums (hf)" in out
    state = torch.load(cases["pt.pt"].path, weights_only=True)
    bare = fast_path / "bare.pt"
    set_crc32_options(False)
    try:
        torch.save(state, bare)
    finally:
        set_crc32_options(True)
    for command in ("verify", "inspect"):
        code, out, _ = main(command, bare, "--config", cases["pt.pt"].config)
        assert code == 0
        assert "its files have no checksums (pt)" in out


# --- the verifier itself -------------------------------------------------------------------------------------------


def test_crcs_of_parts_give_that_of_the_whole():
    data = random.Random(0).randbytes(70_000)
    for cut in (0, 1, 16, 4095, 65_536, 70_000):
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert combine_crc32(first, second, len(data) - cut) == zlib.crc32(data)


@pytest.mark.parametrize("kind", ["crc", "hash"])
@pytest.mark.parametrize("seed", range(8))
def test_parts_in_any_order_from_many_threads(tmp_path, kind, seed):
    """Parts overlap, come twice, come in any order; some never come and are read at the end."""
    import xxhash

    rng = random.Random(seed)
    data = bytearray(rng.randbytes(10_000))
    bounds = [0, 100, 4_000, 9_000]
    ranges = [
        StoredChecksum(
            byte_offset=a,
            n_bytes=b - a,
            name=f"part {a}",
            expected=zlib.crc32(data[a:b]) if kind == "crc" else xxhash.xxh3_128_hexdigest(data[a:b]),
        )
        for a, b in zip(bounds, [*bounds[1:-1], 8_000, 10_000], strict=True)
    ]
    bad = rng.choice([None, *range(10_000)])
    if bad is not None:
        data[bad] ^= 4
    (tmp_path / "x").write_bytes(data)
    verifier = ReadVerifier(tmp_path, lambda file: ranges)
    cuts = sorted(rng.sample(range(1, 10_000), 30))
    parts = [(a, b + rng.randrange(50)) for a, b in zip([0, *cuts], [*cuts, 10_000], strict=True) if rng.random() < 0.8]
    parts += rng.sample(parts, 5)
    rng.shuffle(parts)
    errors: list[CheckpointError] = []

    def add(mine: list[tuple[int, int]]) -> None:
        for begin, end in mine:
            try:
                verifier.add("x", begin, memoryview(data)[begin:end])
            except CheckpointError as exc:
                errors.append(exc)

    threads = [threading.Thread(target=add, args=(parts[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors:
        try:
            verifier.finish()
        except CheckpointError as exc:
            errors.append(exc)
    is_covered = bad is not None and any(s.byte_offset <= bad < s.byte_offset + s.n_bytes for s in ranges)
    assert bool(errors) == is_covered


def test_what_waits_for_the_bytes_in_front_of_it_is_bounded(tmp_path, monkeypatch):
    import xxhash

    from lt_ckpt import read_verification

    monkeypatch.setattr(read_verification, "MAX_PARKED_BYTES", 100)
    assert MAX_PARKED_BYTES <= 2**26
    data = random.Random(1).randbytes(1000)
    (tmp_path / "x").write_bytes(data)
    stored = StoredChecksum(byte_offset=0, n_bytes=1000, name="x", expected=xxhash.xxh3_128_hexdigest(data))
    verifier = ReadVerifier(tmp_path, lambda file: [stored])
    for begin in range(900, -100, -100):
        verifier.add("x", begin, memoryview(data)[begin : begin + 100])
    verifier.finish()
    flip(tmp_path / "x", 950)
    again = ReadVerifier(tmp_path, lambda file: [stored])
    again.add("x", 500, memoryview(data)[500:])
    with pytest.raises(CheckpointError, match="the bytes of x differ"):
        again.finish()
