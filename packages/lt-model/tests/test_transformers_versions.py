"""What we write is read by the oldest transformers that has the family, and by the newest; needs a package index."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from family_models import CASES, DEFAULT, SHAPE, YARN, NoFloat32, make_config, make_model, our_tensors  # noqa: E402

from lt_model import Decoder, config_from_hf, config_to_hf  # noqa: E402
from lt_model.families import FAMILIES  # noqa: E402

READER = Path(__file__).parent / "helpers" / "read_folder.py"
NOT_YET = {
    "qwen2, window from layer 2": {"use_sliding_window": False},
    "qwen3, yarn, head 12": {"rope_parameters": {**YARN, "original_max_position_embeddings": 16}},
    "deepseek_v3, yarn, groups": {
        "rope_parameters": {**YARN, "mscale_all_dim": 1.3, "original_max_position_embeddings": 16}
    },
    "deepseek_v3, queries of the stream": {"q_lora_rank": 20},
    "gpt_oss, window 6": {
        "swiglu_limit": 7.0,
        "rope_parameters": {**YARN, "truncate": False, "original_max_position_embeddings": 16},
    },
    "phi3, partial": {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 1.0}},
}
"""Changes of a case for what the oldest versions do not have.

Qwen's windows outside of flash attention, yarn's factor where it is not new by original positions, parts of Phi-3's
heads, DeepSeek's queries without a latent (from 4.53 on), other limits of gpt-oss than 7.
"""


def write_model(config, folder):
    """Write a model with our config.json and transformers' tensors; return ours."""
    with NoFloat32():
        theirs = make_model(config)
    theirs.float().save_pretrained(folder)
    config = config_from_hf(theirs.config.to_dict())
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    (folder / "generation_config.json").unlink(missing_ok=True)
    ours = Decoder(config).double()
    state = {name: tensor.double() for name, tensor in our_tensors(theirs.state_dict(), config).items()}
    ours.load_state_dict(state, strict=not config.tie_word_embeddings)
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("version", sorted({row.since for row in FAMILIES.values()} | {"newest"}))
def test_exports_are_read_alike(version, tmp_path):
    packages = tmp_path / "packages"
    if version != "newest":
        if shutil.which("uv") is None:
            pytest.skip("uv is missing, which installs the old transformers")
        command = ["uv", "pip", "install", "-q", "--python", sys.executable, "--target", str(packages)]
        done = subprocess.run([*command, f"transformers~={version}.0"], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"transformers {version} cannot be installed here: {done.stderr.strip()[-300:]}")
    cases = [case for case, (family, _) in CASES.items() if version in ("newest", FAMILIES[family].since)]
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(7))
    torch.save(ids, tmp_path / "ids.pt")
    models = {tmp_path / str(number): case for number, case in enumerate(cases)}
    changes = NOT_YET if version != "newest" else {}
    wanted = {
        folder: write_model(make_config(case, **changes.get(case, {})), folder)(ids) for folder, case in models.items()
    }
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(READER), str(tmp_path / "ids.pt"), *map(str, models)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(transformers.__version__ if version == "newest" else version)
    worst = {}
    for folder, case in models.items():
        found = torch.load(folder / "logits.pt")
        worst[case] = ((found - wanted[folder]).abs().max() / wanted[folder].abs().max()).item()
    assert max(worst.values()) < 1e-4, worst
