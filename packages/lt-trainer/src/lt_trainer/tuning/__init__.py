"""`lt train tune`: the fastest settings of a recipe on this machine, from short probes."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.tuning.journal import ProbeJournal as ProbeJournal
    from lt_trainer.tuning.probe import OUT_OF_MEMORY as OUT_OF_MEMORY
    from lt_trainer.tuning.probe import ProbeCommand as ProbeCommand
    from lt_trainer.tuning.probe import ProbeResult as ProbeResult
    from lt_trainer.tuning.search import find_fastest as find_fastest
    from lt_trainer.tuning.settings import CHECKPOINTING_MODES as CHECKPOINTING_MODES
    from lt_trainer.tuning.settings import SettingGrid as SettingGrid
    from lt_trainer.tuning.settings import TunedSetting as TunedSetting
    from lt_trainer.tuning.tune import TuneOptions as TuneOptions
    from lt_trainer.tuning.tune import probe_arguments as probe_arguments
    from lt_trainer.tuning.tune import tune_recipe as tune_recipe
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "journal": "ProbeJournal",
            "probe": "OUT_OF_MEMORY ProbeCommand ProbeResult",
            "search": "find_fastest",
            "settings": "CHECKPOINTING_MODES SettingGrid TunedSetting",
            "tune": "TuneOptions probe_arguments tune_recipe",
        },
    )
