"""Two ranks of the gpu engine with a mirror: killed and stopped while something is sent, restored on an empty machine.

Each test has an empty bucket of one server, and a line that holds the request in whose middle it wants to strike.
"""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lt_ckpt import Checkpoint, list_steps
from lt_test_helpers.pool import RankPool
from lt_test_helpers.rank_processes import GPU_ENGINE, TIMEOUT_S, RankProcesses, start_training
from lt_test_helpers.run_files import read_events, read_losses
from lt_test_helpers.s3_server import MotoServer, run_s3_server
from lt_trainer.errors import PeerError

BASE_OVERRIDES = ("checkpoint.async_save=true", "checkpoint.interval=4", "checkpoint.keep_last=9", "data.validation=")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with run_s3_server(tmp_path_factory.mktemp("moto")) as found:
        yield found


@pytest.fixture
def url(bucket: MotoServer) -> Iterator[str]:
    yield bucket.create_bucket()
    bucket.relay.release()


def start_ranks(prepared: Path, cwd: Path, bucket: MotoServer, url: str, *sets: str) -> RankProcesses:
    cwd.mkdir(exist_ok=True)
    values = (*BASE_OVERRIDES, f"checkpoint.mirror_url={url}", *sets)
    return start_training(prepared / "run.toml", cwd, *values, env=bucket.environ)


def run_to_end(prepared: Path, cwd: Path, bucket: MotoServer, url: str, *sets: str, codes: list[int]) -> list[str]:
    with start_ranks(prepared, cwd, bucket, url, *sets) as run:
        return run.end(codes)


@pytest.fixture(scope="module")
def uninterrupted_run(prepared: Path, tmp_path_factory: pytest.TempPathFactory, bucket: MotoServer) -> Path:
    """A run of two ranks that nothing interrupts, and that has no mirror."""
    cwd = tmp_path_factory.mktemp("whole")
    run_to_end(prepared, cwd, bucket, "", codes=[0, 0])
    return cwd / "run"


def test_kill_9_while_something_is_sent_and_an_empty_machine(
    prepared: Path, tmp_path: Path, bucket: MotoServer, url: str, uninterrupted_run: Path
) -> None:
    """What was being sent is no checkpoint; the one before is brought back, verified, and the rest is bit-equal."""
    bucket.relay.hold_request("PUT", "step-00000008/manifest.json")
    with start_ranks(prepared, tmp_path / "first", bucket, url) as run:
        assert bucket.relay.wait_held(TIMEOUT_S), run.output(0)
        run.kill()
        run.end([-signal.SIGKILL] * 2)
    bucket.relay.down()  # what was held dies with its connection, as the process has
    bucket.relay.release()
    bucket.relay.up()
    assert bucket.steps(url) == [4]
    assert any(name.startswith("step-00000008/") for name in bucket.object_names(url))
    shutil.rmtree(tmp_path / "first")
    said = run_to_end(prepared, tmp_path / "second", bucket, url, codes=[0, 0])
    run = tmp_path / "second" / "run"
    assert f"downloaded {url}/step-00000004 to " in said[0]
    assert "resuming after step 4" in said[0]
    assert read_losses(run) == {step: loss for step, loss in read_losses(uninterrupted_run).items() if step > 4}
    assert [event["step"] for event in read_events(run, "mirror_uploaded")] == [8, 12, 16, 20]
    assert read_events(run, "mirror_uploaded")[0]["kept"] > 0, "what was sent before the kill is not sent again"
    assert bucket.steps(url) == [4, 8, 12, 16, 20]
    for name in ("step-00000004", "step-00000020"):
        ours, theirs = (Checkpoint.open(folder / "checkpoints" / name).manifest for folder in (run, uninterrupted_run))
        assert ours.tensors == theirs.tensors
    for text in run_to_end(prepared, tmp_path / "third", bucket, url, "run.seed=1", codes=[64, 64]):
        assert "has a run with another recipe (run.seed: 0 there, 1 here)" in text, "both ranks say why"


def test_a_stop_while_something_is_sent(
    prepared: Path, tmp_path: Path, bucket: MotoServer, url: str, uninterrupted_run: Path
) -> None:
    """A signal to the other rank: both leave within the grace time, and say what is not there."""
    bucket.relay.hold_request("PUT", "step-00000004/weights-00001")
    with start_ranks(prepared, tmp_path, bucket, url, "fault_tolerance.grace_period_s=4") as run:
        assert bucket.relay.wait_held(TIMEOUT_S), run.output(0)
        run.send_signal(signal.SIGTERM, 1)
        deadline = time.monotonic() + TIMEOUT_S
        while not read_events(tmp_path / "run", "mirror_incomplete"):
            assert run.alive_ranks == [0, 1], run.output(0)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        bucket.relay.release()
        said = run.end([75, 75])[0]
    (missing,) = read_events(tmp_path / "run", "mirror_incomplete")
    assert missing["names"] == [path.name for _, path in reversed(list_steps(tmp_path / "run" / "checkpoints"))]
    assert f"warning: not in the mirror {url}: step-00000004" in said
    assert bucket.steps(url) == []
    run_to_end(prepared, tmp_path, bucket, url, codes=[0, 0])
    assert read_losses(tmp_path / "run") == read_losses(uninterrupted_run)
    assert bucket.steps(url) == sorted(step for step, _ in list_steps(tmp_path / "run" / "checkpoints"))


def act_slowly_on_rank_0(patient: bool) -> list[str]:
    """Rank 0 acts for longer than a collective may wait."""
    import datetime

    import torch.distributed as dist

    from lt_trainer.resilience.rank_sync import run_on_rank0, run_with_keepalive
    from lt_trainer.torch import GlooControl

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    control, seen = GlooControl(1.0), []

    def act() -> str:
        time.sleep(2.5)
        return "done"

    first = dist.get_rank() == 0
    if patient:
        return [run_with_keepalive(control, first, act, lambda: seen.append(1), 0.2), "waited" if seen else ""]
    return [run_on_rank0(control, first, act)]


def test_ranks_wait_longer_than_a_collective_may() -> None:
    pool = RankPool(2, preload=GPU_ENGINE)
    assert pool.run(act_slowly_on_rank_0, True) == [["done", "waited"]] * 2
    with pytest.raises(PeerError):
        pool.run(act_slowly_on_rank_0, False)
