"""What is kept of a launch: the working folder's state as a patch that applies, and never a secret."""

import hashlib
import stat
import subprocess
from pathlib import Path

import pytest

from lt_launch.errors import LaunchError
from lt_launch.git_state import git_state
from lt_launch.job import Job, Pipeline
from lt_launch.launch_dir import (
    acquire_lock,
    create,
    find_launch_dir,
    list_launch_dirs,
    load_launch,
    lock_owner,
    read_events,
    save_job_ids,
)
from lt_launch.profile import Profile
from lt_launch.spec import stage_spec
from lt_launch.target import RenderedLaunch

SECRET_NAMES = [
    *(".env", "prod.env", "my_credentials.json", "password.txt", "passwords.txt", "token.json", "hf_token.yaml"),
    *("kubeconfig", "admin.kubeconfig", ".aws/config", ".ssh/config", ".kube/config", ".docker/config.json"),
    *("id_work", "id_ed25519_sk", "deep/id_rsa", ".git-credentials", ".s3cfg", "server.jks", "prod.tfstate"),
    *("service-account.json", "auth.json", "rclone.conf", "api_key.txt", "wandb_api_key"),
]
SECRET_LINES = [
    "export PGPASSWORD=hush-hush",
    'openai_key = "hush-hush-hush"',
    "token = hf_" + "x" * 34,
    "AKIA" + "X" * 16,
    "sk-proj-" + "x" * 40,
    "ghp_" + "x" * 36,
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    "postgres://me:hush-hush@db/x",
    "Authorization: Bearer " + "x" * 20,
]
"""Values of the usual shapes, none of them real."""


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("one\ntwo\n")
    (folder / ".gitignore").write_text("ignored\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "x")
    return folder


def test_of_untracked_files_name_size_and_hash_are_kept(repository: Path) -> None:
    (repository / "train.py").write_text("one\nchanged\n")
    (repository / "notes").write_text("hush-hush")
    (repository / "link").symlink_to("notes")
    (repository / "pipe").symlink_to("/dev/zero")
    state, patch = git_state(repository)
    assert "+changed" in patch
    assert "hush" not in patch
    assert state["untracked"] == {
        "link": {"bytes": 5, "sha256": "", "in_patch": False},
        "notes": {"bytes": 9, "sha256": hashlib.sha256(b"hush-hush").hexdigest(), "in_patch": False},
        "pipe": {"bytes": 9, "sha256": "", "in_patch": False},
    }


def test_the_patch_with_untracked_files_makes_a_clean_clone_what_ran(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text("one\nchanged\n")
    (repository / "new file.py").write_text("new\n")
    (repository / "ä.bin").write_bytes(bytes(range(256)))
    (repository / "ignored").write_text("x")
    (repository / "big").write_bytes(b"x" * (2 << 20))
    (repository / "run.sh").write_text("export PGPASSWORD=hush-hush\n")
    for name in SECRET_NAMES:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("hush-hush")
    state, patch = git_state(repository, include_untracked=True)
    assert state["commit"] == git(repository, "rev-parse", "HEAD")
    assert (state["branch"], state["changed"]) == ("main", ["train.py"])
    assert {name for name, kept in state["untracked"].items() if kept["in_patch"]} == {"new file.py", "ä.bin"}
    assert set(state["untracked"]) == {"big", "new file.py", "run.sh", "ä.bin", *SECRET_NAMES}
    assert "hush" not in patch
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    (tmp_path / "patch").write_text(patch, encoding="utf-8", errors="surrogateescape")
    git(clone, "apply", str(tmp_path / "patch"))
    for name in ("train.py", "new file.py", "ä.bin"):
        assert (clone / name).read_bytes() == (repository / name).read_bytes()


@pytest.mark.parametrize("line", SECRET_LINES)
def test_a_tracked_file_into_which_a_secret_was_written_is_left_out(repository: Path, line: str) -> None:
    (repository / "other.py").write_text("old\n")
    git(repository, "add", "other.py")
    git(repository, "commit", "-q", "-m", "x")
    (repository / "train.py").write_text(f"one\n{line}\n")
    (repository / "other.py").write_text("api_key = os.environ['API_KEY']\ntoken=self.token\n")
    state, patch = git_state(repository)
    assert state["changed_excluded"] == ["train.py"]
    assert line not in patch
    assert "+token=self.token" in patch


def test_changes_of_private_files_that_git_knows_are_not_kept_either(repository: Path) -> None:
    """Committed once, or on the way to it: what a person puts into .env today is no less a secret."""
    (repository / ".env").write_text("KEY=\n")
    (repository / ".envrc").write_text("export KEY=\n")
    (repository / "old.pem").write_text("hush-hush\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "x")
    (repository / ".env").write_text("KEY=hush-hush\n")
    (repository / ".envrc").write_text("export KEY=hush-hush\n")
    (repository / "my_credentials.json").write_text("hush-hush\n")
    git(repository, "add", "my_credentials.json")
    (repository / "old.pem").unlink()
    (repository / "train.py").write_text("one\nchanged\n")
    state, patch = git_state(repository)
    assert state["changed_excluded"] == [".env", ".envrc", "my_credentials.json", "old.pem"]
    assert "-two\n+changed\n" in patch
    assert "hush" not in patch
    assert not state["untracked"]


def test_the_patch_is_of_the_whole_repository_from_any_folder_of_it(repository: Path, tmp_path: Path) -> None:
    """And it applies, whatever the person has set for looking at differences."""
    (repository / "deep").mkdir()
    (repository / "deep" / "old.py").write_text("old\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "x")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    for name, value in {"diff.noprefix": "true", "color.ui": "always", "diff.external": "/bin/false"}.items():
        git(repository, "config", name, value)
    wanted = {"train.py": "one\n", "deep/old.py": "changed\n", "deep/new.py": "new\n", "top.py": "top\n"}
    for name, text in wanted.items():
        (repository / name).write_text(text)
    state, patch = git_state(repository / "deep", include_untracked=True)
    assert (state["changed"], list(state["untracked"])) == (["deep/old.py", "train.py"], ["deep/new.py", "top.py"])
    (tmp_path / "patch").write_text(patch)
    git(clone, "apply", str(tmp_path / "patch"))
    assert {name: (clone / name).read_text() for name in wanted} == wanted


def test_looking_at_a_repository_runs_no_program_that_it_names(repository: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\necho $0 >> {proof}\n")
    script.chmod(0o755)
    (repository / ".gitattributes").write_text("*.py diff=mine filter=my=own\n")
    names = ("core.fsmonitor", "diff.external", "diff.mine.textconv", "diff.mine.command", "core.pager")
    for name in (*names, "filter.my=own.clean", "filter.my=own.process", "core.sshCommand"):
        git(repository, "config", name, str(script))
    git(repository, "config", "filter.my=own.required", "true")
    hooks = repository / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "post-index-change").symlink_to(script)
    proof.unlink(missing_ok=True)
    (repository / "train.py").write_text("one\nchanged\n")
    state, patch = git_state(repository)
    assert state["changed"] == ["train.py"]
    assert "+changed" in patch
    for name, value in {"core.repositoryFormatVersion": "1", "extensions.partialClone": "origin"}.items():
        git(repository, "config", name, value)
    git(repository, "config", "remote.origin.url", "ssh://nowhere.invalid/x")
    blob = git(repository, "rev-parse", "HEAD:train.py")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    assert git_state(repository)[1] == "", "what a partial clone lacks is not fetched"
    assert not proof.exists(), proof.read_text()


def test_without_a_repository_there_is_nothing_to_keep(tmp_path: Path) -> None:
    assert git_state(tmp_path) == ({}, "")


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
    names = ["launch.json", "events.jsonl", "environment.json", "git.json", "diff.patch", "stages/x/spec.json"]
    for name in (*names, "rendered/a/b.sh"):
        assert stat.S_IMODE((launch.directory / name).stat().st_mode) == 0o600, name


def test_a_launch_that_one_may_not_read_is_its_owners(made, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = made()

    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(LaunchError, match="may be read by its owner alone"):
        load_launch(launch.directory)


@pytest.mark.parametrize("line", SECRET_LINES)
def test_nothing_that_holds_a_secret_is_written(line: str, tmp_path: Path) -> None:
    """Whatever field it came from: a profile, a recipe, a line of the script."""
    pipeline = Pipeline.from_job(Job(name="x", argv=("true",)), out=str(tmp_path / "run"))
    spec = {"x": stage_spec(pipeline.stages[0], pipeline, Profile())}
    profile = Profile().with_values({"slurm.comment": line}, "test")
    for kept in (
        (pipeline, profile, "local", RenderedLaunch(files={}), spec),
        (pipeline, Profile(), "local", RenderedLaunch(files={"job.sh": f"#!/bin/sh\n{line}\n"}), spec),
        (pipeline, Profile(), "local", RenderedLaunch(files={}), {"x": {**spec["x"], "note": line}}),
    ):
        with pytest.raises(LaunchError, match=r"(launch\.json|job\.sh|spec\.json).* looks like a secret") as caught:
            create(*kept)
        assert line not in str(caught.value)
        assert not (tmp_path / "run").exists()


def test_damage_is_named(made) -> None:
    launch = made()
    for content in (b"{", b"[]", b"\xff", b'{"format": "lt-launch", "version": 1, "profile": 3}', b"[" * 10**6):
        (launch.directory / "launch.json").write_bytes(content)
        with pytest.raises(LaunchError, match=r"launch\.json is damaged"):
            load_launch("runs/x")
    with (launch.directory / "events.jsonl").open("ab") as file:
        file.write(b"[" * 10**6 + b"\n")
    assert all("event" in event for event in read_events(launch))
