"""Writes a page and a JSON file about what the layers of a model have learned."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from synthesizer_jax.base.files import write_atomic
from synthesizer_jax.base.registry import plain_json
from synthesizer_jax.inspection.measures import EDGES, NEAR, REACH, Measures
from synthesizer_jax.inspection.static_attention import TABLE
from synthesizer_jax.reports.figures import (
    Line,
    Section,
    drawing_style,
    heat_maps,
    line_chart,
    short_label,
    to_svg,
    write_page,
)

Inspected: TypeAlias = Mapping[str, Any]
"""The type of the result of `inspect_run`, or of the part of the result for one layer."""

MORE_LOCAL = 1.25
"""A local head has near the query at least this many times the weight that equal weights have."""

SHARP, STATIC, TOLERANCE = 0.25, 0.9, 0.01
"""The limits for calling a head sharp or static, and for the increase of the loss.

A head is sharp if it uses less than the share `SHARP` of the keys. A head is static if positions
explain at least the share `STATIC` of the head's divergence from equal weights. If tables replace
heads, the loss may rise by the share `TOLERANCE`.
"""

MOST_LETTERS = 300
"""The number of characters of an example's text that the page shows."""

WIDTH, MAPS = 3.6, 4
"""The width of a figure of attention maps in inches, and the number of maps in each row."""

DISTANCES = np.arange(-REACH, REACH + 1)
"""The distances from the query, in positions, at which profiles of heads are measured."""

OVERVIEW = {
    "keys used, %": "spread",
    f"within {NEAR} positions, %": "near",
    "explained by positions, %": "static",
    "rank of logits, %": "rank",
}
"""Maps the titles of the tables in the section "Heads at a glance" to the measures shown."""

GLANCE = (
    "Keys used: exp(entropy) of a query’s weights, divided by the number of keys that the query "
    "sees. It is 100 if all weights are equal. "
    f"Within {NEAR} positions: the weight of the keys that are at most {NEAR} positions from the "
    "query. "
    "Explained by positions: how much closer to a query’s weights a table of mean weights is than "
    "equal weights are. The table was made from other examples. The value is 100 for a head that "
    "does not depend on tokens, and negative for a head that no table describes. "
    "Rank: the rank of the logits, without a shared position bias, divided by the largest possible "
    "rank. A head of width e has a rank of at most e (Bhojanapalli et al. 2020)."
)
"""The text of the section "Heads at a glance"."""

NUMBERS = ("entropy", "spread", "near", "off_diagonal", "static", "rank")
"""The names of the measures in the table of all heads."""


def write_inspection(path: pathlib.Path, inspected: Inspected, *, title: str) -> pathlib.Path:
    """Writes the page about an inspected run, and a JSON file with the numbers of the page.

    Args:
      path: the HTML file to write.
      inspected: the result of `inspect_run`.
      title: the title of the page.

    Returns:
      The path of the JSON file, which has the name of the page with the suffix ``.json``.
    """
    axes = {"histogram_edges": EDGES, "profile_distances": DISTANCES}
    text = json.dumps(plain_json({"title": title, **axes, **inspected}, digits=4), allow_nan=False)
    numbers = write_atomic(path.with_suffix(".json"), text + "\n")
    shown = [section for section in _sections(inspected) if section.charts or section.rows]
    write_page(path, title=title, sentences=list(summary(inspected)), sections=shown)
    return numbers


