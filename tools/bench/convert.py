"""Conversion of a Llama of real shapes: memory, and speed relative to the disk's in the same minutes.

    uv run python tools/bench/convert.py --preset llama3-70b --layers 8 --to nxd
         --tp 32 --pp 8 --kv-size-multiplier 4 --qkv-linear

A Hugging Face model of the preset's shapes (fewer layers for a small disk; random bits) is written once. Then,
alternating and several times: read the model's bytes and write the output's with plain large direct I/O and one fsync
(the disk's limits), each alone (`read_limit_s`, `write_limit_s`) and both at the same time (`copy_limit_s`, the work of
a conversion), and convert, with the model dropped from the page cache. `--source nxd` converts it to two ranks of NxD
first; `--listed` lets the conversion verify the model by its SHA256SUMS. `of_limit` is the slower direction's time over
the conversion's, `of_copy_limit` that of both at once. Peak memory is that of a process of its own, compared with one
that converts a model of a few kB.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from results import describe_machine

from lt_ckpt.tensorfile import TensorSpec, write_safetensors
from lt_model import PRESETS, ModelConfig, config_to_hf, param_specs

BLOCK_BYTES = 4 * 2**20
CHILD_ARGUMENT = "convert-child"


def make_model(folder: Path, config: ModelConfig, shard_bytes: int) -> int:
    """Write random bf16 weights as a sharded Hugging Face folder; return their bytes."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES + 4096, dtype=np.uint8)
    files: list[dict[str, TensorSpec]] = [{}]
    bytes_left = shard_bytes
    for parameter in param_specs(config):
        spec = TensorSpec("BF16", parameter.shape)
        if files[-1] and spec.n_bytes > bytes_left:
            files.append({})
            bytes_left = shard_bytes
        files[-1][parameter.name] = spec
        bytes_left -= spec.n_bytes
    names = {}

    def bits(key: str, specs: dict[str, TensorSpec]) -> np.ndarray:
        return np.resize(noise[hash(key) % 4096 :], specs[key].n_bytes)

    for i, group in enumerate(files, start=1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / name, group, {"format": "pt"}, partial(bits, specs=group))
        names |= dict.fromkeys(group, name)
    total = sum(spec.n_bytes for group in files for spec in group.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    hf = config_to_hf(config, bos_token_id=1, eos_token_id=2, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    return total


def drop_page_cache(folder: Path) -> None:
    """Drop the page cache of the files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def make_aligned_buffer() -> np.ndarray:
    """Return a page-aligned buffer of huge pages."""
    pages = mmap.mmap(-1, 2 * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    skip = -memory.ctypes.data % 2**21
    memory[:] = 1
    return memory[skip : skip + BLOCK_BYTES]


def direct_read(folder: Path, n_bytes: int) -> float:
    """Return the seconds to read about `n_bytes` of the folder's files with large direct reads."""
    buffer = make_aligned_buffer()
    done, start = 0, time.perf_counter()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        position = 0
        while done < n_bytes and (got := os.preadv(descriptor, [buffer.data], position)):
            position, done = position + got, done + got
        os.close(descriptor)
    return (time.perf_counter() - start) * n_bytes / max(done, 1)


def direct_write(folder: Path, n_bytes: int) -> float:
    """Return the seconds to write `n_bytes` with large direct writes and one fsync."""
    buffer = make_aligned_buffer()
    buffer[:] = np.frombuffer(os.urandom(4096) * (BLOCK_BYTES // 4096), np.uint8)
    path = folder / "probe"
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    for _ in range(-(-n_bytes // BLOCK_BYTES)):
        os.write(descriptor, buffer.data)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds * n_bytes / (-(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES)


def direct_copy(model: Path, folder: Path, n_read: int, n_written: int) -> float:
    """Return the seconds to do both at the same time."""
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(direct_read, model, n_read), pool.submit(direct_write, folder, n_written)]:
            done.result()
    return time.perf_counter() - start


def run_conversion(model: Path, out: Path, arguments: list[str]) -> dict[str, float]:
    """Convert in a subprocess; return its seconds, CPU seconds, peak memory and output size."""
    command = [sys.executable, __file__, CHILD_ARGUMENT, str(model), str(out), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    made = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    found["out_bytes"], found["files"] = sum(path.stat().st_size for path in made), len(made)
    return found


def remove(path: Path) -> None:
    """Remove an output, a folder or a file."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_child(arguments: list[str]) -> None:
    from lt_ckpt.cli import app

    for name in ("lt_ckpt.dcp.format", "lt_ckpt.nxd.format"):  # torch, once and before the clock starts
        importlib.import_module(name)

    start, before = time.perf_counter(), time.process_time()
    app(["convert", *arguments], standalone_mode=False)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds, cpu = time.perf_counter() - start, time.process_time() - before
    print(json.dumps({"seconds": seconds, "cpu_s": cpu, "peak_bytes": usage.ru_maxrss * 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the preset has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="working folder; needs two to three times the size of the model"
    )
    parser.add_argument(
        "--model", type=Path, default=None, help="create the model here and keep it, or use the existing one"
    )
    parser.add_argument("--source", choices=("hf", "nxd"), default="hf")
    parser.add_argument("--listed", action="store_true", help="with a SHA256SUMS, which is verified first")
    parser.add_argument("--out", type=Path, default=None, help="also write the JSON here")
    options, arguments = parser.parse_known_args()
    preset = PRESETS[options.preset]
    config = replace(preset, n_layers=options.layers or preset.n_layers)
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=options.folder) as made:
        folder = Path(made)
        model = options.model or folder / "model"
        if not model.exists():
            make_model(model, config, 5 * 10**9)
        n_bytes = 2 * sum(parameter.numel for parameter in param_specs(config))
        if options.source == "nxd":
            run_conversion(model, folder / "nxd", ["--to", "nxd", "--tp", "2"])
            model = folder / "nxd"
        if options.source == "nxd" and not options.listed:
            (model / "SHA256SUMS").unlink()
        if options.source == "hf" and options.listed:
            subprocess.run("sha256sum *.json *.safetensors > SHA256SUMS", shell=True, check=True, cwd=model)
        tiny = replace(config, vocab_size=64, hidden_size=64, intermediate_size=64, n_heads=8, n_kv_heads=8)
        make_model(folder / "tiny", tiny, 10**9)
        base = run_conversion(folder / "tiny", folder / "tiny-out", ["--to", "hf"])["peak_bytes"]
        rounds = []
        for _ in range(options.rounds):
            drop_page_cache(model)
            read = direct_read(model, n_bytes)
            drop_page_cache(model)
            found = run_conversion(model, folder / "out", arguments)
            remove(folder / "out")
            write = direct_write(folder, int(found["out_bytes"]))
            drop_page_cache(model)
            copy = direct_copy(model, folder, n_bytes, int(found["out_bytes"]))
            rounds.append({**found, "read_limit_s": read, "write_limit_s": write, "copy_limit_s": copy})
            rounds[-1]["of_limit"] = max(read, write) / found["seconds"]
            rounds[-1]["of_copy_limit"] = copy / found["seconds"]
        largest = max(parameter.numel for parameter in param_specs(config)) * 2
    report = {
        "machine": describe_machine("torch", "lt-ckpt"),
        "preset": options.preset,
        "layers": config.n_layers,
        "source": f"{options.source}{', listed' if options.listed else ''}",
        "arguments": arguments,
        "model_bytes": n_bytes,
        "rounds": rounds,
        "median_of_limit": statistics.median(r["of_limit"] for r in rounds),
        "median_of_copy_limit": statistics.median(r["of_copy_limit"] for r in rounds),
        "median_seconds": statistics.median(r["seconds"] for r in rounds),
        "peak_over_base_bytes": max(r["peak_bytes"] for r in rounds) - base,
        "allowed_over_base_bytes": 2 * largest + 64 * 2**20,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD_ARGUMENT]:
        run_child(sys.argv[2:])
    else:
        main()
