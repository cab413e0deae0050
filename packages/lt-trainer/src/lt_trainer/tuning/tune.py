"""`lt train tune`: probes of a recipe's settings, the fastest of them, and the lines that set it.

Begins with the recipe's own setting, or, for a device of `lt train plan`, with the planned setting that recomputes
least and then has the largest micro-batch among those that fit. Every result is appended to a JSON-lines file with the
key of what was measured (a hash of the recipe without the tuned fields, ranks and steps), so an interruption loses the
probe in flight and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lt_trainer.config.recipe import ResolvedRecipe, llama_config, to_toml
from lt_trainer.config.sections import Recipe
from lt_trainer.constants import GIB
from lt_trainer.errors import RecipeError, TrainerError
from lt_trainer.files import write_atomic
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory
from lt_trainer.planning.plan import find_device, vocab_size_and_source
from lt_trainer.run_directory.jsonl import JsonlWriter, read_jsonl
from lt_trainer.tuning.probe import ProbeResult
from lt_trainer.tuning.search import MODES, SettingGrid, TunedSetting, find_fastest

NOT_IN_KEY = ("dir", "micro_batch_size", "activation_checkpointing", "compile", "loss_chunk_tokens")
"""Fields of a recipe that do not change what is measured: the tuned ones and the run directory."""


class TuneError(TrainerError):
    """No setting of the recipe works on this machine."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of a tuning.

    Attributes:
        ranks: ranks of a probe, on this machine.
        steps: timed steps of a probe.
        warmup: steps before them.
        device: device of `lt train plan` whose memory selects the first setting; "" to begin with the recipe's.
        max_probes: limit of probes, with those of the journal; 0 for none.
    """

    ranks: int = 1
    steps: int = 5
    warmup: int = 2
    device: str = ""
    max_probes: int = 0


def tune_recipe(
    resolved: ResolvedRecipe,
    probe: Callable[[TunedSetting], ProbeResult],
    *,
    options: TuneOptions,
    journal: Path,
    out: Path | None = None,
    log: Callable[[str], None] = print,
) -> TunedSetting:
    """Measure settings of a recipe and return the fastest.

    Args:
        resolved: recipe; its data is not read.
        probe: measures one setting.
        options: options of the tuning.
        journal: file of results; those of the same recipe and options are not measured again.
        out: TOML file to write with the fastest setting, also after an interruption.
        log: called with each line for the user.

    Raises:
        RecipeError: the recipe cannot be tuned.
        TuneError: no setting works.
        KeyboardInterrupt: interrupted; what was measured is in the journal and was logged.
    """
    recipe = resolved.recipe
    try:
        grid = SettingGrid.from_recipe(recipe, world_size=options.ranks)
        if options.device:
            grid = replace(grid, start=planned_start(recipe, grid, device=options.device, devices=options.ranks))
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc
    key = journal_key(recipe, options)
    with JsonlWriter(journal) as writer:
        records = [record for record in read_jsonl(journal) if record.pop("key", "") == key]
        found = [ProbeResult(setting=TunedSetting(**record.pop("setting")), **record) for record in records]
        results = {result.setting: result for result in found}
        if results:
            log(f"{len(results)} probe(s) of {journal} are not measured again")

        def measure(setting: TunedSetting) -> float | None:
            if setting not in results:
                if options.max_probes and len(results) >= options.max_probes:
                    return None
                results[setting] = probe(setting)
                writer.write({"key": key} | asdict(results[setting]))
                log(describe(results[setting]))
            return results[setting].step_s

        try:
            find_fastest(grid, measure)
        except KeyboardInterrupt:
            log(f"interrupted; the same command goes on from {journal}")
            _report(results, out, log)
            raise
    fastest = _report(results, out, log)
    if fastest is None:
        raise TuneError(f"no setting works here; the first one, {_words(grid.start)}: {results[grid.start].message}")
    return fastest


def journal_key(recipe: Recipe, options: TuneOptions) -> str:
    """Return the key of a recipe, whatever its tuned fields and its folder are, and of how it is measured."""
    lines = [line for line in to_toml(recipe).splitlines() if line.partition(" = ")[0] not in NOT_IN_KEY]
    text = json.dumps([lines, options.ranks, options.steps, options.warmup])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def probe_arguments(recipe: str, sets: Sequence[str], hyperparameters: Path | None, options: TuneOptions) -> list[str]:
    """Return the arguments of `lt train bench` for probes of a recipe file."""
    arguments = [recipe, "--steps", str(options.steps), "--warmup", str(options.warmup)]
    arguments += [word for text in sets for word in ("--set", text)]
    return arguments + (["--hyperparameters", str(hyperparameters)] if hyperparameters else [])


def planned_start(recipe: Recipe, grid: SettingGrid, *, device: str, devices: int) -> TunedSetting:
    """Return the planned setting with the least recomputation that fits, and its largest micro-batch.

    Raises:
        RecipeError: unknown device, or no setting fits by the plan.
    """
    capacity = find_device(device).memory_bytes
    layout = layout_from_recipe(recipe, devices=devices, nodes=1)
    config = llama_config(recipe, vocab_size_and_source(recipe)[0])
    rows = layout.micro_batch_size * layout.accumulation_steps
    for mode in MODES:
        for size in reversed(grid.micro_batch_sizes):
            split = {"micro_batch_size": size, "accumulation_steps": rows // size}
            candidate = replace(layout, activation_checkpointing=mode, **split)
            if plan_memory(config, recipe.data.seq_len, candidate).needed <= capacity:
                return replace(grid.start, micro_batch_size=size, activation_checkpointing=mode)
    raise RecipeError(
        f"no setting fits on {devices} x {device} by the plan",
        values={"--device": device, "batch.global_batch_size": recipe.batch.global_batch_size},
        remedy="lt train plan suggests a layout that fits; or leave --device out",
    )


def describe(result: ProbeResult) -> str:
    """Return the line of a probe."""
    words = f"{_words(result.setting):<44}"
    if result.step_s is None:
        return f"{words} {result.outcome.replace('_', ' ')}: {result.message}"
    memory = "" if result.peak_bytes is None else f", peak {result.peak_bytes / GIB:.2f} GiB"
    return f"{words} {result.step_s:.4g} s a step, {result.tokens_per_s:,.0f} tokens/s{memory}"


def _words(setting: TunedSetting) -> str:
    compiled = {"True": "compiled", "False": "eager"}.get(str(setting.compile), f"compile {setting.compile}")
    chunk = f", loss by {setting.loss_chunk_tokens} tokens" if setting.loss_chunk_tokens else ""
    return f"micro-batch {setting.micro_batch_size}, recompute {setting.activation_checkpointing}, {compiled}{chunk}"


def _report(
    results: Mapping[TunedSetting, ProbeResult], out: Path | None, log: Callable[[str], None]
) -> TunedSetting | None:
    """Log the fastest setting, write it to `out`, and return it; None without one."""
    worked = [result for result in results.values() if result.step_s is not None]
    if not worked:
        return None
    fastest = min(worked, key=lambda result: result.step_s or 0.0)
    log(f"fastest of {len(results)} probe(s): {describe(fastest)}")
    for text in fastest.setting.to_set_options():
        log(f"--set {text}")
    if out is not None:
        values = {name: json.dumps(value) for name, value in vars(fastest.setting).items()}
        batch = f"[batch]\nmicro_batch_size = {values.pop('micro_batch_size')}\n\n[engine.gpu]\n"
        write_atomic(out, batch + "".join(f"{name} = {value}\n" for name, value in values.items()))
        log(f"wrote {out}")
    return fastest.setting
