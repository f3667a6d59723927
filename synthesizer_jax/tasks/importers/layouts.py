"""Names of the original files, and the number of rows of each complete split.

The sizes are those of TFDS after it has dropped rows. QQP has two sizes: its source was corrected
between TFDS's GLUE 1.0.0 and 2.0.0. A file whose name marks it as a sample (`subset…`, `fewglue…`,
`textfooler…`) is only read if the official file does not exist, and may have any size.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import pathlib
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Split:
    """A split of a task.

    Attributes:
      name: TFDS's name.
      stem: the stem of the file's name.
      sizes: the published numbers of rows.
      also: other names of the file.
    """

    name: str
    stem: str
    sizes: tuple[int, ...]
    also: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Task:
    """A TFDS configuration.

    Attributes:
      config: TFDS data set and configuration.
      folders: the names of the directory that it is distributed in.
      splits: its splits.
    """

    config: str
    folders: tuple[str, ...]
    splits: tuple[Split, ...]


def _task(
    config: str, folder: str, *sizes: int, dev: str = "dev", also: tuple[str, ...] = ()
) -> Task:
    names = zip(("train", "validation", "test"), ("train", dev, "test"), sizes, strict=True)
    return Task(config, (folder, *also), tuple(Split(n, stem, (s,)) for n, stem, s in names))


def _super(config: str, folder: str, *sizes: int) -> Task:
    return _task(config, folder, *sizes, dev="val")


_MNLI = (
    ("validation", "matched", "dev", 9815),
    ("validation", "mismatched", "dev", 9832),
    ("test", "matched", "test", 9796),
    ("test", "mismatched", "test", 9847),
)


def _mnli(domain: str) -> Task:
    """Returns a configuration of MNLI.

    `mnli` has all five splits, `mnli_matched` and `mnli_mismatched` two each, with shorter names.
    """
    splits = tuple(
        Split(split if domain else f"{split}_{split_domain}", f"{stem}_{split_domain}", (size,))
        for split, split_domain, stem, size in _MNLI
        if split_domain == domain or not domain
    )
    if not domain:
        splits = (Split("train", "train", (392702,)), *splits)
    return Task(f"glue/mnli_{domain}" if domain else "glue/mnli", ("MNLI",), splits)


_QQP = Task(
    "glue/qqp",
    ("QQP",),
    (
        Split("train", "train", (363849, 363846)),
        Split("validation", "dev", (40430,)),
        Split("test", "test", (390965,)),
    ),
)
# MRPC is distributed as Microsoft's original files, or as GLUE's three files made from them.
_MRPC = Task(
    "glue/mrpc",
    ("MRPC",),
    (
        Split("train", "msr_paraphrase_train", (3668,), ("train.tsv",)),
        Split("validation", "msr_paraphrase_train", (408,), ("dev.tsv",)),
        Split("test", "msr_paraphrase_test", (1725,), ("test.tsv",)),
    ),
)
_AX = Task(
    "glue/ax",
    ("AX", "diagnostic", "diagnostics", "."),
    (Split("test", "diagnostic", (1104,), ("AX.tsv", "ax.tsv")),),
)
_DPR = Task(
    "definite_pronoun_resolution",
    ("DPR", "definite_pronoun_resolution"),
    (Split("train", "train.c", (1322,)), Split("test", "test.c", (564,))),
)

TASKS: dict[str, tuple[Task, ...]] = {
    "glue": (
        _task("glue/cola", "CoLA", 8551, 1043, 1063),
        _task("glue/sst2", "SST-2", 67349, 872, 1821, also=("SST2",)),
        _MRPC,
        _QQP,
        _task("glue/stsb", "STS-B", 5749, 1500, 1379, also=("STSB",)),
        _mnli(""),
        _mnli("matched"),
        _mnli("mismatched"),
        _task("glue/qnli", "QNLI", 104743, 5463, 5463, also=("QNLIv2",)),
        _task("glue/rte", "RTE", 2490, 277, 3000),
        _task("glue/wnli", "WNLI", 635, 71, 146),
        _AX,
    ),
    "super_glue": (
        _super("super_glue/boolq", "BoolQ", 9427, 3270, 3245),
        _super("super_glue/cb", "CB", 250, 56, 250),
        _super("super_glue/copa", "COPA", 400, 100, 500),
        _super("super_glue/multirc", "MultiRC", 27243, 4848, 9693),
        _super("super_glue/record", "ReCoRD", 100730, 10000, 10000),
        _super("super_glue/rte", "RTE", 2490, 277, 3000),
        _super("super_glue/wic", "WiC", 5428, 638, 1400),
        _super("super_glue/wsc.fixed", "WSC", 554, 104, 146),
        Task("super_glue/axb", ("AX-b",), (Split("test", "AX-b", (1104,)),)),
        Task("super_glue/axg", ("AX-g",), (Split("test", "AX-g", (356,)),)),
        _DPR,
    ),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """The file that a split is read from.

    Attributes:
      path: the file.
      sample: whether it is a sample of the official file.
    """

    path: pathlib.Path
    sample: bool

    @property
    def format(self) -> str:
        """`tsv` (also for `.txt`), `jsonl` or `json`, compressed or not."""
        suffix = pathlib.Path(self.path.name.removesuffix(".gz")).suffix
        return {".txt": "tsv"}.get(suffix, suffix[1:])


def find_folder(root: pathlib.Path, task: Task) -> pathlib.Path | None:
    """Returns the task's directory in `root`, regardless of upper and lower case, or None."""
    directories = {child.name.lower(): child for child in root.iterdir() if child.is_dir()} | {
        ".": root
    }
    return next((directories[n.lower()] for n in task.folders if n.lower() in directories), None)


def find_file(folder: pathlib.Path, split: Split) -> Source | None:
    """Returns the split's official file, else a sample of it, else None.

    Raises:
      PermissionError: the directory cannot be read.
    """
    official = [f"{split.stem}.{kind}" for kind in ("tsv", "jsonl", "json", "txt")]
    official += split.also
    samples = [f"{start}*_{name}" for start in ("subset", "fewglue") for name in official]
    if split.stem == "val":
        samples.append("fewglue*_dev32.jsonl")
    if split.stem == "dev_mismatched":
        samples.append("textfooler_mnli_mismatched*.tsv")
    for patterns, sample in ((official, False), (samples, True)):
        for path in _matches(folder, patterns):
            return Source(path, sample)
    return None


def _matches(folder: pathlib.Path, patterns: list[str]) -> Iterator[pathlib.Path]:
    names = sorted(os.listdir(folder))  # `glob` ignores an unreadable directory
    for pattern in patterns:
        for name_pattern in (pattern, pattern + ".gz"):
            yield from (folder / name for name in names if fnmatch.fnmatchcase(name, name_pattern))


def find_sibling(path: pathlib.Path, names: tuple[str, ...]) -> pathlib.Path | None:
    """Returns the first of `names`, plain or gzip, in the directory of `path`, or None."""
    return next(_matches(path.parent, list(names)), None)
