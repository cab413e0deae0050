"""Locked environment of a release: the packages that lt needs, pinned, with their hashes.

The versions are those that are installed where the release is made; they are compared with those of the run's
environment.json. The hashes come from a `uv.lock` beside lt's sources, or from a requirements file that the user gives;
a package without one is listed, and its line has none. No index is asked. Cost: the metadata of the packages.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from lt_trainer.files import parse_toml, read_text

REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")
EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
HASH_OPTION = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)")


@dataclass(frozen=True, kw_only=True)
class LockedPackage:
    """Pinned package with the SHA-256 of its archives; without any if they are unknown."""

    name: str
    version: str
    hashes: tuple[str, ...]


def normalize(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_closure(roots: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the version of each installed package that these need, themselves left out.

    Args:
        roots: Package → its extras.
    """
    found: dict[str, Distribution] = {}
    seen: dict[str, set[str]] = {}
    waiting = [(normalize(name), set(extras)) for name, extras in roots.items()]
    while waiting:
        name, extras = waiting.pop()
        try:
            package = found.get(name) or distribution(name)
        except PackageNotFoundError:
            continue  # for another platform, or an extra that is not installed
        if name in seen and extras <= seen[name]:
            continue
        found[name] = package
        seen[name] = seen.get(name, set()) | extras
        for line in package.requires or ():
            marker = line.partition(";")[2]
            wanted = EXTRA.findall(marker)
            match = REQUIREMENT.match(line)
            if match is not None and (not wanted or seen[name] & set(wanted)):
                names = {part.strip() for part in (match[2] or "").split(",") if part.strip()}
                waiting.append((normalize(match[1]), names))
    own = {normalize(name) for name in roots}
    return {name: found[name].version for name in sorted(found) if name not in own}


def _is_locked_package(package: object) -> bool:
    if not isinstance(package, dict) or not isinstance(package.get("name"), str):
        return False
    archives = [*package["wheels"]] if isinstance(package.get("wheels"), list) else []
    archives += [package["sdist"]] if "sdist" in package else []
    return (
        isinstance(package.get("wheels", []), list)
        and isinstance(package.get("version", ""), str)
        and all(isinstance(one, dict) and isinstance(one.get("hash", ""), str) for one in archives)
    )


def read_lock_hashes(path: Path) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the SHA-256 hashes of each package and version in a uv.lock or a requirements file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not such a file.
    """
    text = read_text(path)
    if path.suffix == ".lock":
        found = {}
        packages = parse_toml(text).get("package", [])
        if not isinstance(packages, list) or not all(map(_is_locked_package, packages)):
            raise ValueError(f"{path}: not a uv.lock; give one, or a requirements file with hashes")
        for package in packages:
            archives = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
            hashes = tuple(sorted({archive["hash"] for archive in archives if "hash" in archive}))
            found[normalize(package["name"]), package.get("version", "")] = hashes
        return found
    joined = re.sub(r"\\\s*\n", " ", text)
    return {
        (normalize(pin[1]), pin[2]): tuple(sorted(HASH_OPTION.findall(line)))
        for line in joined.splitlines()
        if (pin := PIN.match(line.strip()))
    }


def lock_packages(
    versions: Mapping[str, str], hashes: Mapping[tuple[str, str], tuple[str, ...]]
) -> tuple[LockedPackage, ...]:
    """Return the packages with their hashes; a local version (`2.15.0+cpu`) has those of its public one."""
    return tuple(
        LockedPackage(
            name=name,
            version=version.partition("+")[0],
            hashes=hashes.get((name, version), hashes.get((name, version.partition("+")[0]), ())),
        )
        for name, version in sorted(versions.items())
    )


def format_requirements(packages: Iterable[LockedPackage]) -> str:
    """Return a requirements file."""
    blocks = []
    for package in packages:
        options = "".join(f" \\\n    --hash={digest}" for digest in package.hashes)
        blocks.append(f"{package.name}=={package.version}{options}\n")
    return "".join(blocks)
