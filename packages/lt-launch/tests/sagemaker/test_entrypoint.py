"""The container's side: the contract, what does not fit told in the failure file, and the time that a save has."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_launch.errors import LaunchError
from lt_launch.sagemaker import entrypoint
from lt_launch.sagemaker.container_recipe import procs_per_node, resolve_recipe
from lt_launch.sagemaker.contract import FAILURE_REASON_LIMIT, read_contract, write_failure
from lt_launch.sagemaker.entrypoint import run_entrypoint

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
        hyperparameters: dict[str, Any] = SMALL,
        hosts: tuple[str, ...] = ("algo-1",),
        current: str = "algo-1",
        channels: dict[str, Path] | None = None,
        **resources: str,
    ) -> Path:
        root = tmp_path / "ml"
        config, given = root / "input" / "config", channels or {"train": data / "store"}
        config.mkdir(parents=True)
        (root / "input" / "data").mkdir()
        for name, folder in given.items():
            (root / "input" / "data" / name).symlink_to(folder)
        resources |= {"current_host": current, "network_interface_name": "eth0"}
        for name, values in {
            "inputdataconfig": {name: {"TrainingInputMode": "File"} for name in given},
            "hyperparameters": hyperparameters,
            "resourceconfig": {**resources, "hosts": sorted(hosts)},
        }.items():
            (config / f"{name}.json").write_text(json.dumps(values))
        return root

    return make


def told(root: Path, environ: dict[str, str] | None = None) -> str:
    """What the entry left in the failure file when it ended with 64."""
    assert run_entrypoint(root, {**os.environ, **(environ or {})}, lambda _: None) == 64
    assert not (root / "checkpoints").exists()
    assert not (root / "model").exists()
    return (root / "output" / "failure").read_text()


def test_the_contract_is_read_whole_with_hosts_in_the_order_of_their_numbers(
    opt_ml: Callable[..., Path], data: Path
) -> None:
    hosts = tuple(f"algo-{i}" for i in range(1, 103))
    root = opt_ml(hosts=hosts, current="algo-10", channels={"train": data / "store", "tokenizer": data / "tokenizer"})
    contract = read_contract(root, {})
    assert (contract.hosts, contract.node_rank) == (hosts, 9)
    assert (contract.master_addr, contract.network_interface) == ("algo-1", "eth0")
    assert contract.hyperparameters["LEARNING_RATE"] == "3e-3"
    assert contract.channels == {name: root / "input" / "data" / name for name in ("train", "tokenizer")}
    assert (contract.checkpoint_dir, contract.has_checkpoint_config) == (root / "checkpoints", False)
    (root / "input" / "config" / "checkpointconfig.json").write_text('{"LocalPath": "/opt/ml/kept"}')
    contract = read_contract(root, {})
    assert (contract.checkpoint_dir, contract.has_checkpoint_config) == (root / "kept", True)


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
        ("hyperparameters.json", '{"MAX_STEPS": "many"}', "must be a number of steps such as 10000"),
        ("hyperparameters.json", '{"BETA1": "1.5"}', "must be less than 1"),
        ("hyperparameters.json", '{"NUM_NODES": "2"}', "NUM_NODES = 2 (hyperparameter NUM_NODES) and the job has 1"),
        ("hyperparameters.json", '{"VOCAB_SIZE": "-1"}', "VOCAB_SIZE"),
    ],
)
def test_what_does_not_fit_is_the_failure_reason(opt_ml: Callable[..., Path], name: str, text: str, words: str) -> None:
    root = opt_ml()
    (root / "input" / "config" / name).write_text(text)
    assert words in told(root)


def test_hyperparameters_variables_and_the_container_make_the_recipe(opt_ml: Callable[..., Path], data: Path) -> None:
    hyperparameters = {**SMALL, "sagemaker_job_name": '"x"', "LEARNING_RATE": '"2e-3"', "TOKENIZER": "org/mine"}
    channels = dict.fromkeys(("train", "validation", "validation-other"), data) | {"tokenizer": data / "tokenizer"}
    root = opt_ml(hyperparameters, channels=channels)
    environ = {"LT_SET_00": "run.seed=5", "LT_SET_01": "optimizer.eps=1e-7"}
    recipe, inputs = resolve_recipe(read_contract(root, {}), environ).recipe, root / "input" / "data"
    assert (recipe.optimizer.lr, recipe.optimizer.eps, recipe.run.seed) == (2e-3, 1e-7, 5)
    assert recipe.run.dir == str(root / "checkpoints" / "run")
    assert recipe.data.store == str(inputs / "train" / "store")
    assert recipe.data.validation == str(inputs / "validation" / "store")
    assert recipe.data.validation_sets["other"].store == str(inputs / "validation-other" / "store")
    assert recipe.fault_tolerance.grace_period_s == 115, "a save has at least 110 of the 120 seconds"


def test_a_trainium_container_trains_on_the_cores_that_it_has_processes_for(opt_ml: Callable[..., Path]) -> None:
    """The default of the recipe, 32 cores, is that of the largest instance."""
    root = opt_ml(current_instance_type="ml.trn1.2xlarge")
    for environ, cores in (
        ({"LT_PROCS_PER_NODE": "2"}, 2),
        ({"LT_PROCS_PER_NODE": "1"}, 1),
        ({"LT_SET_00": "engine.neuron.num_neuroncores=4"}, 4),
    ):
        recipe = resolve_recipe(read_contract(root, {}), environ).recipe
        assert (recipe.run.engine, recipe.engine["neuron"].num_neuroncores) == ("neuron", cores)


@pytest.mark.parametrize("name", ["run.dir", "data.store", "data.validation_sets.other.store", "model.init_from"])
def test_what_the_container_says_itself_cannot_be_set(opt_ml: Callable[..., Path], name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name} is set by the container"):
        resolve_recipe(read_contract(opt_ml(), {}), {"LT_SET_00": f"{name}=x"})


def test_another_tokenizer_is_refused_file_by_file(opt_ml: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in (data / "tokenizer").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    values = json.loads((other / "tokenizer.json").read_bytes())
    values["model"]["merges"] = values["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(values))
    reason = told(opt_ml(channels={"train": data / "store", "tokenizer": other}))
    assert "is not the tokenizer that" in reason
    assert reason.count("sha256") == 2


def test_hosts_without_a_shared_folder_and_a_grace_time_beyond_the_services_are_refused(
    opt_ml: Callable[..., Path],
) -> None:
    root = opt_ml(hosts=("algo-1", "algo-2"))
    assert "2 hosts need one folder" in told(root)
    (root / "input/config/resourceconfig.json").write_text('{"hosts": ["a"], "current_host": "a"}')
    (root / "output" / "failure").unlink()
    assert "at most 115" in told(root, {"LT_SET_00": "fault_tolerance.grace_period_s=120"})


@pytest.mark.parametrize(("current", "proof"), [("algo-1", "run_dir"), ("algo-2", "exit")])
def test_hosts_train_offline_and_the_first_alone_proves_the_end(
    opt_ml: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: str, proof: str
) -> None:
    seen: list[tuple[dict[str, Any], dict[str, str]]] = []
    monkeypatch.setattr(entrypoint, "run_attempts", lambda contract, spec, env, *_: seen.append((spec, env)) or 75)
    (tmp_path / "run").mkdir()
    channels = {"train": data / "store", "run": tmp_path / "run"}
    assert run_entrypoint(opt_ml(hosts=("algo-1", "algo-2"), current=current, channels=channels), {}, print) == 75
    ((spec, env),) = seen
    assert (spec["completion"], spec["nodes"]) == (proof, 2)
    assert {"HF_HUB_OFFLINE": "1", "NCCL_SOCKET_IFNAME": "eth0"}.items() <= env.items()


def test_processes_on_a_host(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert procs_per_node({}, tmp_path) == 1
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert procs_per_node({}, tmp_path) == 2
    assert procs_per_node({"LT_PROCS_PER_NODE": "3"}, tmp_path) == 3
    with pytest.raises(LaunchError, match="LT_PROCS_PER_NODE = '0'"):
        procs_per_node({"LT_PROCS_PER_NODE": "0"}, tmp_path)


TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=2000)


@given(TEXT, st.lists(TEXT))
def test_the_cause_comes_first_and_the_last_lines_fill_the_room(
    tmp_path_factory: pytest.TempPathFactory, cause: str, lines: list[str]
) -> None:
    root = tmp_path_factory.mktemp("ml")
    write_failure(root, cause, lines)
    text = (root / "output" / "failure").read_bytes().decode()
    assert len(text) <= FAILURE_REASON_LIMIT
    assert text.startswith(cause if len(cause) <= FAILURE_REASON_LIMIT else cause[: FAILURE_REASON_LIMIT - 3] + "...")
    if len(whole := "\n".join([cause, *lines])) <= FAILURE_REASON_LIMIT:
        assert text == whole
    write_failure(root, "another")
    assert (root / "output" / "failure").read_bytes().decode() == text, "the first failure stays"


ATTEMPTS = """
import os, sys
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
    sys.exit(entrypoint.run_attempts(read_contract(root, {}), spec, os.environ, stop, print))
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
    assert len(list(root.glob("output/data/lt/stages/train/attempt-*/exit.json"))) == attempts
    failure = root / "output" / "failure"
    assert (failure.read_text() if failure.exists() else "").endswith(reason)
    assert failure.exists() == bool(reason)
