"""Mirror of a run with the fake engine and a real server: uploads, downloads, outages, messages."""

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from lt_ckpt import list_steps, verify
from lt_ckpt.s3 import owner as owners
from lt_ckpt.s3.transfer import download, find_latest_remote
from lt_data.remote import s3_folder
from lt_data.remote.s3_folder import S3Folder
from lt_test_helpers import runs
from lt_test_helpers.runs import events, losses, start
from lt_test_helpers.s3_server import MotoServer, run_s3_server
from lt_trainer.checkpointing import mirror as run_mirror
from lt_trainer.checkpointing.mirror import recipe_differences
from lt_trainer.config.recipe import load, to_dict
from lt_trainer.errors import MirrorError, RecipeError
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.training import run as run_module
from lt_trainer.training.loop import TrainingError

SOON_S = 120.0
WHOLE: dict[int, float] = {}
"""Made once: the recipe of all tests is the same."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with run_s3_server(tmp_path_factory.mktemp("moto")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: MotoServer) -> Iterator[object]:
    """Clients are costly to make, so that all runs share one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environ.items():
            patch.setenv(name, value)
        made = s3_folder.make_client()
        yield made
        made.close()


@pytest.fixture
def bucket(server: MotoServer, client: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[MotoServer]:
    from lt_ckpt.s3 import mirror

    monkeypatch.setattr(s3_folder, "make_client", lambda: client)
    monkeypatch.setattr(run_mirror, "POLL_INTERVAL_S", 0.02)
    real = mirror.Mirror.__init__

    def made(self, *args, **more) -> None:
        real(self, *args, **{"poll_interval_s": 0.05, **more})

    monkeypatch.setattr(mirror.Mirror, "__init__", made)
    yield server
    server.relay.release()
    if server.relay._listener is None:
        server.relay.up()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("lt-")] == []


@pytest.fixture
def url(bucket: MotoServer, recipe_base) -> str:
    made = bucket.create_bucket()
    recipe_base["checkpoint"]["mirror_url"] = made
    recipe_base["checkpoint"]["keep_last"] = 9
    recipe_base["data"].pop("validation")
    return made


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check(base, *overrides: str) -> str:
    with redirect_stdout(StringIO()) as printed:
        runs.check(load(base=base, overrides=["run.engine=fake", *overrides]), environ={})
    return printed.getvalue()


def out(base) -> Path:
    return Path(base["run"]["dir"])


def steps_told(base, kind: str) -> list[int]:
    return [event["step"] for event in events(base, kind)]


def lose(base) -> None:
    """The machine is gone: what comes next is an empty one."""
    shutil.rmtree(out(base))


@pytest.fixture
def whole(recipe_base, fake_engine, tmp_path) -> dict[int, float]:
    """The losses of the run that nothing interrupts and that has no mirror."""
    if not WHOLE:
        folder = recipe_base["run"]["dir"]
        recipe_base["run"]["dir"] = str(tmp_path / "whole")
        assert start(recipe_base, "checkpoint.mirror_url=") == 0
        WHOLE.update(losses(recipe_base))
        recipe_base["run"]["dir"] = folder
        fake_engine.opened.clear()
    return WHOLE


@pytest.mark.parametrize("background", ["true", "false"])
def test_every_checkpoint_gets_there_and_an_empty_machine_goes_on_bit_equal(
    bucket, url, recipe_base, whole, capsys, background
) -> None:
    overrides = [f"checkpoint.async_save={background}"]
    assert start(recipe_base, *overrides, stop_after_step=9) == 75
    assert losses(recipe_base) == {step: whole[step] for step in range(1, 10)}
    assert bucket.steps(url) == [6, 9]
    assert steps_told(recipe_base, "mirror_uploaded") == [6, 9]
    assert events(recipe_base, "mirror_problem", "mirror_incomplete") == []
    assert f"all checkpoints are in {url}" in capsys.readouterr().out
    lose(recipe_base)
    assert start(recipe_base, *overrides) == 0
    assert losses(recipe_base) == {step: whole[step] for step in range(10, 21)}
    (restored,) = events(recipe_base, "mirror_downloaded")
    assert restored["url"] == f"{url}/step-00000009"
    assert steps_told(recipe_base, "resume") == [9]
    assert f"downloaded {url}/step-00000009 to " in capsys.readouterr().out
    assert bucket.steps(url) == [6, 9, 12, 18, 20]
    for _, path in list_steps(out(recipe_base) / "checkpoints"):
        assert verify(path).is_loadable


