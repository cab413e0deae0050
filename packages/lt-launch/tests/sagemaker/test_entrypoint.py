"""The container's side: the contract, what does not fit told in the failure file, and the time that a save has."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_launch.sagemaker.container_recipe import procs_per_node, resolve_recipe
from lt_launch.sagemaker.contract import natural_sort_key, read_contract
from lt_launch.sagemaker.entrypoint import run_entrypoint
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.failure import FAILURE_REASON_LIMIT, failure_text, write_failure

SMALL = {
    "HIDDEN_SIZE": "64",
    "INTERMEDIATE_SIZE": "128",
    "N_HEADS": "4",
    "N_KV_HEADS": "2",
    "N_LAYERS": "2",
    "SEQ_LEN": "64",
    "GLOBAL_BATCH_SIZE": "8",
    "MICRO_BATCH_SIZE": "2",
    "MAX_STEPS": "20",
    "WARMUP_STEPS": "3",
    "LEARNING_RATE": "3e-3",
    "MIN_LR": "3e-4",
}


@pytest.fixture
def opt_ml(tmp_path: Path, data: Path) -> Callable[..., Path]:
    """Makes a folder that stands for /opt/ml."""

    def make(
        hyperparameters: dict[str, Any] | None = None,
        hosts: tuple[str, ...] = ("algo-1",),
        current: str = "algo-1",
        channels: dict[str, Path] | None = None,
        mode: str = "File",
    ) -> Path:
        root = tmp_path / "ml"
        config, given = root / "input" / "config", channels or {"train": data / "store"}
        config.mkdir(parents=True)
        (root / "input" / "data").mkdir()
        for name, folder in given.items():
            (root / "input" / "data" / name).symlink_to(folder)
        inputs = {name: {"TrainingInputMode": mode, "S3DistributionType": "FullyReplicated"} for name in given}
        (config / "inputdataconfig.json").write_text(json.dumps(inputs))
        (config / "hyperparameters.json").write_text(json.dumps(SMALL if hyperparameters is None else hyperparameters))
        resources = {"current_host": current, "hosts": sorted(hosts), "network_interface_name": "eth0"}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        return root

    return make


def told(root: Path, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code of the entry and what it left in the failure file."""
    code = run_entrypoint(root, {**os.environ, **(environ or {})}, lambda _: None)
    return code, (root / "output" / "failure").read_text()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 256), st.randoms())
def test_hosts_are_in_the_order_of_their_numbers(count: int, chance: Any) -> None:
    names = [f"algo-{number + 1}" for number in range(count)]
    shuffled = list(names)
    chance.shuffle(shuffled)
    assert sorted(shuffled, key=natural_sort_key) == names


