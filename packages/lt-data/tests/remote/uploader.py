"""Uploads in processes of their own that can be killed: one line `FOLDER URL` on stdin, one process each.

The process answers with the pid of the child that does it, and later with its exit code. It has loaded all that a child
needs, so that a child costs next to nothing.
"""

import os
import sys

from lt_data.remote import s3_folder
from lt_data.remote.upload import upload


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    client = s3_folder.make_client()
    s3_folder.make_client = lambda: client
    s3_folder.PART_BYTES, s3_folder.CONNECTIONS = 5 * 2**20, 4
    say("ready")
    for line in sys.stdin:
        folder, url = line.rstrip("\n").split("\t")
        child = os.fork()
        if not child:
            try:
                upload(folder, url)
            finally:
                os._exit(1 if sys.exc_info()[0] else 0)
        say(child)
        _, status = os.waitpid(child, 0)
        say(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
