"""Run files, profiles and hostfiles: what they mean, what the command line adds, and what is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.hosts import SshOptions, read_hostfile
from lt_launch.job import ContainerImage, Job, Pipeline, Resources
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.profile import Profile, load_profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.sagemaker.options import SageMakerOptions
from lt_launch.slurm.options import SlurmOptions
from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError

EXAMPLES = Path(__file__).parents[3] / "examples" / "launch"
RECIPE = '[run]\ndir = "runs/tiny"\n[data]\nstore = "store"\n[fault_tolerance]\ngrace_period_s = 77.0\n'


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> str:
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(text)
        return name

    return write_file


def pipeline(path: str, **wanted: Any) -> Pipeline:
    return read_run_file(path, Profile(), RunOverrides(**wanted)).pipeline


def test_a_recipe_alone_trains_and_what_is_sent_loads_to_the_same_values(write, tmp_path: Path) -> None:
    file = write("my run.toml", RECIPE)
    made = pipeline(file, procs_per_node=8, nodes=2, sets=["optimizer.lr=0.5"])
    job = made.single_job
    assert (made.name, made.out, job.name) == ("my-run", "runs/tiny", "my-run")
    assert job.argv == ("python", "-P", "-m", "lt_trainer", "run", "{recipe}")
    assert (job.completion, job.run_dir, job.engine, job.grace_period_s) == ("run_dir", "runs/tiny", "gpu", 77.0)
    assert (job.nodes, job.procs_per_node, job.world_size) == (2, 8, 16)
    assert "lr = 0.5  # --set" in job.recipe
    (tmp_path / "sent.toml").write_text(job.recipe)
    assert (
        load(tmp_path / "sent.toml").recipe == load(file, overrides=["parallel.n_nodes=2", "optimizer.lr=0.5"]).recipe
    )


def test_the_launchers_nodes_are_the_recipes_and_degrees_must_fit_the_ranks(write) -> None:
    file = write("run.toml", RECIPE)
    capacity = {"target_capacity": lambda profile: (4, 8)}
    job = pipeline(file, **capacity).single_job
    assert (job.nodes, job.procs_per_node) == (4, 8)
    assert "n_nodes = 4  # --set" in job.recipe
    assert pipeline(file, nodes=2, **capacity).single_job.nodes == 2
    fields = "[parallel]\nn_nodes = 3\ntp = 4\n[batch]\nglobal_batch_size = 24\nmicro_batch_size = 1\n"
    given = write("given.toml", RECIPE + fields)
    assert pipeline(given, **capacity).single_job.nodes == 3
    with pytest.raises(RecipeError, match=r"these degrees need a multiple of 4 ranks, the run has 6"):
        pipeline(given, procs_per_node=2)


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
time_limit = "36h"
[[stages]]
name = "train"
after = ["prepare"]
recipe = "recipes/run.toml"
sets = ["optimizer.lr=0.25"]
procs_per_node = 4
env.B = "2"
resources.gpus_per_node = 8
restart.max_restarts = 1
container = { image = "lt:1", mounts = ["/a folder:/b:ro"] }
"""


def test_a_pipeline_shares_what_stands_in_job_and_reads_back_equal(write) -> None:
    write("recipes/run.toml", RECIPE)
    file = write("p.toml", PIPELINE)
    made = pipeline(file, nodes=2, sets=["optimizer.beta1=0.5"], env={"C": "3"})
    prepare, train = made.stages
    assert (made.name, made.out, prepare.array, prepare.outputs) == ("wiki", "runs/wiki", 4, ("store",))
    assert (prepare.job.cwd, prepare.job.env, prepare.job.time_limit_s) == ("/work", {"A": "1", "C": "3"}, 36 * 3600)
    assert (train.after, train.job.cwd, train.job.env) == (("prepare",), "/work", {"A": "1", "B": "2", "C": "3"})
    assert (train.job.resources.gpus_per_node, train.job.restart.max_restarts) == (8, 1)
    assert (prepare.job.nodes, train.job.nodes) == (1, 2)  # --nodes is for what trains
    assert "lr = 0.25" in train.job.recipe
    assert "beta1 = 0.5" in train.job.recipe
    alone = pipeline(file, stage="train", out="o")
    assert ([(stage.name, stage.after) for stage in alone.stages], alone.out) == ([("train", ())], "o")
    assert Pipeline.model_validate(json.loads(json.dumps(made.model_dump(mode="json")))) == made
    with pytest.raises(RecipeError, match="runs single jobs"):
        _ = made.single_job
    with pytest.raises(RecipeError, match="runs single jobs"):
        _ = pipeline(file, stage="prepare").single_job


