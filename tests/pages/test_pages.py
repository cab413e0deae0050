"""Every command and every Python block of the READMEs and the guides runs, or says above itself why it does not.

A page is run from its first block to its last in one folder, as a reader would; only sizes and names of things that are
not here are replaced (page_fixtures.py). Lines of `pip install` are compared with what the packages offer: the wheels
themselves are installed by tests/test_wheels.py. Whether commands that are not run exist, with their options, is looked
at by test_commands_exist.py.
"""

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import page_fixtures as standins
import pytest
from page_blocks import LT_PROGRAMS, parse_blocks, parse_commands, split_words
from page_runner import PRELOAD, Step, run_page

from lt_test_helpers.pool import RankPool
from lt_test_helpers.s3_server import MotoServer, run_s3_server

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): parse_blocks(path.read_text(encoding="utf-8"))
    for pattern in ("*.md", "packages/*/README.md", "docs/**/*.md", "examples/**/*.md", "containers/*.md")
    for path in sorted(ROOT.glob(pattern))
}
RUN_HERE = {name: found for name, found in PAGES.items() if any(b.kind in ("commands", "python") for b in found)}


def is_install(line: str) -> bool:
    return line.startswith("pip install ") and not re.search(r"[&|;]| \./", line)


def page_steps(page: str) -> list[Step]:
    """What is run of a page."""
    found: list[Step] = []
    wanted = standins.PAGES.get(page, standins.Page())
    for block in PAGES[page]:
        if block.skip_reason is None and block.kind == "python":
            found.append(("python", [block.text], 0))
        elif block.skip_reason is None and block.kind == "commands":
            for line in parse_commands(block.text):
                if not is_install(line):
                    given = [wanted.replacements.get(word, word) for word in split_words(line)]
                    found.append(("command", given, wanted.exit_codes.get(line, 0)))
    return found


@pytest.mark.parametrize("page", RUN_HERE)
def test_a_block_runs_or_says_why_not(page: str) -> None:
    """No reason without a word, no block that only looks as if it were run."""
    for block in PAGES[page]:
        where = f"{page}:{block.line}"
        if block.skip_reason is not None:
            assert block.kind in ("commands", "python"), f"{where}: nothing would be run of this block"
            assert len(block.skip_reason) > 8, f"{where}: `<!-- not run: REASON -->` without a reason"
        elif block.kind == "commands":
            for line in parse_commands(block.text):
                assert is_install(line) or line.split()[0] in LT_PROGRAMS, (
                    f"{where}: `{line}` cannot be run by tests; say why above the block: <!-- not run: REASON -->"
                )
                assert not re.search(r"[|><`$]|&&", re.sub(r"'[^']*'|\"[^\"]*\"", "", line)), f"{where}: `{line}`"


INSTALLS = sorted(
    {line for found in PAGES.values() for b in found for line in parse_commands(b.text) if is_install(line)}
)


@pytest.mark.parametrize("line", INSTALLS)
def test_what_is_to_be_installed_is_there(line: str) -> None:
    offered = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        offered[project["name"]] = set(project.get("optional-dependencies", {}))
    for word in split_words(re.sub(r"\[(?=[\w,-]*\])", "(", line))[2:]:
        name, _, extras = word.rstrip("])").partition("(")
        assert name in offered, f"{line}: {name}"
        assert set(filter(None, extras.split(","))) <= offered[name], line


@pytest.fixture(scope="module")
def process_pool() -> RankPool:
    """The process whose forks read pages."""
    return RankPool(1, preload=PRELOAD)


@pytest.fixture(scope="module")
def fixture_dir(prepared: Path, process_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of stand-ins."""
    root = tmp_path_factory.mktemp("standins") / "world"
    shutil.copytree(prepared, root)
    (root / "run.toml").write_text(standins.RECIPE.format(out="run", store=root / "train"))
    (root / "run-here.toml").write_text(standins.RECIPE.format(out="runs/run", store="store"))
    made = [("command", line.split(), 0) for line in standins.SETUP_COMMANDS]
    done, output = process_pool.run(run_page, str(root), made, ranks=1, env=reader_environment(root), timeout_s=300)[0]
    assert done == len(made), f"{standins.SETUP_COMMANDS[done]}\n{output}"
    return root


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    pytest.importorskip("moto.server", reason="moto[server] is not installed: what pages do with S3 was not run")
    with run_s3_server(tmp_path_factory.mktemp("moto")) as found:
        found.client.create_bucket(Bucket="bucket")
        yield found


def reader_environment(folder: Path) -> dict[str, str]:
    """The variables of a reader with a home of its own and the commands of this environment."""
    return {
        "HOME": str(folder.parent),
        "XDG_STATE_HOME": str(folder.parent / "state"),
        "XDG_CONFIG_HOME": str(folder.parent / "config"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }


@pytest.mark.parametrize("page", [page for page in RUN_HERE if page_steps(page)])
def test_a_page_runs(
    page: str, fixture_dir: Path, process_pool: RankPool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wanted = standins.PAGES.get(page, standins.Page())
    folder = tmp_path / "here"
    folder.mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, source in wanted.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (fixture_dir / source).is_dir() else shutil.copy
        copy(fixture_dir / source, folder / name)
    env = reader_environment(folder)
    if wanted.needs_s3:
        env |= request.getfixturevalue("bucket").environ
    given = page_steps(page)
    done, output = process_pool.run(run_page, str(folder), given, ranks=1, env=env, timeout_s=300)[0]
    if done < len(given):
        pytest.fail(f"{page}: {' '.join(given[done][1])}\n{output}", pytrace=False)
