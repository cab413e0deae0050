"""One answer of `lt train plan`, whichever engine trains: whether it fits, the page, the values.

Plans of the gpu engine are made here (`plan.py`). Another engine makes its own: its spec offers `plan`, which takes
what `plan_of` takes and returns an `Answer`.
"""

from __future__ import annotations

from typing import Any, Protocol

from lt_trainer.engine import engine_spec
from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Resolved


class Answer(Protocol):
    """See the module's text."""

    @property
    def fits(self) -> bool:
        """Whether every device has memory enough."""
        ...

    def page(self) -> str:
        """The plan for a person."""
        ...

    def values(self) -> dict[str, Any]:
        """The plan as plain values for JSON."""
        ...


class _OfGpus:
    def __init__(self, plan: Any) -> None:
        self._plan, self.fits = plan, plan.fits

    def page(self) -> str:
        from lt_trainer.planning.text import page

        return page(self._plan)

    def values(self) -> dict[str, Any]:
        from lt_trainer.planning.plan import to_values

        return to_values(self._plan)


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
        from lt_trainer.planning.plan import make

        return _OfGpus(make(resolved, device=planned_device(device), devices=devices, nodes=nodes, mfu=mfu))
    of_engine = getattr(engine_spec(engine), "plan", None)
    if of_engine is None:
        raise RecipeError(
            "this engine makes no plans",
            values={"run.engine": engine},
            origins=resolved.origins,
            remedy="plan with --set run.engine=gpu",
        )
    return of_engine(resolved, device=device, devices=devices, nodes=nodes, mfu=mfu)
