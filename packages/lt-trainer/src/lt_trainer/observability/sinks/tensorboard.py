"""TensorBoard event files in `<run>/tensorboard/`, written without TensorFlow and without torch.

An event file is a sequence of length-prefixed, checksummed protocol buffers; the `tensorboard` package has both parts.
Each start of a run writes its own file. Before the first numbers of a start, and after each rollback, a
SessionLog.START with the step makes readers drop earlier events of that step and later ones.

Cost: one write per record in the main thread; no thread.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

# Generated modules define their names at import, so type checkers do not see them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from lt_trainer.errors import RunDirError
from lt_trainer.observability.sinks.sink import RunInfo

FOLDER = "tensorboard"
FORMAT = "brain.Event:2"


def _folder_error(folder: Path, exc: OSError) -> RunDirError:
    return RunDirError(f"cannot write {folder}: {exc.strerror}; free space or fix its permissions, then rerun")


class TensorBoardSink:
    """TensorBoard event file writer; use `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        self._writer = RecordWriter(self._file)
        self._write_event(Event(wall_time=time.time(), file_version=FORMAT))

    @classmethod
    def open(cls, info: RunInfo) -> TensorBoardSink:
        """Create an event file for this start of the run, with the recipe as text.

        Raises:
            RunDirError: the folder cannot be written.
        """
        folder = info.run / FOLDER
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(exist_ok=True)
            number = len(list(folder.iterdir()))
            sink = cls(folder / f"{name}.{number}")
            sink._write_text("recipe", f"```toml\n{info.toml}\n```")
        except OSError as exc:
            raise _folder_error(folder, exc) from exc
        return sink

    @classmethod
    def check(cls, run: Path) -> None:
        """Check that `open` can write its folder, without writing.

        Raises:
            RunDirError: it cannot.
        """
        folder = run / FOLDER
        if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK)):
            number = errno.EACCES if folder.is_dir() else errno.ENOTDIR
            raise _folder_error(folder, OSError(number, os.strerror(number)))

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write one event with all numbers."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write_event(Event(wall_time=time_s, step=step, summary=Summary(value=scalars)))

    def resume_at(self, step: int) -> None:
        """Make readers drop earlier events of `step` and later steps."""
        self._write_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_text(self, tag: str, text: str) -> None:
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=f"{tag}/text_summary", tensor=tensor, metadata=metadata)
        self._write_event(Event(wall_time=time.time(), summary=Summary(value=[value])))

    def _write_event(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