SECRETS = (
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID db_password MY_SECRET TOKEN GITHUB_PAT X_APIKEY"
    " DJANGO_SECRET_KEY PGPASSWORD MYSQL_PWD OPENAI_KEY HFTOKEN SMTP_PASS HTTP_AUTH DB_DSN JWT"
)
VALUES = ("hf_" + "x" * 34, "sk-proj-" + "x" * 40, "AKIA" + "X" * 16, "-----BEGIN OPENSSH PRIVATE KEY-----")
ELEMENT = "[[stages]]\nname = 'a.2'\nargv = ['a']\n"
ARGV, NAMED = "[job]\nargv = ['a']\n", "[[stages]]\nname = 'a'\nargv = ['a']\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{ARGV}ndes = 2\n", "job.ndes = 2 (x.toml): unknown field; did you mean nodes?"),
        (f"{ARGV}nodes = 'two'\n", 'job.nodes = "two" (x.toml): must be a valid integer'),
        (f"{ARGV}nodes = 0\n", "job.nodes = 0 (x.toml): must be at least 1"),
        (f"{ARGV}grace_period_s = -1.0\n", "job.grace_period_s = -1.0 (x.toml): must be at least 0"),
        (f"{ARGV}completion = 'run_dir'\n", 'job.run_dir = "": completion = run_dir needs it'),
        (f"{ARGV}env.RANK = '3'\n", 'env.RANK = "3" (x.toml): is set by the launcher'),
        (f"{ARGV}env.'A B' = '3'\n", "is not an environment variable"),
        (f'{ARGV}env.B = "two\\nlines"', 'env.B = "two\\nlines" (x.toml): is not an environment'),
        *((f"{ARGV}env.{name} = 'hush'\n", f'pass_env = ["{name}"]') for name in SECRETS.split()),
        *((f"{ARGV}env.INNOCENT = '{value}'\n", "looks like a secret") for value in VALUES),
        *((f"{ARGV}name = '{name}'\n", "job.name") for name in ("", "-a", "a-", "a b", "a/b", "x" * 64, "ä")),
        (f"{ARGV}resources.partition = 'p5 --uid=0'\n", "has a blank"),
        *(
            (f"{ARGV}container = {{ image = 'x', mounts = ['{mount}'] }}\n", "is not a mount")
            for mount in ("/a", "/a:", "a:b:c:d")
        ),
        (f"{ARGV}pass_env = ['HF_TOKEN=x']\n", "is not the name of an environment variable"),
        (f"{ARGV}array = 2\nprocs_per_node = 2\n", "either an array or a job of several processes"),
        ("[job]\nargv = []\n", "job.argv = []"),
        ("[job]\nargv = 'a b'\n", 'job.argv = "a b" (x.toml): must be a list'),
        (f"{ARGV}time_limit = 'soon'\n", 'job.time_limit = "soon" (x.toml): is not a duration'),
        (f"{ARGV}sets = ['a=b']\n", "has no effect without a recipe"),
        (f"{ARGV}recipe = 'run.toml'\n", 'job.argv = ["a"] (x.toml): a training job has its own command'),
        (f"{ARGV}[jobs]\na = 1\n", "jobs.a = 1 (x.toml): unknown table; did you mean job?"),
        (f"{ARGV}[profile.slrum]\na = 1\n", "slrum.a = 1 (x.toml): unknown field"),
        (f"{ARGV}[pipeline]\nnam = 'a'\n", 'pipeline.nam = "a" (x.toml)'),
        ("[[stages]]\nargv = ['a']\n", "a [[stages]] table has no name"),
        (f"{NAMED}arry = 2\n", "(x.toml [[stages]] a): unknown field; did you mean array"),
        (f"{NAMED}after = ['b']\n", "no stage before it has this name"),
        (f"{NAMED}{NAMED}", "two stages, or a stage and an array element, have this name"),
        (f"{NAMED}array = 3\n{ELEMENT}", "have this name"),
        (f"{ELEMENT}{NAMED}array = 3\n", "have this name"),
        ("stages = []\n", "a pipeline needs stages"),
        ("[job]\nrecipe = 'gone.toml'\n", 'job.recipe = "gone.toml" (x.toml): no such file: gone.toml'),
        ("[job", "is not valid TOML"),
    ],
)
def test_mistakes_name_field_value_place_and_remedy(write, text: str, says: str) -> None:
    with pytest.raises((RecipeError, LaunchError)) as caught:
        pipeline(write("x.toml", text))
    assert says in str(caught.value)
    assert not any(value in str(caught.value) for value in ("hush", *VALUES))
    assert caught.value.exit_code == 64


def job(name: str = "train", **values: Any) -> Job:
    return Job(name=name, **{"argv": ("python", "-c", "import os\nprint(1)"), **values})


