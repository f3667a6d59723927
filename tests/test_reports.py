"""Tests that report pages are self-contained, show what runs have logged, and escape texts."""

import html
import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
import scipy.stats

from synthesizer_jax.models import LoRA
from synthesizer_jax.reports.figures import heat_maps, line_chart
from synthesizer_jax.reports.logged import read_systems
from synthesizer_jax.reports.page import write_report
from synthesizer_jax.runs.metrics import METRICS_FILE
from synthesizer_jax.training.run_directory import save_experiment
from synthesizer_jax.training.trainer import Trainer
from tests.cli import commands
from tests.training.tiny import encoder, experiment, save

TRAINED = {"kind": "train", "loss": 2.0, "steps_per_second": 4.0, "tokens_per_second": 100.0}
ODD = [
    r"$\frac{$",
    "nul\0 bell\a",
    "over\u202eride\u2066",
    "é 中 \U0001f600 שלום",
    "<script>x</script>",
]
SEEN = [r"$\frac{$", r"nul\x00 bell\x07", r"over\u202eride\u2066", *ODD[3:]]


def logged(directory, records=(), *, seed=0, answers=(), **scores):
    """Makes the directory of a run.

    The newest evaluation has the given scores and answers. More records follow the evaluation in
    the log.
    """
    directory.mkdir()
    whole = experiment()
    save_experiment(replace(whole, training=replace(whole.training, seed=seed)), directory)
    lines = [{"step": 1, **TRAINED}, {"step": 2, **TRAINED, "steps_per_second": 8.0}]
    if scores:
        earlier = {"step": 1, "kind": "eval", "loss": 2.5, "glue_rte/accuracy": 1.0}
        newest = {f"glue_{task}": value for task, value in scores.items()}
        lines += [earlier, {"step": 2, "kind": "eval", "loss": 1.5, **newest}]
    text = "".join(json.dumps(record) + "\n" for record in (*lines, *records))
    (directory / METRICS_FILE).write_text(text)
    (directory / "evaluation" / "2").mkdir(parents=True)
    for task in dict.fromkeys(name.rpartition("/")[0] for name in scores) if answers else ():
        rows = "".join(json.dumps({"idx": i, **row}) + "\n" for i, row in enumerate(answers))
        (directory / "evaluation" / "2" / f"glue_{task}.jsonl").write_text(rows)
    return directory


def report(*runs, output):
    """Makes a report. Returns the rows of the printed table, and the page."""
    said = commands.call("compare", *runs, "--output", output)
    rows = [line.replace("│", " ").split() for line in said.splitlines() if "glue_" in line]
    return rows, output.read_text(encoding="utf-8")


def rows_of(page, heading):
    """Returns the cells of the table under a heading.

    A cell consists of its class, text and note.
    """
    section = page.partition(f">{heading}</")[2].partition("</section>")[0]
    cell = r'<td[^>]*>(?:<span(?: class="(\w+)")?>)?([^<]*)(?:</span>)?(?:<small>(.*?)</small>)?'
    rows = re.findall(r"<tr>(.*?)</tr>", section, flags=re.S)
    return [[tuple(map(html.unescape, found)) for found in re.findall(cell, row)] for row in rows][
        1:
    ]


def test_runs_are_compared_by_their_newest_evaluations(tmp_path):
    first = logged(tmp_path / "a", **{"rte/accuracy": 61.04, "stsb/pearson": 80.0, "stsb/s": 9.0})
    scores = {"rte/accuracy": 60.96, "cola/matthews": 12.5, "c4/perplexity": 9}
    second = logged(tmp_path / "b", **scores)
    rows, page = report(first, second, output=tmp_path / "sub" / "page.html")
    assert rows == [
        ["glue_rte", "accuracy", "61.0", "61.0"],
        ["glue_stsb", "pearson", "80.0", "–"],
        ["glue_stsb", "s", "9.0", "–"],
        ["glue_cola", "matthews", "–", "12.5"],
        ["glue_c4", "perplexity", "↓", "–", "9.00"],
    ]
    shown = rows_of(page, "Scores on held-out examples")
    assert shown[0] == [("", "glue_rte", "accuracy"), ("", "61.0", ""), ("", "61.0", "")]
    assert shown[-1] == [("", "all tasks", "loss ↓"), ("", "1.500", ""), ("", "1.500", "")]
    # The table shows the median and the quartiles.
    assert rows_of(page, "Size and speed")[0][4][1:] == ("6.0", "5.0 to 7.0")
    assert "Answers" not in page and "Settings" not in page
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["page.html"]
    assert page.count("<svg") == 2  # the loss and the score, which has two values
    assert page.count("<section>") == page.count("</section>")
    links = re.findall(r'(?:src|href)="(.*?)"', page)
    assert all(link.startswith(("#", "data:")) for link in links)