def test_a_damaged_one_there_is_passed_over_and_sent_anew_when_its_step_comes_again(
    bucket, url, recipe_base, whole, capsys, tmp_path
) -> None:
    assert start(recipe_base, stop_after_step=12) == 75
    bucket.corrupt(url, "step-00000012/weights-00000.safetensors")
    lose(recipe_base)
    assert start(recipe_base) == 0
    assert steps_told(recipe_base, "resume") == [6]
    assert losses(recipe_base) == {step: whole[step] for step in range(7, 21)}
    assert f"warning: {url}/step-00000012 is not used: " in capsys.readouterr().out
    assert "is damaged" in events(recipe_base, "mirror_problem")[0]["message"]
    assert download(f"{url}/step-00000012", tmp_path / "back").path.exists(), "verified"


def test_a_damaged_one_here_is_fetched_from_there(bucket, url, recipe_base, whole, capsys) -> None:
    assert start(recipe_base, stop_after_step=9) == 75
    file = out(recipe_base) / "checkpoints" / "step-00000009" / "weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    assert start(recipe_base) == 0
    assert "step-00000009 is not used" in capsys.readouterr().out
    assert steps_told(recipe_base, "resume") == [9]
    assert losses(recipe_base) == whole
    assert verify(file.parent).is_loadable


def test_the_bucket_of_another_run_is_refused(bucket, url, recipe_base, fake_engine, tmp_path) -> None:
    assert start(recipe_base, stop_after_step=6) == 75
    before, first = bucket.object_names(url), recipe_base["run"]["dir"]
    recipe_base["run"]["dir"] = str(tmp_path / "second")
    for act in (start, check):
        with pytest.raises(RecipeError, match=r"already has checkpoints \(newest: step 6\)"):
            act(recipe_base, "checkpoint.resume=false")
    with pytest.raises(MirrorError, match=r"another recipe \(optimizer.lr: 0.0016 there, 0.001 here; ") as caught:
        start(recipe_base, "optimizer.lr=1e-3")
    assert caught.value.exit_code == 64
    other = bucket.create_bucket()
    assert start(recipe_base, f"checkpoint.mirror_url={other}", stop_after_step=3) == 75
    with pytest.raises(MirrorError, match="belongs to another run"):
        start(recipe_base)
    recipe_base["run"]["dir"] = str(tmp_path / "third")
    assert start(recipe_base, "checkpoint.mirror_url=", "run.seed=1", stop_after_step=6) == 75
    for act in (start, check):
        with pytest.raises(MirrorError, match=r"another recipe \(run.seed: 0 there, 1 here\)"):
            act(recipe_base, "run.seed=1")
    assert bucket.object_names(url) == before
    recipe_base["run"]["dir"] = first
    assert start(recipe_base, "optimizer.lr=1e-3", "checkpoint.mirror_keep_last=3") == 0, "its own may change"


def test_a_mirror_that_is_new_or_moves_gets_everything(bucket, url, recipe_base, whole) -> None:
    assert start(recipe_base, "checkpoint.mirror_url=", stop_after_step=6) == 75
    assert start(recipe_base, stop_after_step=9) == 75
    assert bucket.steps(url) == [6, 9]
    name = json.loads((out(recipe_base) / "mirror.json").read_bytes())["run"]
    (out(recipe_base) / "mirror.json").unlink()
    assert start(recipe_base, stop_after_step=12) == 75, "the recipe shows that it is the same run"
    assert json.loads((out(recipe_base) / "mirror.json").read_bytes())["run"] == name
    other = bucket.create_bucket()
    assert start(recipe_base, f"checkpoint.mirror_url={other}") == 0
    assert bucket.steps(other) == [6, 9, 12, 18, 20]
    assert losses(recipe_base) == whole


