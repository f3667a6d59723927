"""The checksums and the position in the data, which a checkpoint contains in addition to arrays."""

from __future__ import annotations

import json
import pathlib
import tempfile
import zlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from synthesizer_jax.base.files import describing

CONTENTS = "contents"
"""Name of the checkpoint item with the contents. The item is a directory with one file."""

CONTENTS_FILE = "contents.json"


class BatchStream(Protocol):
    """An endless stream of host batches whose position can be saved.

    The position is stored as text files in a directory.
    """

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns the next batch."""
        ...

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position after the last returned batch to a directory."""
        ...

    def restore(self, directory: pathlib.Path) -> None:
        """Moves the stream to the position that was saved in a directory."""
        ...


class Contents(NamedTuple):
    """What a checkpoint contains in addition to its arrays.

    Attributes:
      step: the step of the checkpoint.
      arrays: the checksums of the arrays in the state, by their paths; see `checksums`.
      position: the text files that store the position in the data, by file name.
    """

    step: int
    arrays: dict[str, int]
    position: dict[str, str]

    def to_json(self) -> dict[str, object]:
        """Returns the fields as JSON data, together with a checksum of this data."""
        text = json.dumps(self._asdict(), sort_keys=True)
        return {**self._asdict(), "checksum": zlib.crc32(text.encode())}

    def difference(self, read: Mapping[str, int]) -> str | None:
        """Returns a message about arrays whose checksums are wrong, or None if all checksums match.

        Args:
          read: the checksums of some or all arrays, computed from the arrays that were read, by
            path.
        """
        both = self.arrays.keys() & read.keys()
        wrong = sorted(name for name in both if self.arrays[name] != read[name])
        if not wrong:
            return None
        return f"{len(wrong)} of {len(read)} arrays differ from what was saved, such as {wrong[0]}"

    def restore_position(self, stream: BatchStream) -> None:
        """Moves a data stream to the saved position."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self.position.items():
                (pathlib.Path(folder) / name).write_text(text, encoding="utf-8")
            stream.restore(pathlib.Path(folder))


def read_contents(checkpoint: pathlib.Path) -> Contents | None:
    """Returns the `Contents` of a checkpoint, or None if the checkpoint has none.

    Args:
      checkpoint: the directory of a step.

    Raises:
      ValueError: the file with the contents is damaged, or belongs to a different step.
    """
    path = checkpoint / CONTENTS / CONTENTS_FILE
    if not path.parent.is_dir():
        return None
    with describing(path):
        fields = json.loads(path.read_bytes())
        contents = Contents(fields["step"], fields["arrays"], fields["position"])
        if contents.to_json() != fields:
            raise ValueError("its contents differ from what was saved")
    if contents.step != int(checkpoint.name):
        raise ValueError(f"{checkpoint} contains the contents of another step, {contents.step}.")
    return contents


def checksum_of(checkpoint: pathlib.Path) -> int:
    """Returns one number that identifies the arrays of a checkpoint.

    Other runs can use the number to recognize the checkpoint. The number is computed from the
    recorded checksums of the arrays, so no array is read. Checkpoints without recorded checksums
    all have the same number.
    """
    contents = read_contents(checkpoint)
    text = json.dumps(contents.arrays if contents else {}, sort_keys=True)
    return zlib.crc32(text.encode())


def position_files(stream: BatchStream) -> dict[str, str]:
    """Returns the text files that store a data stream's position, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        stream.save(pathlib.Path(folder))
        return {path.name: path.read_text("utf-8") for path in pathlib.Path(folder).iterdir()}
