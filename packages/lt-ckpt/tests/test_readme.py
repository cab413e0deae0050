import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def test_the_examples_of_the_readme_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    saved = "\n".join(blocks[:3])  # the last one needs a model
    subprocess.run([sys.executable, "-W", "error", "-c", saved], cwd=tmp_path, check=True)
    assert (tmp_path / "checkpoints" / "step-00000100" / "COMMIT").exists()
    assert (tmp_path / "checkpoints" / "step-00000200" / "COMMIT").exists()


def test_every_command_of_the_readme_exists():
    from lt_ckpt.cli import app

    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    shown = set(re.findall(r"^    lt-ckpt (\w+) ", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert shown == names
