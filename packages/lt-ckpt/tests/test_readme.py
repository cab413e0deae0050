import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def test_the_example_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    subprocess.run([sys.executable, "-W", "error", "-c", blocks[0]], cwd=tmp_path, check=True)
    assert (tmp_path / "checkpoints" / "step-00000100" / "COMMIT").exists()


def test_every_command_of_the_readme_exists():
    from lt_ckpt.cli import app

    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    shown = set(re.findall(r"^    lt-ckpt (\w+) ", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert shown == names
