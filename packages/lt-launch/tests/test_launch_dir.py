"""What is kept of a launch, for its owner alone, and how it is found again."""

import stat
from pathlib import Path

import pytest

from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline
from lt_launch.launch_dir import (
    acquire_lock,
    create,
    find_launch_dir,
    list_launch_dirs,
    load_launch,
    lock_owner,
    save_job_ids,
)
from lt_launch.launch_dir_status import read_logs
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.target import RenderedLaunch


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    pipeline = Pipeline.from_job(Job(name="x", argv=("true",)))

    def make(pipeline: Pipeline = pipeline):
        specs = {stage.name: stage_spec(stage, pipeline, Profile()) for stage in pipeline.stages}
        return create(pipeline, Profile(), "local", RenderedLaunch(files={"a/b.sh": "text"}), specs)

    return make


def test_a_launch_is_found_by_folder_and_by_name_and_reads_back(made, tmp_path: Path) -> None:
    launch = made()
    assert launch.directory == tmp_path / "runs" / "x" / "launch"
    assert (launch.directory / "rendered" / "a" / "b.sh").read_text() == "text"
    save_job_ids(launch, {"x": "42"})
    for name in ("runs/x", "runs/x/launch", "x", tmp_path / "runs/x"):
        found = load_launch(name)
        assert (found.pipeline, found.job_ids, found.target) == (launch.pipeline, {"x": "42"}, "local")
    made()
    assert list_launch_dirs() == [launch.directory]
    with pytest.raises(LaunchError, match="no launch here"):
        find_launch_dir("y")


def test_a_launch_is_held_by_one_process(made) -> None:
    launch = made()
    assert lock_owner(launch.directory) == ""
    with acquire_lock(launch):
        assert lock_owner(launch.directory).startswith("process ")
        with pytest.raises(LaunchError, match="is being launched by process"), acquire_lock(launch):
            pass
        with pytest.raises(LaunchError, match="is being launched by process"):
            made()
    assert lock_owner(launch.directory) == ""


def test_records_are_for_their_owner_alone(made) -> None:
    launch = save_job_ids(made(), {"x": "42"})
    for name in ("launch.json", "events.jsonl", "stages/x/spec.json", "rendered/a/b.sh"):
        assert stat.S_IMODE((launch.directory / name).stat().st_mode) == 0o600, name


def test_a_launch_that_one_may_not_read_is_its_owners(made, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = made()

    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(LaunchError, match="may be read by its owner alone"):
        load_launch(launch.directory)


def test_a_log_that_is_a_link_is_not_followed(made, tmp_path: Path) -> None:
    launch = made()
    (tmp_path / "private").write_text("hush\n")
    attempt = launch.directory / "stages" / "x" / "attempt-000"
    attempt.mkdir()
    (attempt / "rank-00000.log").symlink_to(tmp_path / "private")
    with pytest.raises(LaunchError, match=r"rank-00000\.log cannot be read: Too many levels of symbolic links"):
        list(read_logs(launch, stage="", rank=0, follow=False))


def test_damage_is_named(made) -> None:
    launch = made()
    for content in (b"{", b"[]", b"\xff", b'{"format": "lt-launch", "version": 1, "profile": 3}'):
        (launch.directory / "launch.json").write_bytes(content)
        with pytest.raises(LaunchError, match=r"launch\.json is damaged"):
            load_launch("runs/x")
