"""Check of the version ranges in which the packages require each other. uv ignores them, pip does not.

    python tools/check_ranges.py                       # prints problems, in milliseconds
    python tools/check_ranges.py --oldest OUT          # builds the wheels, installs the oldest allowed combination,
                                                       # and checks all imports (tools/sibling_imports.py)

Inside a workspace uv uses the local sibling whatever the range, so only users who install both would notice a version
that a sibling excludes. Each requirement on a sibling must satisfy:

- it has a lower and an upper bound; the upper bound is at most the next breaking version (semver: 0.x breaks with the
  minor);
- it allows the version in the workspace, and the requested extras exist;
- all requirements of one package on the same sibling have the same range, else pip has to pick one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from members import ROOT, Member, ToolError, read_members, topological_order
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def next_breaking_version(version: Version) -> Version:
    """Return the first later version that semver allows to break: 0.4 after 0.3.1, 2 after 1.2.0."""
    return Version(f"{version.major + 1}" if version.major else f"0.{version.minor + 1}")


def lower_bound(requirement: Requirement) -> Version | None:
    """Return the version that a requirement names with >= or ~= or ==, or None."""
    found = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "~=", "==")]
    return max(found, default=None)


def upper_bound(requirement: Requirement) -> Version | None:
    """Return the version that a requirement names with <, or None."""
    return min((Version(s.version) for s in requirement.specifier if s.operator == "<"), default=None)


def find_range_problems(members: Mapping[str, Member]) -> list[str]:
    """Return a sentence with the remedy for each invalid requirement on a sibling."""
    found: list[str] = []
    for member in members.values():
        ranges: dict[str, str] = {}
        for extra, group in member.requirements.items():
            for requirement in group:
                name = canonicalize_name(requirement.name)
                if name in members and name != member.name:
                    place = f"{member.name}{f'[{extra}]' if extra else ''}: {requirement}"
                    found += [f"{place}: {text}" for text in _range_problems(requirement, members[name])]
                    first = ranges.setdefault(name, str(requirement.specifier))
                    if first != str(requirement.specifier):
                        found.append(f"{place}: elsewhere {member.name} requires {name}{first}; use one range")
                elif name == member.name:
                    found += [f"{member.name}[{extra}]: {text}" for text in _missing_extras(requirement, member)]
    return found


def _range_problems(requirement: Requirement, sibling: Member) -> list[str]:
    texts: list[str] = []
    lowest, highest = lower_bound(requirement), upper_bound(requirement)
    wanted = f">={min(lowest or sibling.version, sibling.version)},<{next_breaking_version(sibling.version)}"
    if lowest is None or highest is None:
        texts.append(f"needs a lower and an upper bound; write {wanted}")
    elif highest > next_breaking_version(sibling.version):
        texts.append(f"allows breaking versions; write {wanted}")
    if not requirement.specifier.contains(sibling.version, prereleases=True):
        texts.append(f"excludes {sibling.name} {sibling.version} of this workspace; write {wanted}")
    return texts + _missing_extras(requirement, sibling)


def _missing_extras(requirement: Requirement, sibling: Member) -> list[str]:
    missing = sorted(requirement.extras - set(sibling.extras))
    return [f"{sibling.name} has no extra {extra}; it has {', '.join(sibling.extras) or 'none'}" for extra in missing]


def check_oldest_siblings(
    members: Mapping[str, Member], out: Path, *, names: Iterable[str] = (), index: str | None = None
) -> None:
    """Build all wheels and test each package with its oldest allowed siblings in a venv of its own.

    The package is imported, and every name that it imports from a sibling must exist (tools/sibling_imports.py).
    Siblings come from `index`, or from the wheels just built if they are not published, so that before the first
    release the oldest combination is the workspace itself.

    Raises:
        ToolError: something does not install or import, or a sibling lacks a name.
    """
    wheels = out / "wheels"
    _run("uv", "build", "--quiet", "--all-packages", "--wheel", "--no-sources", "--out-dir", wheels, cwd=ROOT)
    for name in names or topological_order(members):
        member, venv = members[name], out / f"venv-{name}"
        python = venv / "bin" / "python"
        (wheel,) = wheels.glob(f"{member.module}-{member.version}-*.whl")
        chosen = oldest_sibling_versions(member, members, index=index)
        pins = [f"{sibling}=={version}" for sibling, version in chosen.items()]
        fresh = [part for known in members for part in ("--refresh-package", known)]
        sources = ["--find-links", wheels, *(["--index", index] if index else []), *fresh]
        _run("uv", "venv", "--quiet", "--python", sys.executable, venv, cwd=out)
        _run("uv", "pip", "install", "--quiet", "--python", python, *sources, wheel, *pins, cwd=out)
        _run(python, "-W", "error", "-c", f"import {member.module}", cwd=out)
        others = [members[sibling].module for sibling in chosen]
        _run(python, Path(__file__).with_name("sibling_imports.py"), member.module, *others, cwd=out)
        found = f"installs and imports with {', '.join(pins) or 'no sibling'}"
        print(f"{name} {member.version}: {found}", flush=True)


def oldest_sibling_versions(member: Member, members: Mapping[str, Member], *, index: str | None) -> dict[str, Version]:
    """Return the oldest allowed published version of each sibling, or else the one in the workspace."""
    from package_index import published_versions

    found: dict[str, Version] = {}
    for requirement in member.dependencies:
        name = canonicalize_name(requirement.name)
        if name in members:
            known = [*published_versions(name, index=index), members[name].version]
            found[name] = min(v for v in known if requirement.specifier.contains(v))
    return found


def _run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def main(arguments: list[str]) -> int:
    """Check the ranges; return 1 if one is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oldest", metavar="OUT", type=Path, help="an empty folder for wheels and environments")
    parser.add_argument("--package", action="append", default=[], help="only this package (with --oldest)")
    parser.add_argument("--index", help="simple index with our releases; none is published if empty or not given")
    options = parser.parse_args(arguments)
    members = read_members()
    found = find_range_problems(members)
    print("\n".join(found) or "ranges between packages are valid")
    if not found and options.oldest:
        options.oldest.mkdir(parents=True, exist_ok=True)
        check_oldest_siblings(members, options.oldest.resolve(), names=options.package, index=options.index or None)
    return bool(found)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"check_ranges: {exc}")
