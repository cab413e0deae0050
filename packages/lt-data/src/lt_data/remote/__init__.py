"""Folders of data in S3: upload, download, and token stores that are read from there.

`s3_folder.py` is the one module that knows boto3; the others speak of folders, files and lists of files.
"""
