"""Reads datasets of the hub in a process of its own, whose environment names the hub, and prints what came out.

Standard input: a JSON list of cases, each {"source", "options", "piece_rows"}. Standard output: one JSON line per case.
"""

import json
import pickle
import sys

from lt_data import DataError, SourceOptions
from lt_data.sources import hub
from lt_data.sources.reader import DocumentReader


def answer(case: dict) -> dict:
    try:
        reader = DocumentReader([case["source"]], SourceOptions(**case.get("options", {})))
        reader = pickle.loads(pickle.dumps(reader))
        found = list(reader)
    except DataError as exc:
        return {"error": str(exc)}
    return {
        "texts": [d.text if d.ids is None else d.ids.tolist() for d in found],
        "sources": [d.source for d in found],
        "files": [[file.path, file.bytes, file.sha256] for file in reader.finished_files],
        "fields": [d.fields for d in found],
        "skipped": reader.skipped,
        "parts": [[d.text for d in reader.slice(*group)] for group in reader.group(max(1, -(-reader.n_files // 2)))],
    }


for case in json.load(sys.stdin):
    hub.ROWS_PER_PIECE = case.get("piece_rows", 2**16)
    sys.stdout.write(json.dumps(answer(case)) + "\n")
