"""The command, what importing costs, and the README's example."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lt_model

PACKAGE = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "typer", "rich")


def _run(*arguments, check=True, cwd=None):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, check=False, encoding="utf-8"
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def _loaded_after(code):
    done = _run("-c", f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))")
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_loads_nothing_heavy_and_nothing_of_ours():
    loaded = _loaded_after("import lt_model")
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.startswith("lt_model")} == {"lt_model"}
    assert _loaded_after("from lt_model import preset, param_specs, flops_per_token, ModelConfig").isdisjoint(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["show", "tiny-2m"], ["show", "--help"]])
def test_the_command_loads_neither_torch_nor_numpy(arguments):
    code = f"import sys; sys.argv = ['lt-model', *{arguments}]\nfrom lt_model.__main__ import main; assert main() == 0"
    assert _loaded_after(code).isdisjoint(("torch", "numpy"))


def test_every_exported_name_is_there():
    pytest.importorskip("torch")
    # The table that loads names lazily, the list of names, and what type checkers see must agree.
    assert set(lt_model._MODULES) == set(lt_model.__all__) == set(dir(lt_model))
    source = (PACKAGE / "src/lt_model/__init__.py").read_text()
    for name, module in lt_model._MODULES.items():
        assert getattr(lt_model, name) is not None
        assert re.search(rf"from lt_model\.{module} import .*\b{name}\b", source), name
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        lt_model.Lama  # noqa: B018


def test_without_torch_a_missing_name_names_the_extra():
    code = "import sys; sys.modules['torch'] = None\nimport lt_model\ntry: lt_model.Decoder\n"
    done = _run("-c", f"{code}except ModuleNotFoundError as exc: print(exc.name, '|', exc)")
    assert done.stdout == "torch | lt_model.Decoder needs torch: pip install 'lt-model[torch]'\n"


def test_list_shows_each_preset_with_its_size():
    lines = _run("-m", "lt_model", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(lt_model.PRESETS)
    assert "8,030,261,248" in next(line for line in lines if line.startswith("llama3-8b"))


def test_show_prints_shapes_costs_and_the_warning():
    text = _run("-m", "lt_model", "show", "litespark-default", "--seq-len", "1024").stdout
    assert re.search(r"^model\.layers\.\*\.mlp\.down_proj\.weight +\[768, 2072\] +x 12$", text, re.MULTILINE)
    assert re.search(r"^parameters +134,769,408$", text, re.MULTILINE)
    full, causal = (lt_model.flops_per_token(lt_model.preset("litespark-default"), 1024, c) for c in ("full", "causal"))
    assert re.search(rf"^FLOPs/token, full +{full:,} ", text, re.MULTILINE)
    assert re.search(rf"^FLOPs/token, causal +{causal:,} ", text, re.MULTILINE)
    assert "warning: intermediate_size = 2072" in text


def test_show_reads_a_config_json(tmp_path):
    config = lt_model.preset("tiny-5m")
    (tmp_path / "config.json").write_text(json.dumps(lt_model.config_to_hf(config)))
    for argument in (tmp_path, tmp_path / "config.json"):
        facts = json.loads(_run("-m", "lt_model", "show", str(argument), "--json").stdout)
        assert facts["parameters"] == 4_951_296
        assert facts["seq_len"] == config.max_position_embeddings
        assert lt_model.ModelConfig.from_dict(facts["config"]) == config


def test_mistakes_are_one_line_and_exit_code_64(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "clear\x1b[2J.json").write_text("[]")
    for arguments, message in (
        (["show", "lama3-8b"], "error: preset 'lama3-8b': unknown; did you mean 'llama3-8b'"),
        (["show", str(tmp_path)], "config.json: model_type = 'gpt2': unknown; the families are llama"),
        (["show", "tiny-2m", "--seq-len", "-1"], "seq_len = -1"),
        (["show", str(tmp_path / "clear\x1b[2J.json")], r"clear\x1b[2J.json: expected a JSON object"),
    ):
        done = _run("-m", "lt_model", *arguments, check=False)
        assert done.returncode == 64
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert _run("-m", "lt_model", "show", "--nonsense", check=False).returncode == 64


def test_without_typer_the_command_names_the_extra():
    code = "import sys; sys.modules['typer'] = None\nfrom lt_model.__main__ import main; sys.exit(main())"
    done = _run("-c", code, check=False)
    assert done.returncode == 64
    assert done.stderr == "lt-model: the command needs typer: pip install 'lt-model[cli]'\n"


def test_our_own_mistakes_show_a_traceback_and_exit_code_70(monkeypatch, capsys):
    from lt_model import __main__, cli

    def broken(**_):
        raise KeyError("ours")

    monkeypatch.setattr(cli, "app", broken)
    assert __main__.main() == 70
    assert "KeyError: 'ours'" in capsys.readouterr().err


def test_the_readme_example_runs(tmp_path):
    pytest.importorskip("torch")
    (example,) = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    costs, new_ids = _run("-c", example, cwd=tmp_path).stdout.splitlines()
    assert costs == f"8030261248 {lt_model.flops_per_token(lt_model.preset('llama3-8b'), 8192, 'causal')}"
    assert len(json.loads(new_ids)) == 20


def test_list_and_show_name_the_family_and_what_differs_between_layers(tmp_path):
    lines = _run("-m", "lt_model", "list").stdout.splitlines()
    assert {line.split()[0]: line.split()[1] for line in lines[1:]} == {
        name: config.family for name, config in lt_model.PRESETS.items()
    }
    text = _run("-m", "lt_model", "show", "gemma3-1b").stdout
    assert re.search(r"^family +gemma3_text$", text, re.MULTILINE)
    assert re.search(r"^layers +5 x sliding, rope; 1 x rope, repeated$", text, re.MULTILINE)
    values = {"model_type": "qwen2_moe", "num_hidden_layers": 4, "mlp_only_layers": [0], "num_experts_per_tok": 2}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 96}
    values |= {"vocab_size": 99, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    text = _run("-m", "lt_model", "show", str(tmp_path)).stdout
    assert re.search(r"^model\.layers\.\*\.mlp\.up_proj\.weight +\[96, 64\] +x 1$", text, re.MULTILINE)
    assert re.search(r"^model\.layers\.\*\.mlp\.gate\.weight +\[4, 64\] +x 3$", text, re.MULTILINE)