def test_a_stop_while_a_checkpoint_is_fetched_takes_no_step(bucket, url, recipe_base, whole, fake_engine) -> None:
    assert start(recipe_base, stop_after_step=9) == 75
    lose(recipe_base)
    bucket.relay.hold_request("GET", "step-00000009/weights")
    stop = StopSignals()

    def strike() -> None:
        assert bucket.relay.wait_held(SOON_S)
        stop._on_signal(signal.SIGUSR1, None)
        wait_until(lambda: "stop" in agreed)
        bucket.relay.release()

    agreed: list[str] = []
    real = run_mirror.RunMirror._on_poll
    thread = threading.Thread(target=strike)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run_mirror.RunMirror,
            "_on_poll",
            lambda self: (real(self), agreed.append("stop" if self._stop_signal else "")),
        )
        thread.start()
        assert start(recipe_base, stop=stop) == 75
        thread.join()
    assert fake_engine.opened[-1].rows == []
    assert list_steps(out(recipe_base) / "checkpoints") == []
    assert events(recipe_base, "stop")[0]["signal"] == "SIGUSR1"
    assert start(recipe_base) == 0
    assert losses(recipe_base) == {step: whole[step] for step in range(10, 21)}


def test_without_a_checkpoint_here_the_bucket_has_to_be_asked(bucket, url, recipe_base, fake_engine) -> None:
    bucket.relay.down()
    with pytest.raises(MirrorError, match="the mirror may have one") as caught:
        start(recipe_base)
    assert caught.value.exit_code == 75, "another start may be all that it needs"
    bucket.relay.up()
    with pytest.raises(MirrorError, match="NoSuchBucket") as caught:
        start(recipe_base, "checkpoint.mirror_url=s3://no-such-bucket/run")
    assert caught.value.exit_code == 64
    assert [engine.rows for engine in fake_engine.opened] == [[], []]
    assert start(recipe_base) == 0


def test_a_run_that_can_go_on_does_while_the_bucket_is_away(
    bucket, url, recipe_base, whole, fake_engine, capsys
) -> None:
    """At its start, and again at its end, where it is not done before its last checkpoint is there."""
    assert start(recipe_base, stop_after_step=6) == 75
    bucket.relay.down()
    fake_engine.on_step = lambda call: bucket.relay.up() if call == 3 else None
    assert start(recipe_base, stop_after_step=12) == 75
    assert "warning: the mirror cannot be used" in capsys.readouterr().out
    assert bucket.steps(url) == [6, 12]
    fake_engine.on_step = lambda call: bucket.relay.down() if call == 3 else None
    assert start(recipe_base, "fault_tolerance.grace_period_s=0.5") == 75
    assert losses(recipe_base) == whole
    missing = events(recipe_base, "mirror_incomplete")[-1]
    assert (missing["names"][-2:], missing["newest"]) == (["step-00000018", "step-00000020"], True)
    assert "check the network" in missing["message"]
    assert "rerun to upload it" in capsys.readouterr().out
    bucket.relay.up()
    assert start(recipe_base) == 0
    assert fake_engine.opened[-1].rows == []
    assert bucket.steps(url) == [6, 12, 18, 20]


def test_what_a_person_has_to_mend_ends_with_64(bucket, url, recipe_base, whole, fake_engine) -> None:
    """Another process of the same run takes the folder over: nothing of this one goes there any more."""

    def take_over(call: int) -> None:
        if call == 10:
            root = S3Folder(url)
            owner = owners.read_owner(root)
            assert owner is not None
            owners.ensure_owner(root, owners.Owner(run=owner.run, holder="0" * 16), allow_takeover=True)

    fake_engine.on_step = take_over
    assert start(recipe_base) == 64
    assert losses(recipe_base) == whole
    assert bucket.steps(url) == [6]
    assert "another process has resumed this run" in events(recipe_base, "mirror_incomplete")[0]["message"]
    fake_engine.on_step = lambda call: None
    assert start(recipe_base) == 0, "a new start takes it back"
    assert bucket.steps(url) == [6, 12, 18, 20]


