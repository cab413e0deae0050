"""Papers as PDF, packed to rows of 4096 tokens and saved as neuronx-distributed's loader reads them.

    python papers.py papers --tokenizer meta-llama/Llama-2-7b-hf --out data

The text of every paper is one document. A paper that fits a row is never cut (best fit over all papers); a longer one
goes on in the next rows. Papers that cannot be read (damaged, locked) are left out and counted. The number of steps in
an epoch is told with what is left over.
"""

import argparse
from pathlib import Path

import lt_data
from lt_data.exports.export import export
from lt_data.exports.options import ExportOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="+", help="folders of PDF files, or s3:// prefixes of such")
    parser.add_argument("--tokenizer", default="meta-llama/Llama-2-7b-hf", help="of the hub, a folder, or an S3 prefix")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--global-batch-size", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()

    manifest = lt_data.prepare(
        options.papers,
        options=lt_data.SourceOptions(suffixes=[".pdf"], on_bad="skip"),
        tokenizer=options.tokenizer,
        out=options.out / "store",
        workers=options.workers,
    )
    print(f"{manifest.documents} papers, {manifest.tokens} tokens; not readable: {dict(manifest.skipped) or 'none'}")
    store = lt_data.TokenStore(options.out / "store")
    pack = lt_data.pack(store, seq_len=options.seq_len, mode="bfd")
    steps, rest = divmod(pack.n_rows, options.global_batch_size)
    print(f"{pack.n_rows} rows: {steps} steps an epoch, {rest} rows left over")
    rows = ExportOptions(to="hf", seq_len=options.seq_len, packing="bfd")
    done = export(store, out=options.out / "hf", options=rows)
    print(f"{done.samples} rows in {options.out / 'hf'}, {done.padding} positions of padding")


if __name__ == "__main__":
    main()
