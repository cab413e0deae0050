"""Casts beyond the range of the new dtype: refused with the tensor and the count, or allowed by name."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lt_ckpt import CheckpointError, ConvertOptions, convert_checkpoint, open_source
from lt_model import config_to_hf, param_specs

NAME = "model.layers.2.mlp.up_proj.weight"
BF16_MAX = float(torch.finfo(torch.bfloat16).max)
VALUES = {
    ("float32", "f16"): [65519.0, 65520.0, -70000.0, 1e38, float("inf"), float("nan"), 1e-40],
    ("bfloat16", "f16"): [65280.0, 65536.0, -65536.0, BF16_MAX, float("inf"), float("nan"), 1e-40],
    ("float32", "bf16"): [BF16_MAX, 3.4e38, -3.4e38, 3.4028e38, float("-inf"), float("nan"), 1e-44],
    ("float64", "f32"): [3.4e38, 1e39, -1e300, 3.5e38, float("inf"), float("nan"), 1e-320],
}
"""Source and target → one that fits, three that do not, an infinity, no number, one that underflows."""


def make(folder: Path, models, dtype: str, values: list[float]) -> Path:
    config = models.config()
    tensors = {p.name: torch.ones(p.shape, dtype=getattr(torch, dtype)) for p in param_specs(config)}
    tensors[NAME].view(-1)[-len(values) :] = torch.tensor(values, dtype=torch.float64).to(tensors[NAME].dtype)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, dtype=dtype)), encoding="utf-8")
    return folder


@pytest.mark.parametrize("pair", VALUES, ids="-".join)
def test_command_refuses_and_allows(tmp_path: Path, models, monkeypatch, capsys, pair) -> None:
    from lt_ckpt.__main__ import main

    def run(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["lt-ckpt", *map(str, args)])
        return main(), capsys.readouterr().err

    source = make(tmp_path / "hf", models, pair[0], VALUES[pair])
    before = sorted(tmp_path.rglob("*"))
    outputs = {"export": ["export", source, "--out"]}
    outputs |= {to: ["convert", source, "--to", to] for to in ("lt", "nxd", "dcp", "pt")}
    for to, args in outputs.items():
        code, error = run(*args, tmp_path / to, "--dtype", pair[1])
        assert code == 64, to
        assert f"{NAME}: values exceed the range of" in error, to
        assert "--allow-overflow" in error
    # a failed save may leave its (empty) folder of checkpoints
    assert [path for path in sorted(tmp_path.rglob("*")) if path != tmp_path / "lt"] == before
    assert run("export", source, "--out", tmp_path / "out", "--dtype", pair[1], "--allow-overflow")[0] == 0
    assert int(load_file(tmp_path / "out" / "model.safetensors")[NAME].isinf().sum()) == 4
    code, error = run("convert", source, tmp_path / "lt", "--to", "lt", "--dtype", pair[1], "--allow-overflow")
    assert (code, error) == (0, "")


def test_an_overflow_in_any_block_is_found_and_other_tensors_are_cast(tmp_path: Path, models, monkeypatch) -> None:
    source = make(tmp_path / "hf", models, "bfloat16", [70000.0] * 300)
    monkeypatch.setattr("lt_ckpt.laid_out_files.BLOCK_BYTES", 64)
    options = ConvertOptions(format="hf", dtype="F16")
    with pytest.raises(CheckpointError, match=f"{NAME}: values exceed"):
        convert_checkpoint(open_source(source), tmp_path / "out", options)
    saved = convert_checkpoint(open_source(source), tmp_path / "run", ConvertOptions(format="lt"))
    with pytest.raises(CheckpointError, match=f"{NAME}: values exceed"):
        convert_checkpoint(open_source(saved), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    out = convert_checkpoint(open_source(saved), tmp_path / "out", replace(options, allow_overflow=True))
    assert int(load_file(out / "model.safetensors")[NAME].isinf().sum()) == 300
