"""Run files: recipes, jobs and pipelines, what the command line adds, and errors that name file and line."""

from pathlib import Path

import pytest

from lt_launch.errors import LaunchError
from lt_launch.hosts import SshOptions, read_hostfile
from lt_launch.job import Pipeline
from lt_launch.profile import Profile, load_profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_trainer.errors import RecipeError

EXAMPLES = Path(__file__).parents[3] / "examples" / "launch"
RECIPE = """
[run]
dir = "runs/tiny"
[data]
store = "store"
[fault_tolerance]
grace_period_s = 77.0
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> str:
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(text)
        return name

    return write_file


def pipeline(path: str, **wanted) -> Pipeline:
    return read_run_file(path, Profile(), RunOverrides(**wanted)).pipeline


def test_a_recipe_alone_trains(write) -> None:
    made = pipeline(write("my run.toml", RECIPE), procs_per_node=8, sets=["optimizer.lr=0.5"])
    job = made.single_job
    assert (made.name, made.out, job.name) == ("my-run", "runs/tiny", "my-run")
    assert job.argv == ("python", "-P", "-m", "lt_trainer", "run", "{recipe}")
    assert (job.completion, job.run_dir, job.engine, job.grace_period_s) == ("run_dir", "runs/tiny", "gpu", 77.0)
    assert (job.nodes, job.procs_per_node, job.world_size) == (1, 8, 8)
    assert "lr = 0.5  # --set" in job.recipe


def test_the_recipe_that_is_sent_loads_to_the_same_values(write, tmp_path: Path) -> None:
    from lt_trainer.config.recipe import load

    file = write("run.toml", RECIPE)
    sent = tmp_path / "sent.toml"
    sent.write_text(pipeline(file, nodes=2).single_job.recipe)
    assert load(sent).recipe == load(file, overrides=["parallel.n_nodes=2"]).recipe


def test_the_launchers_nodes_are_the_recipes(write) -> None:
    file = write("run.toml", RECIPE)
    capacity = {"target_capacity": lambda profile: (4, 8)}
    assert (pipeline(file, **capacity).single_job.nodes, pipeline(file, **capacity).single_job.procs_per_node) == (4, 8)
    assert "n_nodes = 4  # --set" in pipeline(file, **capacity).single_job.recipe
    assert pipeline(file, nodes=2, **capacity).single_job.nodes == 2
    given = write(
        "given.toml", f"{RECIPE}[parallel]\nn_nodes = 3\n[batch]\nglobal_batch_size = 24\nmicro_batch_size = 1\n"
    )
    assert pipeline(given, **capacity).single_job.nodes == 3


def test_degrees_that_do_not_fit_the_ranks_are_refused_before_anything_is_spent(write) -> None:
    file = write("run.toml", f"{RECIPE}[parallel]\ntp = 4\n")
    with pytest.raises(RecipeError, match=r"these degrees need a multiple of 4 ranks, the run has 2"):
        pipeline(file, procs_per_node=2)


JOB = """
[job]
argv = ["python", "x.py"]
nodes = 2
time_limit = "36h"
[job.env]
A = "1"
[job.resources]
gpus_per_node = 8
[job.restart]
max_restarts = 1
[profile]
python = "/opt/python"
"""


def test_a_job_with_everything_and_what_the_command_line_adds(write) -> None:
    found = read_run_file(write("x.toml", JOB), Profile(), RunOverrides(env={"B": "2"}, nodes=3, out="o"))
    job = found.pipeline.single_job
    assert (job.name, job.nodes, job.time_limit_s, found.pipeline.out) == ("x", 3, 36 * 3600, "o")
    assert (dict(job.env), job.resources.gpus_per_node, job.restart.max_restarts) == ({"A": "1", "B": "2"}, 8, 1)
    assert found.profile.python == "/opt/python"
    assert pipeline("x.toml").out == "runs/x"


PIPELINE = """
[pipeline]
name = "wiki"
[job]
cwd = "/work"
[job.env]
A = "1"
[[stages]]
name = "prepare"
array = 4
argv = ["prepare"]
outputs = ["store"]
[[stages]]
name = "train"
after = ["prepare"]
recipe = "recipes/run.toml"
sets = ["optimizer.lr=0.25"]
procs_per_node = 4
env.B = "2"
"""


def test_a_pipeline_shares_what_stands_in_job(write) -> None:
    write("recipes/run.toml", RECIPE)
    made = pipeline(write("p.toml", PIPELINE), nodes=2, sets=["optimizer.beta1=0.5"])
    prepare, train = made.stages
    assert (made.name, made.out) == ("wiki", "runs/wiki")
    assert (prepare.array, prepare.outputs, prepare.job.cwd, dict(prepare.job.env)) == (
        4,
        ("store",),
        "/work",
        {"A": "1"},
    )
    assert (train.after, train.job.cwd, dict(train.job.env)) == (("prepare",), "/work", {"A": "1", "B": "2"})
    assert (prepare.job.nodes, train.job.nodes) == (1, 2)  # --nodes is for what trains
    assert "lr = 0.25" in train.job.recipe
    assert "beta1 = 0.5" in train.job.recipe
    assert [stage.name for stage in pipeline("p.toml", stage="train").stages] == ["train"]
    assert pipeline("p.toml", stage="train").stages[0].after == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[job]\nargv = ['a']\nndes = 2\n", "job.ndes = 2 (x.toml): unknown field; did you mean nodes?"),
        ("[job]\nargv = ['a']\nnodes = 'two'\n", "job.nodes = 'two' (x.toml): must be a valid integer"),
        ("[job]\nargv = ['a']\nnodes = 0\n", "job.nodes = 0 (x.toml): must be at least 1"),
        ("[job]\nargv = 'a b'\n", "job.argv = 'a b' (x.toml): must be a list"),
        ("[job]\nargv = ['a']\ntime_limit = 'soon'\n", "job.time_limit = 'soon' (x.toml): is not a duration"),
        ("[job]\nargv = ['a']\nsets = ['a=b']\n", "has no effect without a recipe"),
        (
            "[job]\nargv = ['a']\nrecipe = 'run.toml'\n",
            "job.argv = ['a'] (x.toml): a training job has its own command",
        ),
        ("[job]\nargv = ['a']\n[jobs]\na = 1\n", "jobs.a = 1 (x.toml): unknown table; did you mean job?"),
        ("[job]\nargv = ['a']\n[profile.slrum]\na = 1\n", "slrum.a = 1 (x.toml): unknown field"),
        ("[job]\nargv = ['a']\n[pipeline]\nnam = 'a'\n", "pipeline.nam = 'a' (x.toml)"),
        ("[[stages]]\nargv = ['a']\n", "a [[stages]] table has no name"),
        (
            "[[stages]]\nname = 'a'\nargv = ['a']\narry = 2\n",
            "(x.toml [[stages]] a): unknown field; did you mean array",
        ),
        ("[[stages]]\nname = 'a'\nargv = ['a']\nafter = ['b']\n", "no stage before it has this name"),
        ("[job]\nargv = ['a']\nenv.HF_TOKEN = 'hush'\n", 'pass_env = ["HF_TOKEN"]'),
        ("[job]\nrecipe = 'gone.toml'\n", "job.recipe = 'gone.toml' (x.toml): no such file: gone.toml"),
        ("[job", "is not valid TOML"),
    ],
)
def test_mistakes_name_field_value_place_and_remedy(write, text: str, says: str) -> None:
    with pytest.raises((RecipeError, LaunchError)) as caught:
        pipeline(write("x.toml", text))
    assert says in str(caught.value)
    assert "hush" not in str(caught.value)
    assert caught.value.exit_code == 64


def test_profiles_are_found_checked_and_typed_by_their_target(write, tmp_path: Path) -> None:
    mine = write("mine.toml", "python = '/p'\n[env]\nA = '1'\n[ssh]\nlink_timeout_s = 7\n")
    found = load_profile(environ={"LT_LAUNCH_PROFILE": mine})
    assert (found.python, found.env, found.options("ssh", SshOptions).link_timeout_s) == ("/p", {"A": "1"}, 7.0)
    assert load_profile(environ={"HOME": str(tmp_path)}) == Profile()
    write(".config/lt/launch.toml", "python = '/home'\n")
    assert load_profile(environ={"HOME": str(tmp_path)}).python == "/home"
    with pytest.raises(LaunchError, match="no such file"):
        load_profile("gone.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pyton = 'x'\n", "pyton = 'x' (bad.toml): unknown field; did you mean python?"),
        ("[ssh]\nhotsfile = 'x'\n", "ssh.hotsfile = 'x' (bad.toml): unknown field; did you mean ssh.hostfile?"),
        ("[ssh]\nlink_timeout_s = 'x'\n", "ssh.link_timeout_s = 'x' (bad.toml): must be a valid number"),
        ("[env]\nHF_TOKEN = 'hush'\n", "looks like a secret"),
        ("python = 3\n", "python = 3 (bad.toml): must be a valid string"),
    ],
)
def test_mistakes_in_a_profile_are_named(write, text: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_profile(write("bad.toml", text)).options("ssh", SshOptions)
    assert says in str(caught.value)


def test_a_run_files_profile_wins_over_the_persons_and_a_hostfile_is_relative_to_its_file(
    write, tmp_path: Path
) -> None:
    mine = load_profile(write("deep/mine.toml", "python = '/mine'\nsetup = ['module x']\nssh.hostfile = 'hosts'\n"))
    assert mine.options("ssh", SshOptions).hostfile == str(tmp_path / "deep" / "hosts")
    file = write("other/x.toml", "[job]\nargv = ['x']\n[profile]\npython = '/p'\nssh.hostfile = '../hosts'\n")
    found = read_run_file(file, mine).profile
    assert (found.python, found.setup) == ("/p", ("module x",))
    assert Path(found.options("ssh", SshOptions).hostfile).resolve() == tmp_path / "hosts"
    given = read_run_file(file, mine, RunOverrides(hostfile=Path("h"))).profile
    assert given.options("ssh", SshOptions).hostfile == "h"


def test_a_hostfile_is_in_rank_order(write) -> None:
    """node10 sorts before node2 as text; nothing here sorts."""
    text = "# the first rack\n\n" + "".join(f"node{i} slots=8  # and more\n" for i in range(12))
    assert list(read_hostfile(Path(write("hosts", text))).items()) == [(f"node{i}", 8) for i in range(12)]
    assert read_hostfile(EXAMPLES / "hosts.txt") == {f"hostname{i}": 8 for i in range(1, 5)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# only\n\n", "hosts: no host in it"),
        ("a\nb\na\n", "hosts:3: a is listed twice"),
        ("a slots=0", "hosts:1: 'a slots=0' is not a host"),
        ("a port=22", "ports, users and addresses are for ~/.ssh/config"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("a;x", "'a;x' is not a host"),
        ("a slots=8\nb", "hosts: the hosts have different slots"),
    ],
)
def test_lines_that_are_no_hosts_are_named(write, text: str, says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_hostfile(Path(write("hosts", text)))
    assert says in str(caught.value)
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(Path("gone"))
