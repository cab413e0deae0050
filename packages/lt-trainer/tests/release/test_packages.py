"""Lock and wheels of a release, from what is installed."""

import base64
import csv
import hashlib
import io
import subprocess
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import lt_model
from lt_trainer.release.errors import ReleaseError
from lt_trainer.release.lock import format_requirements, installed_closure, lock_packages, read_lock_hashes
from lt_trainer.release.wheels import lt_distributions, make_wheel, source_state

HASH = "sha256:" + "ab" * 32
UV_LOCK = f"""
version = 1

[[package]]
name = "numpy"
version = "2.4.6"
sdist = {{ url = "x", hash = "{HASH}" }}
wheels = [{{ url = "y", hash = "sha256:{"cd" * 32}" }}, {{ url = "z" }}]
"""


def test_a_wheel_has_the_package_and_a_record_that_is_right() -> None:
    name, data = make_wheel(lt_distributions()["lt-model"])
    assert make_wheel(lt_distributions()["lt-model"])[1] == data, "the same files give the same bytes"
    assert name.startswith("lt_model-")
    archive = zipfile.ZipFile(io.BytesIO(data))
    sources = Path(lt_model.__file__).parent
    assert archive.read("lt_model/config.py") == (sources / "config.py").read_bytes()
    assert not [file for file in archive.namelist() if "__pycache__" in file]
    (record,) = (file for file in archive.namelist() if file.endswith("/RECORD"))
    rows = {row[0]: row for row in csv.reader(io.StringIO(archive.read(record).decode()))}
    assert set(rows) == set(archive.namelist())
    for file in set(rows) - {record}:
        digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(file)).digest()).rstrip(b"=").decode()
        assert rows[file][1:] == [f"sha256={digest}", str(len(archive.read(file)))]
    assert f"{record.removesuffix('RECORD')}entry_points.txt" in rows


def test_a_wheel_has_the_licenses_of_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "ltdoor/__init__.py": "",
        "ltdoor-1.0.dist-info/METADATA": "Metadata-Version: 2.4\nName: ltdoor\nVersion: 1.0\nLicense-File: LICENSE\n",
        "ltdoor-1.0.dist-info/licenses/LICENSE": "You may.",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "ltdoor-1.0.dist-info" / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    monkeypatch.syspath_prepend(tmp_path)
    _, data = make_wheel(distribution("ltdoor"))
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert {name: archive.read(name).decode() for name in files} == files


def test_wheels_of_an_editable_installation_have_the_license_of_the_sources() -> None:
    """Its metadata names the file, which the installer leaves in the sources."""
    packages = lt_distributions()
    assert len(packages) >= 4
    for name, package in packages.items():
        file, data = make_wheel(package)
        archive = zipfile.ZipFile(io.BytesIO(data))
        info = f"{file.removesuffix('-py3-none-any.whl')}.dist-info"
        assert package.metadata.get_all("License-File") == ["LICENSE"], name
        assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE"), name


def test_a_wheel_without_the_license_that_it_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "ltgate/__init__.py": "",
        "ltgate-1.0.dist-info/METADATA": "Metadata-Version: 2.4\nName: ltgate\nVersion: 1.0\nLicense-File: LICENSE\n",
        "ltgate-1.0.dist-info/RECORD": "ltgate/__init__.py,,\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ReleaseError, match="its license file LICENSE is not there"):
        make_wheel(distribution("ltgate"))


def test_only_what_is_in_the_wheels_makes_their_sources_differ(tmp_path: Path) -> None:
    source, test = tmp_path / "packages" / "a" / "src" / "a.py", tmp_path / "packages" / "a" / "tests" / "t.py"
    for path in (source, test):
        path.parent.mkdir(parents=True)
        path.write_text("1\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "x")):
        subprocess.run([*git, *words], check=True)
    test.write_text("2\n")
    test.with_name("more.py").write_text("3\n")
    assert source_state(tmp_path).is_clean
    source.write_text("2\n")
    source.with_name("more.py").write_text("3\n")
    state = source_state(tmp_path)
    assert "+2" in state.patch
    assert state.untracked == ("packages/a/src/more.py",)


def test_the_closure_follows_requirements_and_chosen_extras() -> None:
    found = installed_closure({"lt-model": (), "lt-ckpt": ()})
    assert {"numpy", "safetensors", "xxhash"} <= found.keys()
    assert "lt-model" not in found
    assert "typer" not in found, "an extra that was not asked for"
    assert "typer" in installed_closure({"lt-model": ("cli",), "lt-ckpt": ()})


def test_hashes_come_from_a_lock_and_from_a_requirements_file(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text(UV_LOCK)
    hashes = read_lock_hashes(tmp_path / "uv.lock")
    locked = lock_packages({"numpy": "2.4.6+local", "other": "1.0"}, hashes)
    assert [package.hashes for package in locked] == [(HASH, "sha256:" + "cd" * 32), ()]
    text = format_requirements(locked)
    assert text.startswith(f"numpy==2.4.6 \\\n    --hash={HASH}")
    (tmp_path / "requirements.txt").write_text(text)
    assert read_lock_hashes(tmp_path / "requirements.txt") == {
        ("numpy", "2.4.6"): (HASH, "sha256:" + "cd" * 32),
        ("other", "1.0"): (),
    }


def test_sources_outside_a_checkout_have_no_commit(tmp_path: Path) -> None:
    state = source_state(tmp_path)
    assert (state.commit, state.patch, state.is_clean) == ("", "", False)
    assert source_state(None).commit == ""