def test_a_run_without_logs_gives_one_sentence(tmp_path):
    output = tmp_path / "page.html"
    young = logged(tmp_path / "young")
    with pytest.raises(
        FileNotFoundError, match=r"contains no experiment\.json\. Give the directory"
    ):
        report(tmp_path, output=output)
    assert not output.exists()
    # The page shows the curve of the training loss, because there is no other curve.
    assert "Curves" in report(young, output=output)[1]
    (young / METRICS_FILE).unlink()
    with pytest.raises(ValueError, match=r"has logged nothing\. Train the run, or measure it"):
        report(young, output=output)
    # A run that has only results of `eval`, such as a converted model, can also be reported.
    task = {"task": "glue_rte", "metrics": {"accuracy": 63.0}, "loss": None}
    results = json.dumps({"step": 2, "tasks": [task], "score": 63.0})
    for name in ("2", "5_old"):  # a user's copy is ignored
        (young / "evaluation" / name).mkdir(exist_ok=True)
        (young / "evaluation" / name / "results.json").write_text(results)
    assert report(young, output=output)[0] == [["glue_rte", "accuracy", "63.0"]]


def test_numbers_that_were_not_finite_are_left_out(tmp_path):
    nothing = {"step": 3, **dict.fromkeys(TRAINED), "kind": "train"}
    newest = {"step": 5, "kind": "eval", "glue_rte/accuracy": 63.0, "glue_stsb/pearson": None}
    run = logged(tmp_path / "a", [nothing, newest], **{"rte/accuracy": None})
    rows, page = report(run, output=tmp_path / "page.html")
    assert rows == [["glue_rte", "accuracy", "63.0"]]
    assert rows_of(page, "Size and speed")[0][4][1] == "6.0"


def test_a_run_with_adapters_has_the_size_of_its_model(tmp_path):
    plain = experiment(encoder())
    save(tmp_path / "base", plain)
    run = logged(tmp_path / "lora")
    adapters = LoRA(rank=3, targets="encoder/layers_0/mlp/wo/kernel")  # maps 16 inputs to 8 outputs
    training = replace(plain.training, adapters=adapters)
    save(run, replace(plain, training=training, init_from=str(tmp_path / "base")))
    size = sum(x.size for x in jax.tree.leaves(Trainer(plain).layout.abstract.params))
    page = report(run, output=tmp_path / "page.html")[1]
    assert rows_of(page, "Size and speed")[0][3] == ("", f"{size:,}", "72 in adapters")
    shutil.rmtree(tmp_path / "base")
    page = report(run, output=tmp_path / "page.html")[1]
    assert rows_of(page, "Size and speed")[0][3] == ("", "–", "72 in adapters")


