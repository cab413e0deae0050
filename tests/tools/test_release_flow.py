"""The whole way of a release, rehearsed on a copy of this workspace against a package index on this machine.

What runs is what people and the workflow run: tools/release.py, tools/release_check.py, tools/artifacts.py,
`uv publish`, then installations by name. Our packages come from the local index (pypiserver), the others from where
they always come from. About twenty CPU-seconds; with torch 2.9 for real it is marked slow.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from members import ROOT, read_members
from package_index import published_versions
from small_workspace import git, replace_text

MEMBER_NAMES = sorted(read_members())
REFRESH = [part for name in MEMBER_NAMES for part in ("--refresh-package", name)]


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class ReleaseWorkspace:
    """A copy of the workspace with a history of its own, and an index that has nothing yet."""

    def __init__(self, root: Path, index: str) -> None:
        self.root, self.index = root, index

    def run_tool(self, name: str, *arguments: str | Path, code: int = 0) -> str:
        return run(sys.executable, self.root / "tools" / f"{name}.py", *arguments, cwd=self.root, code=code)

    def commit(self, message: str) -> None:
        git("add", ".", cwd=self.root)
        git("commit", "--quiet", "-m", message, cwd=self.root)

    def release(self, package: str, move: str, *options: str) -> str:
        """Prepare, commit, tag; returns the tag."""
        told = self.run_tool("release", package, move, "--date", "2026-03-04", *options)
        self.commit(f"Release {package}")
        tag = f"{package}-v{read_members(self.root)[package].version}"
        assert f"git tag {tag} && git push origin {tag}" in told
        git("tag", tag, cwd=self.root)
        return tag

    def publish(self, tag: str, *, alone: bool) -> None:
        """What the workflow of a tag does: check, build and try, upload."""
        package, _, version = tag.rpartition("-v")
        assert self.run_tool("release_check", tag, "--index", self.index) == f"package={package}\nversion={version}\n"
        out = self.root.parent / f"dist-{tag}"
        if alone:
            told = self.run_tool("artifacts", package, "--out", out, "--index", self.index)
            assert told.count("installs alone") == 2
        else:
            run("uv", "build", "--quiet", "--no-sources", "--package", package, "--out-dir", out, cwd=self.root)
        assert self.run_tool("release_check", tag, "--notes").startswith("### ") or package == "lt-data"
        base = self.index.removesuffix("simple")
        credentials = ["--username", "rehearsal", "--password", "rehearsal", "--trusted-publishing", "never"]
        run("uv", "publish", "--quiet", "--publish-url", base, *credentials, *out.glob("lt_*"), cwd=self.root)

    def create_environment(self, name: str, *wanted: str) -> tuple[Path, dict[str, str]]:
        """An environment with what was asked for by name: its interpreter and what is in it."""
        python = self.root.parent / name / "bin" / "python"
        run("uv", "venv", "--quiet", "--python", sys.executable, python.parents[1], cwd=self.root.parent)
        command = ["uv", "pip", "install", "--quiet", "--python", python, "--index", self.index, *REFRESH, *wanted]
        run(*command, cwd=self.root.parent)
        lines = run("uv", "pip", "freeze", "--python", python, cwd=self.root.parent).splitlines()
        return python, dict(line.split("==", 1) for line in lines if "==" in line)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A package index that takes uploads from anybody on this machine and knows nothing else."""
    if importlib.util.find_spec("pypiserver") is None:
        pytest.skip("pypiserver is not installed: the rehearsal of a release did not run")
    folder = tmp_path_factory.mktemp("index")
    probe = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"
    port = run(sys.executable, "-c", probe, cwd=folder).strip()
    command = [sys.executable, "-m", "pypiserver", "run", "--port", port, "--interface", "127.0.0.1"]
    command += ["--passwords", ".", "--authenticate", ".", "--disable-fallback", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, "pypiserver ended"
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                subprocess.run(["sleep", "0.1"], check=True)
        yield f"{address}/simple"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def released_workspace(tmp_path_factory: pytest.TempPathFactory, index: str) -> ReleaseWorkspace:
    """Releases, in order: lt-model, lt-ckpt, lt-data, lt-trainer and lt-trainer-neuron 0.1.0, then lt-data 0.2.0."""
    root = tmp_path_factory.mktemp("workspace") / "lt"
    root.mkdir()
    for name in ("pyproject.toml", "uv.lock", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, root / name)
    ignore = shutil.ignore_patterns("__pycache__", "tests", ".hypothesis", "bench")
    for name in ("packages", "tools"):
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    git("init", "--quiet", "--initial-branch=main", cwd=root)
    git("config", "core.autocrlf", "false", cwd=root)
    made = ReleaseWorkspace(root, index)
    for name, member in read_members(root).items():  # whatever is released here already, the rehearsal starts before it
        path = member.folder / "CHANGELOG.md"
        path.write_text(f"# Changelog of {name}\n\n## [0.1.0] - unreleased\n\n### Added\n\n- All of it.\n")
    made.commit("The workspace")

    refused = made.run_tool("release_check", "lt-ckpt-v0.1.0", "--index", index, code=1)
    assert "unreleased entries" in refused
    made.publish(made.release("lt-model", "first"), alone=False)
    made.publish(made.release("lt-ckpt", "first"), alone=True)
    made.publish(made.release("lt-data", "first"), alone=True)
    for name in ("lt-trainer", "lt-trainer-neuron"):
        made.publish(made.release(name, "first"), alone=False)

    source = root / "packages/lt-data/src/lt_data"
    (source / "rehearsed.py").write_text(
        '"""New in 0.2."""\n\n\ndef answer() -> int:\n    """The answer."""\n    return 42\n'
    )
    typed = "if TYPE_CHECKING:\n    from lt_data.rehearsed import answer\n"
    replace_text(source / "__init__.py", "if TYPE_CHECKING:\n", typed)
    replace_text(source / "__init__.py", "_MODULES = {\n", '_MODULES = {\n    "answer": "rehearsed",\n')
    replace_text(source / "__init__.py", "__all__ = [\n", '__all__ = [\n    "answer",\n')
    made.commit("lt-data: an answer")
    forgotten = made.run_tool("changelog", "--base", "lt-data-v0.1.0", code=1)
    assert forgotten.startswith("packages/lt-data/src changed and packages/lt-data/CHANGELOG.md has no new entry")
    assert "no unreleased entries" in made.run_tool("release", "lt-data", "minor", code=1)
    replace_text(
        root / "packages/lt-data/CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n### Added\n\n- `answer`.\n"
    )
    assert "lt-data: + function lt_data.answer" in made.run_tool("api_surface", "lt-data", code=1)
    made.run_tool("api_surface", "--write", "lt-data")
    made.commit("lt-data: the answer is told")
    made.run_tool("changelog", "--base", "lt-data-v0.1.0")
    replace_text(root / "packages/lt-data/README.md", "\n", "\n\n")
    assert "uncommitted files: packages/lt-data/README.md" in made.run_tool("release", "lt-data", "minor", code=1)
    git("checkout", "--quiet", "packages/lt-data/README.md", cwd=root)
    excluded = made.run_tool("release", "lt-data", "minor", code=1)
    assert "excludes lt-data 0.2.0; allow <0.3 there, or pass --widen" in excluded
    made.publish(made.release("lt-data", "minor", "--widen"), alone=True)
    return made


def test_the_index_has_two_releases_of_lt_data_and_one_of_lt_ckpt(released_workspace: ReleaseWorkspace) -> None:
    assert [str(v) for v in published_versions("lt-data", index=released_workspace.index)] == ["0.1.0", "0.2.0"]
    assert [str(v) for v in published_versions("lt-ckpt", index=released_workspace.index)] == ["0.1.0"]
    again = released_workspace.run_tool("release_check", "lt-data-v0.2.0", "--index", released_workspace.index, code=1)
    assert "lt-data 0.2.0 is already published" in again
    lock = (released_workspace.root / "uv.lock").read_text()
    assert 'name = "lt-data"\nversion = "0.2.0"' in lock
    run("uv", "lock", "--check", cwd=released_workspace.root)


VERSION_SCRIPT = "import lt_data, importlib.metadata as m; print(m.version('lt-data'), 'answer' in dir(lt_data))"


def test_one_pins_the_old_and_one_takes_the_new(released_workspace: ReleaseWorkspace) -> None:
    old, _ = released_workspace.create_environment("old", "lt-data==0.1.0", "lt-ckpt")
    new, _ = released_workspace.create_environment("new", "lt-data")
    assert run(old, "-W", "error", "-c", VERSION_SCRIPT, cwd=released_workspace.root.parent).split() == [
        "0.1.0",
        "False",
    ]
    assert run(new, "-W", "error", "-c", VERSION_SCRIPT, cwd=released_workspace.root.parent).split() == [
        "0.2.0",
        "True",
    ]
    run(
        new,
        "-W",
        "error",
        "-c",
        "from lt_data import answer; assert answer() == 42",
        cwd=released_workspace.root.parent,
    )


def test_what_was_released_before_keeps_the_lt_data_that_it_knows(released_workspace: ReleaseWorkspace) -> None:
    """lt-trainer 0.1.0 allows lt-data below 0.2, so a Trainium environment stays on 0.1.0, beside torch 2.9."""
    wanted = released_workspace.root.parent / "trn1.in"
    wanted.write_text("lt-trainer-neuron\nlt-data[torch]\ntorch==2.9.*\n")
    platform = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command = [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--index",
        released_workspace.index,
        *REFRESH,
    ]
    found = dict(line.split("==") for line in run(*command, *platform, wanted, cwd=wanted.parent).splitlines())
    ours = {name: version for name, version in found.items() if name.startswith("lt-")}
    released = ("lt-ckpt", "lt-data", "lt-model", "lt-trainer", "lt-trainer-neuron")
    assert ours == dict.fromkeys(released, "0.1.0")
    assert found["torch"].startswith("2.9.")


def test_the_oldest_siblings_that_are_allowed_have_what_is_imported(
    released_workspace: ReleaseWorkspace, tmp_path: Path
) -> None:
    """lt-trainer as it stands now allows lt-data 0.2, which stands here, and 0.1, which only the index has."""
    wanted = ["--package", "lt-trainer", "--index", released_workspace.index]
    told = released_workspace.run_tool("check_ranges", "--oldest", tmp_path / "oldest", *wanted)
    oldest = "lt-ckpt==0.1.0, lt-data==0.1.0, lt-model==0.1.0"
    assert f"lt-trainer 0.1.0: installs and imports with {oldest}" in told
    source = released_workspace.root / "packages/lt-trainer/src/lt_trainer/config/lr_schedule.py"
    before = source.read_text()
    source.write_text(f"{before}\n\ndef _new() -> int:\n    from lt_data import answer\n\n    return answer()\n")
    told = released_workspace.run_tool("check_ranges", "--oldest", tmp_path / "new", *wanted, code=1)
    source.write_text(before)
    assert "lt_data has no answer" in told, "what only 0.2 has, while 0.1 is allowed"


@pytest.mark.slow
def test_a_trainium_environment_with_torch_2_9(released_workspace: ReleaseWorkspace) -> None:
    python, found = released_workspace.create_environment("trn1", "lt-trainer-neuron", "lt-data[torch]", "torch==2.9.*")
    assert found["lt-data"] == "0.1.0"
    assert found["torch"].startswith("2.9.")
    script = "import torch, lt_trainer_neuron, lt_data.torch; print(torch.__version__)"
    assert run(python, "-c", script, cwd=released_workspace.root.parent).startswith("2.9.")