def test_retention_here_spares_what_is_being_sent(bucket, url, recipe_base, fake_engine) -> None:
    bucket.relay.hold_request("PUT", "step-00000003/weights")
    seen = []

    def look(call: int) -> None:
        if call == 6:
            assert bucket.relay.wait_held(SOON_S)
        if call == 13:
            seen.extend(step for step, _ in list_steps(out(recipe_base) / "checkpoints"))
            bucket.relay.release()

    fake_engine.on_step = look
    assert start(recipe_base, "checkpoint.interval=3", "checkpoint.keep_last=1") == 0
    assert seen == [12, 3]
    assert bucket.steps(url)[0] == 3
    assert bucket.steps(url)[-1] == 20


def test_retention_there_keeps_the_last_and_the_multiples(bucket, url, recipe_base, fake_engine) -> None:
    overrides = ["checkpoint.interval=2", "checkpoint.mirror_keep_last=2", "checkpoint.mirror_keep_every=8"]
    mine = {"Bucket": url.split("/")[2], "Key": "run/step-00000004/notes.txt"}
    bucket.client.put_object(**mine, Body=b"mine")
    assert start(recipe_base, *overrides) == 0
    steps = bucket.steps(url)
    assert {8, 16, 18, 20} <= set(steps) <= {4, 8, 16, 18, 20}
    assert "step-00000004/notes.txt" in bucket.object_names(url)


def test_an_error_leaves_the_mirror_in_order(bucket, url, recipe_base, fake_engine) -> None:
    fake_engine.poison = lambda call, batch: call >= 10
    with pytest.raises(TrainingError):
        start(recipe_base, "fault_tolerance.max_skipped_steps=2", "fault_tolerance.max_rollbacks=0")
    assert bucket.steps(url) == [6]


def test_check_tries_the_mirror_and_leaves_nothing(bucket, url, recipe_base, fake_engine) -> None:
    assert f"permissions to write, list, read and delete in {url}; no checkpoint yet" in check(recipe_base)
    assert bucket.object_names(url) == []
    assert not out(recipe_base).exists()
    with pytest.raises(Exception, match="NoSuchBucket"):
        check(recipe_base, "checkpoint.mirror_url=s3://no-such-bucket/run")
    assert start(recipe_base, stop_after_step=6) == 75
    before = bucket.object_names(url)
    assert "newest checkpoint step-00000006" in check(recipe_base)
    assert bucket.object_names(url) == before
    assert find_latest_remote(url)[0] == f"{url}/step-00000006"


def test_a_mirror_needs_boto3(recipe_base, fake_engine, monkeypatch) -> None:
    monkeypatch.setattr(run_module, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"boto3, which is not installed; pip install 'lt-trainer\[s3\]'"):
        start(recipe_base, "checkpoint.mirror_url=s3://bucket/run")


def test_what_an_empty_machine_may_have_otherwise(recipe_base) -> None:
    free = ["run.dir=elsewhere", "data.store=elsewhere", "batch.micro_batch_size=2", "parallel.dp_replicate=2"]
    free += ["checkpoint.interval=7", "fault_tolerance.hang_timeout_s=9"]
    bound = {
        "run.seed=3": "run.seed: 0 there, 3 here",
        "data.packing=concat": 'data.packing: "bfd" there, "concat" here',
        "batch.global_batch_size=16": "batch.global_batch_size: 8 there, 16 here",
        "schedule.max_steps=30": "schedule.max_steps: 20 there, 30 here",
        "model.n_layers=3": "model.n_layers: 2 there, 3 here",
        "run.engine=neuron": 'run.engine: "gpu" there, "neuron" here',
    }
    for setting, told in (dict.fromkeys(free, "") | bound).items():
        there, here = (to_dict(load(base=recipe_base, overrides=overrides).recipe) for overrides in ([], [setting]))
        assert recipe_differences(there, here) == ([told] if told else [])
