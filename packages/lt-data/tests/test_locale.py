"""The locale, the time zone and what standard output can show change no byte of a store and stop no command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lt_data import DataError, TokenStore
from lt_data.file_names import to_local_name, to_portable_name
from lt_data.storage import translate_os_errors

# Several commands in one process, separated by `;`: the arguments come from the system, as a user's do.
DRIVER = """
import sys
from lt_data.__main__ import main
given, call = sys.argv[1:], []
for argument in [*given, ";"]:
    if argument != ";":
        call.append(argument)
        continue
    sys.argv = ["lt-data", *call]
    call = []
    code = main()
    if code:
        sys.exit(code)
    print(end="\\x1e", flush=True)
"""

UTF8 = {"PYTHONUTF8": "1"}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS = {
    "C": {"LC_ALL": "C", "PYTHONWARNDEFAULTENCODING": "1"},  # a file opened without naming its encoding is an error
    "ascii": ASCII,
    "ascii output": {**UTF8, "PYTHONIOENCODING": "ascii", "TZ": "Pacific/Apia"},
}
SEQ_LEN = 16
MAKE = (
    *("train-tokenizer", "../körpus", "--vocab-size", "300", "--out", "tök", ";"),
    *("prepare", "../körpus", "--tokenizer", "tök", "--out", "störe", ";"),
    *("pack", "störe", "--seq-len", str(SEQ_LEN), ";"),
    *("verify", "störe", ";", "stats", "störe", ";", "pack", "--help"),
)
INSPECT = ("inspect", "störe", "--rows", "0:2")


def run(folder: Path, environment: dict[str, str], *arguments: str) -> list[bytes]:
    """What each of the commands prints."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON", "TZ"))}
    command = [os.fsencode(part) for part in (sys.executable, "-W", "error", "-c", DRIVER)]
    done = subprocess.run(
        [*command, *(argument.encode() for argument in arguments)],
        cwd=folder,
        env={**plain, **environment},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.split(b"\x1e")[:-1]


def contents(folder: Path) -> dict[bytes, bytes]:
    return {os.fsencode(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with names and texts in several scripts, and what is made of it under UTF-8, with a run that read it."""
    top = tmp_path_factory.mktemp("localé")
    corpus = top / "körpus"
    (corpus / "日本").mkdir(parents=True)
    texts = {"ä.txt": "naïve text 東京 🦊 one two three\n", "日本/文.txt": "second ünïcode\n", "z": "no suffix"}
    texts |= {"z.jsonl": '{"text": "drei ä"}\n{"text": "\\ud83e\\udd8a"}\n', "\uff21.txt": "wide", "🦊.txt": "fox"}
    for name, text in texts.items():
        (corpus / name).write_text(text, encoding="utf-8")
    for name in (b"caf\xe9.txt", b"caf\xf5.txt", b"\xff.txt"):  # bytes that no UTF-8 has
        try:
            Path(os.fsdecode(os.fsencode(corpus) + b"/" + name)).write_text(f"{name!r}", encoding="utf-8")
        except OSError:
            assert sys.platform == "darwin"  # its file systems have Unicode names only
    (top / "made").mkdir()
    run(top / "made", UTF8, *MAKE)
    return top


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_store_is_the_same_and_every_command_prints(reference: Path, name: str) -> None:
    folder = Path(os.fsdecode(os.fsencode(reference) + b"/" + name.encode()))
    folder.mkdir()
    *made, shown, as_json = run(folder, ENVIRONMENTS[name], *MAKE, ";", *INSPECT, ";", *INSPECT, "--json")
    out = b"".join(made)
    assert contents(folder) == contents(reference / "made")
    assert any("東京" in span["text"] for row in json.loads(as_json) for span in row["spans"])
    if name == "C":
        assert "störe" in out.decode()
        assert "東京" in shown.decode()
    else:
        assert (out + shown).isascii()
        assert b"\\u" in shown
        assert (b"st\\xf6re" if name == "ascii output" else b"st\\udcc3\\udcb6re") in out


def test_sources_are_in_the_order_of_their_bytes(reference: Path) -> None:
    manifest = TokenStore(reference / "made" / "störe").manifest
    names = [file.path.encode("utf-8", "surrogateescape") for file in manifest.sources.listed]
    assert names == sorted(names)
    assert {"../körpus/ä.txt".encode(), "../körpus/日本/文.txt".encode()} <= set(names)
    assert manifest.tokenizer.name == "tök"
    if sys.platform == "linux":
        assert "../körpus/caf".encode() + b"\xe9.txt" in names


def test_portable_names_are_the_same_text_everywhere(reference: Path) -> None:
    code = "import os; from lt_data.file_names import to_local_name, to_portable_name; names = os.listdir('.'); "
    code += "assert [to_local_name(to_portable_name(name)) for name in names] == names; "
    code += "print(sorted(map(ascii, map(to_portable_name, names))))"
    seen = set()
    for environment in (UTF8, ASCII):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=reference / "körpus",
            env={**environment, "PATH": os.environ["PATH"]},
            capture_output=True,
            check=True,
        )
        seen.add(done.stdout)
    assert len(seen) == 1
    assert to_portable_name("ä") == to_local_name("ä") == "ä"
    assert to_portable_name("caf\udce9") == "caf\udce9"


def test_a_name_that_the_locale_cannot_express_is_said(tmp_path: Path) -> None:
    code = "import lt_data; lt_data.TokenStore('st\\u00f6re')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ASCII, capture_output=True, encoding="utf-8", check=False
    )
    assert (
        "DataError: cannot read the token store's st\\xf6re/manifest.json: the locale encodes file names" in done.stderr
    )
    assert "set LC_ALL=C.UTF-8" in done.stderr
    with pytest.raises(DataError, match="as ascii, which"), translate_os_errors("open", "ä"):
        "ä".encode("ascii")
