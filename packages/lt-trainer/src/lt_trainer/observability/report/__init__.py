"""`lt train report RUN...`: self-contained HTML report of one or more runs, and PNG charts.

`run_history` reads a run's files, `curves` and `charts` compute the charts, `model_section` and `data_section` describe
model and data, `page` and `html_charts` render HTML, `png` (the only module that imports matplotlib) renders PNG, and
`writer` writes the files. Run directories are only read.
"""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.observability.report.run_history import RunHistory as RunHistory
    from lt_trainer.observability.report.run_history import read_run as read_run
    from lt_trainer.observability.report.writer import write_report as write_report
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "run_history": "RunHistory read_run",
            "writer": "write_report",
        },
    )
