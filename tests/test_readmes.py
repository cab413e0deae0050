"""The READMEs and docs: what every package has, and links that lead somewhere."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
READMES = sorted([*ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")])


def test_every_package_has_a_readme_with_an_example_and_a_changelog() -> None:
    for pyproject in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())["project"]
        readme = (pyproject.parent / "README.md").read_text()
        assert re.search(rf"pip install ['\"]?{project['name']}\b", readme)
        changelog = (pyproject.parent / "CHANGELOG.md").read_text()
        assert f"## [{project['version']}]" in changelog


def test_links_between_documents_lead_somewhere() -> None:
    for path in READMES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"


def test_the_table_of_memory_is_what_a_plan_says() -> None:
    from lt_trainer.config.recipe import load
    from lt_trainer.planning.devices import DEVICES
    from lt_trainer.planning.plan import make_plan

    text = (ROOT / "docs" / "guides" / "parallelism.md").read_text()
    for column, example in enumerate(("smp-70b.toml", "bench-7b/hsdp.toml")):
        memory = make_plan(load(ROOT / "examples" / example), device=DEVICES["h100"], devices=8).memory
        found = {name: size for name, size in memory.parts.items() if f"| {name} |" in text} | {
            "needed, with reserve": memory.needed
        }
        assert len(found) == 6
        for name, size in found.items():
            (row,) = re.findall(rf"^\| {name} \| (.*) \| (.*) \|$", text, re.M)
            assert row[column] == f"{size / 2**30:.2f}", name
