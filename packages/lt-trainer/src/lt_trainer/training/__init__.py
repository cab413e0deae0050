"""Training loop, runs, preflight and benchmark."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.training.benchmark import resolve_bench_recipe as resolve_bench_recipe
    from lt_trainer.training.benchmark import run_benchmark as run_benchmark
    from lt_trainer.training.preflight import run_preflight as run_preflight
    from lt_trainer.training.run_setup import RunSetup as RunSetup
    from lt_trainer.training.runner import run as run
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "benchmark": "resolve_bench_recipe run_benchmark",
            "preflight": "run_preflight",
            "run_setup": "RunSetup",
            "runner": "run",
        },
    )
