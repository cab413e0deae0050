"""Rebuilding of one store of a release, as a process of the environment that reproduces it.

    python -m lt_trainer.release.rebuild JOB.json

The job names sources, tokenizer, options of `lt_data.prepare`, the pack, and how the store came about: in one piece,
from parts that were merged, or as a side of a split. The tokens must be those of the run: the fingerprint is compared.
Cost: that of `lt data prepare` and `lt data pack`.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_data import DataError, Selection, TokenStore, merge, pack, part_folder, prepare, split


def rebuild_store(job: Mapping[str, Any]) -> None:
    """Prepare and pack a store.

    Args:
        job: `out`, `sources`, `tokenizer`, `arguments`, `parts`, `split` (None or holdout and side), `pack`,
            `fingerprint` and `pack_fingerprint`.

    Raises:
        DataError: The store cannot be made, or is of other tokens than the run's.
    """
    out = Path(job["out"])
    whole = out.with_name(f"{out.name}.whole") if job["split"] else out
    arguments = {**job["arguments"], "selection": Selection(**job["arguments"]["selection"])}
    for i in range(job["parts"]):
        part = {"part_index": i, "num_parts": job["parts"]} if job["parts"] > 1 else {}
        prepare(job["sources"], tokenizer=job["tokenizer"], out=whole, **arguments, **part)
    if job["parts"] > 1:
        merge(whole)
        for i in range(job["parts"]):
            shutil.rmtree(part_folder(whole, i, job["parts"]))
    if job["split"]:
        other = out.with_name(f"{out.name}.other")
        train, validation = (out, other) if job["split"]["side"] == "train" else (other, out)
        split(TokenStore.open(whole), holdout=job["split"]["holdout"], train=train, validation=validation)
        shutil.rmtree(whole)
        shutil.rmtree(other)
    store = TokenStore.open(out)
    if store.manifest.fingerprint != job["fingerprint"]:
        raise DataError(
            f"{out}: prepared again, its tokens are {store.manifest.fingerprint[:16]}, the run has read "
            f"{job['fingerprint'][:16]}; give the options that the store does not record in [stores.NAME.prepare] of "
            "licences.toml when the release is made"
        )
    index = pack(store, **job["pack"])
    if index.fingerprint != job["pack_fingerprint"]:
        raise DataError(
            f"{out}: packed again, its rows are {index.fingerprint[:16]}, not {job['pack_fingerprint'][:16]}"
        )


def main() -> int:
    """Run the job in the file that the command line names; return the exit code."""
    try:
        rebuild_store(json.loads(Path(sys.argv[1]).read_bytes()))
    except DataError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 64
    return 0


if __name__ == "__main__":
    sys.exit(main())
