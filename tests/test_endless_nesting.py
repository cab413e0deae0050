"""JSON nested without end, in files that others may write: an error of the reader's own class, or left out as told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lt_launch.sagemaker.contract import read_contract
from lt_trainer.config.hyperparameters import read_hyperparameters
from lt_trainer.quickstart.settings import MARKER_FILE, QuickstartFolder, QuickstartSettings
from lt_trainer.resilience.heartbeat import decode_heartbeat
from lt_trainer.run_directory.run_dir import _recipe_changes
from lt_trainer_neuron.compile_key import read_keys
from lt_trainer_neuron.environment import ENV_RECORD_VARIABLE, _read_env_record

NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("hyperparameters.json", lambda folder: read_hyperparameters(folder / "hyperparameters.json")),
        ("input/config/hyperparameters.json", lambda folder: read_contract(folder, {})),
        (MARKER_FILE, lambda folder: QuickstartFolder(folder).claim(QuickstartSettings(), overwrite=False)),
        ("key.json", read_keys),
        ("recipe.json", lambda folder: _recipe_changes(folder / "recipe.json", {})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_is_refused_by_name(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(NESTED)
    with pytest.raises(ValueError, match=Path(name).name) as caught:
        read(tmp_path)
    assert getattr(caught.value, "exit_code", None) == 64


def test_what_a_process_tells_of_itself_is_left_out() -> None:
    assert decode_heartbeat(NESTED.encode()) is None
    assert _read_env_record({ENV_RECORD_VARIABLE: NESTED}) == {}
