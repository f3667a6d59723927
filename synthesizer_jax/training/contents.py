"""What a checkpoint says of its own contents, so that damage to them is noticed."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

import orbax.checkpoint as ocp

from synthesizer_jax.training import checksums

CONTENTS = "contents"
"""Name of the item, a directory with a file of every process that saved."""


class DataPosition(Protocol):
    """What a checkpoint needs of a data stream: its position as files in a directory."""

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position after the last consumed batch."""
        ...

    def restore(self, directory: pathlib.Path) -> None:
        """Continues with the batch after the saved position."""
        ...


class DamagedError(ValueError):
    """A checkpoint does not hold what was saved."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, or one process' part of them.

    Attributes:
      step: the step that was saved.
      arrays: checksums of the state's arrays, see `checksums.checksums`.
      files: checksums of the files of the data's position.
    """

    step: int
    arrays: dict[str, int]
    files: dict[str, int]

    def to_files(self, process: int) -> dict[str, bytes]:
        """The file in which a process records its part."""
        return {f"{process}.json": json.dumps(dataclasses.asdict(self)).encode()}

    def check_files(self, directory: pathlib.Path) -> None:
        """Raises a `DamagedError` where a file of the data's position is not as it was saved."""
        for name, expected in self.files.items():
            if checksums.of_bytes((directory / name).read_bytes()) != expected:
                raise DamagedError(f"{directory / name} is not what was saved")

    def check_arrays(self, found: Mapping[str, int]) -> None:
        """Raises a `DamagedError` where arrays are not as they were saved.

        Args:
          found: checksums of whole arrays, some or all of those that were saved.
        """
        if wrong := checksums.different(self.arrays, found):
            raise DamagedError(
                f"{len(wrong)} of {len(found)} arrays are not what was saved, such as {wrong[0]}"
            )


def read_contents(checkpoint: pathlib.Path) -> Contents | None:
    """What a checkpoint says of its contents; None: it was saved by a version that did not say it.

    Args:
      checkpoint: the step's directory.

    Raises:
      DamagedError: what it says is damaged, or of another step.
    """
    directory = checkpoint / CONTENTS
    if not directory.is_dir():
        return None
    parts = []
    for path in sorted(directory.glob("*.json")):
        try:
            parts.append(Contents(**json.loads(path.read_bytes())))
            parts[-1].arrays.values(), parts[-1].files.values()
        except (ValueError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from error
    if not parts:
        raise DamagedError(f"{directory} is empty")
    if {part.step for part in parts} != {int(checkpoint.name)}:
        raise DamagedError(f"{checkpoint} holds step {parts[0].step}")
    files = {name: value for part in parts for name, value in part.files.items()}
    return Contents(parts[0].step, checksums.add(part.arrays for part in parts), files)


def position_files(stream: DataPosition) -> dict[str, bytes]:
    """The files of a data stream's position, by their names."""
    with tempfile.TemporaryDirectory() as place:
        directory = pathlib.Path(place)
        stream.save(directory)
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@dataclasses.dataclass
class FilesArgs(ocp.args.CheckpointArgs):
    """Files by their names below the item's directory."""

    files: dict[str, bytes]


class FilesHandler(ocp.CheckpointHandler):
    """Writes small files into the checkpoint's own directory, committed with it."""

    def save(self, directory: Any, args: FilesArgs) -> None:
        """Writes at once."""
        for name, data in args.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def restore(self, directory: Any, args: Any = None) -> None:
        """Not used: `read_contents` and the stream read their files themselves."""
        raise NotImplementedError


ocp.args.register_with_handler(FilesHandler, for_save=True, for_restore=True)(FilesArgs)
