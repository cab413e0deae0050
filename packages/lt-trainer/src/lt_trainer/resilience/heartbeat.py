"""Heartbeats of ranks, and diagnoses from a sequence of them.

Pure functions of heartbeats; `watchdog` adds files, threads and process exit. No machine's clock is used: "unchanged
for the timeout" is a number of the monitor's own observations, so time in which the monitor did not run (a suspended
machine, a stopped and continued job, a hanging file server) does not count.

Cost: linear in the number of ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from lt_trainer.files import parse_json

STAGES = ("start", "data", "step", "sync_stop", "fetch_metrics", "validate", "save")
"""In the order of one step; "start" is before the first mark."""
START = "start"
HEARTBEAT_BYTES = 4096
"""Constant size of a heartbeat file: it is overwritten in place, so a kill never leaves an empty one."""
MAX_TEXT_BYTES = 1200
"""Limit for a text in a heartbeat, in bytes of JSON, so that the heartbeat always fits."""

PROCESS_UNKNOWN = ""
PROCESS_GONE = "gone"
"""Process state: unknown (another machine), exited, or the state letter of proc(5)."""
PROCESS_STATES = {
    "T": "its process is stopped by a signal",
    "t": "its process is stopped by a debugger",
    "D": "its process hangs in the kernel, waiting for a disk or device",
    PROCESS_UNKNOWN: "its process or machine is frozen or down",
}
GRACE_OBSERVATIONS = 6
"""Observations for which a rank that lost another may still exit by itself, with its own error."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Heartbeat of a rank."""

    attempt: str
    """Start of the run that it belongs to."""
    rank: int
    pid: int
    process_start_time: str
    """Start time as the system counts it; unlike a pid, (pid, start time) is unique."""
    host: str
    """Host name, for messages."""
    machine_id: str
    """Equal only where pids identify the same processes."""
    beat: int
    n_rollbacks: int
    """Number of times the step went back (rollbacks to a checkpoint)."""
    step: int
    stage: str
    main_frame: str = ""
    """Innermost frame of the main thread, if it has made no progress for half of the timeout."""
    exit_message: str | None = None
    """None: running; "": finished; otherwise a message that names the faulty rank, to be quoted."""
    faulty_rank: int | None = None
    """Rank that `exit_message` names; None if unknown."""

    def encode(self) -> bytes:
        """Encode as the `HEARTBEAT_BYTES` bytes of the file: JSON with a checksum, padded with blanks."""
        values = asdict(self)
        for name in ("main_frame", "exit_message"):
            values[name] = values[name] and _truncate(values[name])
        body = json.dumps(values)
        data = f'{body[:-1]}, "sum": {zlib.crc32(body.encode())}}}'.encode()
        assert len(data) < HEARTBEAT_BYTES, f"a record of {len(data)} bytes"
        return data.ljust(HEARTBEAT_BYTES - 1) + b"\n"


def decode_heartbeat(data: bytes) -> Heartbeat | None:
    """Decode a heartbeat file; None if it is torn, mixed from two writes, or of another format."""
    try:
        values = parse_json(data)
    except ValueError:
        return None
    hints = get_type_hints(Heartbeat)
    if not isinstance(values, dict) or values.keys() != hints.keys() | {"sum"}:
        return None
    checksum = values.pop("sum")
    if not all(isinstance(values[name], hint) for name, hint in hints.items()):
        return None
    return Heartbeat(**values) if checksum == zlib.crc32(json.dumps(values).encode()) else None


