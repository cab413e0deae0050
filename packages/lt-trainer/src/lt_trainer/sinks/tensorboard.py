"""TensorBoard event files in `<run>/tensorboard/`, written without TensorFlow and without torch.

An event file is a row of length-prefixed, checksummed protocol buffers; the `tensorboard` package has both halves.
Each start of a run writes a file of its own. Before the first numbers of a start, and after each way back, a
SessionLog.START with the step tells readers to drop what earlier events say about that step and later ones.

Cost: one write per record, by the main thread, and no thread of its own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

# Generated modules make their names when they are loaded, so no checker sees them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from lt_trainer.errors import RunDirError
from lt_trainer.sinks.sink import About

FOLDER = "tensorboard"
FORMAT = "brain.Event:2"


class TensorBoard:
    """See the module's text; `open` makes one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        self._writer = RecordWriter(self._file)
        self._put(Event(wall_time=time.time(), file_version=FORMAT))

    @classmethod
    def open(cls, about: About) -> TensorBoard:
        """Begin a file for this start of the run, with the recipe as a text.

        Raises:
            RunDirError: the folder cannot be written.
        """
        folder = about.run / FOLDER
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(exist_ok=True)
            number = len(list(folder.iterdir()))
            sink = cls(folder / f"{name}.{number}")
            sink._text("recipe", f"```toml\n{about.toml}\n```")
        except OSError as exc:
            raise RunDirError(
                f"cannot write {folder}: {exc.strerror}; free space or mend its permissions, then start again"
            ) from exc
        return sink

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """One event with all numbers."""
        found = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._put(Event(wall_time=time_s, step=step, summary=Summary(value=found)))

    def go_on_at(self, step: int) -> None:
        """Tell readers to drop what they have of `step` and later ones."""
        self._put(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _text(self, tag: str, text: str) -> None:
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=f"{tag}/text_summary", tensor=tensor, metadata=metadata)
        self._put(Event(wall_time=time.time(), summary=Summary(value=[value])))

    def _put(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
