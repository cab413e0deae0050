"""The site of the documentation, built strictly: links lead where they should, nothing is loaded from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
READING_ORDER = ["quickstart", "data", "recipe", "parallelism", "checkpoints", "launch", "launch-slurm", "migration"]


def test_it_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """A link that leads nowhere is an error of the build."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"^(?:[-*]|\d+\.) ", text, re.MULTILINE), f"{page.name}: a list shown as text"
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\"\s>]+)", text), page
    start = (site / "index.html").read_text()
    assert 'href="guides/launch.html"' in start
    assert 'href="packages/lt-data/index.html"' in start
    assert "test_kill.py" not in start, "a link to a test becomes text"
    assert "every flipped byte is found." in start.replace("\n", " "), "(test) would be dead words"
    guide = (site / "guides" / "quickstart.html").read_text()
    links = re.findall(r'href="([^"#]+)\.html" class="md-nav__link', guide)
    assert [link for link in dict.fromkeys(links) if link in READING_ORDER] == READING_ORDER
    assert links.index("../packages/lt-data/index") < links.index("../packages/lt-ckpt/index")
