"""Packing of any number of documents in groups: wall time, memory, disk and fill.

    uv run python tools/bench/pack.py [--documents 1e9] [--folder F] [--out docs/benchmarks/data.md]

The documents are lengths drawn as those of text (log-normal), each group's from a seed of its own, so that no more than
a group of them exists at a time; they go through the packer of `lt data pack` (`write_pack`). Memory is
that of the process. Fill is that of the pack, and of as many documents as three groups have when they are packed at
once and in groups.
The folder takes about 26 bytes per document, and is emptied at the end.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from results import describe_machine, replace_part

from lt_data.packing.pack_index import GROUP_DOCUMENTS, PackIndex, build_index, write_pack

SEQ_LEN = 4096
MEDIAN_TOKENS, SIGMA = 400, 1.2


@dataclass(frozen=True)
class SyntheticLengths:
    """Lengths of documents by group.

    Attributes:
        size: number of documents.
    """

    size: int

    def __getitem__(self, documents: slice, /) -> np.ndarray:
        """Return the lengths of a group (int32)."""
        first, last, _ = documents.indices(self.size)
        assert first % GROUP_DOCUMENTS == 0
        rng = np.random.default_rng(first)
        return (
            np.exp(rng.standard_normal(last - first, np.float32) * SIGMA + np.log(MEDIAN_TOKENS)).astype(np.int32) + 1
        )


def fill_of(index: PackIndex) -> float:
    """Return the share of positions that are not padding."""
    return float(index.length.sum(dtype=np.int64)) / index.n_positions


def measure(n_documents: int, folder: Path) -> list[str]:
    """Pack; return the lines of the page."""
    start, cpu = time.monotonic(), os.times()
    write_pack(SyntheticLengths(n_documents), folder / "pack", seq_len=SEQ_LEN, mode="bfd")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    minutes = (time.monotonic() - start) / 60
    spent = os.times()
    cpu_minutes = (sum(spent[:4]) - sum(cpu[:4])) / 60
    index = PackIndex.load(folder / "pack")
    n_bytes = sum(path.stat().st_size for path in (folder / "pack").iterdir())
    begun = time.monotonic()
    index.verify()
    some = np.random.default_rng(1).choice(SyntheticLengths(GROUP_DOCUMENTS)[0:GROUP_DOCUMENTS], 3_000_000)
    at_once = build_index(some, seq_len=SEQ_LEN, mode="bfd")
    in_groups = build_index(some, seq_len=SEQ_LEN, mode="bfd", documents_per_group=1_000_000)
    return [
        describe_machine("numpy"),
        "",
        f"{n_documents:,} documents, {int(index.length.sum(dtype=np.int64)):,} tokens, rows of {SEQ_LEN}, groups of "
        f"{GROUP_DOCUMENTS:,}:",
        "",
        "| | |",
        "|---|---|",
        f"| wall time | {minutes:.1f} minutes ({cpu_minutes:.1f} of CPU) |",
        f"| peak resident memory | {peak_bytes / 2**30:.1f} GiB |",
        f"| pack | {index.n_rows:,} rows, {n_bytes / 1e9:.1f} GB ({n_bytes / n_documents:.1f} bytes a document) |",
        f"| fill | {fill_of(index):.5%} |",
        f"| check of its fingerprint | {(time.monotonic() - begun) / 60:.1f} minutes |",
        "",
        f"Fill of 3,000,000 documents at once {fill_of(at_once):.5%}, in groups of 1,000,000 {fill_of(in_groups):.5%}.",
    ]


def main() -> None:
    """Measure, print, and replace the part of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=float, default=1e9)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path, help="page whose part is replaced")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lt-bench-pack-", dir=options.folder))
    try:
        lines = measure(int(options.documents), folder)
    finally:
        shutil.rmtree(folder)
    print("\n".join(lines))
    if options.out:
        replace_part(options.out, "pack.py", lines)


if __name__ == "__main__":
    main()
