"""Makes the data sets and vocabularies of the ledger from a folder of published files.

    python -m benchmarks.ledger.data FILES --data-dir DATA --workdir runs/ledger

FILES has the folders ``multi30k``, ``wikitext-2``, ``glue`` and ``super_glue`` as published, and samples of
the others: ``ag_news`` (labeled descriptions, and test.csv), ``wmt15_ende_sample``, ``wmt_newstest``,
``cnn_dailymail_sample`` and ``personachat_xpersona_en``; ``sentencepiece/t5_spiece.model`` is T5's own.
What is not there is left out, and its tables too.
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


def lines(path: pathlib.Path) -> Iterator[str]:
    """Yields the lines of a compressed file."""
    with gzip.open(path) as file:
        yield from decode_lines(file, path)


def pairs(sources: pathlib.Path, targets: pathlib.Path) -> Iterator[Row]:
    """Yields the rows of two files of sentences, line by line."""
    for source, target in zip(lines(sources), lines(targets), strict=True):
        yield {"input": source, "target": target}


def turns(path: pathlib.Path) -> Iterator[Row]:
    """Yields every answer of the dialogues of XPersona, with the persona and the turns before."""
    for dialogue in json.loads("".join(lines(path))):
        said = dialogue["persona"][:]
        for question, answer in dialogue["dialogue"]:
            said.append(question)
            yield {"input": " ".join(said), "target": answer}
            said.append(answer)


def command(*words: object) -> None:
    """Runs `synthesizer-jax`."""
    subprocess.run([sys.executable, "-m", "synthesizer_jax", *map(str, words)], check=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", type=pathlib.Path)
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/ledger"))
    args = parser.parse_args()
    files, data = args.files, ("--data-dir", args.data_dir, "--renew")
    args.workdir.mkdir(parents=True, exist_ok=True)

    def vocabulary(task: str, name: str, size: int) -> None:
        options = ("--output", args.workdir / name, "--size", size)
        command("data", "vocabulary", task, *options, "--data-dir", args.data_dir)

    def mine(name: str, splits: dict[str, Iterable[Row]], *options: str) -> None:
        words: list[object] = []
        for split, rows in splits.items():
            path = args.workdir / f"{name}_{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            words += ["--from", f"{split}={path}"]
        command("data", "import", "mine", "--name", name, *words, *options, *data)

    if (path := files / "sentencepiece" / "t5_spiece.model").exists():
        shutil.copyfile(path, args.workdir / "spiece.model")
    text = ("--input", "{input}", "--target", "{target}")
    for archive in ("glue", "super_glue"):
        if (files / archive).is_dir():
            command("data", "import", archive, "--from", files / archive, *data)
    if (files / "glue" / "SST-2").is_dir():
        vocabulary("glue_sst2_v002", "sst.model", 8000)
    if (folder := files / "multi30k").is_dir():
        words = [
            f"{split}={folder / stem}.en.gz+{folder / stem}.de.gz"
            for split, stem in (
                ("train", "train"),
                ("validation", "val"),
                ("test", "test_2016_flickr"),
            )
        ]
        command("data", "import", "multi30k/en_de", "--from", ",".join(words), *data)
        vocabulary("multi30k_en_de", "multi30k.model", 4000)
    if (valid := files / "wikitext-2" / "valid.txt.gz").exists():
        articles = f"validation={valid},test={valid.with_name('test.txt.gz')}"
        command("data", "import", "wikitext/wikitext-2-v1", "--from", articles, *data)
        mine(
            "wikitext_lines",
            {"train": ({"target": x} for x in lines(valid) if x.strip())},
            *text[2:],
        )
        vocabulary("wikitext_lines", "wikitext.model", 7000)
    if (folder := files / "ag_news").is_dir():
        labels = ("--labels", "1=World,2=Sports,3=Business,4=Sci/Tech")
        options = ("--input", "{text}", "--target", "{label}", *labels)
        # Its cells are quoted as in CSV where they have quotes.
        table = csv.reader(
            lines(folder / "train_subset10k_description_only.tsv.gz"), delimiter="\t"
        )
        rows = ({"text": text, "label": label} for text, label in table)
        mine("ag_descriptions", {"train": rows}, *options)
        test = (f"validation={folder / 'test.csv.gz'}", "--columns", "label,title,text")
        name = ("--name", "ag_descriptions")
        beside = data[:-1]  # the split is added to the other
        command("data", "import", "mine", *name, "--from", *test, *options, *beside)
        vocabulary("ag_descriptions", "ag.model", 8000)
    if (folder := files / "wmt15_ende_sample").is_dir():
        newstest = files / "wmt_newstest" / "en-de"
        splits = {
            "train": pairs(folder / "src-train.txt.gz", folder / "tgt-train.txt.gz"),
            "validation": pairs(newstest / "newstest2013.en.gz", newstest / "newstest2013.de.gz"),
        }
        mine("wmt_sample", splits, *text, "--metric", "bleu")
        vocabulary("wmt_sample", "wmt.model", 4000)
    if (path := files / "cnn_dailymail_sample" / "train_sample.csv.gz").exists():
        rows = [
            {"input": f"summarize: {row['article']}", "target": row["highlights"]}
            for row in csv.DictReader(lines(path))
        ]
        splits = {"train": rows[:-10], "validation": rows[-10:]}
        mine("cnn_sample", splits, *text, "--metric", "rouge")
        vocabulary("cnn_sample", "cnn.model", 4000)
    if (folder := files / "personachat_xpersona_en").is_dir():
        splits = {
            "train": turns(folder / "En_persona_valid.json.gz"),
            "validation": turns(folder / "En_persona_test.json.gz"),
        }
        mine("persona_sample", splits, *text, "--metric", "bleu")
        vocabulary("persona_sample", "persona.model", 4000)


if __name__ == "__main__":
    main()
