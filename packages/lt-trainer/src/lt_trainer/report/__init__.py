"""`lt train report RUN...`: runs as one page that needs nothing beside it, and as pictures.

`reading` says what a run's files tell, `curves` and `charts` make lines of it, `model_part` and `data_part` say what
was trained on what, `page` and `drawing` show all of it as HTML, `png` (the one module that knows matplotlib) as
pictures, `writing` puts them on the disk. The run knows nothing of its readers; nothing in its directory is changed.
"""
