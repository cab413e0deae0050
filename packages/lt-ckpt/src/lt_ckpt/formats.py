"""The formats by name: which one lies at a path, and what to write for a wish.

Detection looks at names only: `hf://` is a model of the Hugging Face hub, a folder with COMMIT (or one of checkpoints,
or a run) is ours, `.metadata` makes it one of torch.distributed.checkpoint, config.json with safetensors one of Hugging
Face, rank files one of NxD, `consolidated.*.pth` one of Meta; a file is a torch-saved state dict.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError
from lt_ckpt.hf.folder import CONFIG, INDEX, SINGLE, read_json
from lt_ckpt.source import Source

FORMATS = ("hf", "nxd", "lt", "dcp", "pt")
HUB = "hf://"
RANK_FILE = re.compile(r"(^|_)tp_rank_\d+_pp_rank_\d+")
SEARCHED_LEVELS = 3


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a conversion is to make.

    Attributes:
        format: One of `FORMATS`.
        dtype: Safetensors code to cast the weights to; None: as stored.
        max_shard_bytes: Most bytes of tensors per file (hf, dcp).
        nxd: The degrees and choices of an NxD target (`lt_ckpt.nxd.options.NxdOptions`).
        dp: NxD: also write the optimizer's ZeRO-1 state, for so many data-parallel ranks; 0: weights alone.
        unequal_copies: Take the first rank's where a source's copies of a tensor differ, in place of refusing.
    """

    format: str
    dtype: str | None = None
    max_shard_bytes: int = 5 * 10**9
    nxd: Any = None
    dp: int = 0
    unequal_copies: bool = False


def detect(path: Path) -> str:
    """Returns the format of what lies at a path: one of `FORMATS`, or `meta`.

    Raises:
        CheckpointError: Nothing is there, or nothing that is known.
    """
    from lt_ckpt.discover import checkpoint_root, list_steps
    from lt_ckpt.folders import COMMIT

    if path.is_file():
        return "pt"
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    if (path / COMMIT).is_file() or list_steps(checkpoint_root(path)):
        return "lt"
    if (path / ".metadata").is_file():
        return "dcp"
    if any(path.glob("consolidated.*.pth")):
        return "meta"
    if (path / INDEX).is_file() or (path / SINGLE).is_file():
        return "hf"
    if _has_rank_files(path, SEARCHED_LEVELS):
        return "nxd"
    raise CheckpointError(
        f"{path}: no checkpoint that lt-ckpt knows: no COMMIT (ours), .metadata (torch.distributed.checkpoint), "
        f"{SINGLE} or {INDEX} (Hugging Face), tp_rank_XX_pp_rank_XX (NxD) or consolidated.*.pth (Meta) in it"
    )


def carries_states(path: str) -> bool:
    """Tells whether an optimizer's state at this path is opened with the weights, without being asked for."""
    return not path.startswith(HUB) and detect(Path(path)) in ("lt", "dcp")


def _has_rank_files(folder: Path, levels: int) -> bool:
    entries = list(os.scandir(folder))
    if any(RANK_FILE.search(entry.name) for entry in entries):
        return True
    inner = (Path(entry.path) for entry in entries if entry.is_dir())
    return levels > 1 and any(_has_rank_files(path, levels - 1) for path in inner)


def open_source(
    path: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    masters: bool = False,
    optimizer: bool = False,
    head_order: str = "trn1",
    progress: files.Progress | None = None,
) -> Source:
    """Opens a model in any format, or on the Hugging Face hub.

    Args:
        path: A file or folder; or `hf://org/name@revision`, which is downloaded first.
        config: A config.json, or a folder with one, for formats that carry none (NxD, a .pt, DCP).
        cache: Where models of the hub are kept; by default the user's cache folder.
        masters: Of an NxD checkpoint, the fp32 master weights of its ZeRO-1 state instead of the model files.
        optimizer: Of an NxD checkpoint, the moments of its ZeRO-1 state too.
        head_order: Of an NxD checkpoint with the GQA layer: trn1 or trn2; it cannot be seen in the files.
        progress: Told the bytes downloaded.

    Raises:
        CheckpointError: Nothing that is known lies there, it is damaged, or a configuration is needed and not given.
        lt_model.ModelError: The configuration is no Llama that lt_model knows.
    """
    given = None if config is None else read_config(Path(config))
    if str(path).startswith(HUB):
        from lt_ckpt.hub.model import fetch_model

        fetched = fetch_model(str(path), cache=cache, progress=progress)
        found = open_source(fetched.path, config=config)
        return replace(found, about={**found.about, **fetched.about})
    place = Path(path)
    kind = detect(place)
    if kind != "nxd" and (masters or optimizer or head_order != "trn1"):
        raise CheckpointError(f"{place}: masters, optimizer and head_order have no effect on {kind}; leave them out")
    if kind == "lt":
        from lt_ckpt.discover import resolve
        from lt_ckpt.lt_format import open_lt

        return open_lt(resolve(place)[0])
    if kind == "hf":
        from lt_ckpt.hf.format import open_hf

        return open_hf(place, config=given)
    if kind == "meta":
        from lt_ckpt.meta.format import open_meta

        return open_meta(place, config=given)
    known = given or _config_beside(place)
    if known is None:
        raise CheckpointError(
            f"{place}: this format does not say what the model is; give its Hugging Face configuration "
            "(--config config.json)"
        )
    if kind == "nxd":
        from lt_ckpt.nxd.format import open_nxd
        from lt_ckpt.nxd.options import HeadOrder

        if head_order not in get_args(HeadOrder):
            raise CheckpointError(f"head order {head_order!r} is not one of {', '.join(get_args(HeadOrder))}")
        return open_nxd(
            place, config=known, masters=masters, optimizer=optimizer, head_order=cast(HeadOrder, head_order)
        )
    if kind == "dcp":
        from lt_ckpt.dcp.format import open_dcp

        return open_dcp(place, config=known)
    from lt_ckpt.torchfile.format import open_pt

    return open_pt(place, config=known)


