"""The report is one self-contained page, says what is so, and escapes what comes from outside."""

import dataclasses
import html.parser
import re

import numpy as np
import pytest

from synthesizer_jax import files
from synthesizer_jax.cli import quickstart
from synthesizer_jax.reports import Answer, Example, Report, RunReport, page, render, write_report
from synthesizer_jax.reports.text import printable, shorten_label
from synthesizer_jax.tasks.synthetic import definitions


def made(word="<script>alert(1)</script>"):
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=(2, 4))
    run = RunReport(
        title=f"R+V {word}",
        parameters=1234567,
        cache_bytes=96,
        flops=5000,
        losses=([1, 2, 3], [3.0, 2.0, 1.0]),
        held_out=([3], [1.5]),
        steps_per_second=[3.0, 3.5, 9.0],
        tokens_per_second=[900.0, 1000.0, 1000.0],
        metrics={"synthetic_cola": 61.5},
        attention=[weights, weights],
        tables=[weights],
        answers=[Answer(word, False)],
    )
    return Report(
        title="Title",
        lead=word,
        runs=[run, dataclasses.replace(run, title=f"T {word}")],
        baselines={"Majority": {"synthetic_cola": 50.0}},
        metric_names={"synthetic_cola": "accuracy"},
        counts={"synthetic_cola": 500},
        examples=[Example("synthetic_cola", word, "acceptable")],
        tokens=["a", "b", "c", word],
        facts={"jax": word},
    )


def test_nothing_from_outside_becomes_markup():
    page = render(made())
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_page_is_whole_and_needs_nothing_else(tmp_path):
    path = tmp_path / "sub" / "report.html"
    write_report(path, made("word"))
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    page = path.read_text()

    class Reader(html.parser.HTMLParser):
        open_tags: list = []
        links: list = []

        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "html", "br"):
                self.open_tags.append(tag)
            wanted = ("src", "href", "xlink:href")
            self.links += [v for k, v in attributes if k in wanted]

        def handle_startendtag(self, tag, attributes):
            self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href")]

        def handle_endtag(self, tag):
            if tag != "html":
                assert self.open_tags.pop() == tag

    reader = Reader()
    reader.feed(page)
    assert reader.open_tags == []
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    assert page.count("<svg") == 2 + 2 * 2
    for text in ("1,234,567", "61.5", "50.0", "1,000 (950–1,000)", "3.5 (3.2–6.2)"):
        assert text in page


TEXTS = {
    r"$\frac{$": r"$\frac{$",
    "$x$ costs $5": "$x$ costs $5",
    "a\ud800b": r"a\ud800b",
    "nul\0 bell\a": r"nul\x00 bell\x07",
    "over\u202eride\u2066": r"over\u202eride\u2066",
    "two\nlines\tmore": "two lines more",
    "é 中 \U0001f600 שלום": "é 中 \U0001f600 שלום",
}


def test_every_character_is_seen_where_it_stands():
    for text, expected in TEXTS.items():
        assert printable(text) == expected


def test_any_text_is_shown_and_never_typeset(tmp_path):
    first, second, third, *words = TEXTS
    report = made(" ".join(TEXTS))
    runs = [
        dataclasses.replace(run, title=title, metrics=dict.fromkeys(words, 61.5))
        for run, title in zip(report.runs, (first, second), strict=True)
    ]
    report = dataclasses.replace(
        report,
        runs=runs,
        baselines={third: dict.fromkeys(words, 50.0)},
        metric_names=dict.fromkeys(words, "accuracy"),
        counts=dict.fromkeys(words, 9),
        tokens=words,
    )
    path = tmp_path / "report.html"
    write_report(path, report)
    text = html.unescape(path.read_text(encoding="utf-8"))
    for expected in TEXTS.values():  # in headings, tables, charts and their legends
        assert text.count(expected) > 5
        assert f">{expected}</text>" in text
    assert not re.search("[\0-\x08\x0e-\x1f\u202a-\u202e\u2066-\u2069]", text)


def test_long_names_keep_beginning_and_end_in_charts():
    assert (
        shorten_label("runs/" + "x" * 90 + "/seed_3")
        == "runs/" + "x" * 14 + "…" + "x" * 13 + "/seed_3"
    )
    assert shorten_label("x" * 17, 16) == "x" * 7 + "…" + "x" * 8
    assert shorten_label("x" * 16, 16) == "x" * 16


