"""Plants "this option is ignored" for each option, and runs the test that `tools/option_effects.toml` names for it.

    python tools/plant_ignored_options.py                    # all
    python tools/plant_ignored_options.py optimizer "lt ckpt convert --xser"    # those that begin so

The test must fail. A test that passes with its option ignored shows nothing, and is printed; exit code 1. The fault is
planted by `ignored_option/sitecustomize.py`, in the processes that a test starts too. Left out are options whose
hardware is absent, and those with a case below tests/options, where slow tests plant the same faults in one process.
torch is loaded once: each test runs in a fork of this process, some seconds to a minute each.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from members import ROOT
from option_effects import Effect, read_effects
from option_schema import Option, read_options

__all__ = ["run_planted"]

PLANT_DIR = ROOT / "tools" / "ignored_option"
TIMEOUT_S = 120
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=ci", "--tb=short"]
PASSED, FAILED, INTERNAL_ERROR = 0, 1, 3
"""Exit codes of pytest."""


def run_planted(option: Option, effect: Effect, plant: ModuleType, output: Path) -> int | None:
    """Run the test of an option that is ignored, in a fork; return pytest's exit code, None after the time limit."""
    text = option.ignored(effect.instead)
    process = os.fork()
    if process == 0:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= {plant.VARIABLE: text, "PYTHONPATH": str(PLANT_DIR), "OMP_NUM_THREADS": "1"}
        plant.plant(text)
        code = INTERNAL_ERROR
        try:
            import pytest

            code = int(pytest.main([*PYTEST, effect.test]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    try:
        return _wait(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # and what the test left


def _wait(process: int) -> int | None:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _load_plant() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ignored_option", PLANT_DIR / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(names: list[str]) -> int:
    """Run the tests; print those that do not fail."""
    for name in ("pytest", "torch"):
        import_module(name)  # once, for all forks
    plant, effects, survivors, count = _load_plant(), read_effects(), 0, 0
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        for option in read_options():
            effect = effects[option.name]
            is_asked = option.name.startswith(tuple(names)) if names else not effect.test.startswith("tests/options/")
            if not is_asked or effect.inert == "hardware absent":
                continue
            start = time.monotonic()
            code = run_planted(option, effect, plant, output)
            count += 1
            words = {FAILED: "noticed", PASSED: "NOT NOTICED", None: "TIMED OUT"}.get(code, f"pytest ended with {code}")
            print(f"{option.name}: {words} by {effect.test} ({time.monotonic() - start:.1f} s)", flush=True)
            if code != FAILED:
                survivors += 1
                print(output.read_text(encoding="utf-8", errors="replace")[-2000:], flush=True)
    print(f"{count - survivors} of {count} ignored options were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