def config_of(
    path: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Mapping[str, Any]:
    """Returns the Hugging Face configuration of a model, of which nothing else is fetched when it lies on a hub.

    Args:
        path: As for `open_source`.
        config: As for `open_source`.
        cache: As for `open_source`.

    Raises:
        CheckpointError: As for `open_source`.
    """
    if config is None and str(path).startswith(HUB):
        from lt_ckpt.hub.model import fetch_config

        return fetch_config(str(path), cache=cache)[0]
    found = open_source(path, config=config).config if config is None else read_config(Path(config))
    if found is None:
        raise CheckpointError(f"{path}: this checkpoint carries no model configuration; give a config.json")
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config.json, or the one of a folder."""
    return read_json(path / CONFIG if path.is_dir() else path)


def _config_beside(place: Path) -> dict[str, Any] | None:
    """Returns the config.json that lies in the folder, or beside the file."""
    folder = place if place.is_dir() else place.parent
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None


def convert_to(
    source: Source, out: str | os.PathLike[str], wish: Wish, *, progress: files.Progress | None = None
) -> Path:
    """Converts a source.

    Args:
        source: What to convert.
        out: The folder to make; for `pt` the file; for `lt` the folder of checkpoints to save into.
        wish: What to make.
        progress: Told the bytes written.

    Returns:
        What was made.

    Raises:
        CheckpointError: The wish cannot be met, or the disk fails; nothing is left behind.
    """
    from lt_ckpt.comparison import unequal_copies
    from lt_ckpt.convert import convert
    from lt_ckpt.models import check_tied_head
    from lt_model import LlamaConfig

    if source.config is None:
        raise CheckpointError(f"{source.path}: has no configuration; give one (--config config.json)")
    if not wish.unequal_copies:
        trouble = next(iter(unequal_copies(source)), "")
        if trouble:
            raise CheckpointError(
                f"{source.path}: {trouble}; the ranks of its training have drifted apart, or the configuration is not "
                "this model's. --unequal-copies takes the first rank's"
            )
    if wish.format in ("hf", "lt") and LlamaConfig.from_hf(dict(source.config)).tie_word_embeddings:
        check_tied_head(source)
    if wish.format == "lt":
        from lt_ckpt.lt_format import save_lt

        return save_lt(source, out, dtype=wish.dtype, progress=progress)
    if wish.format == "hf":
        from lt_ckpt.hf.format import hf_target

        target = hf_target(source, dtype=wish.dtype, max_shard_bytes=wish.max_shard_bytes)
    elif wish.format == "nxd":
        from lt_ckpt.nxd.format import nxd_target

        target = nxd_target(source, wish.nxd, dtype=wish.dtype)
        if wish.dp:
            from lt_ckpt.nxd.zero_out import with_states

            source, target = with_states(source, target, wish.nxd, wish.dp)
    elif wish.format == "dcp":
        from lt_ckpt.dcp.format import dcp_target

        target = dcp_target(source, dtype=wish.dtype, max_file_bytes=wish.max_shard_bytes)
    elif wish.format == "pt":
        from lt_ckpt.torchfile.format import pt_target

        target = pt_target(source, Path(out).name, dtype=wish.dtype)
    else:
        raise CheckpointError(f"format {wish.format!r} is not one of {', '.join(FORMATS)}")
    return convert(source, target, out, progress=progress)