def test_a_page_that_cannot_be_written_leaves_nothing_and_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "render", lambda report: "new")
    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(path, None)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def compared(*values, baseline=50.0):
    """A report on tasks on which two runs reach these values."""
    report = made("word")
    names = [f"synthetic_t{i}" for i in range(len(values))]
    runs = [
        dataclasses.replace(
            run,
            title="AB"[i],
            metrics={n: pair[i] for n, pair in zip(names, values, strict=True)},
            parameters=(110, 100)[i],
            steps_per_second=([40.0], [50.0])[i],
        )
        for i, run in enumerate(report.runs)
    ]
    return dataclasses.replace(
        report,
        runs=runs,
        baselines={"Words": dict.fromkeys(names, baseline)},
        metric_names=dict.fromkeys(names, "accuracy"),
        counts=dict.fromkeys(names, 9),
    )


def section(report, title):
    """The section of the page with this heading, as HTML."""
    (found,) = (part for part in render(report).split("<section>") if f"<h2>{title}</h2>" in part)
    return found


def bold(report):
    """By task, the cells of its row that are bold."""
    rows = section(report, "Metrics on held-out examples").split("</tr>")[1:-1]
    return [re.findall(r'best">(.*?)<', row) for row in rows]


def test_the_best_is_bold_where_it_is_a_baseline_and_where_it_is_a_tie():
    assert bold(compared((80, 70), (40, 30), (60.04, 59.96), (50, 20))) == [
        ["80.0"],
        ["50.0"],
        ["60.0", "60.0"],
        ["50.0", "50.0"],
    ]
    missing = compared((float("nan"), 70))
    assert bold(missing) == [["70.0"]]
    assert ">–</td>" in section(missing, "Metrics on held-out examples")


def test_the_conclusion_is_made_of_the_numbers():
    report = compared((80, 70), (40, 30), (60, 60), (55, 65))
    assert page._summarize_comparison(report) == (
        "A is ahead on 2 of 4 tasks, B on 1, no model on 1; a baseline is better than the models on t1; "
        "A has 1.10 times the parameters of B and trained at 0.80 times its speed on this machine. "
        "Each run has one seed, so differences of a few points may be due to chance."
    )
    assert page._summarize_comparison(report) in render(report)


WSC = next(task for task in definitions.DEFINITIONS if task.name.endswith("wsc"))
COLA = next(task for task in definitions.DEFINITIONS if task.name.endswith("cola"))


def row(target, **more):
    return {"inputs_pretokenized": b"text", "targets_pretokenized": target.encode(), **more}


def test_a_referent_that_is_not_meant_is_shown_so_and_others_are_right():
    wrong = row("Emma", label=0)
    assert quickstart._report_example(quickstart._HeldOutRow(WSC, wrong)).answer == "not Emma"
    right = {said: WSC.is_right(said, wrong) for said in ("Jack", "Emma", "")}
    assert right == {"Jack": True, "Emma": False, "": False}
    meant = row("the king", label=1)
    assert quickstart._report_example(quickstart._HeldOutRow(WSC, meant)).answer == "the king"
    assert WSC.is_right("king", meant)
    assert (
        quickstart._report_example(quickstart._HeldOutRow(COLA, row("acceptable"))).answer
        == "acceptable"
    )
    assert not COLA.is_right("unacceptable", row("acceptable"))


def test_answers_are_colored_by_right_and_wrong_and_those_that_differ_stand_first():
    report = made("word")
    examples = [Example("t", "same", "a"), Example("t", "differs", "not b")]
    answers = [[Answer("a", True), Answer("c", True)], [Answer("a", True), Answer("", False)]]
    runs = [
        dataclasses.replace(run, answers=said)
        for run, said in zip(report.runs, answers, strict=True)
    ]
    text = section(dataclasses.replace(report, runs=runs, examples=examples), "Answers")
    assert text.index("differs") < text.index("same")
    assert re.findall(r'<td class="(right|wrong)">(.*?)<', text) == [
        *(("right", "c"), ("wrong", "(empty)"), ("right", "a"), ("right", "a"))
    ]


def test_every_token_is_a_label_and_every_row_has_a_color_bar():
    words = [f"w{i}" for i in range(24)]
    weights = np.random.default_rng(0).dirichlet(np.ones(24), size=(2, 24))
    rows = [("layer 1", weights), ("layer 2", weights)]
    chart = page.heat_maps(rows, tokens=words)
    for word in words:
        assert chart.count(f">{word}</text>") == 2 * (2 + 1)  # below each map, left of each row
    assert chart.count("rotate(-90)") >= 2 * 2 * 24
    assert chart.count("<image") == 2 * (2 + 1)


def test_whatever_is_wide_moves_inside_its_card():
    text = render(made("word"))
    assert text.count("<svg") == len(re.findall(r'<div class="scroll"><svg', text))
    assert text.count("<table") == len(re.findall(r'<div class="scroll"><table', text))
    assert "overflow-wrap: anywhere" not in text
