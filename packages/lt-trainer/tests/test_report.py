"""The report of a run: what stands on the page, that all of it is escaped, and what is written where."""

import json
import math
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.errors import RunDirError
from lt_trainer.observability.report import ReportError, write_report

EVIL = "<script>alert('$x_1$')</script>"
RECIPE: dict[str, Any] = {
    "model": {"preset": "tiny-2m"},
    "schedule": {"max_steps": 400},
    "optimizer": {"lr": 1e-3},
    "data": {"store": f"no/{EVIL}"},
}
RESOLVED = {"dtype": "float32", "compiled": True}
START = {"event": "start", "world": 8, "device": "NVIDIA H200", "device_kind": "cpu", "resolved": RESOLVED}
DATA = {"event": "data", "dp_size": 8, "seed": 1, "fingerprint": {"store": "ab"}, "data": {}, "batch": {"x": 1}}


def record(step: int, **changes: Any) -> dict[str, Any]:
    values = {"step": step, "loss": 2.5 + 7 * math.exp(-step / 60), "learning_rate": 1e-3, "grad_norm": 300 / step}
    speed = {"tokens_per_sec": 32768.0, "mfu": 0.4, "hfu": 0.5, "memory_gib": 61.5, "elapsed_s": step * 2.0}
    return values | speed | {"data_s": 0.1, "forward_backward_s": 1.9} | changes


