"""What ranks write about themselves for each other, and what a row of such records proves about a rank.

Pure: records in, verdicts out; `watchdog.py` brings the files, the threads and the end. No clock of any machine occurs
here. "Unchanged for the timeout" is a number of the observer's own looks, so that time in which the observer did not
run either (a suspended machine, a job that was stopped and continued, a file server that hung) counts for nothing.

What a look at all ranks costs here is linear in their number.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

STAGES = ("start", "data", "step", "agree", "read", "evaluate", "save")
"""In the order of one step; "start" is before the first mark."""
START = "start"
SIZE = 4096
"""Bytes of a record's file, always: it is overwritten in place, so no kill ever leaves an empty one."""
TEXT = 1200
"""Bytes of JSON that a text in a record may take, so that the record always fits."""

ELSEWHERE = ""
GONE = "gone"
"""What is known of a rank's process: nothing, it runs on another machine; it is gone; or its letter of proc(5)."""
STATES = {
    "T": "its process is stopped by a signal",
    "t": "its process is stopped by a debugger",
    "D": "its process hangs in the kernel, waiting for a disk or a device",
    ELSEWHERE: "its process is frozen or gone, or its machine is",
}
GRACE_LOOKS = 6
"""Looks for which a rank that has lost another may still leave by itself, with an error of its own."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A rank's heartbeat."""

    attempt: str
    """The start of the run that it belongs to."""
    rank: int
    pid: int
    born: str
    """When the process started, as its system counts: a pid may be used again, both together may not."""
    host: str
    """The machine's name, for people."""
    machine: str
    """Equal only where pids mean the same processes."""
    beat: int
    lap: int
    """How often the steps have gone back, as they do when the run goes back to a checkpoint."""
    step: int
    stage: str
    where: str = ""
    """The innermost frame of the main thread, once that has stood still for half of the timeout."""
    left: str | None = None
    """None: in the run. Empty: left, all done. Else a sentence that names the rank at fault, to be quoted as it is."""
    culprit: int | None = None
    """The rank that `left` names; None also where it could not be told."""

    def encode(self) -> bytes:
        """The record as the `SIZE` bytes of its file: JSON with a checksum, then blanks."""
        values = asdict(self)
        for name in ("where", "left"):
            values[name] = values[name] and _clipped(values[name])
        body = json.dumps(values)
        data = f'{body[:-1]}, "sum": {zlib.crc32(body.encode())}}}'.encode()
        assert len(data) < SIZE, f"a record of {len(data)} bytes"
        return data.ljust(SIZE - 1) + b"\n"


def decode(data: bytes) -> Record | None:
    """The record in a file's bytes; None when they are torn, mixed from two writes, or of another form."""
    try:
        values = json.loads(data)
    except ValueError:
        return None
    if not isinstance(values, dict) or set(values) != {field.name for field in fields(Record)} | {"sum"}:
        return None
    found = values.pop("sum")
    return Record(**values) if found == zlib.crc32(json.dumps(values).encode()) else None


