"""Pre-run planning: memory by part, time, energy, and the nearest layout that fits.

Pure functions of the recipe and a device table; needs neither torch nor a device.
"""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.planning.devices import DEVICES as DEVICES
    from lt_trainer.planning.devices import find_device as find_device
    from lt_trainer.planning.layout import PlannedLayout as PlannedLayout
    from lt_trainer.planning.layout import engine_table as engine_table
    from lt_trainer.planning.layout import layout_from_recipe as layout_from_recipe
    from lt_trainer.planning.memory import PlannedMemory as PlannedMemory
    from lt_trainer.planning.memory import plan_memory as plan_memory
    from lt_trainer.planning.plan import make_plan as make_plan
    from lt_trainer.planning.plan import vocab_size_and_source as vocab_size_and_source
    from lt_trainer.planning.plan_text import format_count as format_count
    from lt_trainer.planning.plan_text import format_duration as format_duration
    from lt_trainer.planning.result import PlanResult as PlanResult
    from lt_trainer.planning.result import plan_recipe as plan_recipe
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "devices": "DEVICES find_device",
            "layout": "PlannedLayout engine_table layout_from_recipe",
            "memory": "PlannedMemory plan_memory",
            "plan": "make_plan vocab_size_and_source",
            "plan_text": "format_count format_duration",
            "result": "PlanResult plan_recipe",
        },
    )
