"""Wrong limits, too little memory, links out of a model's folder, and files that cost more than their size."""

import json
import shutil
import subprocess
import sys
import time
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from lt_ckpt import CheckpointError
from lt_ckpt.dcp.metadata import parse_metadata
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.hash_list import HASH_LIST
from lt_ckpt.nxd.zero1_reshard import reshard_optimizer
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import load_pt
from lt_ckpt.torchfile.pickle_writer import dumps
from lt_ckpt.torchfile.safe_globals import make_tensor_node, to_pickle_node
from lt_ckpt.torchfile.safe_pickle import loads

ZERO = Path(__file__).parent / "data" / "nxd" / "llama2-mha-tp2-dp2-zero1"


@pytest.fixture(scope="module")
def model(memory, models):
    return models.make(memory / "limits", n_layers=1)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1", "1e-10", "1e300"])
def test_an_impossible_shard_size_is_refused(tmp_path, model, value):
    from typer.testing import CliRunner

    from lt_ckpt.cli import app

    for line in (
        ["convert", model, tmp_path / "out", "--to", "dcp", f"--max-shard-gb={value}"],
        ["export", model, "--out", tmp_path / "out", f"--max-shard-gb={value}"],
    ):
        result = CliRunner().invoke(app, [str(word) for word in line])
        assert isinstance(result.exception, CheckpointError), (line, result.exception)
        assert f"--max-shard-gb {float(value)}" in str(result.exception)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("n_bytes", [0, -1, 1.5, float("nan")])
def test_options_refuse_an_impossible_shard_size(n_bytes):
    with pytest.raises(CheckpointError, match="max_shard_bytes"):
        ConvertOptions(format="dcp", max_shard_bytes=n_bytes)


LIMITED = """
import resource, sys
from pathlib import Path
from lt_ckpt.__main__ import main
import lt_ckpt.cli.convert, lt_ckpt.conversion, lt_ckpt.torchfile.format, lt_ckpt.comparison
from lt_ckpt.formats import open_source
open_source({model!r})  # loads what is loaded on demand
sys.argv = ["lt-ckpt", "convert", "absent", "absent", "--to", "pt"]
main()  # and what typer loads
limit = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + {extra} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.argv = ["lt-ckpt", "convert", {model!r}, {out!r}, "--to", "pt"]
sys.exit(main())
"""


@pytest.mark.parametrize("extra", [0, 16, 48])
def test_too_little_memory_is_named_as_such(tmp_path, model, extra):
    code = LIMITED.format(extra=extra, model=str(model), out=str(tmp_path / "out.pt"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (64, False), done.stderr
    assert "too little memory" in done.stderr
    assert "check the path" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_does_not_fit_into_memory_is_no_internal_error(monkeypatch, capsys):
    from lt_ckpt import __main__, cli

    def load(text):
        raise ImportError(text)

    for text, code in (
        ("libx.so.1: failed to map segment from shared object", 64),
        ("libx.so.1: cannot map: Cannot allocate memory", 64),
        ("cannot import name 'x'", 70),
    ):
        monkeypatch.setattr(cli, "app", lambda prog_name, text=text: load(text))
        assert __main__.main() == code
        assert ("too little memory" in capsys.readouterr().err) == (code == 64)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_link_out_of_a_model_is_not_followed(tmp_path, models, name):
    folder = models.make(tmp_path / "model", n_layers=1)
    secret = tmp_path / "secret"
    secret.write_text('{"key": 1}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"{name}: is a link to"):
        convert_checkpoint(open_source(folder), tmp_path / "out", ConvertOptions(format="hf"))
    (folder / name).unlink()
    (folder / "own").write_text('{"eos_token_id": 1}')
    (folder / name).symlink_to("own")
    convert_checkpoint(open_source(folder), tmp_path / "out", ConvertOptions(format="hf"))
    assert not (tmp_path / "out" / name).is_symlink()


@pytest.mark.parametrize("name", ["hf", "hf in shards", "dcp", "nxd", "nxd xser", "nxd v1"])
def test_configuration_and_weights_are_not_taken_from_elsewhere(tmp_path, models, name):
    out = models.output(models.make(tmp_path / "model", n_layers=2), tmp_path / "out", name)
    root = open_source(out).root
    (root / HASH_LIST).unlink()
    weights = {root / s.file for slices in open_source(out).weights.locations.values() for s in slices}
    for path in (root / "config.json", *root.glob("*.index.json"), min(weights)):
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=f"{path.name}: is a link to {tmp_path}/elsewhere, outside"):
            open_source(out)
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
    open_source(out)


def test_optimizer_states_are_not_taken_from_elsewhere(tmp_path):
    folder = shutil.copytree(ZERO / "nxd-plain", tmp_path / "zero")
    path = min(folder.rglob("optim/*.pt"))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{path.name}: is a link to"):
        reshard_optimizer(
            folder, tmp_path / "out", dp=1, config=json.loads((ZERO / "hf-start" / "config.json").read_text())
        )
    assert not (tmp_path / "out").exists()


def test_a_link_that_is_named_itself_is_followed(tmp_path, models, model):
    for name, target in (("folder", model), ("config.json", model / "config.json")):
        (tmp_path / name).symlink_to(target)
    assert open_source(tmp_path / "folder").config == open_source(model, config=tmp_path / "config.json").config
    torch_file = models.output(model, tmp_path / "made", "pt")
    (tmp_path / "link.pt").symlink_to(torch_file)
    assert open_source(tmp_path / "link.pt").config == open_source(torch_file).config


def test_links_of_a_hub_cache_are_followed(tmp_path, models):
    made = models.make(tmp_path / "made", n_layers=1)
    (made / "tokenizer.json").write_text("{}")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in made.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert open_source(snapshot).aux_files["tokenizer.json"] == b"{}"


def test_a_long_key_costs_its_own_length(tmp_path):
    spec, n = TensorSpec("F32", (1,)), 20_000
    tree = {"k" * 2**20: {f"{i}": spec for i in range(n)}}
    content = dumps(to_pickle_node(tree, lambda leaf: make_tensor_node("0", leaf)))
    with zipfile.ZipFile(tmp_path / "long.pt", "w") as file:
        for name, data in (("data.pkl", content), ("version", b"3\n"), ("data/0", bytes(4))):
            file.writestr(f"archive/{name}", data)
    start = time.process_time()
    assert len(load_pt(tmp_path / "long.pt")["k" * 2**20]) == n
    assert time.process_time() - start < 4


@pytest.mark.parametrize(
    "unit",
    [b"]", b"}", b"]\x94", b"}NNs", b"\x94", b"(", b"N\x85", b"K\0r%b"],
    ids=["list", "dict", "kept list", "filled dict", "memo", "mark", "tuple", "numbered memo"],
)
@pytest.mark.parametrize("read", [lambda data: parse_metadata(data, "x"), lambda data: loads(data, {}, "x")])
def test_memory_of_a_pickle_is_bounded_by_its_size(unit, read):
    n = 200_000 // len(unit)
    numbered = b"".join(b"r" + i.to_bytes(4, "little") for i in range(40_000))
    data = b"\x80\2N" + (numbered if b"%b" in unit else unit * n) + b"."
    tracemalloc.start()
    try:
        with suppress(CheckpointError):
            read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**19 + 140 * len(data)
