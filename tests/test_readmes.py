"""The READMEs: what every package has, links that lead somewhere, and tables that are what the code says."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
READMES = sorted([*ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/*.md")])


def test_every_package_has_a_readme_with_an_example_and_a_changelog() -> None:
    for pyproject in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())["project"]
        readme = (pyproject.parent / "README.md").read_text()
        assert re.search(rf"pip install ['\"]?{project['name']}\b", readme)
        changelog = (pyproject.parent / "CHANGELOG.md").read_text()
        assert f"## [{project['version']}]" in changelog


def test_hyperparameter_table_is_generated() -> None:
    from lt_trainer.hyperparameters import markdown

    assert markdown().strip() in (ROOT / "packages" / "lt-trainer" / "README.md").read_text()


def test_gpu_options_table_names_every_option() -> None:
    from lt_trainer.fields import leaves
    from lt_trainer_gpu import GpuOptions

    rows = re.findall(
        r"^\| `(\w+)` \| `([^`]*)` \|", (ROOT / "packages" / "lt-trainer-gpu" / "README.md").read_text(), re.M
    )
    written = {name: default.strip('"') for name, default in rows}
    assert written == {leaf.name: str(leaf.default).lower() for leaf in leaves(GpuOptions).values()}


def test_links_between_documents_lead_somewhere() -> None:
    for path in READMES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"
