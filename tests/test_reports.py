"""The report is one self-contained page, and what comes from outside is escaped."""

import html.parser

import numpy as np

from synthesizer_jax.reports import Example, Report, RunReport, render, write_report


def made(word="<script>alert(1)</script>"):
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=(2, 4))
    run = RunReport(
        title=f"R+V {word}",
        parameters=1234567,
        cache_bytes=96,
        flops=5000,
        losses=([1, 2, 3], [3.0, 2.0, 1.0]),
        held_out=([3], [1.5]),
        steps_per_second=3.5,
        tokens_per_second=1000.0,
        metrics={"embedded_cola": 61.5},
        attention=[weights, weights],
        tables=[weights],
        predictions=[word],
    )
    return Report(
        title="Title",
        lead=word,
        runs=[run, run],
        baselines={"Majority": {"embedded_cola": 50.0}},
        metric_names={"embedded_cola": "accuracy"},
        counts={"embedded_cola": 500},
        examples=[Example("embedded_cola", word, "acceptable")],
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
    for text in ("1,234,567", "61.5", "50.0", "1,000"):
        assert text in page
