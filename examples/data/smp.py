"""Ids as SageMaker's model parallel library reads them, json.gz with input_ids and attention_mask; and such files read.

    python smp.py text --tokenizer meta-llama/Llama-2-7b-hf --out data       text to json.gz
    python smp.py data/smp --tokenizer ... --out again --tokens              json.gz to a token store

Rows are as long as the model's context, so that the pipeline of the recipe crops nothing at random. What is read back
are the same ids; padding that the attention mask hides is left out and counted.
"""

import argparse
from pathlib import Path

import lt_data
from lt_data.exports.export import export
from lt_data.exports.options import ExportOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="files, folders, URLs or datasets of the hub")
    parser.add_argument("--tokens", action="store_true", help="the sources hold ids")
    parser.add_argument("--tokenizer", default="meta-llama/Llama-2-7b-hf", help="of the hub, a folder, or an S3 prefix")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()

    manifest = lt_data.prepare(
        options.sources,
        options=lt_data.SourceOptions(tokens_field="input_ids" if options.tokens else None),
        tokenizer=options.tokenizer,
        out=options.out / "store",
        bos=not options.tokens,
        eos=not options.tokens,
        workers=options.workers,
    )
    print(f"{manifest.documents} documents, {manifest.tokens} tokens, left out: {dict(manifest.skipped) or 'nothing'}")
    if not options.tokens:
        done = export(
            options.out / "store",
            out=options.out / "smp",
            options=ExportOptions(to="smp", seq_len=options.seq_len),
        )
        print(f"{done.samples} rows in {done.files} files in {options.out / 'smp'}, {done.padding} of padding")


if __name__ == "__main__":
    main()
