"""The locale and what standard output can show change no byte of a checkpoint or an export and stop no command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    begin_save,
    commit_save,
    find_latest_valid,
    write_rank_files,
)
from lt_ckpt.errors import translate_os_errors

TESTS = Path(__file__).parent

# Several commands in one process, separated by `;`: the arguments come from the system, as a user's do.
DRIVER = """
import sys
from lt_ckpt.__main__ import main
given, call = sys.argv[1:], []
for argument in [*given, ";"]:
    if argument != ";":
        call.append(argument)
        continue
    sys.argv = ["lt-ckpt", *call]
    call = []
    code = main()
    if code:
        sys.exit(code)
"""

UTF8 = {"PYTHONUTF8": "1"}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS = {
    "C": {"LC_ALL": "C", "PYTHONWARNDEFAULTENCODING": "1"},  # a file opened without naming its encoding is an error
    "ascii": ASCII,
    "latin-1": {"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0"},
    "ascii output": {**UTF8, "PYTHONIOENCODING": "ascii", "TZ": "Pacific/Apia"},
    "latin-1 output": {**UTF8, "PYTHONIOENCODING": "latin-1", "TZ": ":no/such/zone"},
}
RECIPE = {"run": {"out": "läuft/東京", "note": "caf\udce9"}}
"""The last one is a path with a byte that is not UTF-8, as Python reads it from the command line."""


def run(folder: Path, environment: dict[str, str], *arguments: str, code: str = DRIVER, exit_code: int = 0) -> bytes:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON", "TZ"))}
    command = [os.fsencode(part) for part in (sys.executable, "-W", "error", "-c", code)]
    done = subprocess.run(
        [*command, *(argument.encode() for argument in arguments)],
        cwd=folder,
        env={**plain, **environment},
        capture_output=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr.decode(errors="replace")
    return done.stderr if exit_code else done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def latin_locale(tmp_path_factory):
    """A locale whose file names and output are ISO 8859-1, made here: machines seldom have one."""
    folder = tmp_path_factory.mktemp("locales")
    if not shutil.which("localedef"):
        pytest.skip("no localedef here: nothing was tried under a locale of ISO 8859-1")
    command = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(folder / "de_DE.ISO-8859-1")]
    made = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if not (folder / "de_DE.ISO-8859-1").exists():
        pytest.skip(f"localedef made no locale of ISO 8859-1 ({made.stderr.strip()}): nothing was tried under one")
    return {"LOCPATH": str(folder)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with a checkpoint of a small model, both with names in several scripts, and its export."""
    pytest.importorskip("torch", reason="the model is made with torch")
    sys.path.insert(0, str(TESTS))
    from test_export import config, save_model  # pyright: ignore[reportMissingImports]

    sys.path.pop(0)
    top = tmp_path_factory.mktemp("locale")
    tokenizer = {"tokenizer_config.json": json.dumps({"note": "東京 ä"}, ensure_ascii=False).encode()}
    save_model(top / "läuft-東" / "checkpoints", config(), tokenizer=tokenizer)
    run(top, UTF8, "export", "läuft-東", "--out", "hf-ü")
    return top


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_command_prints_and_exports_the_same(saved, name, request):
    environment = ENVIRONMENTS[name]
    if name == "latin-1":
        environment = {**environment, **request.getfixturevalue("latin_locale")}
    out = f"aus-ä-{name}"
    printed = run(
        saved,
        environment,
        *("inspect", "läuft-東", ";", "verify", "läuft-東", ";"),
        *("export", "läuft-東", "--out", out, "--dtype", "f32"),
    )
    assert contents(saved / out) == contents(saved / "hf-ü")
    as_json = json.loads(run(saved, environment, "inspect", "läuft-東", "--json"))
    assert as_json["step"] == 7
    missing = run(saved, environment, "inspect", "fehlt-東", exit_code=64)
    assert missing.startswith(b"error: fehlt-")
    assert missing.count(b"\n") == 1
    if name in ("ascii", "ascii output"):
        assert printed.isascii()
        assert missing.isascii()
        assert (rb"l\xe4uft-\u6771" if name == "ascii output" else rb"l\udcc3\udca4uft-\udce6\udc9d\udcb1") in printed
    elif name == "latin-1 output":
        assert "läuft-".encode("latin-1") + rb"\u6771" in printed
    elif name == "latin-1":
        given = "läuft-東".encode().replace(b"\x9d", rb"\x9d")
        assert given in printed, "the bytes that were given, but for one that is a control character there"
    else:
        assert "läuft-東".encode() in printed, "the bytes that were given"


def test_help_prints_on_an_ascii_output(tmp_path):
    for command in ("inspect", "verify", "export"):
        assert b"--help" in run(tmp_path, ASCII, command, "--help")


SAVE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from conftest import toy_save
toy_save(Path(sys.argv[1]), 3)
"""


@pytest.mark.parametrize("name", ["C", "ascii", "latin-1"])
def test_a_save_is_the_same(tmp_path, toy, name, request):
    environment = ENVIRONMENTS[name]
    if name == "latin-1":
        environment = {**environment, **request.getfixturevalue("latin_locale")}
    run(tmp_path, environment, "kört-東", code=SAVE)
    found, rejected = find_latest_valid(tmp_path / "kört-東")
    assert found is not None
    assert rejected == []
    toy.check(found)
    here = Checkpoint.open(toy.save(tmp_path / "here", 3))
    assert found.manifest.tensors == here.manifest.tensors
    own = {"save.json", *(f"part-0000{rank}.json" for rank in range(2))}  # they hold the save's token
    assert {name: record for name, record in found.manifest.files.items() if name not in own} == {
        name: record for name, record in here.manifest.files.items() if name not in own
    }


def test_a_path_that_is_not_utf8_does_not_stop_a_save(tmp_path):
    tmp = begin_save(tmp_path, step=1, world_size=1)
    write_rank_files(tmp, rank=0, shards=[])
    path = commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=1, recipe=RECIPE))
    assert Checkpoint.open(path).manifest.recipe == RECIPE
    raw = (path / "manifest.json").read_bytes()
    assert json.loads(raw.decode("utf-8"))["recipe"] == RECIPE
    assert "läuft/東京".encode() in raw
    assert rb"caf\udce9" in raw
    for environment in (UTF8, ASCII):
        assert json.loads(run(tmp_path, environment, "inspect", ".", "--json"))["recipe"] == RECIPE


def test_a_name_that_the_locale_cannot_express_is_said(tmp_path):
    code = "import lt_ckpt; lt_ckpt.begin_save('k\\u00f6rt', step=1, world_size=1)"
    said = run(tmp_path, ASCII, code=code, exit_code=1).decode()
    assert "CheckpointError: " in said
    assert "k\\xf6rt: beginning a save failed: under this locale file names are ascii" in said
    assert said.rstrip().endswith("set LC_ALL=C.UTF-8")
    with pytest.raises(CheckpointError, match="are latin-1, which"), translate_os_errors("reading", "東"):
        "東".encode("latin-1")
