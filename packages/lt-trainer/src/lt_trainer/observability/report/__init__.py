"""`lt train report RUN...`: self-contained HTML report of one or more runs, and PNG charts.

`run_history` reads a run's files, `curves` and `charts` compute the charts, `model_section` and `data_section` describe
model and data, `page` and `html_charts` render HTML, `png` (the only module that imports matplotlib) renders PNG, and
`writer` writes the files. Run directories are only read.
"""
