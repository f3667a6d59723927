"""Pages are self-contained, say what is so, and escape what comes from outside."""

import dataclasses
import html.parser
import re

import numpy as np
import pytest

from synthesizer_jax.costs.summary import Summary
from synthesizer_jax.reports.figures import heat_maps, line_chart
from synthesizer_jax.reports.page import RunSummary, compare, write_report

ODD = [
    r"$\frac{$",
    "nul\0 bell\a",
    "over\u202eride\u2066",
    "é 中 \U0001f600 שלום",
    "<script>x</script>",
]
SEEN = [r"$\frac{$", r"nul\x00 bell\x07", r"over\u202eride\u2066", *ODD[3:]]


def made(title="A", **metrics):
    answer = {"input": "same", "target": "a", "prediction": "a", "label": 0, "target_label": 0}
    wrong = answer | {"input": "differs", "prediction": "", "label": -1 if title == "A" else 0}
    free = {"input": "free", "target": "b", "prediction": "c"}
    fields = {field.name: 96 for field in dataclasses.fields(Summary)}
    return RunSummary(
        title=title,
        costs=Summary(**fields | {"parameters": 110 if title == "A" else 100}),
        losses=([1, 2, 3], [3.0, 2.0, 1.0]),
        held_out=([3], [1.5]),
        steps_per_second=[40.0] if title == "A" else [50.0],
        tokens_per_second=[900.0, 1000.0, 1000.0],
        metric_names=dict.fromkeys(metrics, "accuracy"),
        metrics=metrics,
        answers={"t0": {a["input"]: a for a in (answer, wrong, free)}},
    )


@pytest.fixture
def written(tmp_path):
    def write(*runs, title="Title"):
        write_report(tmp_path / "sub" / "page.html", runs, title=title)
        assert [p.name for p in (tmp_path / "sub").iterdir()] == ["page.html"]
        return (tmp_path / "sub" / "page.html").read_text(encoding="utf-8")

    return write


def test_the_page_is_whole_and_needs_nothing_else(written):
    page = written(made("A", t0=61.5), made("B", t0=50.0))
    opened, links = [], []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "html"):
                opened.append(tag)
            links.extend(v for k, v in attributes if k in ("src", "href", "xlink:href"))

        def handle_startendtag(self, tag, attributes):
            links.extend(v for k, v in attributes if k in ("src", "href", "xlink:href"))

        def handle_endtag(self, tag):
            if tag != "html":
                assert opened.pop() == tag

    Reader().feed(page)
    assert opened == []
    assert all(link.startswith(("#", "data:")) for link in links)
    assert page.count("<svg") == 1
    for text in (
        "110",
        "61.5",
        "1,000 (950–1,000)",
        compare([made("A", t0=61.5), made("B", t0=50.0)]),
    ):
        assert text in page


def test_any_text_is_shown_and_never_markup_or_typeset(written):
    title = " ".join(ODD)
    page = written(made(title, **{title: 1.0}), made(title[:30]), title=title)
    assert "<script" not in page
    text = html.unescape(page)
    for expected in SEEN:
        assert expected in text
    assert rf">{SEEN[0]} nul" in text  # in the chart's legend
    assert not re.search("[\0-\x08\x0e-\x1f\u202a-\u202e\u2066-\u2069]", text)


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ((80.0, 70.0), [(" best", "80.0"), ("", "70.0")]),
        ((60.04, 59.96), [(" best", "60.0"), (" best", "60.0")]),
        ((float("nan"), 70.0), [("", "–"), (" best", "70.0")]),
    ],
)
def test_the_best_is_bold_as_it_is_shown(written, values, cells):
    page = written(made("A", t0=values[0]), made("B", t0=values[1]))
    assert re.findall(r'<td class="number( best)?">([\d.–]+)</td>', page)[:2] == cells


def test_the_conclusion_is_made_of_the_numbers():
    first, second = made("A", t0=80, t1=40, t2=60, t3=55), made("B", t0=70, t1=30, t2=60, t3=65)
    assert compare([first, second]) == (
        "A is ahead on 2 of 4 tasks, B on 1, no run on 1; "
        "A has 1.10 times the parameters of B and trained at 0.80 times its speed on this machine. "
        "Each run has one seed, so differences of a few points may be due to chance."
    )


def test_answers_that_differ_stand_first_and_are_marked_where_labels_are_compared(written):
    page = written(made("A", t0=1.0), made("B", t0=1.0))
    assert page.index("differs") < page.index("same")
    assert re.findall(r'<td class="(right|wrong|)">(.*?)</td>', page) == [
        *(("wrong", "✗ (empty)"), ("right", "✓ (empty)")),
        *(("right", "✓ a"), ("right", "✓ a"), ("", "c"), ("", "c")),
    ]


def test_charts_have_their_names_and_numbers():
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=(2, 4))
    weights[0, 0, 0] = np.nan
    chart = heat_maps(
        {"mean": weights}, ["1.1", "1.2"], x_label="key", y_label="query", numbers=True
    )
    assert chart.count(f">{weights[1, 2, 3]:.2f}</text>") >= 1 and "nan" not in chart
    assert ">mean 1.1</text>" in chart and chart.count("<image") == 3  # two maps, a color bar
    chart = line_chart({"x" * 60: ([0, 1], [1, 2])}, x_label="step", y_label="loss")
    assert f">{'x' * 19}…{'x' * 20}</text>" in chart
