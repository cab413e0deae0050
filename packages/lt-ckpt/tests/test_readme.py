import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def test_the_examples_of_the_readme_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(blocks)], cwd=tmp_path, check=True)
    assert (tmp_path / "checkpoints" / "step-00000100" / "COMMIT").exists()


def test_every_command_of_the_readme_exists():
    from lt_ckpt.cli import app

    names = {c.callback.__name__.replace("_", "-") for c in app.registered_commands if c.callback}
    shown = set(
        re.findall(r"^    lt-ckpt ([\w-]+) ", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert len(shown) >= 6
    assert shown <= names
