"""Checkpoints of lt and Hugging Face folders need no torch: they are saved, converted, verified and read without it."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
sys.path.insert(0, sys.argv[1])
from conftest import toy_check, toy_model, toy_save
from lt_ckpt import CheckpointError, ConvertOptions, convert_checkpoint, find_latest_valid, open_source, verify
from lt_ckpt.__main__ import main

root = Path(sys.argv[2])
toy_save(root / "own", 3)
found, rejected = find_latest_valid(root / "own")
assert rejected == []
toy_check(found)
model = toy_model(root / "model")
checkpoint = convert_checkpoint(open_source(model), root / "ck", ConvertOptions(format="lt", dtype="F32"))
assert verify(checkpoint).is_ok
options = ConvertOptions(format="hf", dtype="BF16", max_shard_bytes=2000)
convert_checkpoint(open_source(root / "ck"), root / "hf", options)
for arguments in (["verify", root / "ck"], ["verify", root / "hf", "--against", model], ["diff", root / "hf", model],
                  ["inspect", root / "ck"], ["export", root / "ck", "--out", root / "exported"]):
    sys.argv = ["lt-ckpt", *map(str, arguments)]
    assert main() == 0, arguments
(root / "x.pt").touch()
(root / "dcp").mkdir()
(root / "dcp" / ".metadata").touch()
for path in (root / "x.pt", root / "dcp"):
    try:
        open_source(path, config=model)
    except CheckpointError as exc:
        assert "pip install 'lt-ckpt[torch]'" in str(exc), exc
    else:
        raise AssertionError(path)
assert "torch" not in sys.modules
"""


def test_own_checkpoints_and_hugging_face_folders(tmp_path):
    command = [sys.executable, "-c", CODE, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "tensors are equal" in done.stdout
