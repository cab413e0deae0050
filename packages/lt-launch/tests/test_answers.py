"""Broken and hostile answers of other machines: a sentence or a state, never a traceback."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_launch import policy
from lt_launch.answers import is_record, machine_problem
from lt_launch.attempt import Attempt, Stop
from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Job, Pipeline, Stage
from lt_launch.launch_dir import create, load_launch
from lt_launch.launch_dir_status import read_logs, read_stage_statuses
from lt_launch.look import look
from lt_launch.machine import machine_findings
from lt_launch.policy import Place, write_table
from lt_launch.profile import Profile
from lt_launch.progress import parse_progress, read_progress
from lt_launch.slurm.commands import parse_jobs, parse_nodes
from lt_launch.spec import stage_spec
from lt_launch.ssh_connection import SshConnection
from lt_launch.ssh_doctor import probe_hosts
from lt_launch.ssh_transport import SshTransport
from lt_launch.status import show_launches, show_status
from lt_launch.target import Launch, RenderedLaunch
from lt_trainer.config.recipe import load, to_toml

DEEP = "[" * 100_000
HUGE = "9" * 400
STRANGE: list[Any] = [None, True, "abc", [], {}, [1], {"a": 1}, 1.5, -1, 10**30, float("nan"), float("inf"), "\x1b[2J"]
GOOD_RECORDS: list[dict[str, Any]] = [
    {"hello": "h", "port": 1234},
    {"refused": "/x: Permission denied"},
    {"beat": 1},
    {"left": 1},
    {"lines": "step=1\n", "rank": 0},
    {"ended": 3, "code": 1, "tail": ["x"]},
    {"progress": {"step_before": -1, "step": 5, "completed": True}},
]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("record", GOOD_RECORDS)
def test_what_hosts_say_is_taken(record: dict[str, Any]) -> None:
    assert is_record(record)


@pytest.mark.parametrize("record", [one for one in GOOD_RECORDS if not {"beat", "left"} & set(one)])
def test_a_field_of_another_kind_is_not_taken(record: dict[str, Any]) -> None:
    for name in set(record) - {"hello"}:
        for value in STRANGE:
            is_other = type(value) is not type(record[name]) or name == "progress" or value == [1]
            if is_other or value == 10**30:
                assert not is_record(record | {name: value}), (name, value)
    for name, good in record.get("progress", {}).items():
        for value in STRANGE:
            if type(value) is not type(good) or value == 10**30:
                assert not is_record({"progress": record["progress"] | {name: value}}), (name, value)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["ended", "code", "tail"]), JSON_VALUES), max_size=3))
def test_records_that_are_taken_can_be_judged(changes: list[dict[str, Any]]) -> None:
    records = [{"ended": 3, "code": 1, "tail": []} | change for change in changes]
    notes = {one["ended"]: (one["code"], "h", 1.0) for one in records if is_record(one)}
    kind, *_ = policy.judge(range(4), notes, 0)
    assert kind in ("done", "stopped", "requeued", "lost", "killed", "failed")


@pytest.mark.parametrize(
    "line",
    [
        '{"lines": "x", "rank": "abc"}',
        '{"ended": 1, "code": 1}',
        '{"ended": "1", "code": 1, "tail": []}',
        '{"progress": {"step": 1}}',
        '{"event": "ended", "rank": 1, "code": 1}',
        f'{{"lines": "x", "rank": {HUGE}}}',
        '{"hello": "h"}',
        '{"hello": "h", "port": "80; x"}',
        '{"unknown": 1}',
        DEEP,
        HUGE,
        "Last login: today",
    ],
)
def test_what_is_no_record_is_kept_as_a_complaint(line: str) -> None:
    program = f'import sys; sys.stdin.close(); print({line!r}); print(\'{{"hello": 1, "port": 7}}\')'
    connection = SshConnection("host", [sys.executable, "-c", program], {}, launch="/x", files={}, link_timeout_s=60)
    deadline = time.monotonic() + 60
    while not connection.port():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    connection.close()
    assert connection.port() == 7
    assert [one[:100] for one in connection.complaints] == [line[:100]]


@pytest.mark.parametrize("rank", [-1, 2, 7, 10**12])
def test_ranks_that_a_host_has_not_are_left_out(tmp_path: Path, rank: int) -> None:
    """The number becomes a file's name."""
    place = Place(tmp_path / "stages" / "x" / "spec.json")
    spec = {"argv": ["x"], "nodes": 2, "procs_per_node": 1, "grace_s": 1, "completion": "exit"}
    number = policy.open_attempt(spec, place, launched=True)
    answers = [{"hello": "h", "port": 7}, {"ended": rank, "code": 1, "tail": []}, {"left": 1}]
    program = f"import sys; print({chr(10).join(map(json.dumps, answers))!r}, flush=True); sys.stdin.read()"
    nodes = [
        SshConnection(name, [sys.executable, "-c", program], spec, launch="/x", files={}, link_timeout_s=60)
        for name in "ab"
    ]
    hosts = [Host(name="a"), Host(name="b")]
    attempt = Attempt(
        spec=spec, place=place, number=number, hosts=hosts, nodes=nodes, env={}, stop=Stop(), show=lambda *_: None
    )
    assert attempt.run()["kind"] == "lost"
    assert not list((place.attempt(number) / "notes").iterdir())