def make_run(folder: Path, records: Any = (), events: Any = (), recipe: Any = RECIPE) -> Path:
    folder.mkdir(parents=True)
    (folder / ".lt-run").write_text('{"format": "lt-run", "version": 1}')
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe}))
    (folder / "environment.json").write_text(json.dumps({"python": EVIL, "packages": {"torch": "2.15.0"}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    events = [{"time": f"2026-01-02T10:{minute:02}:30.000+00:00", **event} for minute, event in enumerate(events)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.fixture
def eventful(tmp_path: Path) -> Path:
    """A run that was stopped, resumed, skipped steps, rolled back and is done, with two validation sets."""
    records = [record(step) for step in range(1, 301)] + [record(step, loss=99.0) for step in range(301, 311)]
    records += [record(step, loss="nan" if step < 304 else 2.5) for step in range(301, 401)]
    for name in ("web", EVIL):
        records.append({"step": 400, "val_loss": 2.5, "val_tokens": 9, "val_bits_per_byte": 1.25, "val_set": name})
    events = [
        START,
        {"event": "stop", "step": 200, "signal": "SIGTERM"},
        START,
        {"event": "resume", "step": 200},
        {"event": "step_skipped", "step": 308, "loss": "nan"},
        DATA | {"step": 300, "row": 19840, "skipped": [[19200, 19840]]},
        {"event": "rollback", "step": 300, "from_step": 310},
        {"event": "note", "text": EVIL},
        {"event": "completed", "step": 400},
    ]
    return make_run(tmp_path / "runs" / "eventful", records, events)


def words_of(*runs: Path) -> str:
    out = runs[0].parent / "page.html"
    write_report(runs, out, overwrite=True)
    body = re.sub(r"<style.*?</style>", "", out.read_text(), flags=re.DOTALL)
    links = re.findall(r"""\s(?:src|href|xlink:href|data|action)=["']?([^"'\s>]+)""", body)
    assert all(link.startswith(("#", "data:,")) for link in links), "the page loads nothing"
    assert not re.search("<(img|iframe|object|script|b)\\b", body)
    words = (unescape(word).strip() for word in re.sub("<[^>]*>", "\0", body).split("\0"))
    return "\n".join(word for word in words if word)


# Older versions of matplotlib use names that newer ones of pyparsing call old when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")


def test_the_page_of_a_run_has_everything_escaped(eventful: Path) -> None:
    words = words_of(eventful)
    legend = (f"eventful, validation {EVIL}", "Loss, nats per token")
    assert set(words.split("\n")) >= {
        *("completed", "400 of 400", "0.23 h", "8 x NVIDIA H200", "40.0%", "2.5000, mean of 9 records"),
        *(f"validation loss {EVIL}", "2.5000, 1.2500 bits per byte", *legend, json.dumps(f"no/{EVIL}")),
        *("stop", "resume", "rollback", "step skipped", "data: skipped", "torch 2.15.0", "optimizer.lr"),
    }
    assert words.startswith("tiny-2m in runs/eventful\n")
    assert "data: fingerprint.store\nab\n" in words
    assert "data: batch" not in words
    assert "resolved.dtype float32, resolved.compiled true" in words
    assert "peak resident memory of a process\n61.50 GiB" in words
    assert "Peak resident memory of a process, GiB" in words
    assert "records without a finite loss\n3\n" in words
    page = (eventful.parent / "page.html").read_text()
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert "99" not in [word for word in words.split("\n") if re.fullmatch(r"\d+", word)], "the steps of a rollback"
    words_of(eventful)
    assert (eventful.parent / "page.html").read_text() == page, "the same files, the same bytes"


def test_the_page_of_several_runs_tells_where_their_recipes_differ(eventful: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / ("other" * 20) / "eventful", [record(1)], [START], RECIPE | {"optimizer": {"lr": 6e-4}})
    words = words_of(eventful, other).split("\n")
    assert f"2 runs: {eventful}, {other}" in words, "equal names are told apart"
    assert "\noptimizer.lr\n0.001\n0.0006\n" in "\n".join(words)
    assert "The recipes are equal." in words_of(eventful, make_run(tmp_path / "same"))
    assert "No records yet." in words_of(tmp_path / "same")


def test_the_model_is_that_of_the_newest_checkpoint(recipe_base, fake_engine) -> None:
    assert run(load(base=recipe_base, overrides=["run.engine=fake"]), environ={}) == 0
    words = words_of(Path(recipe_base["run"]["dir"])).split("\n")
    assert set(words) >= {"completed", "20 of 20", "model: parameters", "model: hidden_size"}


def test_a_report_has_only_json_of_the_run_directory(eventful: Path, tmp_path: Path) -> None:
    """A link in the place of a run's file does not bring what it leads to onto the page or into an error."""
    (tmp_path / "secret").write_text("a secret key\n")
    (eventful / "recipe.toml").symlink_to(tmp_path / "secret")
    words_of(eventful)
    assert "a secret key" not in (eventful.parent / "page.html").read_text()
    for name in ("environment.json", "events.jsonl", "metrics.jsonl", "recipe.json"):
        (eventful / name).rename(tmp_path / "kept")
        (eventful / name).symlink_to(tmp_path / "secret")
        with pytest.raises(RunDirError, match=name) as caught:
            words_of(eventful)
        assert "secret key" not in str(caught.value)
        (tmp_path / "kept").replace(eventful / name)


def test_figures_are_written_as_png_and_files_that_are_there_stay(eventful: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in eventful.rglob("*") if path.is_file()}
    out, png = tmp_path / "new" / "page.html", tmp_path / "png"
    written = write_report([eventful], out, png=png)
    names = ["loss", "learning_rate", "grad_norm", "tokens_per_sec", "mfu", "memory"]
    assert written == (out, *(png / f"{name}.png" for name in names))
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in written[1:])
    out.unlink()
    with pytest.raises(ReportError, match=r"loss.png exists; choose another name or pass --overwrite"):
        write_report([eventful], out, png=png)
    assert not out.exists()
    write_report([eventful], out, png=png, overwrite=True)
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    assert {path: path.read_bytes() for path in eventful.rglob("*") if path.is_file()} == before


def test_fields_by_layer_have_a_curve_of_each_layer(tmp_path: Path) -> None:
    from lt_trainer.observability import figures

    experts = [{}, {"expert_load": [1.5, 2.0]}, {"expert_load": [1.25, 3.0]}]  # the first of an older version
    records = [record(step, **one) for step, one in enumerate(experts, start=1)]
    run = figures.RunHistory(make_run(tmp_path / "run", records))
    lines = figures.draw_figures([run])["expert_load"].axes[0].lines
    assert [line.get_xydata().tolist() for line in lines] == [[[2, 1.5], [3, 1.25]], [[2, 2.0], [3, 3.0]]]


def test_an_average_stands_in_the_middle_of_what_it_is_of(tmp_path: Path) -> None:
    from lt_trainer.observability import figures

    run = figures.RunHistory(make_run(tmp_path / "run", [record(step, loss=9 - step / 50) for step in range(1, 301)]))
    _, (middles, means) = (line.get_data() for line in figures.draw_figures([run])["loss"].axes[0].lines)
    assert means == pytest.approx(9 - middles / 50)


def test_a_report_without_matplotlib_is_a_line(eventful: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lt_trainer.observability.figures", raising=False)
    monkeypatch.delattr("lt_trainer.observability.figures", raising=False)
    with pytest.raises(ReportError, match=r"needs matplotlib for its figures: pip install 'lt-trainer\[plot\]'"):
        words_of(eventful)
