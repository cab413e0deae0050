"""Build a package's wheel and sdist and try each of them alone in an empty environment.

    python tools/artefacts.py lt-data --out dist              # siblings: wheels of what stands here
    python tools/artefacts.py lt-data --out dist --index URL  # siblings: what is published (a release)
    python tools/artefacts.py lt-data --out dist --python 3.13  # tried with that Python, not with this one

Built with `--no-sources`, so that the metadata are those that users get, and the wheel from the sdist, so that the
sdist is whole. Each is installed by its path and imported with warnings as errors; its console scripts answer `--help`.
`OUT` keeps the two files and nothing else; environments live in a folder that is removed. Seconds per package, all of
it downloads on a fresh machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from members import ROOT, Member, ToolError, chosen, read, siblings

__all__ = ["build", "try_alone"]


def build(member: Member, out: Path, *, cached: bool = True, root: Path = ROOT) -> tuple[Path, Path]:
    """The wheel and the sdist of a package, built into `out`.

    Raises:
        ToolError: `out` has other files, or the build fails.
    """
    if out.exists() and any(out.iterdir()):
        raise ToolError(f"{out} is not empty; give an empty folder, so that nothing else is published from it")
    cache = () if cached else ("--no-cache",)
    run("uv", *cache, "build", "--quiet", "--no-sources", "--package", member.name, "--out-dir", out, cwd=root)
    # uv writes a .gitignore beside what it builds; only the two files are to be published.
    (out / ".gitignore").unlink(missing_ok=True)
    names = {f"{member.module}-{member.version}-py3-none-any.whl", f"{member.module}-{member.version}.tar.gz"}
    if (found := {path.name for path in out.iterdir()}) != names:
        raise ToolError(
            f"{member.name}: expected {', '.join(sorted(names))}, the build made {', '.join(sorted(found))}"
        )
    wheel, sdist = sorted(out.iterdir(), key=lambda path: path.suffix != ".whl")
    return wheel, sdist


def try_alone(
    member: Member,
    file: Path,
    work: Path,
    *,
    sources: Sequence[str | Path],
    cached: bool = True,
    python: str = sys.executable,
) -> None:
    """Install one file into an empty environment below `work`, import it and ask its scripts for help.

    `python` is an interpreter or a version, as uv takes them.

    Raises:
        ToolError: it does not install, import or answer.
    """
    venv, cache = work / f"venv-{file.suffix.strip('.')}", () if cached else ("--no-cache",)
    interpreter = venv / "bin" / "python"
    extra = "[cli]" if "cli" in member.extras else ""
    target = f"{member.name}{extra} @ {file.resolve().as_uri()}"
    run("uv", "venv", "--quiet", "--python", python, venv, cwd=work)
    run("uv", *cache, "pip", "install", "--quiet", "--python", interpreter, *sources, target, cwd=work)
    told = f"import {member.module}; from importlib.metadata import version; print(version({member.name!r}))"
    version = run(interpreter, "-W", "error", "-c", told, cwd=work).strip()
    if version != str(member.version):
        raise ToolError(f"{file.name}: installed as {version}")
    for script in member.scripts:
        run(venv / "bin" / script, "--help", cwd=work)


def run(*command: str | Path, cwd: Path) -> str:
    """What a command printed.

    Raises:
        ToolError: it failed.
    """
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Build and try a package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("--out", type=Path, required=True, help="an empty folder for wheel and sdist")
    parser.add_argument("--index", help="take siblings from this simple index, not from here")
    parser.add_argument("--python", default=sys.executable, help="the Python of the empty environments; this one")
    parser.add_argument("--no-cache", action="store_true", help="neither build nor install from uv's cache")
    options = parser.parse_args(arguments)
    members = read()
    member, out = chosen(members, options.package), options.out.resolve()
    files = build(member, out, cached=not options.no_cache)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # Neither an older build of the same version nor an older page of the index is good enough.
        sources: list[str | Path] = [part for name in members for part in ("--refresh-package", name)]
        if options.index:
            sources += ["--index", options.index]
        elif siblings(member, members):
            wheels = work / "wheels"
            run("uv", "build", "--quiet", "--all-packages", "--wheel", "--no-sources", "--out-dir", wheels, cwd=ROOT)
            sources += ["--find-links", wheels]
        for file in files:
            try_alone(member, file, work, sources=sources, cached=not options.no_cache, python=options.python)
            print(f"{file.name}: installs alone, imports{', answers --help' if member.scripts else ''}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"artefacts: {exc}")