@pytest.mark.parametrize("more", ["\n#SBATCH --uid=0", "\rx", "\x1b[2J", "\u2028x"])
@pytest.mark.parametrize(
    ("make", "field", "values"),
    [
        *((Resources, f"resources.{name}", {name: "p5{}"}) for name in ("partition", "instance_type", "constraint")),
        (ContainerImage, "container.image", {"image": "lt:1{}"}),
        (ContainerImage, "container.mounts", {"image": "lt:1", "mounts": ("/a:/b{}",)}),
        (ContainerImage, "container.workdir", {"image": "lt:1", "workdir": "/w{}"}),
        *((job, f"job.{name}", {name: "/w{}"}) for name in ("cwd", "run_dir")),
        *((SlurmOptions, f"slurm.{name}", {name: "p5{}"}) for name in ("partition", "account", "qos", "reservation")),
        (SlurmOptions, "slurm.exclude", {"exclude": ("node1", "node2{}")}),
        (SlurmOptions, "slurm.sbatch_args", {"sbatch_args": ("--comment=x{}",)}),
        (KubernetesOptions, "k8s.mount_path", {"mount_path": "/fsx{}"}),
        (SageMakerOptions, "sagemaker.role", {"role": "arn{}"}),
        (SageMakerOptions, "sagemaker.channels", {"channels": ("train=s3://bucket/a{}",)}),
    ],
)
def test_text_that_goes_into_scripts_and_requests_is_one_line(
    make: Any, field: str, values: dict[str, Any], more: str
) -> None:
    given = {
        name: value.replace("{}", more) if isinstance(value, str) else tuple(one.replace("{}", more) for one in value)
        for name, value in values.items()
    }
    with pytest.raises(RecipeError) as caught:
        make(**given)
    assert field in caught.value.values


def test_names_and_variables_that_only_look_wrong_are_taken() -> None:
    names = "TOKENIZERS_PARALLELISM MAX_TOKENS NCCL_DEBUG KEYS EOS_TOKEN SORT_KEY BYPASS"
    assert job("llama-3.1_70B" + "x" * 50, env=dict.fromkeys(names.split(), "1"))


# --- profiles and hostfiles


def test_profiles_are_found_and_a_run_files_wins(write, tmp_path: Path) -> None:
    """A hostfile named in a file is relative to that file."""
    text = "python = '/p'\nsetup = ['module x']\nenv.A = '1'\nssh = { link_timeout_s = 7, hostfile = 'hosts' }\n"
    mine = load_profile(environ={"LT_LAUNCH_PROFILE": write("deep/mine.toml", text)})
    options = mine.options("ssh", SshOptions)
    assert (mine.python, mine.env, options.link_timeout_s) == ("/p", {"A": "1"}, 7.0)
    assert options.hostfile == str(tmp_path / "deep" / "hosts")
    assert load_profile(environ={"HOME": str(tmp_path)}) == Profile()
    write(".config/lt/launch.toml", "python = '/home'\n")
    assert load_profile(environ={"HOME": str(tmp_path)}).python == "/home"
    with pytest.raises(LaunchError, match="no such file"):
        load_profile("gone.toml")
    file = write("other/x.toml", f"{ARGV}[profile]\npython = '/q'\nssh.hostfile = '../hosts'\n")
    found = read_run_file(file, mine).profile
    assert (found.python, found.setup) == ("/q", ("module x",))
    assert Path(found.options("ssh", SshOptions).hostfile).resolve() == tmp_path / "hosts"
    given = read_run_file(file, mine, RunOverrides(hostfile=Path("h"))).profile
    assert given.options("ssh", SshOptions).hostfile == "h"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pyton = 'x'\n", 'pyton = "x" (bad.toml): unknown field; did you mean python?'),
        ("[ssh]\nhotsfile = 'x'\n", 'ssh.hotsfile = "x" (bad.toml): unknown field; did you mean ssh.hostfile?'),
        ("[ssh]\nlink_timeout_s = 'x'\n", 'ssh.link_timeout_s = "x" (bad.toml): must be a valid number'),
        ("[env]\nHF_TOKEN = 'hush'\n", "looks like a secret"),
        ("python = 3\n", "python = 3 (bad.toml): must be a valid string"),
    ],
)
def test_mistakes_in_a_profile_are_named(write, text: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_profile(write("bad.toml", text)).options("ssh", SshOptions)
    assert says in str(caught.value)


def test_a_hostfile_is_in_rank_order(write) -> None:
    """node10 sorts before node2 as text; nothing here sorts."""
    text = "# the first rack\n\n" + "".join(f"node{i} slots=8  # and more\n" for i in range(12))
    assert list(read_hostfile(Path(write("hosts", text))).items()) == [(f"node{i}", 8) for i in range(12)]
    assert read_hostfile(EXAMPLES / "hosts.txt") == {f"hostname{i}": 8 for i in range(1, 5)}
    with pytest.raises(LaunchError, match=r"^cannot read the hostfile gone: No such file or directory; give"):
        read_hostfile(Path("gone"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# only\n\n", "hosts: no host in it"),
        ("a\nb\na\n", "hosts:3: a is listed twice"),
        ("Node1\nnode1\n", "hosts:2: node1 is listed twice"),
        ("n1:8", "hosts:1: 'n1:8' is not a host; write the number of devices as n1 slots=N"),
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
