"""Makes the data sets and vocabularies of the ledger from a folder of published files.

    python -m benchmarks.ledger.data FILES --data-dir DATA --workdir runs/ledger

FILES has the folders ``multi30k``, ``wikitext-2``, ``glue`` and ``super_glue`` as they were
published, and samples of other data: ``ag_news`` (labeled descriptions, and test.csv),
``wmt15_ende_sample``, ``wmt_newstest``, ``cnn_dailymail_sample`` and ``personachat_xpersona_en``.
``sentencepiece/t5_spiece.model`` is T5's vocabulary. If a folder is missing, its data sets are left
out, and tables that need them cannot be made.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator

from synthesizer_jax.base.files import decode_lines

Row = dict[str, str]


TEXT = ("--input", "{input}", "--target", "{target}")
"""The options for importing rows that have an input and a target."""


def lines(path: pathlib.Path) -> Iterator[str]:
    """Yields the lines of a compressed file."""
    with gzip.open(path) as file:
        yield from decode_lines(file, path)


def pairs(sources: pathlib.Path, targets: pathlib.Path) -> Iterator[Row]:
    """Yields a row for each pair of lines in two files that are translations of each other."""
    for source, target in zip(lines(sources), lines(targets), strict=True):
        yield {"input": source, "target": target}


def turns(path: pathlib.Path) -> Iterator[Row]:
    """Yields a row for each answer in the dialogues of XPersona.

    The input consists of the persona and of all turns before the answer.
    """
    for dialogue in json.loads("".join(lines(path))):
        said = dialogue["persona"][:]
        for question, answer in dialogue["dialogue"]:
            said.append(question)
            yield {"input": " ".join(said), "target": answer}
            said.append(answer)


def command(*words: object) -> None:
    """Runs the command `synthesizer-jax`."""
    subprocess.run([sys.executable, "-m", "synthesizer_jax", *map(str, words)], check=True)


class Importer:
    """Imports data sets, and trains vocabularies on them.

    Attributes:
      files: the folder of published files.
      data_dir: the directory of the data sets.
      workdir: the directory of vocabularies and of intermediate files.
    """

    def __init__(self, files: pathlib.Path, data_dir: pathlib.Path, workdir: pathlib.Path):
        self.files = files
        self.data_dir = data_dir
        self.workdir = workdir

    def load(self, name: str, source: object, *options: object) -> None:
        """Imports a data set, which replaces an existing data set with the same name."""
        directory = ("--data-dir", self.data_dir, "--renew")
        command("data", "import", name, "--from", source, *options, *directory)

    def load_rows(self, name: str, splits: dict[str, Iterable[Row]], *options: str) -> None:
        """Writes rows to files, and imports these files as a new task."""
        words: list[object] = []
        for split, rows in splits.items():
            path = self.workdir / f"{name}_{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            words += ["--from", f"{split}={path}"]
        directory = ("--data-dir", self.data_dir, "--renew")
        command("data", "import", "mine", "--name", name, *words, *options, *directory)

    def train_vocabulary(self, task: str, name: str, size: int) -> None:
        """Trains a vocabulary on the texts of a task."""
        options = ("--output", self.workdir / name, "--size", size)
        command("data", "vocabulary", task, *options, "--data-dir", self.data_dir)

    def copy_t5_vocabulary(self) -> None:
        """Copies the file of T5's vocabulary."""
        path = self.files / "sentencepiece" / "t5_spiece.model"
        if path.exists():
            shutil.copyfile(path, self.workdir / "spiece.model")

    def import_glue(self) -> None:
        """Imports GLUE and SuperGLUE, and trains a vocabulary on SST-2."""
        for archive in ("glue", "super_glue"):
            if (self.files / archive).is_dir():
                self.load(archive, self.files / archive)
        if (self.files / "glue" / "SST-2").is_dir():
            self.train_vocabulary("glue_sst2_v002", "sst.model", 8000)

    def import_multi30k(self) -> None:
        """Imports Multi30k for translation from English to German."""
        folder = self.files / "multi30k"
        if not folder.is_dir():
            return
        stems = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
        sources = [
            f"{split}={folder / stem}.en.gz+{folder / stem}.de.gz" for split, stem in stems.items()
        ]
        self.load("multi30k/en_de", ",".join(sources))
        self.train_vocabulary("multi30k_en_de", "multi30k.model", 4000)

    def import_wikitext(self) -> None:
        """Imports WikiText-2 as articles, and again as single lines to train a vocabulary on."""
        valid = self.files / "wikitext-2" / "valid.txt.gz"
        if not valid.exists():
            return
        test = valid.with_name("test.txt.gz")
        self.load("wikitext/wikitext-2-v1", f"validation={valid},test={test}")
        rows = ({"target": line} for line in lines(valid) if line.strip())
        self.load_rows("wikitext_lines", {"train": rows}, "--target", "{target}")
        self.train_vocabulary("wikitext_lines", "wikitext.model", 7000)

    def import_ag_news(self) -> None:
        """Imports the descriptions of AG News."""
        folder = self.files / "ag_news"
        if not folder.is_dir():
            return
        labels = ("--labels", "1=World,2=Sports,3=Business,4=Sci/Tech")
        options = ("--input", "{text}", "--target", "{label}", *labels)
        # Read the tab-separated file with the CSV reader, because cells that contain quotes are
        # quoted as in CSV.
        table = csv.reader(
            lines(folder / "train_subset10k_description_only.tsv.gz"), delimiter="\t"
        )
        rows = ({"text": text, "label": label} for text, label in table)
        self.load_rows("ag_descriptions", {"train": rows}, *options)
        # This import does not pass --renew, so the validation split is added to the existing data
        # set.
        source = ("--from", f"validation={folder / 'test.csv.gz'}", "--columns", "label,title,text")
        name = ("--name", "ag_descriptions")
        command("data", "import", "mine", *name, *source, *options, "--data-dir", self.data_dir)
        self.train_vocabulary("ag_descriptions", "ag.model", 8000)

    def import_wmt(self) -> None:
        """Imports an English-German sample of WMT 2015, with newstest2013 for validation."""
        folder = self.files / "wmt15_ende_sample"
        if not folder.is_dir():
            return
        newstest = self.files / "wmt_newstest" / "en-de"
        splits = {
            "train": pairs(folder / "src-train.txt.gz", folder / "tgt-train.txt.gz"),
            "validation": pairs(newstest / "newstest2013.en.gz", newstest / "newstest2013.de.gz"),
        }
        self.load_rows("wmt_sample", splits, *TEXT, "--metric", "bleu")
        self.train_vocabulary("wmt_sample", "wmt.model", 4000)

    def import_cnn_dailymail(self) -> None:
        """Imports a sample of CNN/DailyMail. The last ten articles become the validation split."""
        path = self.files / "cnn_dailymail_sample" / "train_sample.csv.gz"
        if not path.exists():
            return
        rows = [
            {"input": f"summarize: {row['article']}", "target": row["highlights"]}
            for row in csv.DictReader(lines(path))
        ]
        splits = {"train": rows[:-10], "validation": rows[-10:]}
        self.load_rows("cnn_sample", splits, *TEXT, "--metric", "rouge")
        self.train_vocabulary("cnn_sample", "cnn.model", 4000)

    def import_personachat(self) -> None:
        """Imports the English dialogues of XPersona."""
        folder = self.files / "personachat_xpersona_en"
        if not folder.is_dir():
            return
        splits = {
            "train": turns(folder / "En_persona_valid.json.gz"),
            "validation": turns(folder / "En_persona_test.json.gz"),
        }
        self.load_rows("persona_sample", splits, *TEXT, "--metric", "bleu")
        self.train_vocabulary("persona_sample", "persona.model", 4000)


def main() -> None:
    """Imports all data sets whose files exist."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", type=pathlib.Path, help="folder of published files")
    parser.add_argument(
        "--data-dir", type=pathlib.Path, required=True, help="directory of the data sets"
    )
    parser.add_argument(
        "--workdir",
        type=pathlib.Path,
        default=pathlib.Path("runs/ledger"),
        help="directory of the vocabularies (default: runs/ledger)",
    )
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    importer = Importer(args.files, args.data_dir, args.workdir)
    importer.copy_t5_vocabulary()
    importer.import_glue()
    importer.import_multi30k()
    importer.import_wikitext()
    importer.import_ag_news()
    importer.import_wmt()
    importer.import_cnn_dailymail()
    importer.import_personachat()


if __name__ == "__main__":
    main()
