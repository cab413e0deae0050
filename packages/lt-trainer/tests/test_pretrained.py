"""A run that starts from a model: the architecture it takes over, the slices it reads, and every refusal."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lt_ckpt import Checkpoint, Source, convert_checkpoint, list_steps, open_source
from lt_ckpt.formats import ConvertOptions
from lt_ckpt.torchfile.file import write_pt
from lt_data import DataError, TokenStore
from lt_model import ModelConfig, RopeScaling, config_to_hf, param_specs
from lt_test_helpers.runs import start
from lt_trainer.checkpointing import pretrained as pretrained_module
from lt_trainer.checkpointing.pretrained import open_pretrained
from lt_trainer.config.model_section import ModelOptions
from lt_trainer.config.recipe import complete, load, model_config, to_toml
from lt_trainer.control import Control
from lt_trainer.errors import RecipeError
from lt_trainer.run_directory.jsonl import read_jsonl

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    n_heads=4,
    n_kv_heads=2,
    n_layers=2,
    max_position_embeddings=64,
    rope_theta=5e5,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    norm_eps=1e-6,
)
SHAPE = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers", "norm_eps", "tie_word_embeddings")


def weights_of(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {p.name: rng.standard_normal(p.shape).astype(np.float32) for p in param_specs(config)}


def write_model(folder: Path, config: ModelConfig, tokenizer: dict[str, bytes] | None = None) -> dict[str, np.ndarray]:
    folder.mkdir()
    weights = weights_of(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    for name, data in (tokenizer or {}).items():
        (folder / name).write_bytes(data)
    return weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", CONFIG)
    return tmp_path / "model"


def opened(options: ModelOptions, config: ModelConfig, tokenizer: dict[str, bytes] | None = None):
    return open_pretrained(options, config, tokenizer or {}, Control(), 0, lambda: None)


def joined(blocks, shape, dtype=np.float32) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint8), *blocks]).view(dtype).reshape(shape)


def test_the_model_decides_the_architecture(model, tmp_path) -> None:
    base = {"data": {"store": "s", "seq_len": 32}, "model": {"init_from": str(model)}}
    resolved = load(base=base)
    made = resolved.recipe.model
    assert {name: getattr(made, name) for name in SHAPE} == {name: getattr(CONFIG, name) for name in SHAPE}
    assert (made.vocab_size, made.rope_theta, made.max_position_embeddings) == (300, 5e5, 64)
    assert (made.rope_scaling.factor, made.rope_scaling.original_max_position_embeddings) == (8.0, 16)
    assert resolved.origins["model.n_layers"] == f"init_from {model}"
    assert not resolved.is_given("model.n_layers")
    longer = load(base=base, overrides=["model.max_position_embeddings=128", "model.rope_theta=1e6"]).recipe.model
    assert (longer.max_position_embeddings, longer.rope_theta) == (128, 1e6)
    assert load(base=base, overrides=["model.resize_vocab=true"]).recipe.model.vocab_size == 0, "the data's"
    larger = (load(base={**base, "model": {field: str(model)}}).recipe for field in ("init_from", "config"))
    assert [model_config(one, 290).vocab_size for one in larger] == [300, 300], "rows beyond the tokenizer's are kept"

    written = tmp_path / "written.toml"
    written.write_text(to_toml(resolved.recipe, resolved.origins))
    shutil.rmtree(model)
    assert load(written).recipe == resolved.recipe, "a recipe that says everything needs the model no more"
    with pytest.raises(RecipeError, match=r"model\.init_from = .*no such file or folder"):
        load(base=base)


def test_another_model_than_the_recipe_says_is_refused(model) -> None:
    base = {"data": {"store": "s", "seq_len": 32}, "model": {"init_from": str(model), "n_layers": 3}}
    options = load(base=base).recipe.model
    three = ModelConfig.from_dict(CONFIG.to_dict() | {"n_layers": 3})
    with pytest.raises(RecipeError, match=r"model\.n_layers = 3.*has n_layers = 2; remove these fields"):
        opened(options, three)
    base["model"] = {"init_from": str(model), "init_std": 0.5}
    with pytest.raises(RecipeError, match=r"model\.init_std = 0\.5.*has init_std = 0\.02; remove these fields"):
        opened(load(base=base).recipe.model, ModelConfig.from_dict(CONFIG.to_dict() | {"init_std": 0.5}))
    grown = ModelConfig.from_dict(CONFIG.to_dict() | {"vocab_size": 320})
    with pytest.raises(RecipeError, match=r"model\.vocab_size = 320.*vocab_size = 300.*model\.resize_vocab"):
        opened(ModelOptions(init_from=str(model)), grown)
    longer = ModelConfig.from_dict(CONFIG.to_dict() | {"rope_theta": 1e6, "max_position_embeddings": 128})
    assert "theta 500000.0 -> 1000000.0; max_position_embeddings 64 -> 128" in opened(options, longer).describe()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_slice_is_the_models(model, data, monkeypatch) -> None:
    """Also in blocks of a row or two, and cast to another dtype."""
    monkeypatch.setattr("lt_trainer.checkpointing.pretrained.BLOCK_BYTES", data.draw(st.sampled_from([1, 700, 2**24])))
    weights = weights_of(CONFIG)
    parameter = data.draw(st.sampled_from(param_specs(CONFIG)))
    offset, shape = [], []
    for size in parameter.shape:
        begin = data.draw(st.integers(0, size))
        offset.append(begin)
        shape.append(data.draw(st.integers(0, size - begin)))
    wanted = weights[parameter.name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    pretrained = opened(ModelOptions(init_from=str(model)), CONFIG)
    for dtype, kind in (("F32", np.float32), ("F64", np.float64)):
        found = joined(pretrained.read(parameter.name, tuple(offset), tuple(shape), dtype), shape, kind)
        assert (found == wanted).all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(new=st.integers(200, 420), begin=st.integers(0, 419), n=st.integers(0, 420), column=st.integers(0, 31))
def test_a_vocabulary_of_another_size(model, new, begin, n, column, monkeypatch) -> None:
    monkeypatch.setattr("lt_trainer.checkpointing.pretrained.BLOCK_BYTES", 999)
    weights = weights_of(CONFIG)
    begin, n = min(begin, new), min(n, new - min(begin, new))
    resized = ModelConfig.from_dict(CONFIG.to_dict() | {"vocab_size": new})
    pretrained = opened(ModelOptions(init_from=str(model), resize_vocab=True), resized)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = weights[name].astype(np.float64)
        whole = np.concatenate([old, np.tile(old.mean(axis=0), (max(0, new - 300), 1))])[:new]
        found = joined(pretrained.read(name, (begin, column), (n, 32 - column), "F64"), (n, 32 - column), np.float64)
        np.testing.assert_allclose(found, whole[begin : begin + n, column:], rtol=1e-12, atol=1e-14)
        kept = max(0, min(n, 300 - begin))
        assert (found[:kept] == whole[begin : begin + kept, column:]).all()
    norm = joined(pretrained.read("model.norm.weight", (0,), (32,), "F32"), (32,))
    assert (norm == weights["model.norm.weight"]).all()
    assert new == 300 or f"vocab_size 300 -> {new}" in pretrained.describe()


def test_every_format_is_a_start(model, tmp_path) -> None:
    source, config, weights = open_source(model), str(model / "config.json"), weights_of(CONFIG)
    convert_checkpoint(source, tmp_path / "one.pt", ConvertOptions(format="pt", dtype="BF16"))
    convert_checkpoint(source, tmp_path / "dcp", ConvertOptions(format="dcp"))
    convert_checkpoint(source, tmp_path / "lt", ConvertOptions(format="lt"))
    write_pt(tmp_path / "bare.pt", dict(weights))  # plain tensors, which `model.init_config` describes
    for name, given_config in (("one.pt", config), ("dcp", config), ("lt", ""), ("bare.pt", config)):
        pretrained = opened(ModelOptions(init_from=str(tmp_path / name), init_config=given_config), CONFIG)
        wanted = weights["model.layers.1.self_attn.k_proj.weight"]
        found = joined(pretrained.read("model.layers.1.self_attn.k_proj.weight", (0, 0), (16, 32), "F32"), (16, 32))
        assert (np.abs(found - wanted) <= (2**-8 * np.abs(wanted) if name == "one.pt" else 0)).all(), name
    write_pt(tmp_path / "theirs.pt", {"model": {}})
    with pytest.raises(RecipeError, match=r"model\.init_from = .*theirs\.pt.*has no model config.*model\.init_config"):
        load(base={"data": {"store": "s"}, "model": {"init_from": str(tmp_path / "theirs.pt")}})


def test_damaged_weights_are_no_start(model, tmp_path) -> None:
    """A checkpoint that is named is refused; of a run whose newest one is damaged, the older one is taken, as said."""
    source = open_source(model)
    older = convert_checkpoint(source, tmp_path / "run", ConvertOptions(format="lt"))
    newer = convert_checkpoint(replace(source, format_info={"step": 3}), tmp_path / "run", ConvertOptions(format="lt"))
    file = newer / "weights-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RecipeError, match=r"model\.init_from is damaged: .* have changed since they were written"):
        opened(ModelOptions(init_from=str(newer)), CONFIG)
    pretrained = opened(ModelOptions(init_from=str(tmp_path / "run")), CONFIG)
    assert pretrained.source.path == older
    assert f"taking {older} instead of {newer}: " in pretrained.describe()


@pytest.fixture
def own_tokenizer(little_data) -> dict[str, bytes]:
    return dict(TokenStore(little_data / "train").tokenizer().files)


def changed(files: dict[str, bytes], change) -> dict[str, bytes]:
    table = json.loads(files["tokenizer.json"])
    change(table)
    return files | {"tokenizer.json": json.dumps(table).encode()}


def test_ids_must_mean_the_same(own_tokenizer, tmp_path) -> None:
    """Data of another tokenizer trains without any error, and ruins the model."""

    def swap(table) -> None:
        vocab = table["model"]["vocab"]
        first, second = list(vocab)[40:42]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    def shorten(table) -> None:
        vocab = table["model"]["vocab"]
        for token, number in list(vocab.items()):
            if number >= 290:
                del vocab[token]
        del table["model"]["merges"][-10:]

    swapped = r"another tokenizer than the model's: 2 ids differ, first \d+, .* in the data and .* in the model"
    short = r"10 ids differ, first 290, .* and no token in the model"
    for name, files, resizes, error in (
        ("same", own_tokenizer, False, ""),
        ("none", {}, False, ""),
        ("swapped", changed(own_tokenizer, swap), False, swapped),
        ("swapped-2", changed(own_tokenizer, swap), True, swapped),
        ("short", changed(own_tokenizer, shorten), False, short),
        ("short-2", changed(own_tokenizer, shorten), True, ""),
        ("damaged", {**own_tokenizer, "tokenizer.json": b"[]"}, False, r"damaged: tokenizer\.json"),
    ):
        write_model(tmp_path / name, CONFIG, files)
        options = ModelOptions(init_from=str(tmp_path / name), resize_vocab=resizes)
        with pytest.raises((RecipeError, DataError), match=error) if error else nullcontext():
            opened(options, CONFIG, own_tokenizer)
        opened(options.model_copy(update={"allow_tokenizer_mismatch": True}), CONFIG, own_tokenizer)


def test_a_model_of_a_hub(model, tmp_path, monkeypatch) -> None:
    """The recipe needs its configuration alone; ranks agree on one commit, although the branch moves at every look."""
    asked: list[str] = []
    verified: list[bool] = []

    def look(address: str, **options: Any) -> Source:
        asked.append(address)
        verified.append(options["verify"])
        revision = address.partition("@")[2] or f"{len(asked):040x}"
        return replace(open_source(model, **options), format_info={"hub": "org/name", "revision": revision})

    monkeypatch.setattr(pretrained_module, "open_source", look)
    config = config_to_hf(CONFIG), {"revision": f"{0:040x}"}
    monkeypatch.setattr("lt_ckpt.hub.model.fetch_config", lambda address: config)
    resolved = load(base={"data": {"store": "s", "seq_len": 32}, "model": {"init_from": "hf://org/name"}})
    assert resolved.origins["model.n_layers"] == "from hf://org/name", "to show a recipe needs no network"
    assert "n_layers" not in resolved.to_dict()["model"]
    written = tmp_path / "written.toml"
    written.write_text(to_toml(resolved.recipe, resolved.origins))
    assert "# n_layers  # from hf://org/name" in written.read_text().splitlines()
    assert load(written).origins["model.n_layers"] == "from hf://org/name"
    resolved = complete(resolved)
    assert (resolved.recipe.model.n_layers, resolved.origins["model.n_layers"]) == (2, "init_from hf://org/name")
    assert not resolved.pending
    pretrained = opened(resolved.recipe.model, CONFIG)
    assert f"org/name at commit {1:040x}" in pretrained.describe()
    assert asked == ["hf://org/name", f"hf://org/name@{1:040x}"], "the branch is looked at once for all ranks"
    for rank, local in ((1, 1), (8, 0)):  # of the second machine's ranks the first reads all files once
        open_pretrained(resolved.recipe.model, CONFIG, {}, Control(), rank, lambda: None, verifies=local == 0)
    assert verified == [True, False, False, True], "rank 0 has verified the files where it looked"


def test_a_run_starts_from_it_once_and_resume_wins(model, recipe_base, fake_engine, capsys) -> None:
    recipe_base["model"] = {"init_from": str(model)}
    recipe_base["data"]["seq_len"] = 32
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', encoding="utf-8")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    out = Path(recipe_base["run"]["dir"])
    assert start(recipe_base, "schedule.max_steps=6") == 0
    events = read_jsonl(out / "events.jsonl")
    (event,) = [e for e in events if e["event"] == "init_from"]
    assert event["model"]["format"] == "hf"
    lrs = fake_engine.opened[0].lrs
    assert lrs[0] == pytest.approx(1.6e-3 / 2), "the schedule starts anew"
    assert f"starting from the weights of {model} (hf)" in capsys.readouterr().out
    norm = weights_of(CONFIG)["model.norm.weight"].astype(np.float64)
    first = read_jsonl(out / "metrics.jsonl")[0]["loss"]
    assert abs(first - np.abs(norm[:16]).sum()) < 0.5, "its weights, not the engine's own"

    shutil.rmtree(model)  # the run goes on without it
    assert start(recipe_base, "schedule.max_steps=9") == 0
    said = capsys.readouterr().out
    assert "resuming after step 6" in said
    assert len([e for e in read_jsonl(out / "events.jsonl") if e["event"] == "init_from"]) == 1
    assert fake_engine.opened[1].lrs[0] != lrs[0]
    saved = [Checkpoint.open(path).hf_files() for _, path in list_steps(out / "checkpoints")]
    assert len(saved) > 1
    for files in saved:
        assert files["generation_config.json"] == b'{"eos_token_id": [7, 9]}'
        assert json.loads(files["config.json"]) == config

    recipe_base["run"]["dir"] = str(out.parent / "other")
    with pytest.raises(RecipeError, match=r"model\.init_from"):
        start(recipe_base)


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, np.float32), (-np.inf, np.float32), (1e300, np.float64)])
def test_weights_that_are_not_finite_end_the_start(model, recipe_base, fake_engine, value, dtype) -> None:
    """Before a step, with the tensor's name; also what is too large for the dtype that is trained in."""
    weights = {name: array.astype(dtype) for name, array in weights_of(CONFIG).items()}
    weights["model.norm.weight"][3] = value
    weights["lm_head.weight"][299, 31] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    pretrained = opened(ModelOptions(init_from=str(model)), CONFIG)
    list(pretrained.read("model.embed_tokens.weight", (0, 0), (300, 32), "F32"))
    list(pretrained.read("lm_head.weight", (0, 0), (299, 32), "F32"))
    pretrained.check_finite(Control())
    list(pretrained.read("lm_head.weight", (299, 0), (1, 32), "F32"))
    with pytest.raises(RecipeError, match=r"NaN or infinite in lm_head\.weight"):
        pretrained.check_finite(Control())
    if np.isfinite(value):
        return  # the fake engine has float64
    recipe_base["model"] = {"init_from": str(model)}
    with pytest.raises(RecipeError, match=r"NaN or infinite in model\.norm\.weight; train") as caught:
        start(recipe_base)
    assert caught.value.exit_code == 64
    assert fake_engine.opened[0].rows == []
