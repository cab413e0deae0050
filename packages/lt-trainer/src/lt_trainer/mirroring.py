"""The mirror of a run's checkpoints in S3, as the ranks of the run see it.

    bring    at the start, on all ranks: the newest checkpoint of the bucket, where it is newer than what is here
    start    rank 0's thread begins to send what is committed (`lt_ckpt.Mirror`)
    tell     at each step boundary: what the thread has done or met goes into the journal
    finish   at the end, on all ranks: waits for what is not there yet, and says what is missing

Training does not depend on the bucket: while it cannot be reached the run goes on, is told so, and the mirror tries
again with growing pauses. Two things do depend on it. A run without any checkpoint here has to know whether there is
one in the bucket, or it would begin anew what was trained for weeks: it ends when the bucket cannot be asked. And a run
that is done is not done before its last checkpoint is in the bucket: else it ends with 75, so that another start sends
it, or with 64 when a person has to mend something.

Only rank 0 talks to the bucket. The others wait for it in short collectives, however long it takes, so that neither
they nor the watchdogs lose patience; a stop signal to any of them ends the waiting.

At a stop the mirror has three quarters of `guard.grace_s`, counted from the signal; the rest is for leaving. At the end
it has all the time that it needs while bytes go out, and `guard.grace_s` while none do.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lt_ckpt import CheckpointError, Mirror
from lt_ckpt.folders import COMMIT, new_token
from lt_ckpt.s3.client import S3Folder, UnreachableError
from lt_ckpt.s3.fetching import bring_latest, remote_steps
from lt_ckpt.s3.mirror import Problem
from lt_ckpt.s3.owner import ForeignError, Owner, hold
from lt_ckpt.s3.sending import Uploaded, try_address
from lt_ckpt.summary import size
from lt_trainer.errors import MirrorError, RecipeError
from lt_trainer.identity import settle
from lt_trainer.rundir import read_mirror_name
from lt_trainer.together import patiently

if TYPE_CHECKING:
    from lt_ckpt import Checkpoint, Manifest
    from lt_trainer.engine import Engine
    from lt_trainer.journal import RunJournal, SilentJournal
    from lt_trainer.recipe import Recipe
    from lt_trainer.rundir import RunDir
    from lt_trainer.stop import StopSignals

EXIT_PERSON, EXIT_AGAIN = 64, 75
PAUSE_S = 0.2
"""How often ranks meet while rank 0 waits for bytes."""
SAY_S = 30.0
"""How often a long download is told."""
PATIENCE_S = 10.0
"""How long a run that ends with an error lets an upload go on."""


class Stopped(Exception):
    """A stop signal has ended the waiting for the bucket; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _StoppedError(Exception):
    """The same, in the thread that downloads."""


