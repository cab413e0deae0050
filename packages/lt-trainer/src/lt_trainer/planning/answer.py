"""One answer of `lt train plan`, whichever engine trains: whether it fits, the page, the values.

Plans of the gpu engine are made here (`plan.py`). Another engine makes its own: its spec offers `plan`, which takes
what `plan_of` takes and returns an `Answer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lt_trainer.engine import engine_spec
from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Resolved


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan that is made.

    Attributes:
        fits: whether every device has memory enough.
        page: gives the plan for a person.
        values: gives it as plain values for JSON.
    """

    fits: bool
    page: Callable[[], str]
    values: Callable[[], dict[str, Any]]


def plan_of(resolved: Resolved, *, device: str, devices: int, nodes: int | None, mfu: float | None) -> Answer:
    """Make the plan of a recipe.

    Args:
        resolved: the recipe.
        device: name of the kind of device.
        devices: how many a node has.
        nodes: how many nodes; the recipe's parallel.n_nodes when None.
        mfu: measured MFU, or None to assume one.

    Raises:
        RecipeError: the recipe or the device is wrong, or the engine makes no plans.
    """
    engine = resolved.recipe.run.engine
    if engine == "gpu":
        from lt_trainer.planning.devices import planned_device
        from lt_trainer.planning.plan import make, to_values
        from lt_trainer.planning.text import page

        plan = make(resolved, device=planned_device(device), devices=devices, nodes=nodes, mfu=mfu)
        return Answer(fits=plan.fits, page=lambda: page(plan), values=lambda: to_values(plan))
    of_engine = getattr(engine_spec(engine), "plan", None)
    if of_engine is None:
        raise RecipeError(
            "this engine makes no plans",
            values={"run.engine": engine},
            origins=resolved.origins,
            remedy="plan with --set run.engine=gpu",
        )
    return of_engine(resolved, device=device, devices=devices, nodes=nodes, mfu=mfu)
