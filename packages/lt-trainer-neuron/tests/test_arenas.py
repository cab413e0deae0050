"""The arenas of glibc's malloc are bounded in a rank that runs already, where its environment comes too late."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lt_trainer.config.recipe import load, model_config
from lt_trainer.engine import World
from lt_trainer_neuron.malloc import limit_malloc_arenas
from lt_trainer_neuron.sdk import NotInstalledError
from lt_trainer_neuron.spec import SPEC

SCRIPT = """
import ctypes, os, sys, threading
exec(sys.argv[1])
threads = 8
there, leave = threading.Barrier(threads + 1), threading.Event()
def work():
    kept = [bytes(20_000) for _ in range(10)]
    there.wait()
    leave.wait()
started = [threading.Thread(target=work) for _ in range(threads)]
for one in started:
    one.start()
there.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
leave.set()
print(open(sys.argv[2]).read().count("<heap nr="))
"""


def arenas(first: str, tmp_path: Path) -> int:
    command = [sys.executable, "-c", SCRIPT, first, tmp_path / "info.xml"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="NO GLIBC: its arenas are not counted")
def test_a_running_process_makes_no_more_arenas(tmp_path: Path) -> None:
    """The variable alone, set then, does nothing."""
    ours = "from lt_trainer_neuron.malloc import limit_malloc_arenas; assert limit_malloc_arenas('2')"
    assert arenas(ours, tmp_path) == 2
    assert arenas("os.environ['MALLOC_ARENA_MAX'] = '2'", tmp_path) > 2


def test_a_rank_bounds_its_own_by_the_users_value_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("lt_trainer_neuron.spec.limit_malloc_arenas", asked.append)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    sets = ["run.engine=neuron", "engine.neuron.num_neuroncores=1"]
    recipe = load(base={"data": {"store": "x"}}, overrides=sets).recipe
    for mine in ("", "7"):
        if mine:
            monkeypatch.setenv("MALLOC_ARENA_MAX", mine)
        with pytest.raises(NotInstalledError):
            SPEC.open(recipe, model_config(recipe, 512), World())
    assert asked == ["64", "7"]
    assert limit_malloc_arenas("many") is False
