"""Small generated tasks, which need no files: what a model must learn before it can do more.

Items come from a seed, so every machine has the same. `lt_recall` is a cloze: the value of a name that the context has
given. The others are multiple choice of four: `lt_copy` repeats a list of words, `lt_count` goes on counting, and
`lt_pattern` goes on with a pattern of words that has been shown several times.

Cost: none to speak of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

N_ITEMS, N_CHOICES = 200, 4
WORDS = tuple(
    "river stone cloud lamp bread horse garden window paper salt forest bridge silver candle mountain letter apple "  # noqa: SIM905
    "winter road bird ship glass morning fire music table shadow field door star".split()
)
NAMES = ("Anna", "Omar", "Lena", "Pavel", "Mina", "Jonas", "Aisha", "Diego", "Ruth", "Kenji")


def _choices(rng: random.Random, right: str, others: list[str]) -> dict[str, Any]:
    """Return the choices in a random order, with the place of the right one."""
    choices = [right, *others]
    assert len(set(choices)) == N_CHOICES, choices
    rng.shuffle(choices)
    return {"choices": choices, "label": choices.index(right)}


def _copy() -> list[dict[str, Any]]:
    rng, items = random.Random("lt_copy"), []
    for _ in range(N_ITEMS):
        *words, a, b, c = rng.sample(WORDS, 8)
        right, *others = (f" {word}" for word in (words[-1], a, b, c))
        items.append({"context": f"{' '.join(words)}; {' '.join(words[:-1])}", **_choices(rng, right, others)})
    return items


def _count() -> list[dict[str, Any]]:
    rng, items = random.Random("lt_count"), []
    for _ in range(N_ITEMS):
        first, step = rng.randrange(1, 60), rng.choice((1, 2, 5, 10))
        numbers = [first + step * i for i in range(6)]
        wrong = rng.sample([n for n in range(1, 130) if n != numbers[-1] and n not in numbers[:5]], N_CHOICES - 1)
        right, *others = (f" {number}" for number in (numbers[-1], *wrong))
        items.append({"context": ", ".join(map(str, numbers[:5])) + ",", **_choices(rng, right, others)})
    return items


def _pattern() -> list[dict[str, Any]]:
    rng, items = random.Random("lt_pattern"), []
    for _ in range(N_ITEMS):
        a, b, c, d, e = rng.sample(WORDS, 5)
        right, *others = (f" {word}" for word in (c, d, e, b))
        items.append({"context": f"{f'{a} {b} {c} ' * 3}{a} {b}", **_choices(rng, right, others)})
    return items


def _recall() -> list[dict[str, Any]]:
    rng, items = random.Random("lt_recall"), []
    for _ in range(N_ITEMS):
        names, words = rng.sample(NAMES, 3), rng.sample(WORDS, 3)
        facts = " ".join(f"{name} has the {word}." for name, word in zip(names, words, strict=True))
        asked = rng.randrange(3)
        items.append({"context": f"{facts} {names[asked]} has the", "target": f" {words[asked]}"})
    return items


GENERATED_TASKS: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "lt_copy": _copy,
    "lt_count": _count,
    "lt_pattern": _pattern,
    "lt_recall": _recall,
}
"""Items of each generated task by name, as records of a task file."""