def test_the_contract_is_read_whole(opt_ml: Callable[..., Path], data: Path) -> None:
    hosts = tuple(f"algo-{i}" for i in range(1, 13))
    root = opt_ml(hosts=hosts, current="algo-10", channels={"train": data / "store", "tokenizer": data / "tokenizer"})
    contract = read_contract(root, {})
    assert contract.cluster.hosts == hosts
    assert contract.cluster.node_rank == 9
    assert contract.cluster.master_addr == "algo-1"
    assert contract.cluster.network_interface == "eth0"
    assert contract.hyperparameters["LEARNING_RATE"] == "3e-3"
    assert contract.channels == {name: root / "input" / "data" / name for name in ("train", "tokenizer")}
    assert contract.checkpoint_dir == root / "checkpoints"
    assert not contract.has_checkpoint_config
    (root / "input" / "config" / "checkpointconfig.json").write_text('{"LocalPath": "/opt/ml/kept"}')
    assert read_contract(root, {}).checkpoint_dir == root / "kept"
    assert read_contract(root, {}).has_checkpoint_config


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("resourceconfig.json", "{", "not valid JSON"),
        ("resourceconfig.json", '{"hosts": ["a"], "current_host": "b"}', "current_host = 'b' must be exactly once"),
        ("resourceconfig.json", '{"hosts": ["a", "a"], "current_host": "a"}', "exactly once"),
        ("resourceconfig.json", "[]", "not an object"),
        ("inputdataconfig.json", '{"train": {}, "other": {}}', "channel other is in inputdataconfig.json"),
        ("inputdataconfig.json", '{"train": {"TrainingInputMode": "Pipe"}}', "input mode Pipe"),
        ("inputdataconfig.json", "{}", "channel train is missing"),
        ("hyperparameters.json", '{"LERNING_RATE": "1"}', "did you mean LEARNING_RATE"),
        ("hyperparameters.json", '{"MAX_STEPS": "many"}', "must be a valid integer"),
        ("hyperparameters.json", '{"BETA1": "1.5"}', "must be less than 1"),
        ("hyperparameters.json", '{"NUM_NODES": "2"}', "NUM_NODES = 2 (hyperparameter NUM_NODES) and the job has 1"),
        ("hyperparameters.json", '{"VOCAB_SIZE": "-1"}', "VOCAB_SIZE"),
    ],
)
def test_what_does_not_fit_is_the_failure_reason(opt_ml: Callable[..., Path], name: str, text: str, words: str) -> None:
    root = opt_ml()
    (root / "input" / "config" / name).write_text(text)
    code, reason = told(root)
    assert code == 64
    assert words in reason
    assert not (root / "checkpoints").exists()
    assert not (root / "model").exists()


def test_hyperparameters_variables_and_the_container_make_the_recipe(opt_ml: Callable[..., Path], data: Path) -> None:
    hyperparameters = {**SMALL, "sagemaker_job_name": '"x"', "LEARNING_RATE": '"2e-3"', "TOKENIZER": "org/mine"}
    root = opt_ml(hyperparameters, channels={"train": data, "tokenizer": data / "tokenizer", "validation": data})
    environ = {"LT_SET_00": "run.seed=5", "LT_SET_01": "optimizer.eps=1e-7"}
    recipe = resolve_recipe(read_contract(root, {}), environ).recipe
    assert recipe.optimizer.lr == 2e-3
    assert recipe.optimizer.eps == 1e-7
    assert recipe.run.seed == 5
    assert recipe.run.dir == str(root / "checkpoints" / "run")
    assert recipe.data.store == str(root / "input" / "data" / "train" / "store")
    assert recipe.data.validation == str(root / "input" / "data" / "validation" / "store")
    assert recipe.fault_tolerance.grace_period_s == 115
    assert 120 - recipe.fault_tolerance.grace_period_s <= 10, "a save has at least 110 of the 120 seconds"


def test_a_trainium_container_trains_on_the_cores_that_it_has_processes_for(opt_ml: Callable[..., Path]) -> None:
    """The default of the recipe, 32 cores, is that of the largest instance."""
    root = opt_ml()
    file = root / "input" / "config" / "resourceconfig.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "current_instance_type": "ml.trn1.2xlarge"}))
    for environ, cores in (
        ({"LT_PROCS_PER_NODE": "2"}, 2),
        ({"LT_PROCS_PER_NODE": "1"}, 1),
        ({"LT_SET_00": "engine.neuron.num_neuroncores=4"}, 4),
    ):
        recipe = resolve_recipe(read_contract(root, {}), environ).recipe
        assert (recipe.run.engine, recipe.engine["neuron"].num_neuroncores) == ("neuron", cores)


def test_what_the_container_says_itself_cannot_be_set(opt_ml: Callable[..., Path]) -> None:
    root = opt_ml()
    code, reason = told(root, {"LT_SET_00": "fault_tolerance.grace_period_s=120"})
    assert code == 64
    assert "at most 115" in reason
    for name in ("run.dir", "data.store", "data.validation", "data.validation_sets.other.store", "model.init_from"):
        with pytest.raises(SageMakerError, match=f"{name} is set by the container"):
            resolve_recipe(read_contract(root, {}), {"LT_SET_00": f"{name}=x"})


