"""What a model is besides its tensors comes back through every format: configuration, tokenizer, chat template.

The models are published ones (`data/published_models.json` says where its values are from) with small weights.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lt_ckpt import CheckpointError, ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.checksums import iter_damages
from lt_ckpt.folders import remove_checkpoint
from lt_ckpt.integrity import verify
from lt_ckpt.model_files import find_differences, with_architecture
from lt_ckpt.nxd.options import NxdOptions
from lt_model import config_from_hf, param_specs

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_models.json").read_text(encoding="utf-8"))
MODELS = [name for name in PUBLISHED if name != "about"]
SHRUNK = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
FORMATS = {
    "lt": ConvertOptions(format="lt"),
    "nxd tag": ConvertOptions(format="nxd", nxd=NxdOptions(tp=2, pp=2, tag="step_3", xser=True)),
    "dcp": ConvertOptions(format="dcp"),
    "pt": ConvertOptions(format="pt"),
}


def tokenizer_json(special: dict[str, int]) -> dict[str, Any]:
    """Return a tokenizer with the special tokens and the bytes of ASCII."""
    free = [i for i in range(3, 200) if i not in special.values()]
    vocab = {chr(c): free[c - 32] for c in range(32, 127)}
    added = [
        {"id": i, "content": t, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        | {"single_word": False}
        for t, i in special.items()
    ]
    model = {"type": "BPE", "vocab": {**vocab, **special}, "merges": []}
    return {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": None, "model": model} | {
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "decoder": None,
    }


def make(folder: Path, name: str) -> Path:
    """Write a published model with small weights; other files as published."""
    files = PUBLISHED[name]
    config = {**files["config.json"], **SHRUNK}
    config["num_key_value_heads"] = min(2, config["num_key_value_heads"])
    if "head_dim" in config:
        config["head_dim"] = 8
    folder.mkdir()
    dtype, generator = getattr(torch, config["torch_dtype"]), torch.Generator().manual_seed(0)
    tensors = {p.name: torch.randn(p.shape, generator=generator).to(dtype) for p in param_specs(config_from_hf(config))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    contents = {**files, "config.json": config, "tokenizer.json": tokenizer_json(files["special_tokens"])}
    del contents["special_tokens"]
    for file, value in contents.items():
        text = value if isinstance(value, str) else json.dumps(value, indent=2)
        (folder / file).write_text(text, encoding="utf-8")
    return folder


def through(source: Path, root: Path, name: str) -> tuple[Path, Path]:
    """Convert a Hugging Face folder to a format and back; return both outputs."""
    options = FORMATS[name]
    middle = root / ("middle.pt" if options.format == "pt" else "middle")
    convert_checkpoint(open_source(source), middle, options)
    config = source if options.format == "pt" else None  # such a file carries none
    back = convert_checkpoint(open_source(middle, config=config), root / "back", ConvertOptions(format="hf"))
    return middle, back


def read(folder: Path) -> dict[str, Any]:
    return {
        path.name: json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else path.read_bytes()
        for path in folder.iterdir()
        if path.suffix != ".safetensors" and path.name != "SHA256SUMS"
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("published")
    return lambda name: root / name if (root / name).exists() else make(root / name, name)


@pytest.mark.parametrize("through_format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_every_file_of_a_published_model_comes_back(tmp_path: Path, published, name: str, through_format: str) -> None:
    start = published(name)
    middle, back = through(start, tmp_path, through_format)
    assert read(back) == read(start)
    for path in (middle, back) if through_format != "pt" else (back,):
        assert list(find_differences(open_source(path), open_source(start))) == []


CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bos": ("config.json", {"bos_token_id": 5}, "configuration: bos_token_id is 128000, in .* 5"),
    "eos": ("config.json", {"eos_token_id": [128001]}, "configuration: eos_token_id is 128009, in .* 128001"),
    "generation": ("generation_config.json", {"eos_token_id": [128001]}, r"eos_token_id is \[128001, 128009\]"),
    "template": ("tokenizer_config.json", {"chat_template": "{{ x }}"}, "chat_template is "),
    "vocabulary": ("tokenizer.json", {"version": "2.0"}, "version is '1.0', in .* '2.0'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_verify_against_finds_what_differs(tmp_path: Path, published, monkeypatch, capsys, change: str) -> None:
    from lt_ckpt.__main__ import main

    def verify(path: Path, other: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["lt-ckpt", "verify", str(path), "--against", str(other)])
        return main(), capsys.readouterr().out

    start, other = published("llama-3-8b-instruct"), tmp_path / "other"
    other.mkdir()
    for path in start.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    code, out = verify(start, other)
    assert code == 0, out
    assert "every tensor and model file equal" in out
    file, values, message = CHANGES[change]
    changed = {**json.loads((other / file).read_text()), **values, "transformers_version": "9", "_name_or_path": "x"}
    (other / file).write_text(json.dumps(changed), encoding="utf-8")
    code, out = verify(start, other)
    assert code == 64
    (line,) = [line for line in out.splitlines() if line.startswith("broken: ")]
    assert re.search(message, line), line
    (other / file).unlink()
    if file != "config.json":
        assert f"broken: {file}: not in {other}" in verify(start, other)[1]


def test_files_beside_a_given_configuration_belong_to_the_model(tmp_path: Path, published) -> None:
    start = published("llama-3-8b-instruct")
    convert_checkpoint(open_source(start), tmp_path / "nxd", ConvertOptions(format="nxd", nxd=NxdOptions(tp=2)))
    for path in (tmp_path / "nxd").iterdir():
        if path.is_file():
            path.unlink()  # as NxD itself writes
    with pytest.raises(CheckpointError, match="no model configuration"):
        open_source(tmp_path / "nxd")
    out = convert_checkpoint(
        open_source(tmp_path / "nxd", config=start / "config.json"), tmp_path / "hf", ConvertOptions(format="hf")
    )
    assert read(out) == read(start)


TEMPLATES = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}", "rag-2.0_x": "{{ documents }}"}


@pytest.mark.parametrize("through_format", ["lt", "nxd tag"])
def test_named_chat_templates_come_back(tmp_path: Path, published, through_format: str) -> None:
    from transformers import AutoTokenizer

    start = shutil.copytree(published("llama-3-8b-instruct"), tmp_path / "start")
    written = AutoTokenizer.from_pretrained(start)
    written.chat_template = dict(TEMPLATES)
    written.save_pretrained(start)
    assert len(list((start / "additional_chat_templates").iterdir())) == 2
    middle, back = through(start, tmp_path, through_format)
    assert AutoTokenizer.from_pretrained(back).chat_template == TEMPLATES
    for path in (middle, back) if through_format != "pt" else (back,):
        assert list(find_differences(open_source(path), open_source(start))) == []
        assert list(iter_damages(open_source(path))) == []
    (back / "additional_chat_templates" / "tool_use.jinja").write_text("{{ x }}")
    with pytest.raises(CheckpointError, match=r"additional_chat_templates/tool_use\.jinja"):
        open_source(back)
    if through_format == "lt":
        [step] = middle.glob("step-*") if not (middle / "COMMIT").exists() else [middle]
        assert verify(step).is_loadable
        assert remove_checkpoint(step)
        assert not step.exists()


def test_a_trained_architecture_keeps_the_rest_of_the_configuration() -> None:
    config = PUBLISHED["llama-3.2-1b-instruct"]["config.json"]
    model = config_from_hf({**config, "vocab_size": 128300, "rope_theta": 1e6, "rope_scaling": None})
    changed = with_architecture(config, model)
    assert config_from_hf(changed) == model
    assert changed["eos_token_id"] == [128001, 128008, 128009]
    assert {name for name, value in changed.items() if config.get(name) != value} == {
        "vocab_size",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    }
    assert with_architecture(config, config_from_hf(config)) == config