def test_runs_that_differ_in_seeds_are_one_system(tmp_path):
    scores = (60.0, 61.0, 65.0)
    runs = [
        logged(tmp_path / f"rv-{i}", seed=i, **{"rte/accuracy": x}) for i, x in enumerate(scores)
    ]
    watched = json.loads((runs[2] / "experiment.json").read_text())
    watched["training"]["writers"] = ["wandb"]
    (runs[2] / "experiment.json").write_text(json.dumps(watched))
    other = logged(tmp_path / "v", **{"rte/accuracy": 50.0})
    whole = json.loads((other / "experiment.json").read_text())
    whole["model"]["d_model"] = 16
    whole["model"]["encoder"]["norm"] = {"type": "OfTheUser", "size": [1, None]}
    (other / "experiment.json").write_text(json.dumps(whole))
    rows, page = report(*runs, other, output=tmp_path / "page.html")
    assert rows == [["glue_rte", "accuracy", "62.0", "±", "1.5", "50.0"]]  # √7 / √3
    settings = [[text for _, text, _ in row] for row in rows_of(page, "Settings that differ")]
    assert settings == [
        ["model.d_model", "8", "16"],
        ["model.encoder.norm", "RMSNorm(epsilon=1e-06, offset=0.0)", "OfTheUser(size=[1, –])"],
    ]
    several, alone = read_systems([*runs, other])
    assert several.name == "rv" and alone.name == "v"
    assert several.curve("evaluations", "glue_rte/accuracy") == (
        *([1.0, 2.0], [1.0, 62.0], [1.0, 60.0], [1.0, 65.0]),
    )
    assert several.curve("training", "steps_per_second", most=1) == ([1.5], [6.0], [6.0], [6.0])
    same = [logged(tmp_path / name, **{"rte/accuracy": 1.0}) for name in ("x-1", "x-2")]
    assert [system.name for system in read_systems(same)] == ["x-1", "x-2"]


def test_answers_that_differ_come_first_and_any_text_is_shown_unchanged(tmp_path):
    same = {"input": "same", "target": "a", "prediction": "a", "label": 0, "target_label": 0}
    differs = same | {"input": "differs", "target": "b", "target_label": 1}
    for name, answers in (("A", ("a", "")), ("B", ("b", "b"))):
        for seed, answer in enumerate(answers):
            given = {"prediction": answer, "label": {"a": 0, "b": 1}.get(answer, -1)}
            scores = {"rte/accuracy": 100.0 if answer == "b" else 50.0}
            run = logged(
                tmp_path / f"{name}-{seed}", seed=seed, answers=(same, differs | given), **scores
            )
            text = (run / "experiment.json").read_text()
            (run / "experiment.json").write_text(text.replace('"copy"', f'"copy {name}"'))
    runs = [tmp_path / f"{name}-{seed}" for name in "AB" for seed in (0, 1)]
    write_report(tmp_path / "page.html", read_systems(runs))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.index("differs") < page.index("same")
    answers = page.partition(">Answers</")[2]
    assert re.findall(r'<span class="(right|wrong)">(.*?)</span><small>(.*?)</small>', answers) == [
        *(("wrong", "✗ a", "1 of 2"), ("wrong", "✗ (empty)", "1 of 2"), ("right", "✓ b", "2 of 2")),
        *(("right", "✓ a", "2 of 2"), ("right", "✓ a", "2 of 2")),
    ]
    low, high = scipy.stats.binomtest(1, 2).proportion_ci(method="wilson")
    shown = rows_of(page, "Scores on held-out examples")[0]
    assert shown[1][2] == f"{100 * low:.1f} to {100 * high:.1f}"
    # The page escapes any text.
    odd = {"input": " ".join(ODD), "target": "b", "prediction": " ".join(ODD)}
    run = logged(tmp_path / "odd", answers=[odd], **{"rte/accuracy": 61.0})
    system = replace(read_systems([run])[0], name=" ".join(ODD))
    write_report(tmp_path / "page.html", [system, system])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    text = html.unescape(page)
    assert "<script" not in page and all(expected in text for expected in SEEN)
    assert rf">{SEEN[0]} nul" in text  # shown in the chart's legend
    assert not re.search("[\0-\x08\x0e-\x1f\u202a-\u202e\u2066-\u2069]", text)


def test_charts_have_their_names_and_numbers_in_the_colors_of_the_page():
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=(2, 4))
    weights[0, 0, 0] = np.nan
    chart = heat_maps({"1.1": weights[0], "1.2": weights[1]}, x_label="key", y_label="query")
    assert chart.count(f">{weights[1, 2, 3]:.2f}</td>") >= 1 and "nan" not in chart
    assert ">1.1</caption>" in chart and chart.count("<td></td>") == 1
    lines = {"x" * 60: ([0, 1], [1, 2], [0.5, 1], [2, 3]), "y": ([0, 1], [1, 2])}
    chart = line_chart(lines, x_label="step", y_label="loss", points={"y": ([1], [9])})
    assert f">{'x' * 19}…{'x' * 20}</text>" in chart and "#0000" not in chart
    assert all(f"var(--{name})" in chart for name in ("c1", "c2", "c9"))
