"""Which charts there are, what stands on the page, and what is written where."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lt_trainer.errors import TrainerError
from lt_trainer.observability.report.charts import build_charts, event_lanes, last_step, time_breakdowns
from lt_trainer.observability.report.html_charts import chart_values
from lt_trainer.observability.report.page import last_loss, report_html
from lt_trainer.observability.report.run_history import read_run
from lt_trainer.observability.report.writer import ReportError, write_report


class Parsed(HTMLParser):
    """Checks that elements are closed in order; collects words, links and tables."""

    VOID = ("meta", "rect", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        values = dict(attrs)
        self.loads += [values[name] for name in ("src", "xlink:href", "data", "action") if name in values]
        if tag == "link":
            self.loads.append(values["href"])
        if tag == "a":
            self.links.append(values["href"])
        if "id" in values:
            self.ids.append(values["id"])
        assert tag not in ("img", "iframe", "object")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)


def test_curves_stand_at_their_steps_and_values(eventful: Path) -> None:
    """The step axis begins at 0 and ends at the last step, on all charts alike."""
    page = report_html([read_run(eventful)])
    chart = page[page.index("id=chart-learning_rate") :]
    places = [float(point.split()[0]) for point in re.search(r"d='M([^']*)'/></svg>", chart)[1].split("L")]
    steps = [record["step"] for record in read_run(eventful).train]
    assert places == [pytest.approx(1000 * step / steps[-1], abs=0.06) for step in steps]


def test_charts_of_a_run(eventful: Path) -> None:
    run = read_run(eventful)
    made = {one.key: one for one in build_charts([run])}
    assert list(made) == ["loss", "learning_rate", "grad_norm", "tokens_per_sec", "mfu", "memory", "validation"]
    looks = [(line.name, line.style, line.color) for line in made["loss"].curves]
    assert looks == [
        ("eventful", "faint", 0),
        ("eventful, smoothed", "line", 0),
        ("eventful, web", "dots", 1),
        ("eventful, code", "dots", 2),
    ]
    assert made["loss"].curves[0].points == [(float(r["step"]), r["loss"]) for r in run.train]
    assert made["learning_rate"].curves[0].points[29] == (30.0, run.train[29]["learning_rate"])
    assert [point[0] for point in made["validation"].curves[1].points] == list(range(50, 401, 50))
    assert made["grad_norm"].log
    assert made["mfu"].percent
    assert made["mfu"].title == "MFU", "nothing says what is computed again"


def test_what_nobody_knows_has_no_chart(make_run) -> None:
    records = [{"step": s, "loss": 2.0, "mfu": "nan", "elapsed_s": 1.0} for s in range(1, 5)]
    assert [one.key for one in build_charts([read_run(make_run(records=records))])] == ["loss"]


def test_hfu_is_dashed_where_it_differs(make_run, eventful: Path) -> None:
    records = [
        {"step": s, "loss": 2.0, "mfu": 0.4, "hfu": 0.5, "joules_per_token": 0.1, "elapsed_s": 1.0} for s in (1, 2)
    ]
    (mfu,) = [one for one in build_charts([read_run(make_run(records=records))]) if one.key == "mfu"]
    assert [(line.style, line.points[-1][1]) for line in mfu.curves] == [("line", 0.4), ("dashed", 0.5)]
    assert mfu.title == "MFU and HFU"
    same = [{"step": s, "loss": 2.0, "mfu": 0.4, "hfu": 0.4, "elapsed_s": 1.0} for s in (1, 2)]
    (mfu,) = [one for one in build_charts([read_run(make_run("same", records=same))]) if one.key == "mfu"]
    assert len(mfu.curves) == 1


def test_several_runs_have_a_colour_each(eventful: Path, make_run) -> None:
    runs = [read_run(eventful), read_run(make_run("other"))]
    loss = build_charts(runs)[0]
    assert [(line.name, line.color) for line in loss.curves if line.style == "line"] == [
        ("eventful, smoothed", 0),
        ("other, smoothed", 1),
    ]
    assert {line.color for line in loss.curves if line.style == "dots"} == {0}


def test_where_the_time_goes(make_run) -> None:
    parts = {"forward_backward_s": 3.0, "optimizer_s": 0.5, "checkpoint_s": 0.0, "validation_s": 0.0, "rest_s": 0.5}
    records = [{"step": s, "loss": 1.0, "elapsed_s": s, "data_s": float(s > 2), **parts} for s in range(1, 5)]
    (split,) = time_breakdowns([read_run(make_run(records=records))])
    assert [(begin, end) for begin, end, _ in split.columns] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [shares["data"] for _, _, shares in split.columns] == [0, 0, 0.2, 0.2]
    assert [shares["forward_backward"] for _, _, shares in split.columns] == [0.75, 0.75, 0.6, 0.6]
    assert split.seconds == {
        "data": 2.0,
        "forward_backward": 12.0,
        "optimizer": 2.0,
        "checkpoint": 0.0,
        "validation": 0.0,
        "rest": 2.0,
    }


def test_no_second_is_lost_in_columns(eventful: Path) -> None:
    run = read_run(eventful)
    (split,) = time_breakdowns([run])
    assert split.columns[0][0] == 0
    assert split.columns[-1][1] == 400
    assert all(a[1] == b[0] for a, b in zip(split.columns, split.columns[1:], strict=False))
    assert all(sum(shares.values()) == pytest.approx(1) for _, _, shares in split.columns)
    assert split.seconds["checkpoint"] == pytest.approx(4 * 0.6)
    assert split.seconds["forward_backward"] == pytest.approx(400 * 1.7)


def test_events_stand_in_lanes(eventful: Path) -> None:
    run = read_run(eventful)
    found = {lane.kind: [step for _, step, _ in lane.events] for lane in event_lanes([run])}
    assert found == {
        "checkpoint": [100, 200, 300, 400],
        "stop": [200],
        "resume": [200],
        "step_skipped": [308, 309, 310],
        "rollback": [300],
        "completed": [400],
    }
    assert last_step([run]) == 400


def test_the_last_loss_is_the_mean_of_a_fortieth(make_run) -> None:
    records = [{"step": s, "loss": float(s), "elapsed_s": 1.0} for s in range(1, 81)]
    assert last_loss(read_run(make_run(records=records))) == (79.5, 2)
    records[-1]["loss"] = "nan"
    assert last_loss(read_run(make_run("b", records=records))) == (79.0, 1)
    assert last_loss(read_run(make_run("c", records=[])))[1] == 0


def test_the_page_is_whole_by_itself_and_escaped(eventful: Path) -> None:
    text = report_html([read_run(eventful)])
    found = Parsed(text)
    assert found.loads == ["data:,"]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "unsafe" not in text
    assert "style=" not in text, "the policy would not apply it"
    assert set(found.links) == {"#curves", "#events", "#tasks", "#data", "#model", "#recipe"}
    assert {link[1:] for link in found.links} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)
    assert "<script>alert" not in text
    words = " ".join(found.words)
    for shown in (
        "Training run ",
        "bits per byte, web",
        "completed, step 400 of 400, 8 x NVIDIA H200, 23 min 40 s of training",
        "10 records of repeated steps are omitted.",
        "<script>alert('a note')</script>",
        "26,240 rows, 53,739,520 positions",
        "rows 19,200 to 19,839",
        "No store at this path",
        "Planned peak (",
        "Measured peak: 61.50 GiB, memory allocated by torch.",
        "input embedding",
        "model.layers.*.mlp.up_proj.weight",
        'preset = "tiny-2m"',
    ):
        assert shown in words, shown
    assert text == report_html([read_run(eventful)]), "the same files, the same bytes"


def test_the_page_of_several_runs_tells_where_their_recipes_differ(eventful: Path, make_run) -> None:
    other = make_run("<other>", overrides=["optimizer.lr=6e-4", "batch.global_batch_size=128"], records=[])
    words = Parsed(report_html([read_run(eventful), read_run(other)])).words
    at = words.index("optimizer.lr")
    assert words[at : at + 3] == ["optimizer.lr", "0.0016", "0.0006"]
    at = words.index("batch.global_batch_size")
    assert words[at + 1 : at + 3] == ["64", "128"]
    assert "schedule.max_steps" not in words
    assert "2 runs: eventful, <other>" in words


def test_runs_with_equal_recipes_say_so(make_run) -> None:
    words = Parsed(report_html([read_run(make_run("a")), read_run(make_run("b"))])).words
    assert "The recipes are equal." in words


def test_a_run_without_a_record_has_a_page(make_run) -> None:
    folder = make_run(records=[], events=[])
    words = Parsed(report_html([read_run(folder)])).words
    assert "No records yet." in words
    (folder / "recipe.json").unlink()
    assert any("has no recipe.json" in word for word in Parsed(report_html([read_run(folder)])).words)


def test_values_that_stand_above_the_axis_are_counted(make_run) -> None:
    records = [{"step": s, "loss": 3.0 + s / 1000 + 900 * (s == 50), "elapsed_s": 1.0} for s in range(1, 101)]
    words = Parsed(report_html([read_run(make_run(records=records))])).words
    assert any("1 value above the axis." in word for word in words)


def test_the_script_has_the_numbers_of_every_line_that_is_told(eventful: Path) -> None:
    run = read_run(eventful)
    values = chart_values(build_charts([run]))
    assert values["loss"]["lines"][0] is None, "of pale lines nothing is told"
    steps, losses = values["loss"]["lines"][2]
    assert steps == list(range(50, 401, 50))
    assert losses == [float(f"{record['val_loss']:.5g}") for record in run.validation["web"]]
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_the_data_part_shows_the_stores(little_data: Path, make_run) -> None:
    folder = make_run(overrides=[])
    table = json.loads((folder / "recipe.json").read_text())
    table["recipe"]["data"] |= {"store": str(little_data / "train"), "validation": str(little_data / "validation")}
    table["recipe"]["data"]["seq_len"] = 32
    (folder / "recipe.json").write_text(json.dumps(table))
    words = " ".join(Parsed(report_html([read_run(folder)])).words)
    assert "Length of documents" in words
    assert "bfd-32" in words
    assert "001.txt" in words
    assert words.count("Left out and special") == 2


def test_the_shape_is_that_of_the_newest_checkpoint(recipe_base, fake_engine, tmp_path: Path) -> None:
    from lt_trainer.config.recipe import load
    from lt_trainer.training.runner import run

    recipe_base["checkpoint"] = {"interval": 6, "keep_last": 3}
    assert run(load(base=recipe_base, overrides=["run.engine=fake"]), environ={}) == 0
    words = " ".join(Parsed(report_html([read_run(recipe_base["run"]["dir"])])).words)
    assert "Shape from the checkpoint step-00000020; rows of 32 positions." in words
    assert "No plan: run.engine = 'fake'" in words
    assert "completed, step 20 of 20" in words


def test_a_damaged_store_is_named_and_the_page_goes_on(make_run, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    folder = make_run(overrides=[f"data.store={store}"])
    words = " ".join(Parsed(report_html([read_run(folder)])).words)
    assert "The store cannot be read: " in words
    assert "Memory per device" in words


# ---- what is written ----


def test_files_that_are_there_stay_unless_told(eventful: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    assert write_report([eventful], out) == (out,)
    out.write_text("mine")
    with pytest.raises(ReportError, match=r"page.html exists; choose another name or pass --overwrite"):
        write_report([eventful], out)
    assert out.read_text() == "mine"
    write_report([eventful], out, overwrite=True)
    assert out.read_text().startswith("<!doctype html>")
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_runs_that_are_none_or_named_twice_are_refused_before_anything_is_written(
    eventful: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    with pytest.raises(ReportError, match="no run directory given"):
        write_report([], out)
    with pytest.raises(ReportError, match="duplicate run directory"):
        write_report([eventful, eventful / ".." / "eventful"], out)
    with pytest.raises(TrainerError, match="is not a run directory"):
        write_report([eventful, tmp_path], out)
    assert not out.exists()


def test_a_place_that_cannot_be_written(eventful: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write .*page.html: .*; choose a writable folder"):
        write_report([eventful], tmp_path / "file" / "page.html")


# Older versions of matplotlib use names that newer ones of pyparsing call old when they are imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_pictures(eventful: Path, make_run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_report([eventful, make_run("other")], tmp_path / "page.html", png=tmp_path / "png")
    names = ["overview", "loss", "learning_rate", "grad_norm", "tokens_per_sec", "mfu", "memory", "validation"]
    assert [path.name for path in written] == ["page.html", *(f"{one}.png" for one in [*names, "time-1", "time-2"])]
    first = [path.read_bytes() for path in written]
    for content in first[1:]:
        assert content.startswith(b"\x89PNG\r\n")
        assert int.from_bytes(content[16:20], "big") == 1200
        assert len(content) > 5000
    assert len(set(first)) >= len(first) - 1, "the two runs spent their time alike, and no other pictures are equal"


def test_pictures_without_matplotlib(eventful: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrainerError, match=r'pip install "lt-trainer\[plot\]"'):
        write_report([eventful], tmp_path / "page.html", png=tmp_path / "png")
    assert not (tmp_path / "page.html").exists()


def test_the_command(eventful: Path, tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "lt-train"
    done = subprocess.run(
        [program, "report", eventful, "--out", tmp_path / "page.html"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{tmp_path / 'page.html'}\n"
    again = subprocess.run(
        [program, "report", eventful, "--out", tmp_path / "page.html"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 64
    assert "page.html exists" in again.stderr
    assert "Traceback" not in again.stderr


def test_importing_the_page_loads_no_matplotlib() -> None:
    module = "lt_trainer.observability.report.writer"
    script = f"import sys, {module}; sys.exit(bool({{'matplotlib', 'torch', 'rich'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_nan_is_no_chart_value(make_run) -> None:
    records = [{"step": s, "loss": "nan" if s == 3 else 2.0, "elapsed_s": 1.0} for s in range(1, 6)]
    (loss,) = build_charts([read_run(make_run(records=records))])
    assert [x for x, _ in loss.curves[0].points] == [1, 2, 4, 5]
    assert all(math.isfinite(y) for line in loss.curves for _, y in line.points)


def test_losses_that_are_not_finite_are_told(make_run) -> None:
    """A curve that ends early, or is not there, says nothing by itself."""
    good = [{"step": step, "loss": 2.0, "elapsed_s": 1.0} for step in range(1, 21)]
    bad = [{"step": step, "loss": "nan", "elapsed_s": 1.0} for step in range(21, 26)]
    some = make_run("some", records=good + bad, events=[{"event": "completed", "step": 25}])
    none = make_run("none", records=bad[:1])
    told = "5 of 25 records have a non-finite loss, the first at step 21, the last at step 25;"
    assert told in report_html([read_run(some)])
    assert "1 event<" in report_html([read_run(some)])
    assert "1 of 1 records have a non-finite loss, the first at step 21" in report_html([read_run(none)])
    both = report_html([read_run(some), read_run(none)])
    assert f"some: {told}" in both
    assert "none: 1 of 1 records" in both
    assert "non-finite" not in report_html([read_run(make_run("good", records=good))])
