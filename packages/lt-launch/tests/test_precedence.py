"""Which source of a variable wins: `--env`, then the job's [env], the profile's, the machine's own."""

import os
import subprocess
import sys
from pathlib import Path

RUN_FILE = """
[job]
name = "who"
argv = ["bash", "-c", "echo $FLAG $JOB $PROFILE $MACHINE >found"]
[job.env]
FLAG = "job"
JOB = "job"
[profile.env]
FLAG = "profile"
JOB = "profile"
PROFILE = "profile"
"""


def test_env_of_the_command_over_the_jobs_over_the_profiles_over_the_machines(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE, encoding="utf-8")
    names = ("FLAG", "JOB", "PROFILE", "MACHINE")
    machine = {**os.environ, **dict.fromkeys(names, "machine"), "LT_LAUNCH_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "lt_launch", "launch", "run", "run.toml", "--on", "local", "--env", "FLAG=flag"]
    done = subprocess.run(command, cwd=tmp_path, env=machine, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found").read_text(encoding="utf-8").split() == ["flag", "job", "profile", "machine"]
