"""The device's log of one rank, read: what each part of the run asked of the device.

The engine's calls are parts named "step 0", "fetch 0" and so on. A part's schedule is its collectives in the order in
which the host sent them, with the matrix products between them, as text:

    all_gather bf16 65536 of 2
    4 products

A collective's line has its count of elements as NCCL takes it (of an all-gather and a broadcast the input's, of a
reduce-scatter the output's), the ranks of its group, and "apart N" where these are not neighbors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAUNCHES = ("kernel", "product", "triton")
STAGED_BYTES = 64 << 10
"""CUDA copies this much from pageable memory without waiting."""


@dataclass(frozen=True, order=True)
class Communicator:
    """Communicator of NCCL; several of the same ranks are told apart by the order in which they were made."""

    ranks: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class Queued:
    """Kernel or copy in the queue of a stream.

    Attributes:
        kind: "kernel" or "copy".
        text: its text in the log.
        stream: its stream.
        number: how many kernels and copies the stream has with this one, from the start of the part.
        before: by stream, how many of them end before this one begins.
    """

    kind: str
    text: str
    stream: str
    number: int
    before: dict[str, int]

    def follows(self, other: Queued) -> bool:
        """Return whether `other` has ended when this one begins."""
        return self.before.get(other.stream, 0) >= other.number


@dataclass(frozen=True)
class Part:
    """Events of one part of the run, as (kind, text), and the rank's communicators by their numbers in it."""

    events: list[tuple[str, str]]
    communicators: dict[str, Communicator]

    def of(self, kind: str) -> list[str]:
        """Return the texts of all events of a kind."""
        return [text for found, text in self.events if found == kind]

    @property
    def waits(self) -> list[str]:
        """Synchronizations, copies to the host, and large ones from memory that is not pinned, for which CUDA waits."""
        return self.of("sync") + [text for text in self.of("copy") if _waits(text)]

    @property
    def launches(self) -> int:
        """Kernels of all kinds; a matrix product counts as one."""
        return sum(kind in LAUNCHES for kind, _ in self.events)

    @property
    def optimizer_launches(self) -> int:
        """Kernels of the fused AdamW."""
        return sum("FusedAdam" in text or "fused_adam" in text for text in self.of("kernel"))

    @property
    def triton_launches(self) -> int:
        """Kernels that Triton has made."""
        return len(self.of("triton"))

    @property
    def product_dtypes(self) -> Counter[str]:
        """Number of matrix products by the dtypes of their inputs and their output."""
        return Counter(" ".join(text.split()[:3]) for text in self.of("product"))

    @property
    def schedule(self) -> list[str]:
        """Collectives with the matrix products between them."""
        return list(self._schedule())

    def on(self, communicator: Communicator) -> list[str]:
        """Return the collectives, sends and receives of one communicator."""
        texts = self.of("nccl")
        return [self._describe(text) for text in texts if self.communicators[text.split()[3]] == communicator]

    def queued(self) -> list[Queued]:
        """Return kernels and copies with what is known to end before each begins."""
        done: dict[str, dict[str, int]] = {}  # stream → how much of each stream ends before what is queued next
        recorded: dict[str, dict[str, int]] = {}  # the same by event
        found, stream = [], ""
        for kind, text in self.events:
            if kind == "stream":
                stream = text
            elif kind == "event":
                recorded[text] = dict(done.get(stream, {}))
            elif kind == "wait":
                for other, count in recorded.get(text, {}).items():
                    done.setdefault(stream, {})[other] = max(count, done.get(stream, {}).get(other, 0))
            elif kind in ("kernel", "copy"):
                before = dict(done.setdefault(stream, {}))
                done[stream][stream] = before.get(stream, 0) + 1
                found.append(Queued(kind, text, stream, done[stream][stream], before))
        return found

    def _schedule(self) -> Iterator[str]:
        products = 0
        for kind, text in [*self.events, ("nccl", "")]:
            products += kind == "product"
            if kind == "nccl":
                if products:
                    yield f"{products} product{'s' * (products > 1)}"
                products = 0
                if text:
                    yield self._describe(text)

    def _describe(self, text: str) -> str:
        operation, dtype, count, communicator = text.split()
        ranks = self.communicators[communicator].ranks
        distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        apart = f" apart {distance}" if distance > 1 else ""
        return f"{operation} {dtype} {count} of {len(ranks)}{apart}"


def _waits(copy: str) -> bool:
    return "to host" in copy or (copy.startswith("pageable") and int(copy.split()[-1]) > STAGED_BYTES)


def read_log(path: Path) -> dict[str, Part]:
    """Return the parts of a rank's run, by name."""
    parts: dict[str, Part] = {}
    communicators: dict[str, Communicator] = {}
    now, stream = parts.setdefault("start", Part([], communicators)), ""
    for line in path.read_text().splitlines():
        kind, _, text = line.partition(" ")
        if kind == "mark":
            now = parts.setdefault(text, Part([("stream", stream)], communicators))
        elif kind == "communicator":
            number, _, members = text.partition(" ")
            ranks = tuple(int(rank) for rank in members.split(",") if rank)
            communicators[number] = Communicator(ranks, sum(one.ranks == ranks for one in communicators.values()))
        else:
            stream = text if kind == "stream" else stream
            now.events.append((kind, text))
    return parts