class AnsweringTransport:
    """A connection to hosts whose python prints one text."""

    python, connect_timeout_s = "python3", 10.0

    def __init__(self, text: str) -> None:
        self.text = text

    def ssh_argv(self, host: Host, command: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", f"import sys; sys.stdout.write({self.text!r})"]


def asked(text: str) -> dict[str, Any]:
    ((_, answer),) = probe_hosts([Host(name="h")], cast("SshTransport", AnsweringTransport(text)), folder="/x")
    return dict(answer)


def test_the_description_of_a_machine_is_taken() -> None:
    found = look("")
    assert machine_problem(found) == ""
    assert asked(json.dumps(found))["skew_s"] < 60


@pytest.mark.parametrize("name", ["time", "python", "devices", "free_gib", "packages", "sees_token", "shm_gib"])
def test_a_description_that_is_none_is_told(name: str) -> None:
    good = look("")
    without = {key: value for key, value in good.items() if key != name}
    assert f"no {name} in its description" in asked(json.dumps(without))["problem"]
    for value in ("abc" if not isinstance(good[name], str) else 3, None, {"a": 1}, float("nan")):
        assert f"{name} = " in asked(json.dumps(good | {name: value}))["problem"]


@pytest.mark.parametrize("text", ["", "[]", "3", "null", DEEP, HUGE, '{"time": 1e999}', "no json\n"])
def test_an_answer_that_is_no_description_is_told(text: str) -> None:
    assert "unexpected answer of python" in asked(text)["problem"]


@pytest.mark.parametrize("version", ["", "abc", "3", "3.x", "three.eleven", "-1.2", f"{HUGE}.1"])
def test_a_version_that_is_none_is_an_error_of_that_host(version: str) -> None:
    (found,) = [
        one for one in machine_findings(look("") | {"python": version}, None, host="h7") if one.check == "python"
    ]
    assert (found.level, found.host) == ("error", "h7")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    pipeline = Pipeline(name="p", stages=(Stage(job=Job(name="x", argv=("x",))),), out="out")
    specs = {"x": stage_spec(pipeline.stages[0], pipeline, Profile())}
    made = create(pipeline, Profile(), "local", RenderedLaunch(files={}), specs)
    Place(made.directory / "stages/x/spec.json").new_attempt()
    return made


def place_of(launch: Launch) -> Place:
    return Place(launch.directory / "stages/x/spec.json")


@pytest.mark.parametrize(
    "line",
    [
        '{"no": "event"}',
        '{"event": null}',
        '{"event": "attempt_started", "stage": "x"}',
        '{"event": "attempt_started", "stage": "x", "hosts": 7}',
        '{"event": "attempt_started", "stage": "x", "hosts": [1, {}]}',
        '{"event": ["created"]}',
        DEEP,
    ],
)
def test_events_without_their_fields_are_left_out(launch: Launch, line: str) -> None:
    with open(launch.directory / "events.jsonl", "a") as file:
        file.write(line + "\n")
    (status,) = read_stage_statuses(launch)
    assert (status.state, status.nodes) == ("lost", ())


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ({}, "unknown"),
        ({"kind": 7, "code": "abc"}, "unknown"),
        ({"kind": "failed"}, "failed"),
        ({"kind": "failed", "code": [], "reason": {"a": 1}}, "failed"),
        ({"kind": ["failed"], "code": True, "reason": "x"}, "unknown"),
        ({"kind": "failed", "code": 10**30, "reason": "x"}, "failed"),
    ],
)
def test_an_exit_record_without_its_fields_is_a_state(
    launch: Launch, record: dict[str, Any], state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(place_of(launch).attempt(0) / "exit.json", record)
    (status,) = read_stage_statuses(launch)
    assert (status.state, status.exit_code) == (state, None)
    show_status([str(launch.directory)], as_json=False)
    show_status([str(launch.directory)], as_json=True)
    assert state in capsys.readouterr().out


@pytest.mark.parametrize("spec", [{"nodes": "abc"}, {"procs_per_node": 0}, {"procs_per_node": None}, {"nodes": True}])
def test_logs_of_a_damaged_spec_are_an_error(launch: Launch, spec: dict[str, Any]) -> None:
    write_table(place_of(launch).stage / "spec.json", spec)
    with pytest.raises(LaunchError, match=r"spec\.json is damaged: .* = .*; launch again"):
        list(read_logs(launch, stage="x", rank=0, follow=False))


@pytest.mark.parametrize("name", ["exit.json", "spec.json", "launch.json"])
def test_records_nested_without_end_are_a_state_or_an_error(launch: Launch, name: str) -> None:
    place = place_of(launch)
    folders = {"exit.json": place.attempt(0), "spec.json": place.stage, "launch.json": launch.directory}
    (folders[name] / name).write_text(DEEP)
    if name == "exit.json":
        assert [status.state for status in read_stage_statuses(launch)] == ["lost"]
    elif name == "spec.json":
        assert list(read_logs(launch, stage="x", rank=0, follow=False)) == []
    else:
        with pytest.raises(LaunchError, match="is damaged"):
            load_launch(launch.directory)


@pytest.mark.parametrize("change", [{"job_ids": ["x"]}, {"job_ids": {"x": 7}}, {"target": 7}, {"profile": "x"}])
def test_a_damaged_launch_is_an_error(launch: Launch, change: dict[str, Any]) -> None:
    file = launch.directory / "launch.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    with pytest.raises(LaunchError, match="is damaged"):
        load_launch(launch.directory)


@pytest.mark.parametrize("change", [{"created_at": "abc"}, {"created_at": None}, {"target": "nowhere"}, {"cwd": 7}])
def test_one_strange_launch_hides_no_other(
    launch: Launch, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = launch.directory / "launch.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    show_launches()
    found = capsys.readouterr()
    assert ("nowhere" in found.err) if "target" in change else ("lost" in found.out)


@pytest.mark.parametrize(
    "row",
    [
        {"loss": 1.0},
        {"loss": 1.0, "step": "abc"},
        {"loss": {}, "step": 5, "tokens_per_sec": []},
        {"loss": 1.0, "step": 10**30, "tokens_per_sec": 1.0},
        {"loss": 10**400, "step": 5, "tokens_per_sec": 1e-320},
        {"loss": "nan", "step": 5, "tokens_per_sec": "inf"},
    ],
)
def test_strange_metrics_are_shown_as_far_as_they_go(
    tmp_path: Path, row: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lt-run").write_text('{"format": "lt-run", "version": 1}')
    sizes = {"schedule": {"max_steps": "many"}, "batch": {"global_batch_size": 8}, "data": {"seq_len": 8}}
    (folder / "recipe.json").write_text(json.dumps({"recipe": sizes}))
    (folder / "events.jsonl").write_text('{"event": "start", "world": "abc"}\n')
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = read_progress(folder)
    assert found is not None
    assert found.max_steps == 0
    show_status([str(folder)], as_json=False)
    assert "run" in capsys.readouterr().out


@pytest.mark.parametrize("step", ["abc", "-1", "1.5", HUGE, "²"])
def test_a_step_in_the_output_that_is_none_is_left_out(step: str) -> None:
    recipe = to_toml(load(base={"data": {"store": "store"}}).recipe)
    job = Job(name="x", argv=("x",), recipe=recipe)
    lines = ["step=7 loss=2.5 tokens_per_sec=1e-320", f"step={step} loss=2.0"]
    found = parse_progress(lines, job)
    assert found is not None
    assert (found.step, found.loss) == (7, 2.5)


def test_what_slurm_does_not_say_is_an_error_or_nothing() -> None:
    with pytest.raises(LaunchError, match=r"sinfo: 'sinfo: warning' is not a line"):
        parse_nodes("node1|p5*|idle|gpu:8|none\nsinfo: warning\n")
    (job,) = parse_jobs(f"JobId=5 ArrayTaskId=² Restarts=many ExitCode={HUGE}:0 JobState=RUNNING")
    assert (job.id, job.index, job.restarts, job.exit_code) == ("5", None, 0, None)
