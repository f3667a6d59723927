"""Checksums of a checkpoint's contents, by which damage is detected."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Protocol

import orbax.checkpoint as ocp
from etils import epath

from synthesizer_jax.checkpoints import checksums
from synthesizer_jax.files import describing

CONTENTS = "contents"
"""Name of the item, a directory with one file per process."""


class DataPosition(Protocol):
    """A data stream whose position can be saved as files in a directory."""

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position after the last batch that was taken."""
        ...

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after the saved position."""
        ...


@dataclasses.dataclass(frozen=True)
class Contents:
    """The checksums of a checkpoint, or one process's part of them.

    Attributes:
      step: the step that was saved.
      arrays: checksums of the state's arrays, see `checksums.checksums`.
      files: checksums of the files of the data position.
    """

    step: int
    arrays: dict[str, int]
    files: dict[str, int]

    def to_files(self, process: int) -> dict[str, bytes]:
        """Returns the file in which a process stores its part, by its name."""
        return {f"{process}.json": json.dumps(dataclasses.asdict(self)).encode()}

    def check_files(self, directory: pathlib.Path) -> None:
        """Raises a `ValueError` if a file of the data position differs from what was saved."""
        for name, expected in self.files.items():
            if checksums.file_checksum((directory / name).read_bytes()) != expected:
                raise ValueError(f"{directory / name} is not what was saved")

    def check_arrays(self, found: Mapping[str, int]) -> None:
        """Raises a `ValueError` if arrays differ from what was saved.

        Args:
          found: checksums of some or all of the arrays.
        """
        if wrong := checksums.differing_arrays(self.arrays, found):
            raise ValueError(
                f"{len(wrong)} of {len(found)} arrays are not what was saved, such as {wrong[0]}"
            )


def read_contents(checkpoint: pathlib.Path) -> Contents | None:
    """Reads the checksums of a checkpoint; None if it was saved by a version without checksums.

    Args:
      checkpoint: directory of the step.

    Raises:
      ValueError: the checksums are damaged, or belong to another step.
    """
    directory = checkpoint / CONTENTS
    if not directory.is_dir():
        return None
    parts = []
    for path in sorted(directory.glob("*.json")):
        with describing(path):
            parts.append(Contents(**json.loads(path.read_bytes())))
            if not (isinstance(parts[-1].arrays, dict) and isinstance(parts[-1].files, dict)):
                raise ValueError("it has no arrays and files by name")
    if not parts:
        raise ValueError(f"{directory} is empty")
    if {part.step for part in parts} != {int(checkpoint.name)}:
        raise ValueError(f"{checkpoint} holds step {parts[0].step}")
    files = {name: value for part in parts for name, value in part.files.items()}
    return Contents(
        parts[0].step, checksums.combine_checksums(part.arrays for part in parts), files
    )


def position_files(stream: DataPosition) -> dict[str, bytes]:
    """Returns the files of a data stream's position by name."""
    with tempfile.TemporaryDirectory() as place:
        directory = pathlib.Path(place)
        stream.save(directory)
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@dataclasses.dataclass
class FilesArgs(ocp.args.CheckpointArgs):
    """Files by their paths relative to the item's directory."""

    files: dict[str, bytes]


class FilesHandler(ocp.CheckpointHandler):
    """Writes small files into the checkpoint's directory, which are committed with it."""

    def save(self, directory: epath.Path, args: FilesArgs) -> None:
        """Writes the files synchronously."""
        for name, data in args.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def restore(self, directory: epath.Path, args: object = None) -> None:
        """Is not called: `read_contents` and the data stream read the files."""
        raise NotImplementedError


ocp.args.register_with_handler(FilesHandler, for_save=True, for_restore=True)(FilesArgs)
