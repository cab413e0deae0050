"""Uploads in processes of their own that can be killed: one line `FOLDER URL PART_BYTES` on stdin, one process each.

The process answers with the pid of the child that does it, and later with its exit code. It has loaded all that a child
needs, so that a child costs next to nothing.
"""

import os
import sys
from typing import Any

from lt_data.remote import s3
from lt_data.remote.sending import upload


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    client = s3.make_client(s3.S3Options())

    def shared(options: s3.S3Options) -> Any:
        return client

    s3.make_client = shared
    say("ready")
    for line in sys.stdin:
        folder, url, part_bytes = line.rstrip("\n").split("\t")
        child = os.fork()
        if not child:
            try:
                upload(folder, url, options=s3.S3Options(part_bytes=int(part_bytes), connections=3))
            finally:
                os._exit(1 if sys.exc_info()[0] else 0)
        say(child)
        _, status = os.waitpid(child, 0)
        say(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