def test_another_tokenizer_is_refused_file_by_file(opt_ml: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in (data / "tokenizer").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    values = json.loads((other / "tokenizer.json").read_bytes())
    values["model"]["merges"] = values["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(values))
    code, reason = told(opt_ml(channels={"train": data / "store", "tokenizer": other}))
    assert code == 64
    assert "is not the tokenizer that" in reason
    assert reason.count("sha256") == 2


def test_hosts_without_a_shared_folder_are_refused(opt_ml: Callable[..., Path]) -> None:
    code, reason = told(opt_ml(hosts=("algo-1", "algo-2")))
    assert code == 64
    assert "2 hosts need one folder" in reason


def test_processes_on_a_host(opt_ml: Callable[..., Path], tmp_path: Path) -> None:
    contract = read_contract(opt_ml(), {})
    (tmp_path / "dev").mkdir()
    assert procs_per_node(contract, {}, tmp_path) == 1
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert procs_per_node(contract, {}, tmp_path) == 2
    assert procs_per_node(contract, {"LT_PROCS_PER_NODE": "3"}, tmp_path) == 3
    with pytest.raises(SageMakerError, match="LT_PROCS_PER_NODE = '0'"):
        procs_per_node(contract, {"LT_PROCS_PER_NODE": "0"}, tmp_path)


@given(st.text(max_size=3000), st.lists(st.text(alphabet=st.characters(exclude_characters="\n"), max_size=200)))
def test_the_cause_comes_first_and_the_last_lines_fill_the_room(cause: str, lines: list[str]) -> None:
    text = failure_text(cause, lines)
    assert len(text) <= FAILURE_REASON_LIMIT
    assert text.startswith(cause if len(cause) <= FAILURE_REASON_LIMIT else cause[: FAILURE_REASON_LIMIT - 3] + "...")
    if len(cause) + sum(len(line) + 1 for line in lines) <= FAILURE_REASON_LIMIT:
        assert text == "\n".join([cause, *lines])


def test_the_first_failure_stays(tmp_path: Path) -> None:
    assert write_failure(tmp_path / "output" / "failure", "first")
    assert not write_failure(tmp_path / "output" / "failure", "second")
    assert (tmp_path / "output" / "failure").read_text() == "first"


ATTEMPTS = """
import json, os, sys
from pathlib import Path
from lt_launch.attempt import Stop, handle_stop_signals
from lt_launch.sagemaker import entrypoint
from lt_launch.sagemaker.contract import read_contract
root, script = Path(sys.argv[1]), sys.argv[2]
spec = {"argv": ["bash", "-c", script], "nodes": 1, "procs_per_node": 2, "env": {},
        "cwd": str(root), "run_dir": "", "grace_s": entrypoint.GRACE_PERIOD_S, "completion": "exit",
        "restart": {"max_restarts": 2, "max_without_progress": 2}}
stop = Stop()
with handle_stop_signals(stop):
    sys.exit(entrypoint._run_attempts(read_contract(root, {}), spec, root / "kept", os.environ, stop, print))
"""


@pytest.mark.parametrize(
    ("script", "code", "attempts", "reason"),
    [
        ("test $RANK = 0 || test $LT_ATTEMPT = 1 || kill -9 $$", 0, 2, ""),
        ("test $LT_ATTEMPT = 2 || exit 75", 0, 3, ""),
        ("exit 75", 75, 3, "was the first to leave with 75"),
        (
            "test $RANK = 0 || { echo why; exit 7; }; sleep 60",
            7,
            1,
            "rank 1 on algo-1 was the first to fail: exit code 7\nwhy",
        ),
    ],
)
def test_attempts_follow_one_another_only_where_that_may_help(
    opt_ml: Callable[..., Path], script: str, code: int, attempts: int, reason: str
) -> None:
    root = opt_ml()
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(root), script], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert len(list((root / "kept" / "stages" / "train").glob("attempt-*/exit.json"))) == attempts
    failure = root / "output" / "failure"
    assert (failure.read_text() if failure.exists() else "").endswith(reason)
    assert failure.exists() == bool(reason)
