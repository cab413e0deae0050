"""Every package builds, and its wheel alone in an empty venv imports, without a sibling it did not ask for.

The venvs take our wheels from a folder and everything else from the package index, as a user's pip would.
"""

import json
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
SIBLINGS = {
    "lt-data": set(),
    "lt-model": set(),
    "lt-ckpt": {"lt-model"},
    "lt-trainer": {"lt-data", "lt-model", "lt-ckpt"},
    "lt-trainer-gpu": {"lt-trainer", "lt-data", "lt-model", "lt-ckpt"},
    "lt-trainer-neuron": {"lt-trainer", "lt-data", "lt-model", "lt-ckpt"},
    "lt-launch": {"lt-ckpt", "lt-data", "lt-model", "lt-trainer"},
}
NEEDS_TORCH = {"lt-trainer-gpu"}
SDIST_FILES = {"LICENSE", "PKG-INFO", "pyproject.toml", "pyproject.toml.orig", "README.md"}
"""What an sdist has beside the sources; the one with .orig is what its maker was given."""
HEAVY_PACKAGES = ["torch", "transformers", "boto3", "datasets", "matplotlib"]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    run("uv", "build", "--all-packages", "--no-sources", "--out-dir", out, cwd=ROOT)
    return out


@pytest.fixture
def install(wheels: Path, tmp_path: Path):
    def install_package(requirement: str) -> tuple[Path, list[dict[str, str]]]:
        """A fresh venv with one of our packages in it: its interpreter and what was installed."""
        name, _, extra = requirement.partition("[")
        (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
        venv = tmp_path / "venv"
        run("uv", "venv", "--quiet", "--python", sys.executable, venv, cwd=tmp_path)
        python = venv / "bin" / "python"
        target = f"{name}{'[' + extra if extra else ''} @ file://{wheel}"
        run("uv", "pip", "install", "--quiet", "--python", python, "--find-links", wheels, target, cwd=tmp_path)
        return python, json.loads(run("uv", "pip", "list", "--python", python, "--format", "json", cwd=tmp_path))

    return install_package


def test_every_package_is_listed_here() -> None:
    assert set(SIBLINGS) == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_and_sdist_carry_the_package_and_nothing_else(wheels: Path, package: str) -> None:
    module = package.replace("-", "_")
    (wheel,) = wheels.glob(f"{module}-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {
        str(path.relative_to(ROOT / "packages" / package / "src"))
        for path in (ROOT / "packages" / package / "src").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    ours = {name for name in names if not name.split("/")[0].endswith(".dist-info") and not name.endswith("/")}
    assert ours == sources
    assert f"{module}/py.typed" in names
    (info,) = {name.split("/")[0] for name in names} - {module}
    assert zipfile.ZipFile(wheel).read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    (sdist,) = wheels.glob(f"{module}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {part.name.partition("/")[2] for part in archive.getmembers() if part.isfile()}
    assert {f"src/{name}" for name in sources} <= inside
    assert {name for name in inside if not name.startswith("src/")} <= SDIST_FILES


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_alone_imports(install, package: str, tmp_path: Path) -> None:
    python, installed = install(package)
    names = {entry["name"] for entry in installed}
    assert {name for name in names if name.startswith("lt-")} == {package} | SIBLINGS[package]
    if package not in NEEDS_TORCH:
        assert "torch" not in names
    module = package.replace("-", "_")
    script = f"import sys, {module}; print([m for m in {HEAVY_PACKAGES!r} if m in sys.modules])"
    assert run(python, "-W", "error", "-c", script, cwd=tmp_path).strip() == "[]"


def test_lt_data_alone_prepares_packs_and_streams(install, tmp_path: Path) -> None:
    """The user's wish: import just lt-data elsewhere. At most 30 distributions, no torch, no sibling."""
    python, installed = install("lt-data")
    assert len(installed) <= 30, [entry["name"] for entry in installed]
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i:02}.txt").write_text(f"Document {i}. " + "The quick brown fox jumps over the lazy dog. " * (i + 1))
    script = tmp_path / "use.py"
    script.write_text(
        textwrap.dedent(
            """
            from lt_data import RowReader, Stream, TokenStore, Tokenizer, pack, prepare
            from lt_data.sources.reader import read_documents

            if __name__ == "__main__":
                tokenizer = Tokenizer.train((d.text for d in read_documents(["text"])), vocab_size=300)
                prepare(["text"], tokenizer=tokenizer, out="store", workers=2)
                store = TokenStore("store")
                store.verify()
                index = pack(store, seq_len=32, mode="bfd")
                stream = Stream(RowReader(store, index), global_batch_size=4, seed=1)
                batch = stream.next()
                assert batch.rows.input_ids.shape == (4, 32)
                assert batch.valid_tokens == int((batch.rows.labels != -100).sum()) > 0
                print(store.n_documents, int(index.valid.sum()) == store.n_tokens - store.n_documents)
            """
        )
    )
    assert run(python, "-W", "error", script, cwd=tmp_path).split() == ["20", "True"]


@pytest.mark.parametrize(
    ("requirement", "command"),
    [
        ("lt-data[cli]", "lt-data"),
        ("lt-model[cli]", "lt-model"),
        ("lt-ckpt[cli]", "lt-ckpt"),
        ("lt-trainer[cli]", "lt-train"),
        ("lt-launch", "lt"),
    ],
)
def test_console_script_alone(install, requirement: str, command: str, tmp_path: Path) -> None:
    python, _ = install(requirement)
    assert "Usage" in run(python.parent / command, "--help", cwd=tmp_path)


@pytest.mark.parametrize(
    ("package", "command"),
    [("lt-data", "lt-data"), ("lt-model", "lt-model"), ("lt-ckpt", "lt-ckpt"), ("lt-trainer", "lt-train")],
)
def test_console_script_without_typer_names_the_extra(install, package: str, command: str, tmp_path: Path) -> None:
    python, installed = install(package)
    if any(entry["name"] == "typer" for entry in installed):
        run("uv", "pip", "uninstall", "--quiet", "--python", python, "typer", cwd=tmp_path)
    done = subprocess.run(
        [python.parent / command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 64, done
    assert f"pip install '{package}[cli]'" in done.stderr
