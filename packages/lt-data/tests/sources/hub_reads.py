"""Reads datasets of the hub in a process of its own, whose environment names the hub, and prints what came out.

Standard input: a JSON list of cases, each {"sources", "options", "position", "num_parts", "run_rows"}, or {"save",
"texts"} for folders to be made with save_to_disk. Standard output: one JSON line per case.
"""

import json
import sys

from lt_data import DataError, DocumentReader, SourceOptions
from lt_data.sources import hub


def answer(case: dict) -> dict:
    try:
        reader = DocumentReader(case["sources"], SourceOptions(**case.get("options", {})))
        found = list(reader.documents_from(*case.get("position", (0, 0))))
        answer = {
            "documents": [
                [d.text if d.ids is None else d.ids.tolist(), d.source, d.file_index, d.next_record] for d in found
            ],
            "files": [[file.path, file.bytes, file.sha256] for file in reader.finished_files],
            "total_bytes": reader.total_bytes,
            "n_files": reader.n_files,
            "fields": [d.fields for d in found],
            "skipped": reader.skipped,
            "fingerprint": reader.fingerprint,
        }
        if num_parts := case.get("num_parts"):
            parts = [reader.part(rank, num_parts) for rank in range(num_parts)]
            answer["parts"] = [[d.text for d in part] for part in parts]
    except DataError as exc:
        return {"error": str(exc)}
    return answer


def save(folder: str, texts: list[str]) -> dict:
    import datasets

    dataset = datasets.Dataset.from_dict({"text": texts, "n": list(range(len(texts)))})
    dataset.save_to_disk(f"{folder}/plain", num_shards=3)
    shuffled = dataset.shuffle(seed=1).select(range(10))
    shuffled.save_to_disk(f"{folder}/shuffled")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([3])}).save_to_disk(f"{folder}/several")
    return {"folder": folder, "shuffled": shuffled["text"][:]}


for case in json.load(sys.stdin):
    hub.ROWS_PER_RUN = case.get("run_rows", 2**16)
    made = save(case["save"], case["texts"]) if "save" in case else answer(case)
    sys.stdout.write(json.dumps(made) + "\n")
