"""`lt train tune`: probes of a recipe's settings, the fastest of them, and the lines that set it.

Begins with the recipe's own setting. Every result is appended to a JSON-lines file with the key of what was measured (a
hash of the recipe without the tuned fields, and of the probes' options), so an interruption loses the probe in flight
and nothing else.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lt_trainer.config.recipe import ResolvedRecipe, values_of
from lt_trainer.constants import GIB
from lt_trainer.errors import RecipeError, TrainerError
from lt_trainer.files import write_atomic
from lt_trainer.run_directory.jsonl import JsonlWriter, read_jsonl
from lt_trainer.toml import dump
from lt_trainer.tuning.probe import ProbeResult
from lt_trainer.tuning.search import TunedSetting, candidates, find_fastest


class TuneError(TrainerError):
    """No setting of the recipe works on this machine."""


def tune_recipe(
    resolved: ResolvedRecipe,
    probe: Callable[[Sequence[str]], ProbeResult],
    *,
    ranks: int,
    options: Sequence[str],
    journal: Path,
    out: Path | None = None,
    log: Callable[[str], None] = print,
) -> TunedSetting:
    """Measure settings of a recipe and return the fastest.

    Args:
        resolved: recipe; its data is not read.
        probe: measures a setting, given as values of `--set`.
        ranks: ranks of a probe.
        options: options of the probes.
        journal: file of results; those of the same recipe, ranks and options are not measured again.
        out: TOML file to write with the fastest setting, also after an interruption.
        log: called with each line for the user.

    Raises:
        RecipeError: the recipe cannot be tuned.
        TuneError: no setting works.
        KeyboardInterrupt: interrupted; what was measured is in the journal and was logged.
    """
    recipe = resolved.recipe
    try:
        grid = candidates(recipe, world_size=ranks)
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc
    fixed = {name: value for name, value in values_of(recipe).items() if name not in {*grid.start.values, "run.dir"}}
    key = hashlib.sha256(json.dumps([fixed, ranks, *options]).encode()).hexdigest()[:16]
    with JsonlWriter(journal) as writer:
        records = [record for record in read_jsonl(journal) if record.pop("key", "") == key]
        results = {TunedSetting(*record.pop("setting")): ProbeResult(**record) for record in records}
        if results:
            log(f"{len(results)} probe(s) of {journal} are not measured again")

        def measure(setting: TunedSetting) -> float | None:
            if setting not in results:
                results[setting] = probe(setting.to_set_options())
                writer.write({"key": key, "setting": list(setting)} | asdict(results[setting]))
                log(describe(setting, results[setting]))
            return results[setting].step_s

        try:
            fastest = find_fastest(grid, measure)
        except KeyboardInterrupt:
            log(f"interrupted; the same command goes on from {journal}")
            worked = [setting for setting, result in results.items() if result.step_s is not None]
            if worked:
                _report(min(worked, key=lambda setting: results[setting].step_s or 0.0), results, out, log)
            raise
    if fastest is None:
        raise TuneError(f"no setting works here; the first one: {results[grid.start].message}")
    _report(fastest, results, out, log)
    return fastest


def describe(setting: TunedSetting, result: ProbeResult) -> str:
    """Return the line of a probe."""
    compiled = {"True": "compiled", "False": "eager"}.get(str(setting.compile), f"compile {setting.compile}")
    words = f"micro-batch {setting.micro_batch_size}, recompute {setting.activation_checkpointing}, {compiled}"
    if result.step_s is None:
        return f"{words:<44} {result.message}"
    memory = "" if result.peak_bytes is None else f", peak {result.peak_bytes / GIB:.2f} GiB"
    return f"{words:<44} {result.step_s:.4g} s a step, {result.tokens_per_s:,.0f} tokens/s{memory}"


def _report(
    fastest: TunedSetting, results: Mapping[TunedSetting, ProbeResult], out: Path | None, log: Callable[[str], None]
) -> None:
    """Log the fastest setting and write it to `out`."""
    log(f"fastest of {len(results)} probe(s): {describe(fastest, results[fastest])}")
    for text in fastest.to_set_options():
        log(f"--set {text}")
    if out is not None:
        write_atomic(out, dump(fastest.values))
        log(f"wrote {out}")
