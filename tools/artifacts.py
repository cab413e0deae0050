"""Build and smoke test of a package's wheel and sdist, each in an empty environment.

    python tools/artifacts.py lt-data --out dist              # siblings: wheels built from the workspace
    python tools/artifacts.py lt-data --out dist --index URL  # siblings: published releases
    python tools/artifacts.py lt-data --out dist --python 3.13  # test with that Python instead of this one

Built with `--no-sources`, so that users get the same metadata, and the wheel is built from the sdist, so that the sdist
is complete. Each is installed by path and imported with warnings as errors; its console scripts answer `--help`.
`OUT` gets the two files and nothing else; environments are created in a temporary folder. Seconds per package, all of
it downloads on a new machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from members import ROOT, Member, ToolError, get_member, read_members, sibling_dependencies


def build_distributions(member: Member, out: Path, *, use_cache: bool = True, root: Path = ROOT) -> tuple[Path, Path]:
    """Build the wheel and the sdist of a package into `out` and return their paths.

    Raises:
        ToolError: `out` is not empty, or the build fails.
    """
    if out.exists() and any(out.iterdir()):
        raise ToolError(f"--out {out}: is not empty; give an empty folder, since everything in it is published")
    cache = () if use_cache else ("--no-cache",)
    run_command("uv", *cache, "build", "--quiet", "--no-sources", "--package", member.name, "--out-dir", out, cwd=root)
    # uv also writes a .gitignore; only the two files are published
    (out / ".gitignore").unlink(missing_ok=True)
    names = {f"{member.module}-{member.version}-py3-none-any.whl", f"{member.module}-{member.version}.tar.gz"}
    if (found := {path.name for path in out.iterdir()}) != names:
        raise ToolError(
            f"{member.name}: the build made {', '.join(sorted(found))}; expected {', '.join(sorted(names))}"
        )
    wheel, sdist = sorted(out.iterdir(), key=lambda path: path.suffix != ".whl")
    return wheel, sdist


def smoke_test(
    member: Member,
    file: Path,
    work: Path,
    *,
    sources: Sequence[str | Path],
    use_cache: bool = True,
    python: str = sys.executable,
) -> None:
    """Install one file into an empty environment below `work`, import it and run its scripts with --help.

    `python` is an interpreter or a version, as uv takes them.

    Raises:
        ToolError: it does not install, import or run.
    """
    venv, cache = work / f"venv-{file.suffix.strip('.')}", () if use_cache else ("--no-cache",)
    interpreter = venv / "bin" / "python"
    extra = "[cli]" if "cli" in member.extras else ""
    target = f"{member.name}{extra} @ {file.resolve().as_uri()}"
    run_command("uv", "venv", "--quiet", "--python", python, venv, cwd=work)
    run_command("uv", *cache, "pip", "install", "--quiet", "--python", interpreter, *sources, target, cwd=work)
    code = f"import {member.module}; from importlib.metadata import version; print(version({member.name!r}))"
    version = run_command(interpreter, "-W", "error", "-c", code, cwd=work).strip()
    if version != str(member.version):
        raise ToolError(f"{file.name}: installed as {version}")
    for script in member.scripts:
        run_command(venv / "bin" / script, "--help", cwd=work)


def run_command(*command: str | Path, cwd: Path) -> str:
    """What a command printed.

    Raises:
        ToolError: it failed.
    """
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Build and test a package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("--out", type=Path, required=True, help="an empty folder for wheel and sdist")
    parser.add_argument("--index", help="simple index with the siblings' releases; else they are built here")
    parser.add_argument("--python", default=sys.executable, help="Python of the empty environments; default: this one")
    parser.add_argument("--no-cache", action="store_true", help="build and install without uv's cache")
    options = parser.parse_args(arguments)
    members = read_members()
    member, out = get_member(members, options.package), options.out.resolve()
    files = build_distributions(member, out, use_cache=not options.no_cache)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # --refresh: a cached build of the same version or a cached index page may be outdated
        sources: list[str | Path] = [part for name in members for part in ("--refresh-package", name)]
        if options.index:
            sources += ["--index", options.index]
        elif sibling_dependencies(member, members):
            wheels = work / "wheels"
            run_command(
                "uv", "build", "--quiet", "--all-packages", "--wheel", "--no-sources", "--out-dir", wheels, cwd=ROOT
            )
            sources += ["--find-links", wheels]
        for file in files:
            smoke_test(member, file, work, sources=sources, use_cache=not options.no_cache, python=options.python)
            print(f"{file.name}: installs alone, imports{', answers --help' if member.scripts else ''}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"artifacts: {exc}")
