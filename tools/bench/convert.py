"""Conversion of a Llama of real shapes: memory, and speed relative to the disk's in the same minutes.

    uv run python tools/bench/convert.py --preset llama3-70b --layers 8 --to nxd
         --tp 32 --pp 8 --kv-size-multiplier 4 --qkv-linear

A Hugging Face model of the preset's shapes (fewer layers for a small disk; random bits) is written once. Then,
alternating and several times: read the model's bytes and write the output's at the same time with plain large direct
I/O and one fsync (the disk's limit of a conversion), and convert; both with the model dropped from the page cache.
`--source nxd` converts it to two ranks of NxD first; `--listed` lets the conversion verify the model by its SHA256SUMS.
"of copy" is the limit's time over the conversion's. Peak memory is that of a process of its own, compared with one that
converts a model of a few kB.
"""

from __future__ import annotations

import argparse
import importlib
import json
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
from typing import Any

import numpy as np
from disk import drop_page_cache, files_of, read_raw, write_raw
from results import describe_machine, format_table, run_child

from lt_ckpt.tensorfile import TensorSpec, write_safetensors
from lt_model import PRESETS, ModelConfig, config_to_hf, param_specs

CHILD_ARGUMENT = "convert-child"
SHARD_BYTES = 5 * 10**9


def make_model(folder: Path, config: ModelConfig) -> int:
    """Write random bf16 weights as a sharded Hugging Face folder; return their bytes."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, 2**22 + 4096, dtype=np.uint8)
    files: list[dict[str, TensorSpec]] = [{}]
    for parameter in param_specs(config):
        spec = TensorSpec("BF16", parameter.shape)
        if files[-1] and sum(one.n_bytes for one in files[-1].values()) + spec.n_bytes > SHARD_BYTES:
            files.append({})
        files[-1][parameter.name] = spec
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


def time_copy(model: Path, out: Path, n_bytes: int) -> float:
    """Return the seconds to read a model and to write `n_bytes` at the same time."""
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read_raw, files_of(model)), pool.submit(write_raw, out, n_bytes)]:
            done.result()
    return time.perf_counter() - start


def run_conversion(model: Path, out: Path, arguments: list[str]) -> dict[str, Any]:
    """Convert in a subprocess; return its seconds, CPU seconds and peak memory."""
    return run_child([sys.executable, __file__, CHILD_ARGUMENT, str(model), str(out), *arguments])


def convert(arguments: list[str]) -> None:
    """Convert in this process, and print what it took."""
    from lt_ckpt.cli import app

    for name in ("lt_ckpt.dcp.format", "lt_ckpt.nxd.format"):  # torch, once and before the clock starts
        importlib.import_module(name)

    start, before = time.perf_counter(), time.process_time()
    app(["convert", *arguments], standalone_mode=False)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds, cpu = time.perf_counter() - start, time.process_time() - before
    print(json.dumps({"seconds": seconds, "cpu_s": cpu, "peak_bytes": peak_bytes}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the preset has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="working folder; needs two to three times the size of the model")
    parser.add_argument("--source", choices=("hf", "nxd"), default="hf")
    parser.add_argument("--listed", action="store_true", help="with a SHA256SUMS, which is verified first")
    options, arguments = parser.parse_known_args()
    preset = PRESETS[options.preset]
    config = replace(preset, n_layers=options.layers or preset.n_layers)
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=options.folder) as made:
        folder = Path(made)
        model, out, probe = folder / "model", folder / "out", folder / "probe"
        n_bytes = make_model(model, config)
        if options.source == "nxd":
            run_conversion(model, folder / "nxd", ["--to", "nxd", "--tp", "2"])
            model = folder / "nxd"
        if options.source == "nxd" and not options.listed:
            (model / "SHA256SUMS").unlink()
        if options.source == "hf" and options.listed:
            subprocess.run("sha256sum *.json *.safetensors > SHA256SUMS", shell=True, check=True, cwd=model)
        tiny = replace(config, vocab_size=64, hidden_size=64, intermediate_size=64, n_heads=8, n_kv_heads=8)
        make_model(folder / "tiny", tiny)
        base = run_conversion(folder / "tiny", folder / "tiny-out", ["--to", "hf"])["peak_bytes"]
        rounds = []
        for _ in range(options.rounds):
            drop_page_cache(model)
            found = run_conversion(model, out, arguments)
            out_bytes = sum(path.stat().st_size for path in files_of(out) or [out])  # some formats are one file
            shutil.rmtree(out) if out.is_dir() else out.unlink()
            drop_page_cache(model)
            copy_s = time_copy(model, probe, out_bytes)
            probe.unlink()
            rounds.append({**found, "copy_s": copy_s, "of_copy": copy_s / found["seconds"]})
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    peak = max(one["peak_bytes"] for one in rounds) - base
    what = " ".join([options.preset, f"from {options.source}", *["listed"] * options.listed, *arguments])
    row = [what, *(f"{middle[name]:.2f}" for name in ("seconds", "cpu_s", "copy_s", "of_copy")), f"{peak / 2**20:.0f}"]
    head = [f"{config.n_layers} layers, {n_bytes / 1e9:.2f} GB", "s", "CPU s", "copy, s", "of copy"]
    lines = format_table([*head, "peak above base, MiB"], [row])
    print(describe_machine("torch", "lt-ckpt"), "", *lines, sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD_ARGUMENT]:
        convert(sys.argv[2:])
    else:
        main()
