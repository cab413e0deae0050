"""REPORT.md: the technical report of a run, from the numbers of its own files."""

from collections.abc import Sequence

from lt_trainer.config.fields import flatten
from lt_trainer.release.cards import describe_steps, score_table
from lt_trainer.release.facts import Facts
from lt_trainer.release.markdown import code, plain, table

SHOWN_EVENTS = ("start", "resume", "stop", "rollback", "step_skipped", "completed")
MAX_SCORES = 200
"""Rows of the table of scores; a store may have many source files."""


def report_page(facts: Facts) -> str:
    """Return REPORT.md."""
    return "".join(
        (
            f"# {plain(facts.info.release.name)}: technical report\n",
            "\nEvery number is from the files of this release; `lt release verify` computes them again.\n",
            _model(facts),
            _training(facts),
            _figures(facts),
            _evaluation(facts),
            _data(facts),
            _energy(facts),
            _environment(facts),
            _limits(facts),
        )
    )


def _model(facts: Facts) -> str:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
    rows: list[tuple[str, object]] = [(code(name), plain(facts.model[name])) for name in names]
    return f"\n## Model\n\nLlama with {facts.n_parameters:,} parameters.\n\n" + table(("field", "value"), rows)


def _training(facts: Facts) -> str:
    given = [
        (code(name), code(repr(value)), plain(facts.origins.get(name, "")))
        for name, value in flatten(facts.recipe).items()
        if facts.origins.get(name, "default") != "default"
    ]
    text = "\n## Training\n\nSettings that are not defaults; all are in `recipe/recipe.toml`.\n\n"
    text += table(("field", "value", "origin"), given)
    if facts.train:
        first, last = facts.train[0], facts.train[-1]
        rows: list[tuple[str, object]] = [
            ("steps", describe_steps(facts)),
            ("logged steps", plain(f"{first['step']} to {last['step']}")),
            ("first loss", f"{first['loss']:.6g} nats per token"),
            ("last loss", f"{last['loss']:.6g} nats per token"),
        ]
        if facts.trained_tokens is not None:
            rows.append(("tokens", f"{facts.trained_tokens:,}"))
        rows += [
            (plain(f"validation {r.name or 'loss'}, step {r.step}"), f"{r.loss:.6g} nats per token")
            for r in facts.validation
        ]
        text += "\n" + table(("result", "value"), rows)
    events = [
        (event["event"], plain(event.get("step", "")), plain(event.get("time", "")))
        for event in facts.events
        if event.get("event") in SHOWN_EVENTS
    ]
    return text + "\n" + table(("event", "step", "time"), events)


def _figures(facts: Facts) -> str:
    if not facts.figures:
        return ""
    shown = "".join(f"![{name.removesuffix('.svg')}](figures/{name})\n" for name in facts.figures)
    return f"\n## Figures\n\nDrawn by `plots.py` from `run/metrics.jsonl`.\n\n{shown}"


def _evaluation(facts: Facts) -> str:
    if not facts.scores:
        return ""
    shown = facts.scores[:MAX_SCORES]
    more = len(facts.scores) - len(shown)
    text = "\n## Evaluation\n\nTasks, and losses of stores: of the whole, by source file and by document length.\n\n"
    return text + score_table(shown) + (f"\nand {more} more in `results/`\n" if more else "")


def _data(facts: Facts) -> str:
    rows = [
        (
            plain(store.name),
            f"{store.manifest['documents']:,}",
            f"{store.manifest['tokens']:,}",
            f"{store.pack['rows']:,}",
            "" if store.weight is None else f"{store.weight:g}",
        )
        for store in facts.stores
    ]
    stores = table(("store", "documents", "tokens", "rows", "weight"), rows) if rows else "No token stores.\n"
    return "\n## Data\n\n" + stores + "\nSources, licenses and filters: DATA_CARD.md.\n"


def _energy(facts: Facts) -> str:
    if facts.energy_kwh is None:
        return "\n## Energy\n\nThe energy of this run was not measured.\n"
    return f"\n## Energy\n\n{facts.energy_kwh:.6g} kWh, of the GPUs alone, since the first start of the run.\n"


def _environment(facts: Facts) -> str:
    environment, start = facts.environment, facts.start_event
    rows: list[tuple[str, object]] = [
        (name, plain(environment[name]))
        for name in ("python", "implementation", "platform", "machine", "cpu", "cpu_capability", "cpus", "memory_gib")
        if name in environment
    ]
    rows += [(plain(name), plain(text)) for name, text in environment.get("packages", {}).items()]
    rows += [(plain(name), plain(text)) for name, text in environment.get("variables", {}).items()]
    rows += [(name, plain(start[name])) for name in ("world", "device", "peak_source") if name in start]
    commit = facts.provenance.commit or "unknown: lt was not installed from a git checkout"
    rows.append(
        ("commit of lt", plain(commit) + (", with `environment/lt.patch`" if facts.provenance.has_patch else ""))
    )
    return "\n## Environment\n\n" + table(("", ""), rows)


def _limits(facts: Facts) -> str:
    lines: list[str] = []
    if facts.provenance.removed_steps:
        steps = ", ".join(map(str, facts.provenance.removed_steps))
        lines.append(f"checkpoints of steps {steps} were removed before the release")
    lines += _missing(facts)
    lines += [f"{name}: no hash of its archives is known" for name in facts.provenance.without_hash]
    lines += [f"lt source file without a commit: {name}" for name in facts.provenance.untracked]
    return "\n## What is missing\n\n" + ("".join(f"- {plain(line)}\n" for line in lines) if lines else "Nothing.\n")


def _missing(facts: Facts) -> Sequence[str]:
    number = facts.openness.class_number
    return facts.openness.missing[number - 1 if number else 3] if number != 1 else ()
