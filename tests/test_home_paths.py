"""`~` is the home folder wherever a path is taken: in every option of a command, and every field of a file.

A new option or field of text is either a path, or its name stands here among those that are not.
"""

import importlib
import inspect
import json
import pkgutil
import typing
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter
from typer.main import get_command

from lt_data.cli.command_app import expand_home as expand_home_of_data
from lt_launch.hosts import SshOptions
from lt_launch.job import ContainerImage
from lt_launch.profile import Profile, read_values
from lt_launch.run_file import RunOverrides, read_run_file
from lt_model import PRESETS, config_to_hf
from lt_model.home_folder import expand_home
from lt_trainer.config.recipe import load as load_recipe
from lt_trainer.config.section import Section
from lt_trainer.errors import RecipeError

TEXT_OPTIONS = """
boundaries description device digest dtype engine env expect format holdout image keep labels last_row layout map_
map_args mode name on on_bad options packing preset prompt ray revision rows sets special_tokens_as
split split_rule stage suffix tag tasks text_field to tokens_field torchrun_options url
"""
TEXT_OPTIONS_OF = {
    ("data append", "config"),  # of a hub dataset
    ("data prepare", "config"),
    ("data train-tokenizer", "config"),
    ("train inspect", "store"),  # [NAME=]FOLDER, which the command takes apart
}
TEXT_FIELDS = """
account after algorithm argv cc_flags channels checkpoint_s3_uri constraint endpoint_url engine env exclude
instance_type loader mirror_url mount_path name namespace output_path partition pass_env persistent_volume_claim
preset queue_name recipe region request role runtime sbatch_args security_groups service_account setup shape
srun_args ssh_args subnets tasks workdir
"""
TEXT_FIELDS_OF = {("KubernetesOptions", "image"), ("SageMakerOptions", "image")}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")


def commands() -> Iterator[tuple[list[str], Any]]:
    def walk(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
        if not hasattr(command, "list_commands"):
            yield words, command
            return
        for name in command.list_commands(None):
            yield from walk(command.get_command(None, name), [*words, name])

    for entry in sorted(entry_points(group="lt.commands")):
        if entry.module.startswith("lt_"):
            yield from walk(get_command(entry.load()), [entry.name])


def kind(hint: object) -> object:
    """Return what a parameter or field holds, without list, tuple and None."""
    inner = [item for item in typing.get_args(hint) if item not in (type(None), ...)]
    return kind(inner[0]) if inner and typing.get_origin(hint) is not typing.Literal else hint


@pytest.mark.parametrize(("words", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands()])
def test_options_of_commands(words: list[str], command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hints = typing.get_type_hints(inspect.unwrap(command.callback))
    line, paths, texts = [], [], []
    for param in command.params:
        held = kind(hints.get(param.name))
        if held in (str, Path):
            is_named = param.name in TEXT_OPTIONS.split() or (" ".join(words), param.name) in TEXT_OPTIONS_OF
            is_text = held is str and is_named
            (texts if is_text else paths).append(param.name)
            value = "~/x"
        elif param.required:
            value = "1"
        else:
            continue
        line += [value] if param.param_type_name == "argument" else [f"{param.opts[0]}={value}"]
    taken: dict[str, Any] = {}
    monkeypatch.setattr(command, "callback", lambda **values: taken.update(values))
    command.main(line, standalone_mode=False)
    for names, expected in ((paths, "/users/me/x"), (texts, "~/x")):
        for name in names:
            values = taken[name] if isinstance(taken[name], list | tuple) else [taken[name]]
            assert [str(value) for value in values] == [expected], f"{' '.join(words)}: {name}"


def sections() -> list[type[Section]]:
    for package in ("lt_trainer.config", "lt_trainer_gpu", "lt_trainer_neuron", "lt_launch"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.startswith("lt_trainer_") or module.name.endswith(".options"):
                importlib.import_module(module.name)

    def subclasses(cls: type[Section]) -> Iterator[type[Section]]:
        for each in cls.__subclasses__():
            yield each
            yield from subclasses(each)

    return [each for each in subclasses(Section) if each.__module__.startswith("lt_")]


def test_fields_of_files() -> None:
    checked = 0
    for section in sections():
        for name, field in section.model_fields.items():
            is_text = name in TEXT_FIELDS.split() or (section.__name__, name) in TEXT_FIELDS_OF
            if is_text or kind(field.annotation) is not str:
                continue
            if typing.get_origin(field.annotation) is dict:
                continue  # its values are sections, with fields of their own
            hint = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            is_list = typing.get_origin(field.annotation) is tuple
            value = TypeAdapter(hint).validate_python(["~/x"] if is_list else "~/x")
            assert value == (("/users/me/x",) if is_list else "/users/me/x"), f"{section.__name__}.{name}"
            checked += 1
    assert checked > 15


def test_files_that_name_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe and the hostfile of a run file, which are relative to it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "recipe.toml").write_text("run.dir = '~/run'\ndata.synthetic = true\nmodel.vocab_size = 64\n")
    (tmp_path / "launch.toml").write_text("[job]\nrecipe = '~/recipe.toml'\n[profile.ssh]\nhostfile = '~/hosts'\n")
    found = read_run_file(tmp_path / "launch.toml", Profile(), RunOverrides())
    assert found.pipeline.out == found.pipeline.stages[0].job.run_dir == str(tmp_path / "run")
    assert found.profile.options("ssh", SshOptions).hostfile == str(tmp_path / "hosts")
    assert read_values(tmp_path / "launch.toml")["profile.ssh.hostfile"].value == "~/hosts"


@pytest.mark.parametrize("expand", [expand_home, expand_home_of_data])
def test_a_home_folder_that_is_unknown_is_refused(expand: Any) -> None:
    assert expand("~") == "/users/me"
    assert expand("a/~/b") == "a/~/b"
    with pytest.raises(
        ValueError, match=r"~nobody-here/x: there is no home folder ~nobody-here; write ./~nobody-here/x"
    ):
        expand("~nobody-here/x")


def test_a_home_folder_in_a_container_is_refused() -> None:
    for values in ({"workdir": "~/w"}, {"mounts": ("~/a:~/b",)}):
        with pytest.raises(RecipeError, match="is a folder in the container, whose home folder is not known here"):
            ContainerImage(image="i", **values)


@pytest.mark.parametrize("name", ["~/model", "~/model/config.json"])
def test_the_architecture_of_a_recipe_is_read_from_the_home_folder(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    values = config_to_hf(PRESETS["tiny-2m"])
    (tmp_path / "model" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    resolved = load_recipe(base={"data": {"store": "s", "seq_len": 64}}, overrides=[f"model.config={name}"])
    assert resolved.recipe.model.hidden_size == PRESETS["tiny-2m"].hidden_size
    assert resolved.origins["model.hidden_size"] == f"config {tmp_path}/{name.removeprefix('~/')}"
    with pytest.raises(RecipeError, match=f"{tmp_path}/none: no such"):
        load_recipe(base={"data": {"store": "s", "seq_len": 64}}, overrides=["model.init_from=~/none"])
