"""Litespark's default: a dataset of the hub, Litespark's tokenizer, rows of 4097 tokens in .ds files, on S3.

    python litespark.py --out data --upload s3://my-bucket/train

Does what prepare_data.py and upload_to_s3.py of the Litespark recipe are for. A run that is cut off goes on where it
was when the same command is run again. Every token is written once, and counted in metadata.json as in the files.
"""

import argparse
from pathlib import Path

import lt_data
from lt_data.display.progress_bars import progress_bar
from lt_data.exports.export import export
from lt_data.exports.options import ExportOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="hf://HuggingFaceFW/fineweb?config=sample-10BT&split=train&streaming=true")
    parser.add_argument("--tokenizer", default="mindbeam-ai/Litespark", help="of the hub, a folder, or an S3 prefix")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--upload", help="s3://bucket/prefix for the .ds files")
    options = parser.parse_args()

    store, rows = options.out / "store", options.out / "litespark"
    if not store.exists():
        with progress_bar("prepare") as progress:
            lt_data.prepare(
                [options.source], tokenizer=options.tokenizer, out=store, workers=options.workers, progress=progress
            )
    if not rows.exists():
        done = export(store, out=rows, options=ExportOptions(to="litespark", seq_len=options.seq_len))
        print(f"{done.samples} rows of {options.seq_len + 1} tokens, {done.padding} of padding, in {rows}")
    if options.upload:
        from lt_data.remote.upload import upload

        sent = upload(rows, options.upload)
        print(f"{len(sent.sent)} files sent to {sent.url}, {len(sent.kept)} were there")


if __name__ == "__main__":
    main()
