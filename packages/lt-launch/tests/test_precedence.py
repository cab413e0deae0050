"""Which source of a variable wins: `--env`, then the job's [env], the profile's, the machine's own."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

SOURCES = ("flag", "job", "profile", "machine")
"""The first wins."""
PAIRS = [*combinations(SOURCES, 2), SOURCES]


def variables(source: str) -> dict[str, str]:
    """Return the variables that a source sets: one for each pair, and one that all set."""
    return {"_OR_".join(names).upper(): source for names in PAIRS if source in names}


def test_of_each_pair_of_sources_and_of_all_the_first_wins(tmp_path: Path) -> None:
    names = ["_OR_".join(pair).upper() for pair in PAIRS]
    lines = ["[job]", 'name = "who"', f'argv = ["bash", "-c", "echo {" ".join(f"${name}" for name in names)} >found"]']
    for table, source in (("job.env", "job"), ("profile.env", "profile")):
        lines += [f"[{table}]", *(f'{name} = "{value}"' for name, value in variables(source).items())]
    (tmp_path / "run.toml").write_text("\n".join(lines), encoding="utf-8")
    machine = {**os.environ, **variables("machine"), "LT_LAUNCH_HOME": str(tmp_path / "home")}
    flags = [word for name, value in variables("flag").items() for word in ("--env", f"{name}={value}")]
    command = [sys.executable, "-m", "lt_launch", "launch", "run", "run.toml", "--on", "local", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=machine, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found").read_text(encoding="utf-8").split() == [pair[0] for pair in PAIRS]
