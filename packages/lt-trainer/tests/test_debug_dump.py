"""Debug dump of a hanging rank before its watchdog ends it; the rank ends even if the dump hangs or fails."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lt_trainer.resilience import watchdog
from lt_trainer.resilience.watchdog import Watchdog
from lt_trainer.run_directory.rank_log import RankLog


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RankLog]:
    with RankLog(tmp_path, 0) as log:
        yield log


def ended(log: RankLog, last_words: Callable[[], str]) -> str:
    """Hang until the watchdog ends the rank; returns the rank's log."""
    codes: list[int] = []
    over = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        over.set()

    run = log.path.parent.parent
    dog = Watchdog(
        run, rank=0, world_size=1, attempt="a", timeout_s=0.1, log=log, dump_debug_info=last_words, exit_process=end
    )
    with dog:
        dog.mark("fetch_metrics", 7)
        assert over.wait(60)
    assert codes == [75]
    return log.path.read_text()


def test_they_stand_in_the_log_and_on_standard_error(log: RankLog, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []

    def words() -> str:
        heard.append(threading.current_thread().name)
        return "the last collectives are in flight/x"

    text = ended(log, words)
    assert heard == ["debug dump"]  # a thread of its own, and once
    assert text.rstrip().endswith("the last collectives are in flight/x")
    assert "; the last collectives are in flight/x\n" in capfd.readouterr().err


def test_a_rank_with_nothing_to_show_ends_as_ever(log: RankLog, capfd: pytest.CaptureFixture[str]) -> None:
    ended(log, lambda: "")
    err = capfd.readouterr().err
    assert err.startswith("error: rank 0 exits")
    assert not err.rstrip().endswith(";")


def test_a_rank_ends_though_its_last_words_hang(log: RankLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "DEBUG_DUMP_TIMEOUT_S", 0.05)
    released = threading.Event()
    text = ended(log, lambda: str(released.wait()))
    released.set()
    assert "rank 0 exits" in text


def test_a_rank_ends_though_its_last_words_fail(log: RankLog) -> None:
    def fail() -> str:
        raise OSError("No space left on device")

    assert "the debug dump failed: OSError: No space left on device" in ended(log, fail)