def _sections(inspected: Inspected) -> Iterator[Section]:
    """Yields the sections of the page. A section may have neither charts nor rows."""
    layers = inspected["layers"]
    yield Section(
        "Layer by layer",
        "How sharp, local and static each layer is. The range over its heads is in parentheses.",
        headings=("layer", "what it does"),
        rows=[(name, sentences_about(layer)) for name, layer in layers.items()],
        numbers=False,
    )
    yield Section("Heads at a glance", GLANCE, _tiles(_overview(layers)))
    yield Section(
        "Weights at the start and at the end",
        "The share of the pairs of a query and a key that have a given weight, for all heads "
        "together, as in Tay et al. (2021). The first point includes all smaller weights.",
        _tiles(_histograms(layers)),
    )
    yield Section(
        "Mixtures",
        "The weight α of each part, and its mean over heads in every saved checkpoint.",
        _tiles(_mixtures(inspected["mixtures"])),
    )
    texts = [
        f"“{text[:MOST_LETTERS]}…”" if len(text) > MOST_LETTERS else f"“{text}”"
        for text in inspected["example"]
        if text
    ]
    yield Section(
        "Where heads look",
        "Rows are queries and columns are keys. The first figure of a layer is the mean over all "
        f"examples by position, and the second is for one example: {' → '.join(texts)}",
        _tiles(_maps(layers)),
    )
    yield Section(
        "Distance from the query",
        "The share of the weight by the position of the key minus the position of the query. The "
        "values at the ends include all larger distances.",
        _tiles(_distances(layers)),
    )
    similarities = {name: {"": layer["end"]["similarity"]} for name, layer in layers.items()}
    yield Section(
        "How alike heads are",
        "The cosine similarity of the weights of two heads for the same query, averaged over "
        "queries, in percent.",
        _tiles(_grids(similarities, "head", 100.0)),
    )
    yield Section(
        "Talking heads",
        "P_l mixes the logits of heads, and P_w mixes their weights. Rows are the heads before the "
        "mixing, and columns are the heads after it.",
        _tiles(_grids(inspected["projections"], "to head", 1.0)),
    )
    if inspected["static"] is not None:
        yield _static(inspected["static"])
    yield Section(
        "All numbers by head",
        "Entropies are in nats, and distances are in positions. The sign – means that a measure is "
        "not defined: numbers of keys in a window, and distances in cross-attention. The JSON file "
        "beside this page contains all numbers that are drawn here.",
        headings=("layer, head", *(x.replace("_", " ") for x in NUMBERS)),
        rows=list(_rows(layers)),
        folded=True,
    )


def summary(inspected: Inspected) -> Iterator[str]:
    """Yields the sentences at the top of the page.

    The sentences say how many heads are sharp, local and static, which layers have no attention
    weights, and which checkpoint and examples were measured.
    """
    measures = {name: layer["end"] for name, layer in inspected["layers"].items()}
    if measures:
        yield from _summary_of_heads(measures)
    kinds: dict[str, list[str]] = {}
    for name, mixer in inspected["without"].items():
        kinds.setdefault(mixer, []).append(name)
    if kinds:
        subject = "These layers have" if measures else "This model has"
        which = "; ".join(f"{', '.join(names)} ({mixer})" for mixer, names in kinds.items())
        yield f"{subject} no attention weights: {which}."
    yield (
        f"The checkpoint of step {inspected['step']:,} was measured on {inspected['examples']:,} "
        f"examples of the evaluation sets. The parameters at the start are {inspected['start']}."
    )


def _summary_of_heads(measures: Mapping[str, Measures]) -> Iterator[str]:
    """Yields the sentences about how many heads are sharp, local and static.

    Args:
      measures: the result of `measure` for each layer, by the name of the layer.
    """
    spread = np.concatenate([m["spread"] for m in measures.values()])
    static = np.concatenate([m["static"] for m in measures.values()])
    num_local = sum(_is_local(m, near) for m in measures.values() for near in m["near"])
    yield (
        f"{len(spread)} heads: {(spread < SHARP).sum()} sharp, {num_local} local, "
        f"{(static >= STATIC).sum()} static."
    )
    yield (
        f"A head is sharp if its queries use less than {SHARP:.0%} of the keys that they see. It "
        "is local if, in self-attention, at least half of its weight is within "
        f"{NEAR} positions of the query, and at least {MORE_LOCAL} times what equal weights would "
        "have there. It is "
        f"static if positions alone explain at least {STATIC:.0%} of where it looks."
    )
    if np.isfinite(spread).any():
        heads = [f"{name}.{i + 1}" for name, m in measures.items() for i in range(len(m["spread"]))]
        sharpest = heads[np.nanargmin(spread)]
        yield f"The sharpest head is {sharpest}, which uses {np.nanmin(spread):.1%} of the keys."
    if np.isnan(spread).any():
        yield "Heads with a window are not counted as any of these."


def sentences_about(layer: Inspected) -> str:
    """Returns sentences that say how sharp, local and static a layer is."""
    m = layer["end"]
    spread, near, off_diagonal, static = (
        float(np.mean(m[name])) for name in ("spread", "near", "off_diagonal", "static")
    )
    said = [f"{layer['mixer']}."]
    if m["keys"] > 1 and math.isfinite(spread):
        kind = "sharp" if spread < SHARP else "rather sharp" if spread < 0.6 else "diffuse"
        said.append(
            f"It is {kind}: a query uses {_share(m['spread'])} of the {m['keys']:.0f} keys that it "
            "sees."
        )
    # If sequences are so short that most keys are near the query, no head can be called local.
    if m["near_of_equal"] <= 1 / MORE_LOCAL:
        kind = "local" if _is_local(m, near) else "not local"
        said.append(
            f"It is {kind}: {_share(m['near'])} of the weight is within {NEAR} positions. With "
            f"equal weights, it would be {m['near_of_equal']:.0%}."
        )
    if math.isfinite(off_diagonal):
        said.append(
            f"The largest weight is {off_diagonal:.1f} positions off the diagonal on average."
        )
    if math.isfinite(static):
        kind = "It reads tokens"
        if static >= 0.5:
            kind = "It is static" if static >= STATIC else "It is partly static"
        where = _share(np.maximum(m["static"], 0))
        said.append(f"{kind}: positions explain {where} of where it looks.")
    return " ".join(said)


