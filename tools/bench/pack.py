"""Packing of any number of documents in groups: wall time, memory, disk and fill.

    uv run python tools/bench/pack.py [--documents 1e9] [--folder F]

The documents are lengths drawn as those of text (log-normal), each group's from a seed of its own, so that no more than
a group of them exists at a time; they go through the packer of `lt data pack` (`write_pack`). Memory is
that of the process. The folder takes about 26 bytes per document, and is emptied at the end.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from results import describe_machine, format_table

from lt_data.packing.pack_index import GROUP_DOCUMENTS, PackIndex, write_pack

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
    n_tokens = int(index.length.sum(dtype=np.int64))
    rows = [
        ["wall time", f"{minutes:.1f} minutes ({cpu_minutes:.1f} of CPU)"],
        ["peak resident memory", f"{peak_bytes / 2**30:.1f} GiB"],
        ["pack", f"{index.n_rows:,} rows, {n_bytes / 1e9:.1f} GB ({n_bytes / n_documents:.1f} bytes a document)"],
        ["fill", f"{n_tokens / index.n_positions:.5%}"],
    ]
    size = f"{n_documents:,} documents, {n_tokens:,} tokens, rows of {SEQ_LEN}, groups of {GROUP_DOCUMENTS:,}:"
    return [describe_machine("numpy"), "", size, "", *format_table(["", ""], rows)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=float, default=1e9)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lt-bench-pack-", dir=options.folder) as folder:
        print(*measure(int(options.documents), Path(folder)), sep="\n")


if __name__ == "__main__":
    main()