def _truncate(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """Return the text on one line, truncated to `limit` bytes of JSON."""
    text = " ".join(text.split())
    if len(json.dumps(text)) <= limit:
        return text
    while len(json.dumps(text)) > limit - 3:
        text = text[: len(text) * 9 // 10]
    return f"{text}..."


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Observation of a rank.

    If the process has exited, the heartbeat was read after that, to see the exit message of a rank that just left.
    """

    heartbeat: Heartbeat | None
    """None if missing, torn, or of another attempt; such an observation proves nothing."""
    process_state: str = PROCESS_UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Diagnosis in a sentence or two, and the faulty rank (None if unknown)."""

    text: str
    faulty_rank: int | None


class PeerState:
    """State of another rank, from observations."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.heartbeat: Heartbeat | None = None
        self.process_state = PROCESS_UNKNOWN
        self.n_observations = 0
        """Observations with a heartbeat."""
        self.n_unchanged = 0
        """Number of the latest of these with an unchanged beat."""
        self.has_beaten = False
        """The beat was seen to change."""
        self.failed_since: int | None = None
        """Observation number since which it is known to have failed or exited."""

    def update(self, observation: Observation, *, number: int, is_reliable: bool) -> None:
        """Process observation `number`; an unchanged beat counts only if the observation is reliable."""
        self.process_state = observation.process_state
        if observation.heartbeat is not None:
            if self.heartbeat is not None and observation.heartbeat.beat == self.heartbeat.beat:
                self.n_unchanged += is_reliable
            else:
                self.has_beaten, self.n_unchanged = self.heartbeat is not None, 0
            self.heartbeat = observation.heartbeat
            self.n_observations += 1
        if not (self.has_failed or self.is_gone):
            self.failed_since = None
        elif self.failed_since is None:
            self.failed_since = number

    @property
    def has_failed(self) -> bool:
        """The rank has exited with an error."""
        return self.heartbeat is not None and bool(self.heartbeat.exit_message)

    @property
    def is_done(self) -> bool:
        """The rank has finished."""
        return self.heartbeat is not None and self.heartbeat.exit_message == ""

    @property
    def is_gone(self) -> bool:
        """The process has exited without an exit message."""
        return self.heartbeat is not None and self.heartbeat.exit_message is None and self.process_state == PROCESS_GONE


class HeartbeatMonitor:
    """Monitor of other ranks.

    Args:
        ranks: ranks to monitor.
        limit: number of observations without a new beat after which a rank is silent.
        interval_s: time between observations, only for messages.
        logs: folder of the ranks' logs, only for messages.
    """

    def __init__(self, ranks: Iterable[int], *, limit: int, interval_s: float, logs: Path) -> None:
        self.peers = {rank: PeerState(rank) for rank in ranks}
        self.has_alarm = False
        """A rank has failed or exited: time to observe all ranks."""
        self._limit, self._interval_s, self._logs = limit, interval_s, logs
        self._n_observations = self._n_alarmed = 0

    def observe(self, observations: Mapping[int, Observation], *, is_reliable: bool = True) -> Diagnosis | None:
        """Process observations of some ranks; return a diagnosis if it is time to end.

        A silent rank is diagnosed at once, one that has failed or exited after `GRACE_OBSERVATIONS`.

        Args:
            observations: observations by rank.
            is_reliable: False if the monitor's own writes failed: the file system may be at fault, so unchanged beats
                prove nothing.
        """
        self._n_observations += 1
        for rank, observation in observations.items():
            self.peers[rank].update(observation, number=self._n_observations, is_reliable=is_reliable)
        cause = self.find_cause()
        self.has_alarm = cause is not None
        self._n_alarmed = self._n_alarmed + 1 if self.has_alarm else 0
        if self.has_alarm:
            return cause if self._n_alarmed > GRACE_OBSERVATIONS else None
        return self._diagnose_silent([p for p in self.peers.values() if p.n_unchanged >= self._limit and not p.is_done])

    def find_cause(self) -> Diagnosis | None:
        """Return the most likely cause among ranks that have failed or exited.

        The earliest observation comes first. Within one observation, a rank's message about another rank (it has
        observed all) precedes an exited process, and that a rank's own error, which may be a consequence. A message
        without a rank is last.
        """
        causes: list[tuple[tuple[bool, int, int, int], Diagnosis]] = []
        for peer in self.peers.values():
            if peer.failed_since is None:
                continue
            heartbeat = peer.heartbeat
            assert heartbeat is not None
            if heartbeat.exit_message:
                diagnosis = Diagnosis(text=heartbeat.exit_message, faulty_rank=heartbeat.faulty_rank)
                kind = 2 * (heartbeat.faulty_rank == peer.rank)
            else:
                diagnosis, kind = Diagnosis(text=self._lost_message(heartbeat), faulty_rank=peer.rank), 1
            causes.append(((diagnosis.faulty_rank is None, peer.failed_since, kind, peer.rank), diagnosis))
        return min(causes, key=lambda item: item[0])[1] if causes else None

    @property
    def all_seen_alive(self) -> bool:
        """Every rank was seen to beat, or has exited."""
        return all(peer.has_beaten or peer.is_done or peer.has_failed for peer in self.peers.values())

    def diagnose(self) -> Diagnosis | None:
        """Return which rank, after observations of all, has exited or is silent; None if all seem alive."""
        peers = self.peers.values()
        return (
            self.find_cause()
            or self._diagnose_silent([peer for peer in peers if not (peer.has_beaten or peer.is_done)])
            or self._diagnose_left([peer for peer in peers if peer.is_done])
        )

    def diagnose_hang(self, own: Heartbeat) -> Diagnosis:
        """Return why the rank of `own` has made no progress for the timeout, after observations of all."""
        known = self.diagnose()
        if known is not None:
            return known
        heartbeats = sorted([own, *(p.heartbeat for p in self.peers.values() if p.heartbeat)], key=lambda h: h.rank)
        last = min(heartbeats, key=_progress_key)
        lead = max(heartbeats, key=_progress_key)
        time = f"{self._limit * self._interval_s:g} s"
        if len(heartbeats) == 1:
            text = f"{_describe_rank(own)} has made no progress for {time}, {_describe_location(own)}"
        elif _is_behind(last, lead):
            also = [h.rank for h in heartbeats if h is not last and _progress_key(h) == _progress_key(last)]
            text = (
                f"{_describe_rank(last)} is behind{f' ({_format_ranks(also)} too)' if also else ''}, "
                f"{_describe_location(last)}, and has blocked others, {describe_progress(lead)}, for {time}"
            )
        else:
            return self._diagnose_outlier(heartbeats)
        return Diagnosis(text=f"{text}; its stack is in {self._log_path(last.rank)}", faulty_rank=last.rank)

    def _diagnose_outlier(self, heartbeats: Sequence[Heartbeat]) -> Diagnosis:
        """Diagnose ranks in the same step: the likely cause is the smallest group at its own location."""
        groups: dict[tuple[str, str], list[Heartbeat]] = {}
        for heartbeat in heartbeats:
            groups.setdefault((heartbeat.stage, heartbeat.main_frame), []).append(heartbeat)
        sizes = sorted(len(group) for group in groups.values())
        outliers = min(groups.values(), key=len)
        text = f"no rank has made progress for {self._limit * self._interval_s:g} s"
        if len(sizes) > 1 and sizes[0] < sizes[1] and outliers[0].main_frame:
            first = outliers[0]
            text = (
                f"{text}; the likely cause is {_describe_rank(first)}, which unlike most is "
                f"{_describe_location(first)} ({_format_ranks([h.rank for h in outliers])} of {len(heartbeats)} ranks)"
                f"; its stack is in {self._log_path(first.rank)}"
            )
            return Diagnosis(text=text, faulty_rank=first.rank)
        locations = "; ".join(
            f"{_format_ranks([h.rank for h in group])} {_describe_location(group[0])}" for group in groups.values()
        )
        text = f"{text}, for an unknown cause: {locations}; the stacks are in {self._logs}"
        return Diagnosis(text=text, faulty_rank=None)

    def _diagnose_silent(self, silent: list[PeerState]) -> Diagnosis | None:
        if not silent:
            return None
        first = max(silent, key=lambda peer: (peer.n_unchanged, -peer.rank))
        also = sorted(peer.rank for peer in silent if peer is not first)
        heartbeat, log = first.heartbeat, self._log_path(first.rank)
        if heartbeat is None:
            text = (
                f"rank {first.rank} has no readable heartbeat of this start of the run: it exited early, or the ranks "
                f"do not share the run directory; its log would be {log}"
            )
        else:
            state = PROCESS_STATES.get(first.process_state, "its process exists but does not run")
            text = (
                f"{_describe_rank(heartbeat)} has had no heartbeat for {first.n_unchanged * self._interval_s:g} s, "
                f"last {describe_progress(heartbeat)}: {state}; its log is {log}"
            )
        if also:
            text = f"{text} ({_format_ranks(also)} silent as well)"
        return Diagnosis(text=text, faulty_rank=first.rank)

    def _diagnose_left(self, done: list[PeerState]) -> Diagnosis | None:
        if not done:
            return None
        heartbeat = done[0].heartbeat
        assert heartbeat is not None
        text = (
            f"{_describe_rank(heartbeat)} has finished, {describe_progress(heartbeat)}, while others still wait for "
            f"it; its log is {self._log_path(heartbeat.rank)}"
        )
        return Diagnosis(text=text, faulty_rank=heartbeat.rank)

    def _lost_message(self, heartbeat: Heartbeat) -> str:
        return (
            f"the process of {_describe_rank(heartbeat)} has exited without an error message, "
            f"{describe_progress(heartbeat)}, perhaps killed; its log is {self._log_path(heartbeat.rank)}"
        )

    def _log_path(self, rank: int) -> Path:
        return self._logs / f"rank{rank:05}.log"


def failure_message(heartbeat: Heartbeat, error: str, log: Path) -> str:
    """Return the exit message of a rank that an error ends."""
    text = _truncate(error, MAX_TEXT_BYTES // 2)
    return f"{_describe_rank(heartbeat)} has failed {describe_progress(heartbeat)}: {text}; its log is {log}"


def _describe_rank(heartbeat: Heartbeat) -> str:
    return f"rank {heartbeat.rank} on {heartbeat.host} (pid {heartbeat.pid})"


def describe_progress(heartbeat: Heartbeat) -> str:
    """Describe the progress of a rank's main thread."""
    return (
        "before its first step" if heartbeat.stage == START else f"in stage {heartbeat.stage} of step {heartbeat.step}"
    )


def _describe_location(heartbeat: Heartbeat) -> str:
    return describe_progress(heartbeat) + (f" at {heartbeat.main_frame}" if heartbeat.main_frame else "")


def _progress_key(heartbeat: Heartbeat) -> tuple[int, int, int]:
    """Return the progress of a rank; an unknown stage counts as the end of its step."""
    stage = STAGES.index(heartbeat.stage) if heartbeat.stage in STAGES else len(STAGES)
    return heartbeat.n_rollbacks, heartbeat.step, stage


def _is_behind(one: Heartbeat, other: Heartbeat) -> bool:
    """Return True if `one` is in an earlier step, or in an earlier known stage of the same step."""
    same = (one.n_rollbacks, one.step) == (other.n_rollbacks, other.step)
    if same and not {one.stage, other.stage} <= set(STAGES):
        return False
    return _progress_key(one) < _progress_key(other)


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks: "rank 3", "ranks 3, 5-7"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    shown = ", ".join("-".join(str(end) for end in span) for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
