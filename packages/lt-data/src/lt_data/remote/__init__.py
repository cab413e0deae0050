"""Folders of data in S3: upload, download, and token stores that are read from there block by block.

`s3.py` is the one module that knows boto3; the others speak of folders, files and blocks.
"""
