"""Pages are self-contained, say what runs have logged, and escape what comes from outside."""

import html.parser
import json
import re

import numpy as np
import pytest

from synthesizer_jax.reports.figures import heat_maps, line_chart
from synthesizer_jax.reports.page import summarize_run, write_report
from synthesizer_jax.runs.metrics import METRICS_FILE
from synthesizer_jax.training.run_directory import save_experiment
from tests.cli import commands
from tests.training.tiny import experiment

TRAINED = {"kind": "train", "loss": 2.0, "steps_per_second": 4.0, "tokens_per_second": 100.0}
ODD = [
    r"$\frac{$",
    "nul\0 bell\a",
    "over\u202eride\u2066",
    "é 中 \U0001f600 שלום",
    "<script>x</script>",
]
SEEN = [r"$\frac{$", r"nul\x00 bell\x07", r"over\u202eride\u2066", *ODD[3:]]


def logged(directory, records=(), **scores):
    """A run's directory whose newest evaluation has these scores, and then more records."""
    directory.mkdir()
    save_experiment(experiment(), directory)
    lines = [{"step": 1, **TRAINED}, {"step": 2, **TRAINED, "steps_per_second": 8.0}]
    if scores:
        earlier = {"step": 1, "kind": "eval", "loss": 2.5, "glue_rte/accuracy": 1.0}
        newest = {f"glue_{task}": value for task, value in scores.items()}
        lines += [earlier, {"step": 2, "kind": "eval", "loss": 1.5, **newest}]
    text = "".join(json.dumps(record) + "\n" for record in (*lines, *records))
    (directory / METRICS_FILE).write_text(text)
    return directory


def report(*runs, output):
    """The rows of the table that is printed, and the page."""
    said = commands.call("report", *runs, "--output", output)
    rows = [line.replace("│", " ").split() for line in said.splitlines() if "glue_" in line]
    return rows, output.read_text(encoding="utf-8")


def test_runs_are_compared_by_their_newest_evaluations(tmp_path):
    first = logged(tmp_path / "a", **{"rte/accuracy": 61.04, "stsb/pearson": 80.0, "stsb/s": 9.0})
    scores = {"rte/accuracy": 60.96, "cola/matthews": 12.5, "c4/perplexity": 9}
    second = logged(tmp_path / "b", **scores)
    rows, page = report(first, second, output=tmp_path / "sub" / "page.html")
    assert rows == [
        ["glue_rte", "accuracy", "61.0", "61.0"],
        ["glue_stsb", "pearson", "80.0", "–"],
        ["glue_cola", "matthews", "–", "12.5"],
    ]
    cells = re.findall(r'<td(?: class="(best)")?>([\d.–]+)</td>', page)
    best = [("best", "61.0"), ("best", "61.0"), ("best", "80.0"), ("", "–"), ("", "–")]
    assert cells[:6] == [*best, ("best", "12.5")]  # as they are shown
    assert "<td>6.0</td>" in page and "Answers" not in page  # the median speed
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["page.html"]
    opened, links = [], []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "html"):
                opened.append(tag)
            self.handle_startendtag(tag, attributes)

        def handle_startendtag(self, tag, attributes):
            links.extend(v for k, v in attributes if k in ("src", "href", "xlink:href"))

        def handle_endtag(self, tag):
            if tag != "html":
                assert opened.pop() == tag

    Reader().feed(page)
    assert opened == [] and page.count("<svg") == 1
    assert all(link.startswith(("#", "data:")) for link in links)


def test_what_is_no_run_or_has_no_evaluation_is_one_sentence(tmp_path):
    output = tmp_path / "page.html"
    with pytest.raises(FileNotFoundError, match=r"holds no experiment\.json; give the directory"):
        report(tmp_path, output=output)
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds no evaluation; continue the run"):
        report(logged(tmp_path / "young"), output=output)
    assert not output.exists()


def test_numbers_that_were_not_finite_are_left_out(tmp_path):
    nothing = {"step": 3, **dict.fromkeys(TRAINED), "kind": "train"}
    newest = {"step": 5, "kind": "eval", "glue_rte/accuracy": 63.0, "glue_stsb/pearson": None}
    run = logged(tmp_path / "a", [nothing, newest], **{"rte/accuracy": None})
    rows, page = report(run, output=tmp_path / "page.html")
    assert rows == [["glue_rte", "accuracy", "63.0"]] and "<td>6.0</td>" in page


def test_answers_that_differ_stand_first_and_any_text_is_shown_as_it_is(tmp_path):
    same = {"input": "same", "target": "a", "prediction": "a", "label": 0, "target_label": 0}
    free = {"input": " ".join(ODD), "target": "b", "prediction": "c"}
    runs = []
    for title, label in ((" ".join(ODD), -1), ("B", 0)):
        run = logged(tmp_path / title[-1], **{"rte/accuracy": 61.0})
        differs = same | {"input": "differs", "prediction": "", "label": label}
        (run / "evaluation" / "2").mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in (same, differs, free))
        (run / "evaluation" / "2" / "glue_rte.jsonl").write_text(lines)
        runs.append(summarize_run(title, run))
    write_report(tmp_path / "page.html", runs, title=" ".join(ODD))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.index("differs") < page.index("same")
    assert re.findall(r'<td class="(right|wrong|)">(.*?)</td>', page) == [
        *(("wrong", "✗ (empty)"), ("right", "✓ (empty)")),
        *(("right", "✓ a"), ("right", "✓ a"), ("", "c"), ("", "c")),
    ]
    text = html.unescape(page)
    assert "<script" not in page and all(expected in text for expected in SEEN)
    assert rf">{SEEN[0]} nul" in text  # in the chart's legend
    assert not re.search("[\0-\x08\x0e-\x1f\u202a-\u202e\u2066-\u2069]", text)


def test_charts_have_their_names_and_numbers():
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=(2, 4))
    weights[0, 0, 0] = np.nan
    chart = heat_maps({"1.1": weights[0], "1.2": weights[1]}, x_label="key", y_label="query")
    assert chart.count(f">{weights[1, 2, 3]:.2f}</text>") >= 1 and "nan" not in chart
    assert ">1.1</text>" in chart and chart.count("<image") == 3  # two maps, a color bar
    chart = line_chart({"x" * 60: ([0, 1], [1, 2])}, x_label="step", y_label="loss")
    assert f">{'x' * 19}…{'x' * 20}</text>" in chart
