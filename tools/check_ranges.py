"""The ranges in which packages of this workspace require each other. uv does not look at them, pip does.

    python tools/check_ranges.py                       # says what is wrong, in milliseconds
    python tools/check_ranges.py --oldest OUT          # builds the wheels, installs the oldest allowed combination,
                                                       # and sees that it has all that is imported (tools/taken.py)

Inside a workspace uv takes the sibling that is there, whatever the range says, so a version that a sibling excludes is
noticed only by the users who install both. What must hold of each requirement on a sibling:

- it has a floor and a cap; the cap is not above the next version that may break (semver: 0.x breaks with the minor);
- it admits the version that stands here, and the extras that it asks for exist there;
- all requirements of one package on the same sibling say the same range, or pip has to guess which one is meant.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from members import ROOT, Member, ToolError, in_order, read
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

__all__ = ["cap", "floor", "next_breaking", "problems"]


def next_breaking(version: Version) -> Version:
    """The first version after this one that semver allows to break: 0.3.1 to 0.4, 1.2.0 to 2."""
    return Version(f"{version.major + 1}" if version.major else f"0.{version.minor + 1}")


def floor(requirement: Requirement) -> Version | None:
    """The oldest version that a requirement names with >= or ~= or ==."""
    found = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "~=", "==")]
    return max(found, default=None)


def cap(requirement: Requirement) -> Version | None:
    """The version that a requirement names with <."""
    return min((Version(s.version) for s in requirement.specifier if s.operator == "<"), default=None)


def problems(members: Mapping[str, Member]) -> list[str]:
    """One sentence for each requirement on a sibling that does not hold, with the remedy."""
    found: list[str] = []
    for member in members.values():
        ranges: dict[str, str] = {}
        for extra, group in member.requirements.items():
            for requirement in group:
                name = canonicalize_name(requirement.name)
                if name in members and name != member.name:
                    place = f"{member.name}{f'[{extra}]' if extra else ''}: {requirement}"
                    found += [f"{place}: {text}" for text in _wrong(requirement, members[name])]
                    first = ranges.setdefault(name, str(requirement.specifier))
                    if first != str(requirement.specifier):
                        found.append(f"{place}: elsewhere {member.name} says {name}{first}; say the same everywhere")
                elif name == member.name:
                    found += [f"{member.name}[{extra}]: {text}" for text in _missing_extras(requirement, member)]
    return found


def _wrong(requirement: Requirement, sibling: Member) -> list[str]:
    texts: list[str] = []
    lowest, highest = floor(requirement), cap(requirement)
    wanted = f">={min(lowest or sibling.version, sibling.version)},<{next_breaking(sibling.version)}"
    if lowest is None or highest is None:
        texts.append(f"needs a floor and a cap, as {wanted}")
    elif highest > next_breaking(sibling.version):
        texts.append(f"admits versions that may break; write {wanted}")
    if not requirement.specifier.contains(sibling.version, prereleases=True):
        texts.append(f"excludes {sibling.name} {sibling.version}, which stands here; write {wanted}")
    return texts + _missing_extras(requirement, sibling)


def _missing_extras(requirement: Requirement, sibling: Member) -> list[str]:
    missing = sorted(requirement.extras - set(sibling.extras))
    return [f"{sibling.name} has no extra {extra}; it has {', '.join(sibling.extras) or 'none'}" for extra in missing]


def oldest(members: Mapping[str, Member], out: Path, *, names: Iterable[str] = (), index: str | None = None) -> None:
    """Build all wheels; install each package with the oldest siblings that it allows into a venv of its own; try it.

    It is imported, and every name that it imports from a sibling anywhere must be there (tools/taken.py). Siblings come
    from `index` where it has them and from the wheels that were just built where it has not, so that before the first
    release the oldest combination is the one that stands here.

    Raises:
        ToolError: something does not install or import, or a sibling lacks a name.
    """
    wheels = out / "wheels"
    _run("uv", "build", "--quiet", "--all-packages", "--wheel", "--no-sources", "--out-dir", wheels, cwd=ROOT)
    for name in names or in_order(members):
        member, venv = members[name], out / f"venv-{name}"
        python = venv / "bin" / "python"
        (wheel,) = wheels.glob(f"{member.module}-{member.version}-*.whl")
        chosen = floors(member, members, index=index)
        pins = [f"{sibling}=={version}" for sibling, version in chosen.items()]
        fresh = [part for known in members for part in ("--refresh-package", known)]
        sources = ["--find-links", wheels, *(["--index", index] if index else []), *fresh]
        _run("uv", "venv", "--quiet", "--python", sys.executable, venv, cwd=out)
        _run("uv", "pip", "install", "--quiet", "--python", python, *sources, wheel, *pins, cwd=out)
        _run(python, "-W", "error", "-c", f"import {member.module}", cwd=out)
        others = [members[sibling].module for sibling in chosen]
        _run(python, Path(__file__).with_name("taken.py"), member.module, *others, cwd=out)
        found = f"installs and finds all it imports with {', '.join(pins) or 'no sibling'}"
        print(f"{name} {member.version}: {found}", flush=True)


def floors(member: Member, members: Mapping[str, Member], *, index: str | None) -> dict[str, Version]:
    """The oldest published version of each sibling that the package allows, or the one that stands here."""
    from published import versions

    found: dict[str, Version] = {}
    for requirement in member.dependencies:
        name = canonicalize_name(requirement.name)
        if name in members:
            known = [*versions(name, index=index), members[name].version]
            found[name] = min(v for v in known if requirement.specifier.contains(v))
    return found


def _run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def main(arguments: list[str]) -> int:
    """Check the ranges; returns 1 if one of them does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oldest", metavar="OUT", type=Path, help="an empty folder for wheels and environments")
    parser.add_argument("--package", action="append", default=[], help="only this one (with --oldest)")
    parser.add_argument(
        "--index", help="the simple index that has our releases; without one, or empty, none is released"
    )
    options = parser.parse_args(arguments)
    members = read()
    found = problems(members)
    print("\n".join(found) or "ranges between packages hold")
    if not found and options.oldest:
        options.oldest.mkdir(parents=True, exist_ok=True)
        oldest(members, options.oldest.resolve(), names=options.package, index=options.index or None)
    return bool(found)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"check_ranges: {exc}")
