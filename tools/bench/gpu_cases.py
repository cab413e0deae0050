"""Cases of gpu.py by stage, and the marks they are compared with.

Every case is a row: a model, and sizes that are tried from large to small until one fits. A model whose state does not
fit has layers taken off, until `lt train plan` says that it does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lt_model import preset
from lt_trainer.config.recipe import load
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory

MARK_PEAK_FLOPS = 989e12
"""Dense bfloat16 FLOP/s of an H100 SXM or H200, over which the marks are stated."""
FITTED_SHARES = (0.92, 0.84, 0.72)
"""Shares of the device's memory that the planned peak may take, tried in this order."""
MIN_LAYERS = 3
"""Fewest layers of a model that is cut to fit: fp8 keeps the first and the last in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Row of the table.

    Attributes:
        name: name of the row.
        preset: model preset.
        sizes: (micro_batch_size, seq_len) to try, from large to small.
        limit_s: most seconds of one try; the case may take as long for each further one.
        sets: recipe overrides such as "engine.gpu.deterministic=true".
        shares: shares of the memory for which layers are taken off until the plan fits; () keeps all layers.
        document_tokens: tokens of a document; 0 for rows of one document.
        plain: the plain FSDP2 model instead of the engine, eager or compiled.
        curve_seed: seed of a loss curve; None measures speed.
    """

    name: str
    preset: str
    sizes: tuple[tuple[int, int], ...]
    limit_s: float
    sets: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    document_tokens: int = 0
    plain: Literal["", "eager", "compiled"] = ""
    curve_seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Try:
    """Size at which a case is tried; `n_layers` 0 for those of the preset."""

    micro_batch_size: int
    seq_len: int
    n_layers: int


def _fp8(name: str) -> tuple[str, ...]:
    return (f"engine.gpu.fp8={name}",)


_1B = Case(name="1b", preset="llama3.2-1b", sizes=((8, 4096), (4, 4096), (2, 4096), (1, 4096)), limit_s=150)
_3B = replace(_1B, name="3b", preset="llama3.2-3b", sizes=((4, 4096), (2, 4096), (1, 4096)), limit_s=160)
_8B = Case(name="8b", preset="llama3-8b", sizes=((2, 4096),), limit_s=160, shares=FITTED_SHARES)
# one size for all rows of a comparison, which fits the hungriest of them
_1B_SMALL = replace(_1B, sizes=((4, 4096), (2, 4096)))
_8B_SMALL = replace(_8B, shares=FITTED_SHARES[1:])
_8B_PLAIN = replace(_8B, shares=(0.6, 0.45))
_DOCUMENTS = replace(_1B_SMALL, document_tokens=512)
_CURVE = Case(name="", preset="llama3-8b", sizes=((2, 1024),), limit_s=200, shares=(0.6,))

STAGES: dict[str, tuple[Case, ...]] = {
    "1b": (_1B,),
    "3b": (_3B,),
    "8b": (_8B,),
    "fp8": (
        replace(_8B_SMALL, name="8b-bf16"),
        replace(_8B_SMALL, name="8b-tensorwise", sets=_fp8("tensorwise")),
        replace(_8B_SMALL, name="8b-rowwise", sets=_fp8("rowwise")),
    ),
    "fp8-loss": (
        *(replace(_CURVE, name=f"bf16-{seed}", curve_seed=seed) for seed in range(3)),
        replace(_CURVE, name="tensorwise-0", curve_seed=0, sets=_fp8("tensorwise")),
        replace(_CURVE, name="rowwise-0", curve_seed=0, sets=_fp8("rowwise")),
    ),
    "plain": (
        replace(_1B_SMALL, name="1b-engine"),
        replace(_1B_SMALL, name="1b-plain", plain="compiled"),
        replace(_1B_SMALL, name="1b-plain-eager", plain="eager"),
        replace(_8B_PLAIN, name="8b-engine"),
        replace(_8B_PLAIN, name="8b-plain", plain="compiled"),
    ),
    "compile": (
        replace(_1B_SMALL, name="1b-eager", sets=("engine.gpu.compile=false",)),
        replace(_1B_SMALL, name="1b-compiled", sets=("engine.gpu.compile=true",)),
    ),
    "documents": (
        replace(_1B_SMALL, name="unmasked", sets=("data.document_mask=false",)),
        replace(_1B_SMALL, name="rows"),
        replace(_DOCUMENTS, name="documents"),
        replace(_DOCUMENTS, name="documents-flex", sets=("engine.gpu.attention=flex",)),
    ),
}
"""Stages after `device` and `tests`, in the order in which they run."""
_TINY = Case(name="tiny", preset="tiny-2m", sizes=((2, 64),), limit_s=60)
QUICK_STAGES: dict[str, tuple[Case, ...]] = {
    "tiny": (_TINY,),
    "fp8": (replace(_TINY, name="tensorwise", sets=_fp8("tensorwise"), shares=(0.4,)),),
    "fp8-loss": (replace(_TINY, name="bf16-0", curve_seed=0, limit_s=120),),
    "plain": (replace(_TINY, name="plain", plain="eager"),),
    "documents": (replace(_TINY, name="documents", document_tokens=16),),
}