def _clipped(text: str, limit: int = TEXT) -> str:
    """The text in one line that takes at most `limit` bytes of JSON."""
    text = " ".join(text.split())
    if len(json.dumps(text)) <= limit:
        return text
    while len(json.dumps(text)) > limit - 3:
        text = text[: len(text) * 9 // 10]
    return f"{text}..."


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one look at a rank showed.

    Where the process is gone, the record was read after that was known: else a rank that left between the two would
    seem gone without a word.
    """

    record: Record | None
    """None: missing, torn, or of another attempt; such a look proves nothing."""
    process: str = ELSEWHERE


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is wrong, in a sentence or two, and the rank at fault (None: it cannot be told)."""

    text: str
    culprit: int | None


class Peer:
    """What an observer has seen of one other rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.record: Record | None = None
        self.process = ELSEWHERE
        self.looks = 0
        """Looks at it that showed a record."""
        self.still = 0
        """Of those, the latest ones in which its beat stood still."""
        self.moved = False
        """Whether its beat was seen to change."""
        self.wrong_since: int | None = None
        """The look, counted by the observer, since which it is known to have left with an error or to be gone."""

    def see(self, sight: Sight, *, number: int, counts: bool) -> None:
        """Take in one look, the observer's `number`; where it does not count, a beat that stands still is no news."""
        self.process = sight.process
        if sight.record is not None:
            if self.record is not None and sight.record.beat == self.record.beat:
                self.still += counts
            else:
                self.moved, self.still = self.record is not None, 0
            self.record = sight.record
            self.looks += 1
        if not (self.failed or self.gone):
            self.wrong_since = None
        elif self.wrong_since is None:
            self.wrong_since = number

    @property
    def failed(self) -> bool:
        """Whether it has left with an error."""
        return self.record is not None and bool(self.record.left)

    @property
    def done(self) -> bool:
        """Whether it has left because all is done."""
        return self.record is not None and self.record.left == ""

    @property
    def gone(self) -> bool:
        """Whether its process is gone without having left."""
        return self.record is not None and self.record.left is None and self.process == GONE


class Observer:
    """Looks at other ranks and judges them.

    Args:
        ranks: the ranks to judge.
        limit: looks without a new beat that make a rank silent.
        beat_s: time from one look to the next, for the sentences only.
        logs: folder of the ranks' logs, for the sentences only.
    """

    def __init__(self, ranks: Iterable[int], *, limit: int, beat_s: float, logs: Path) -> None:
        self.peers = {rank: Peer(rank) for rank in ranks}
        self.alarmed = False
        """Whether some rank is gone or has left with an error: time to look at them all."""
        self._limit, self._beat_s, self._logs = limit, beat_s, logs
        self._looks = self._waited = 0

    def observe(self, sights: Mapping[int, Sight], *, counts: bool = True) -> Verdict | None:
        """Take in what one look at some of the ranks showed, and say whether it is time to end.

        A silent rank is a verdict at once. One that is gone or has left with an error is one after `GRACE_LOOKS`.

        Args:
            sights: what was seen, by rank.
            counts: False where the observer's own writing failed: the file system may be at fault, so that beats which
            stand still prove nothing.
        """
        self._looks += 1
        for rank, sight in sights.items():
            self.peers[rank].see(sight, number=self._looks, counts=counts)
        found = self.cause()
        self.alarmed = found is not None
        self._waited = self._waited + 1 if self.alarmed else 0
        if self.alarmed:
            return found if self._waited > GRACE_LOOKS else None
        return self._silence([p for p in self.peers.values() if p.still >= self._limit and not p.done])

    def cause(self) -> Verdict | None:
        """The first known reason among ranks that are gone or have left with an error.

        What was seen first comes first. Of what was seen in the same look, a rank's sentence about another one (it has
        looked at all) comes before a process that is gone, and that before a rank's own error, which may follow from
        the others. A sentence that names no rank is the last resort.
        """
        found: list[tuple[tuple[bool, int, int, int], Verdict]] = []
        for peer in self.peers.values():
            if peer.wrong_since is None:
                continue
            record = peer.record
            assert record is not None
            if record.left:
                verdict, kind = Verdict(text=record.left, culprit=record.culprit), 2 * (record.culprit == peer.rank)
            else:
                verdict, kind = Verdict(text=self._lost(record), culprit=peer.rank), 1
            found.append(((verdict.culprit is None, peer.wrong_since, kind, peer.rank), verdict))
        return min(found, key=lambda item: item[0])[1] if found else None

    @property
    def seen_alive(self) -> bool:
        """Whether every rank was seen to beat, or to have left."""
        return all(peer.moved or peer.done or peer.failed for peer in self.peers.values())

    def explain(self) -> Verdict | None:
        """Who, after a few looks at every rank, is gone, has left or shows no sign of life; None: all seem alive."""
        peers = self.peers.values()
        return (
            self.cause()
            or self._silence([peer for peer in peers if not (peer.moved or peer.done)])
            or self._left([peer for peer in peers if peer.done])
        )

    def stuck(self, me: Record) -> Verdict:
        """Why the rank of `me` has not gone on for the timeout, after a few looks at every other rank."""
        known = self.explain()
        if known is not None:
            return known
        records = sorted([me, *(p.record for p in self.peers.values() if p.record)], key=lambda r: r.rank)
        last = min(records, key=_position)
        behind = [r for r in records if _position(r) == _position(last)]
        lead = max(records, key=_position)
        for_s = f"{self._limit * self._beat_s:g} s"
        if len(records) == 1:
            text = f"{_name(me)} has not gone on for {for_s}, {_stands(me)}; its stack is in {self._log(me.rank)}"
            return Verdict(text=text, culprit=me.rank)
        if _is_behind(last, lead):
            first = behind[0]
            also = f" ({_ranks([r.rank for r in behind[1:]])} too)" if len(behind) > 1 else ""
            text = f"{_name(first)} is behind{also}, {_stands(first)}, and has kept others, {at(lead)}, waiting for"
            return Verdict(text=f"{text} {for_s}; its stack is in {self._log(first.rank)}", culprit=first.rank)
        return self._odd_one_out(records)

    def _odd_one_out(self, records: Sequence[Record]) -> Verdict:
        """All stand in the same step: the likely cause is the smallest group that stands in a place of its own."""
        places: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            places.setdefault((record.stage, record.where), []).append(record)
        sizes = sorted(len(group) for group in places.values())
        odd = min(places.values(), key=len)
        text = f"no rank has gone on for {self._limit * self._beat_s:g} s"
        if len(sizes) > 1 and sizes[0] < sizes[1] and odd[0].where:
            text = f"{text}; {_name(odd[0])} stands elsewhere than most, {_stands(odd[0])}, and is the likely cause"
            text = f"{text} ({_ranks([r.rank for r in odd])} of {len(records)} ranks stand there)"
            return Verdict(text=f"{text}; its stack is in {self._log(odd[0].rank)}", culprit=odd[0].rank)
        shown = "; ".join(f"{_ranks([r.rank for r in group])} {_stands(group[0])}" for group in places.values())
        text = f"{text}, and which one is the cause cannot be told: {shown}; the stacks are in {self._logs}"
        return Verdict(text=text, culprit=None)

    def _silence(self, silent: list[Peer]) -> Verdict | None:
        if not silent:
            return None
        first = max(silent, key=lambda peer: (peer.still, -peer.rank))
        also = sorted(peer.rank for peer in silent if peer is not first)
        record = first.record
        if record is None:
            text = f"no heartbeat of rank {first.rank} from this start of the run can be read: it died early, or not"
            text = f"{text} all ranks see the same run directory; its log would be {self._log(first.rank)}"
        else:
            state = STATES.get(first.process, "its process is there but does not get to run")
            text = f"{_name(record)} has shown no sign of life for {first.still * self._beat_s:g} s, last seen"
            text = f"{text} {at(record)}: {state}; its log is {self._log(first.rank)}"
        return Verdict(text=text + (f" ({_ranks(also)} silent as well)" if also else ""), culprit=first.rank)

    def _left(self, done: list[Peer]) -> Verdict | None:
        if not done:
            return None
        record = done[0].record
        assert record is not None
        text = f"{_name(record)} has left the run as done, {at(record)}, while others still wait for it"
        return Verdict(text=f"{text}; its log is {self._log(record.rank)}", culprit=record.rank)

    def _lost(self, record: Record) -> str:
        return (
            f"the process of {_name(record)} is gone without a word, killed perhaps (it was {at(record)}); its log is "
            f"{self._log(record.rank)}"
        )

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank{rank:05}.log"


def failure(record: Record, error: str, log: Path) -> str:
    """The sentence that a rank leaves behind when an error ends it."""
    return f"{_name(record)} has left with an error {at(record)}: {_clipped(error, TEXT // 2)}; its log is {log}"


def _name(record: Record) -> str:
    return f"rank {record.rank} on {record.host} (pid {record.pid})"


def at(record: Record) -> str:
    """Where the main thread of a rank stands, for sentences."""
    return "before its first step" if record.stage == START else f"in stage {record.stage} of step {record.step}"


def _stands(record: Record) -> str:
    return at(record) + (f" at {record.where}" if record.where else "")


def _position(record: Record) -> tuple[int, int, int]:
    """How far a rank has come; a stage that is not known stands at the end of its step."""
    stage = STAGES.index(record.stage) if record.stage in STAGES else len(STAGES)
    return record.lap, record.step, stage


def _is_behind(one: Record, other: Record) -> bool:
    """Whether `one` is surely behind: in its step, or in a stage of the same step where both stages are known."""
    same = (one.lap, one.step) == (other.lap, other.step)
    if same and not {one.stage, other.stage} <= set(STAGES):
        return False
    return _position(one) < _position(other)


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks for people: "rank 3", "ranks 3, 5-7"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    shown = ", ".join("-".join(str(end) for end in span) for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