def _is_local(m: Measures, near: float) -> bool:
    """Returns whether a head is local if the share `near` of its weight is near the query."""
    return near >= 0.5 and near >= MORE_LOCAL * m["near_of_equal"]


def _share(values: np.ndarray) -> str:
    """Returns the mean of shares in percent, followed by the range of the shares if they differ."""
    low, mean, high = (f"{100 * x:.0f}" for x in (values.min(), values.mean(), values.max()))
    return f"{mean}%" + (f" ({low} to {high})" if low != high else "")


def _overview(layers: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields a table of layers and heads for each stack and each measure of `OVERVIEW`."""
    for group in dict.fromkeys(map(_stack, layers)):
        measures = [layer["end"] for name, layer in layers.items() if _stack(name) == group]
        for title, field in OVERVIEW.items():
            # `grid` has the shape [layers, heads]. If a layer has fewer heads than another layer,
            # the last columns of the layer's row are NaN.
            grid = np.full((len(measures), max(len(m[field]) for m in measures)), np.nan)
            for i, m in enumerate(measures):
                grid[i, : len(m[field])] = m[field]
            if np.isfinite(grid).any():
                yield _grid(f"{group}: {title}", grid, x_label="head", y_label="layer")


def _stack(name: str) -> str:
    """Returns the name of a layer without its number, such as ``decoder cross``."""
    return " ".join(word for word in name.split() if not word.isdecimal())


def _histograms(layers: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields a chart for each layer, with histograms of the weights before and after training."""
    # The weight axis is logarithmic, so the center of a bin is the geometric mean of its edges.
    centers = np.sqrt(EDGES[1:] * EDGES[:-1])
    for name, layer in layers.items():
        both = {which: layer[which] for which in ("start", "end") if layer[which]}
        lines = {which: (centers, 100 * m["histogram"].mean(0)) for which, m in both.items()}
        if np.isfinite(layer["end"]["histogram"]).all():
            yield line_chart(
                lines,
                title=name,
                x_label="weight",
                y_label="% of pairs",
                logarithmic=False,
                logarithmic_x=True,
            )


def _mixtures(mixtures: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields the weights of a mixture's parts by head, and a chart of the mean weights by step."""
    for name, mixture in mixtures.items():
        parts, steps, alpha = mixture["parts"], mixture["steps"], mixture["alpha"]
        yield _grid(f"{name}: α, %", alpha[-1], columns=parts, x_label="part", y_label="head")
        lines = {part: (steps, [a[:, i].mean() for a in alpha]) for i, part in enumerate(parts)}
        yield _lines(f"{name}: α over time", lines, "step", "mean α")


def _grids(matrices: Mapping[str, Inspected], x_label: str, scale: float) -> Iterator[Markup]:
    """Yields a table for each matrix of each layer. The rows of the tables are heads."""
    for name, of_layer in matrices.items():
        for title, x in of_layer.items():
            yield _grid(f"{name} {title}", x, scale=scale, x_label=x_label, y_label="head")


def _maps(layers: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields a figure of mean attention maps and a figure of one example's maps for each layer."""
    for name, layer in layers.items():
        yield _weight_maps(f"{name}, mean", layer["end"]["map"])
        yield _weight_maps(f"{name}, one example", layer["example"])


def _distances(layers: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields a chart for each layer, of the share of the weight at each distance from the query."""
    for name, layer in layers.items():
        lines = {f"head {i + 1}": (DISTANCES, y) for i, y in enumerate(layer["end"]["profile"])}
        if np.isfinite(layer["end"]["profile"]).all():
            yield _lines(name, lines, "distance, tokens", "share of weight")


def _static(static: Inspected) -> Section:
    """Returns the section about static forms.

    The section shows how far each static form is from each head, and the loss of the model if heads
    are replaced by tables.
    """
    heads = static["divergences"]
    charts = []
    said = ""
    if "replaced" in static:
        numbers, losses, equal = static["replaced"], static["loss"], static["uniform_loss"]
        limit = (1.0 + TOLERANCE) * losses[0]
        # Find the index of the last loss before the first loss above the limit. A loss of NaN is
        # treated as above the limit.
        within = next((i for i, x in enumerate(losses) if not x <= limit), len(losses)) - 1
        said = (
            f"The {numbers[max(within, 0)]} most static of {len(heads)} heads can read a fitted "
            "table instead of tokens, without further training, and the loss rises by at most "
            f"{TOLERANCE:.0%}. "
        )
        if equal <= limit:
            said += (
                "The loss rises as little if all heads have equal weights, so it hardly depends on "
                "where these heads look. Train longer. "
            )
        ends = (numbers[0], numbers[-1])
        lines = {
            "tables": (numbers, losses),
            f"+{TOLERANCE:.0%}": (ends, [limit] * 2),
            "equal weights": (ends, [equal] * 2),
        }
        charts.append(_lines("tables", lines, "heads replaced", "loss, nats"))
    names = list(dict.fromkeys(name for kl in heads.values() for name in kl))
    return Section(
        "What static forms miss",
        f"{said}The forms do not depend on tokens. Each was fitted to each head on one half of the "
        "examples, in addition to the model’s position bias. The table shows the mean "
        "Kullback–Leibler divergence of a query’s weights on the other half, in nats. If another "
        f"form is better than {TABLE}, which can express all others, use more --examples.",
        charts=_tiles(charts),
        headings=("head", *names),
        rows=[
            (f"{stack} {layer + 1}.{i + 1}", *(f"{kl.get(name, math.nan):.3f}" for name in names))
            for (stack, layer, i), kl in heads.items()
        ],
    )


def _tiles(charts: Iterable[Markup]) -> list[Markup]:
    """Arranges charts side by side or, on a phone, in a column.

    The result is an empty list if there are no charts.
    """
    inner = Markup("\n").join(map(Markup("<div>{}</div>").format, charts))
    return [Markup('<div class="tiles">\n{}\n</div>').format(inner)] if inner else []


def _lines(title: str, lines: Mapping[str, Line], x_label: str, y_label: str) -> Markup:
    """Draws lines, with markers on lines that have fewer than eight points."""
    few = {name: line for name, line in lines.items() if len(line[0]) < 8}
    return line_chart(
        lines, points=few, x_label=x_label, y_label=y_label, title=title, logarithmic=False
    )


def _grid(
    title: str,
    values: np.ndarray,
    *,
    x_label: str,
    y_label: str,
    scale: float = 100.0,
    columns: Sequence[str] = (),
) -> Markup:
    """Multiplies a matrix by a scale, and shows the product as a table; see `heat_maps`."""
    return heat_maps(
        {title: scale * values},
        x_label=x_label,
        y_label=y_label,
        columns=columns,
        number="{:.0f}" if scale == 100.0 else "{:.2f}",
    )


def _weight_maps(title: str, maps: np.ndarray) -> Markup:
    """Draws the attention maps of a layer, ``[heads, q, k]``.

    Queries are rows and keys are columns. The colors of a map range from 0 to the largest weight of
    the map.
    """
    rows = -(-len(maps) // MAPS)
    # `ratio` is the height of a map divided by the width of the map. Maps that are very high or
    # very flat are stretched.
    ratio = min(1.3, max(0.5, maps.shape[1] / maps.shape[2]))
    with drawing_style():
        height = 0.4 + rows * (0.22 + WIDTH / MAPS * ratio * 0.9)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle(short_label(title), fontsize=9.5, x=0.02, ha="left")
        for i, axes in enumerate(figure.subplots(rows, MAPS, squeeze=False).flat):
            axes.set(xticks=[], yticks=[])
            if i >= len(maps):
                axes.axis("off")  # the last row of a figure may have fewer maps than the other rows
                continue
            axes.imshow(maps[i], cmap="BuPu", vmin=0, aspect="auto", interpolation="nearest")
            axes.set_title(f"head {i + 1}", fontsize=7, pad=2)
        return to_svg(figure)


def _rows(layers: Mapping[str, Inspected]) -> Iterator[list[str]]:
    """Yields a row of a table for each head, with the head's name and the measures in `NUMBERS`."""
    for name, layer in layers.items():
        measures = layer["end"]
        for i in range(len(measures["spread"])):
            values = [measures[measure][i] for measure in NUMBERS]
            yield [f"{name}.{i + 1}", *("–" if math.isnan(x) else f"{x:.3g}" for x in values)]