class Mirroring:
    """The mirror of one run, on one rank; a context around training. Without `checkpoint.mirror` it does nothing.

    Args:
        recipe: The recipe.
        values: The recipe as nested tables.
        run_dir: The run directory, on rank 0.
        engine: Its control group is how ranks meet.
        journal: Who hears of it.
        stop: The stop signals of this process.
        go_on: Tells the watchdog that the main thread goes on.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        values: Mapping[str, Any],
        run_dir: RunDir | None,
        engine: Engine,
        journal: RunJournal | SilentJournal,
        stop: StopSignals,
        go_on: Callable[[], None],
    ) -> None:
        self._options, self._guard, self._values = recipe.checkpoint, recipe.guard, values
        self._run_dir, self._control, self._first = run_dir, engine.control, engine.topology.rank == 0
        self._journal, self._stop, self._go_on = journal, stop, go_on
        self._url = recipe.checkpoint.mirror
        self._root: S3Folder | None = None
        self._mirror: Mirror | None = None
        self._owner: Owner | None = None
        self._held = False
        self._damaged: list[str] = []
        self._heard: deque[Problem | Uploaded] = deque()
        self._number = 0
        """The stop signal that the ranks have agreed on while they waited."""
        self._moved, self._said_at = (0, 0), time.monotonic()

    # At the start

    def bring(self, here: Checkpoint | None) -> Path | None:
        """Download the newest valid checkpoint of the bucket, on rank 0, when it is newer than `here`; on all ranks.

        Returns:
            Its folder in the run directory; None when there is none, or no mirror.

        Raises:
            MirrorError: the bucket is another run's; or cannot be used, and there is no checkpoint here.
            RecipeError: there is one, and checkpoint.resume is false.
            Stopped: a stop signal came.
        """
        if not self._url:
            return None
        step = -1 if here is None else here.step
        answer = json.loads(patiently(self._control, self._first, lambda: self._bring(step), self._meanwhile, PAUSE_S))
        if self._number and answer.get("stopped"):
            raise Stopped(self._number)
        self._say_brought(answer)
        return Path(answer["path"]) if answer["path"] else None

    def _bring(self, step: int) -> str:
        """In a thread of rank 0: what was brought, as JSON."""
        assert self._run_dir is not None
        out = self._run_dir.path
        self._root = S3Folder(self._url)
        answer: dict[str, Any] = {"path": "", "rejected": [], "problem": ""}
        try:
            try_address(self._root)
            name = settle(self._root, out, self._values)
            self._own(name)
            assert self._owner is not None
            hold(self._root, self._owner, first=True)
            self._held = True
            found, rejected = bring_latest(
                self._root,
                self._run_dir.checkpoints,
                newer_than=step,
                accept=self._accept,
                progress=self._progress,
                stop=self._go_on_bringing,
            )
            self._damaged = [item.url.rpartition("/")[2] for item in rejected if item.damaged]
            answer["rejected"] = [f"{item.url} is not used: {item.reason}" for item in rejected]
            if found is not None:
                answer |= {"path": str(found.path), "url": found.url, "bytes": found.n_bytes, "seconds": found.seconds}
        except _StoppedError:
            answer["stopped"] = True
        except ForeignError as exc:
            raise MirrorError(f"checkpoint.mirror = {self._url!r}: {exc}") from exc
        except CheckpointError as exc:
            if step < 0:
                raise MirrorError(
                    f"checkpoint.mirror = {self._url!r}: {exc}. There is no checkpoint in {out}, and without the "
                    "mirror nobody can tell whether this run has one; start again when it can be used, or leave "
                    "checkpoint.mirror out to begin anew",
                    again=isinstance(exc, UnreachableError),
                ) from exc
            answer["problem"] = str(exc)
        return json.dumps(answer)

    def _own(self, name: str) -> None:
        assert self._run_dir is not None
        if name != read_mirror_name(self._run_dir.path):
            self._run_dir.name_mirror(name)
        self._owner = Owner(run=name, holder=new_token())

    def _accept(self, manifest: Manifest) -> None:
        if not self._options.resume:
            raise RecipeError(
                f"{self._url} already holds checkpoints (newest: step {manifest.step})",
                values={"checkpoint.resume": False, "checkpoint.mirror": self._url},
                remedy="set checkpoint.mirror to a new folder to start from nothing, or leave checkpoint.resume out",
            )

    def _progress(self, done: int, total: int, unit: str) -> None:
        self._moved = (done, total)

    def _go_on_bringing(self) -> None:
        if self._number:
            raise _StoppedError

    def _meanwhile(self) -> None:
        """On all ranks, while rank 0 downloads."""
        self._number = self._number or self._control.all_max(self._stop.received)
        done, total = self._moved
        if total and time.monotonic() - self._said_at > SAY_S:
            self._said_at = time.monotonic()
            self._journal.say(f"bringing a checkpoint from {self._url}: {size(done)} of {size(total)}")

    def _say_brought(self, answer: Mapping[str, Any]) -> None:
        for text in answer.get("rejected", ()):
            self._journal.event("mirror_problem", message=text)
            self._journal.say(f"warning: {text}")
        if answer.get("problem"):
            self._journal.event("mirror_problem", message=answer["problem"])
            self._journal.say(
                f"warning: the mirror cannot be used: {answer['problem']}; the run goes on from what is here, and the "
                "mirror is tried again"
            )
        if answer["path"]:
            n_bytes, seconds = answer["bytes"], answer["seconds"]
            self._journal.event("restore", url=answer["url"], path=answer["path"], bytes=n_bytes, seconds=seconds)
            self._journal.say(f"brought {answer['url']} to {answer['path']}: {_rate(n_bytes, seconds)}, verified")

    # While training

    def start(self) -> None:
        """Begin to send what is committed (rank 0)."""
        if not self._url or not self._first:
            return
        assert self._run_dir is not None
        if self._owner is None:  # the bucket could not be asked: the mirror asks before it sends anything
            self._own(read_mirror_name(self._run_dir.path) or new_token())
        assert self._root is not None
        self._mirror = Mirror(
            self._run_dir.checkpoints,
            self._root,
            owner=self._owner,
            held=self._held,
            keep_last=self._options.mirror_keep_last,
            keep_every=self._options.mirror_keep_every,
            may_replace=True,  # what is there of this run and of the same step is older than what is here
            distrusted=self._damaged,
            told=self._heard.append,
        )

    def notify(self, path: Path) -> None:
        """A checkpoint was committed."""
        if self._mirror is not None:
            self._mirror.notify(path)

    def sparing(self) -> AbstractContextManager[Collection[Path]]:
        """The checkpoints that retention must leave alone for as long as it works."""
        return nullcontext(()) if self._mirror is None else self._mirror.sparing()

    def tell(self) -> None:
        """Journal what the mirror has done and met since the last call; by the main thread."""
        while self._heard:
            item = self._heard.popleft()
            if isinstance(item, Uploaded):
                name = item.url.rpartition("/")[2]
                self._journal.event(
                    "mirrored",
                    step=int(name.removeprefix("step-")),
                    url=item.url,
                    bytes=item.n_bytes,
                    seconds=item.seconds,
                    sent=len(item.sent),
                    kept=len(item.kept),
                )
                self._journal.say(f"{name} is in the mirror: {_rate(item.n_bytes, item.seconds)}")
            else:
                self._journal.event("mirror_problem", path=str(item.path), message=item.message, final=item.final)
                then = "it is not tried again" if item.final else "it is tried again while the run goes on"
                self._journal.say(f"warning: the mirror has not got {item.path.name}: {item.message}; {then}")

    # At the end

    def finish(self) -> int:
        """Wait until everything is in the bucket, or for as long as may be; on all ranks.

        Returns:
            0 when the newest checkpoint is there; 75 when another start may send it; 64 when a person has to mend
            something first.

        Raises:
            PeerError: another rank is gone.
        """
        if not self._url:
            return 0
        mirror, code = self._mirror, 0
        if self._first and mirror is not None:
            self._seen, self._since = -1, time.monotonic()
        while True:
            waiting = self._first and mirror is not None and not mirror.finish(PAUSE_S)
            self.tell()
            self._go_on()
            number = self._control.all_max(self._stop.received)
            waiting = waiting and mirror is not None and not self._too_long(mirror, stopped=bool(number))
            if not self._control.broadcast(waiting):
                break
        if self._first and mirror is not None:
            code = self._conclude(mirror)
        return self._control.broadcast(code)

    def _too_long(self, mirror: Mirror, *, stopped: bool) -> bool:
        now, grace_s = time.monotonic(), self._guard.grace_s
        if stopped:
            self._stopped_at = self._stop.received_at or self._stopped_at or now  # the signal may be another rank's
            return now - self._stopped_at > 0.75 * grace_s
        if mirror.progress != self._seen:
            self._seen, self._since = mirror.progress, now
        return now - self._since > grace_s

    _seen, _since, _stopped_at = -1, 0.0, 0.0

    def _conclude(self, mirror: Mirror) -> int:
        missing = mirror.close(0, stop_s=min(30.0, self._guard.grace_s / 8, self._guard.timeout_s / 4))
        self.tell()
        self._mirror = None
        if not missing:
            self._journal.say(f"every checkpoint that is kept is in {self._url}")
            return 0
        # One that has to be tried again stands in the way of all that come after it.
        last = [
            problem
            for problem in mirror.problems
            if problem.path in (missing[-1], mirror.root) or (problem.path in missing and not problem.final)
        ]
        reason = last[-1].message if last else "there was no time left to send it"
        person = bool(last) and not last[-1].passing
        newest = bool(missing) and missing[-1] == self._newest_here(mirror.root)
        names = ", ".join(path.name for path in missing)
        self._journal.event("not_mirrored", names=[path.name for path in missing], newest=newest, message=reason)
        remedy = "mend that, then start the run again" if person else "start the run again to send it"
        self._journal.say(
            f"warning: not in the mirror {self._url}: {names} ({reason}); it is in {mirror.root}; {remedy}"
        )
        if not newest:
            return 0
        return EXIT_PERSON if person else EXIT_AGAIN

    @staticmethod
    def _newest_here(root: Path) -> Path | None:
        from lt_ckpt import list_steps

        return next((path for _, path in list_steps(root) if (path / COMMIT).is_file()), None)

    def __enter__(self) -> Mirroring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mirror, self._mirror = self._mirror, None
        if mirror is None:
            return
        assert error is not None, "a run that ends well has finished its mirror"
        patience_s = min(PATIENCE_S, self._guard.timeout_s / 4)
        try:
            missing = mirror.close(patience_s, stop_s=patience_s)
        except BaseException as exc:  # noqa: BLE001 - the error that ends the run goes on, with this beside it
            error.add_note(f"the mirror could not be finished: {type(exc).__name__}: {exc}")
            return
        self.tell()
        if missing:
            error.add_note(f"not in the mirror {self._url} yet: {', '.join(path.name for path in missing)}")


def describe(recipe: Recipe, values: Mapping[str, Any]) -> list[str]:
    """Try the mirror as a run would at its start, and say what is there; for `lt train check`, on rank 0.

    Raises:
        MirrorError: it is another run's.
        CheckpointError: it cannot be written, listed, read or deleted in.
    """
    root, out = S3Folder(recipe.checkpoint.mirror), Path(recipe.run.out)
    try_address(root)
    settle(root, out, values)
    steps = [folder for _, folder in remote_steps(root)]
    found = f"newest checkpoint there {steps[0].url.rpartition('/')[2]}" if steps else "no checkpoint there yet"
    return [f"{root.url} can be written, listed, read and deleted in", found]


def _rate(n_bytes: int, seconds: float) -> str:
    return f"{size(n_bytes)} in {seconds:.1f} s ({size(round(n_bytes / max(seconds, 1e-9)))}/s)"