RATIOS = (
    ("fp8 tensorwise / bf16", "8b-tensorwise", "8b-bf16", 1.2),
    ("fp8 rowwise / bf16", "8b-rowwise", "8b-bf16", None),
    ("1b engine / plain FSDP2, compiled", "1b-engine", "1b-plain", 1.0),
    ("8b engine / plain FSDP2, compiled", "8b-engine", "8b-plain", 1.0),
    ("1b engine / plain FSDP2, eager", "1b-engine", "1b-plain-eager", None),
    ("compiled / eager", "1b-compiled", "1b-eager", None),
    ("unmasked / rows of one document", "unmasked", "rows", None),
    ("documents / rows of one document", "documents", "rows", None),
    ("documents by flex / rows of one document", "documents-flex", "rows", None),
)
"""(name, case, case that it is divided by, mark) of tokens per second."""
MFU_MARKS = (("3b", 0.51, None), ("8b", 0.50, 0.60))
"""(case, mark, aim) of MFU in the full convention over `MARK_PEAK_FLOPS`."""
TOKENS_MARKS = (("1b", 45_000.0),)
"""(case, mark) of tokens per second on an H100."""
LOSS_CASES = ("tensorwise-0", "rowwise-0")
LOSS_REFERENCES = ("bf16-0", "bf16-1", "bf16-2")


def fitting_layers(case: Case, size: tuple[int, int], share: float, memory_bytes: int) -> int:
    """Return the largest number of layers whose planned peak is at most that share of the memory.

    The overrides of the case do not count, so that all rows of a comparison have the same number.
    """
    config = preset(case.preset)
    base = {
        "model": {"preset": case.preset},
        "data": {"store": "random ids", "seq_len": size[1]},
        "batch": {"global_batch_size": size[0], "micro_batch_size": size[0]},
        "engine": {"gpu": {"device": "cuda"}},
    }
    recipe = load(base=base, base_name="benchmark").recipe
    layout = layout_from_recipe(recipe, devices=1, nodes=1)
    for n_layers in range(config.n_layers, MIN_LAYERS, -1):
        if plan_memory(replace(config, n_layers=n_layers), size[1], layout).peak <= share * memory_bytes:
            return n_layers
    return MIN_LAYERS


def list_tries(case: Case, memory_bytes: int | None) -> list[Try]:
    """Return the sizes at which to try a case, in order; on a CPU (None) a cut model has the fewest layers."""
    found: list[Try] = []
    for share in case.shares or (None,):
        for size in case.sizes:
            n_layers = 0
            if share is not None:
                n_layers = fitting_layers(case, size, share, memory_bytes) if memory_bytes else MIN_LAYERS
            found.append(Try(micro_batch_size=size[0], seq_len=size[1], n_layers=n_layers))
    return found


def compare_with_marks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return values with their marks, and ratios of rows, of those cases that ran."""
    by_case = {row["case"]: row for row in rows if row["status"] == "ok"}
    found: list[dict[str, Any]] = []

    def add(name: str, value: float, mark: float | None, **more: Any) -> None:
        met = None if mark is None else value >= mark
        found.append({"name": name, "value": value, "mark": mark, "met": met, **more})

    for case, mark in TOKENS_MARKS:
        if case in by_case:
            add(f"{case} tokens/s", by_case[case]["tokens_per_s"], mark)
    for case, mark, aim in MFU_MARKS:
        if case in by_case:
            row = by_case[case]
            add(f"{case} MFU", row["flops_per_s"]["full"] / MARK_PEAK_FLOPS, mark, aim=aim, n_layers=row["n_layers"])
    for name, case, other, mark in RATIOS:
        if case in by_case and other in by_case and _same_size(by_case[case], by_case[other]):
            row, beside = by_case[case], by_case[other]
            add(name, row["tokens_per_s"] / beside["tokens_per_s"], mark, n_layers=row["n_layers"])
    if all(name in by_case for name in LOSS_REFERENCES):
        tails = [by_case[name]["tail"] for name in LOSS_REFERENCES]
        for case in LOSS_CASES:
            if case in by_case:
                tail = by_case[case]["tail"]
                entry = {"name": f"{case} loss after training", "value": tail, "mark": max(tails)}
                found.append(entry | {"met": tail <= max(tails), "bf16_seeds": tails})
    return found


def _same_size(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two rows trained the same model on the same rows: only then their speeds are compared."""
    return all(row[name] == other[name] for name in ("micro_batch_size", "seq_len", "n_layers"))
