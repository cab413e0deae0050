"""Command `convert`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lt_ckpt.cli.terminal import (
    ConfigOption,
    DtypeOption,
    MasterOption,
    ModelArgument,
    OverflowOption,
    ShardOption,
    open_model,
    progress_bar,
)
from lt_ckpt.terminal_text import echo

if TYPE_CHECKING:
    from lt_ckpt.nxd.options import LayoutVersion


def convert(
    path: ModelArgument,
    out: Annotated[Path, typer.Argument(help="The output: a folder; for --to pt a file.")],
    to: Annotated[str, typer.Option("--to", help="hf, nxd, lt, dcp or pt.")],
    config: ConfigOption = None,
    dtype: DtypeOption = "",
    allow_overflow: OverflowOption = False,
    max_shard_gb: ShardOption = 5.0,
    tp: Annotated[int, typer.Option("--tp", help="NxD: tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="NxD: pipeline stages.")] = 1,
    virtual_pp: Annotated[int, typer.Option("--virtual-pp", help="NxD: chunks of layers per stage.")] = 1,
    kv_size_multiplier: Annotated[
        int,
        typer.Option("--kv-size-multiplier", help="NxD: times each key/value head is repeated (with --qkv-linear)."),
    ] = 1,
    qkv_linear: Annotated[bool, typer.Option("--qkv-linear", help="NxD: the GQA layer, weight_q/_k/_v.")] = False,
    fuse_qkv: Annotated[bool, typer.Option("--fuse-qkv", help="NxD: weight_qkv of the GQA layer.")] = False,
    coalesce_qkv: Annotated[bool, typer.Option("--coalesce-qkv", help="NxD: one qkv_proj.weight (MHA).")] = False,
    xser: Annotated[bool, typer.Option("--xser", help="NxD: every tensor in a file of its own.")] = False,
    layout: Annotated[str, typer.Option("--layout", help="NxD: v1 or v2.")] = "v2",
    tag: Annotated[str, typer.Option("--tag", help="NxD v2: the tag folder, with its markers.")] = "",
    master_weights: MasterOption = False,
    optimizer: Annotated[
        bool,
        typer.Option("--optimizer", help="Between lt and NxD: also moments, master weights and step (ZeRO-1 state)."),
    ] = False,
    dp: Annotated[int, typer.Option("--dp", help="NxD with --optimizer: data parallel ranks.")] = 0,
    allow_replica_mismatch: Annotated[
        bool,
        typer.Option(
            "--allow-replica-mismatch", help="Use the first rank's replica where replicas of a tensor differ."
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare the source's files with their checksums first.")
    ] = True,
) -> None:
    """Convert a model between formats, in one pass and with little memory."""
    from lt_ckpt.checksums import describe_checksums
    from lt_ckpt.dtypes import parse_float_dtype
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.formats import FORMATS, ConvertOptions, convert_checkpoint
    from lt_ckpt.hf.tokenizer_classes import describe_other_ids
    from lt_ckpt.nxd.options import NxdOptions

    if to not in FORMATS:
        raise CheckpointError(f"--to {to}: not one of {', '.join(FORMATS)}")
    if coalesce_qkv and (qkv_linear or fuse_qkv):
        raise CheckpointError("--coalesce-qkv and --qkv-linear exclude each other: MHA has one, GQA the other")
    if fuse_qkv and not qkv_linear:
        raise CheckpointError("--fuse-qkv has no effect without --qkv-linear; give both")
    gqa = "gqa_fused" if fuse_qkv else "gqa"
    nxd_options = NxdOptions(
        tp=tp,
        pp=pp,
        virtual_pp=virtual_pp,
        kv_size_multiplier=kv_size_multiplier,
        qkv=gqa if qkv_linear else "coalesced" if coalesce_qkv else "separate",
        layout=cast("LayoutVersion", layout),
        xser=xser,
        tag=tag,
    )
    if to != "nxd" and nxd_options != NxdOptions():
        raise CheckpointError(f"options of NxD have no effect with --to {to}; leave them out, or use --to nxd")
    if optimizer and to not in ("lt", "nxd"):
        raise CheckpointError(f"--optimizer: no effect with --to {to}, which holds weights only; use --to lt or nxd")
    if (optimizer and to == "nxd") != (dp > 0):
        raise CheckpointError(
            "--dp: number of data parallel ranks of the state written by --to nxd --optimizer; give both"
        )
    source = open_model(path, config, master_weights=master_weights, optimizer=optimizer)
    if optimizer and source.groups.keys() == {"weights"}:
        raise CheckpointError(f"{path}: has no optimizer state; leave out --optimizer")
    options = ConvertOptions(
        allow_replica_mismatch=allow_replica_mismatch,
        allow_overflow=allow_overflow,
        format=to,
        dtype=parse_float_dtype(dtype) if dtype else None,
        max_shard_bytes=round(max_shard_gb * 1e9),
        nxd=nxd_options,
        dp=dp,
        verify=verify,
    )
    with progress_bar(f"converting to {to}") as progress:
        output = convert_checkpoint(source, out, options, progress=progress)
    checked = describe_checksums(source) if verify else "its files were not compared with any checksum (--no-verify)"
    step = f" step {source.format_info['step']}" if "step" in source.format_info else ""
    echo(f"{source.format} {path}{step} converted to {to}: {output}; {checked}")
    if to == "hf":
        note = describe_other_ids(source.aux_files, source.config["model_type"])
        if note:
            echo(f"note: {note}")
