"""Writes the page about what the layers of a model have learned, and its numbers as JSON."""

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
"""The result of `inspect_run`, or its part for one layer."""

MORE_LOCAL = 1.25
"""The factor by which a local head has more weight near the query than equal weights would have."""

SHARP, STATIC, TOLERANCE = 0.25, 0.9, 0.01
"""Limits of shares.

A head is sharp if it uses a share of less than `SHARP` of the keys. It is static if positions
explain a share of at least `STATIC`. With tables in the place of heads, the loss may rise by a
share of `TOLERANCE`.
"""

MOST_LETTERS = 300
"""The number of characters of an example's text that the page shows."""

WIDTH, MAPS = 3.6, 4
"""The width of a figure of attention maps in inches, and the number of maps in one of its rows."""

DISTANCES = np.arange(-REACH, REACH + 1)
"""The distances from the query, in positions, at which profiles of heads are measured."""

OVERVIEW = {
    "keys used, %": "spread",
    f"within {NEAR} positions, %": "near",
    "explained by positions, %": "static",
    "rank of logits, %": "rank",
}
"""The tables of the section "Heads at a glance": their titles and the measures that they show."""

GLANCE = (
    "Keys used: exp(entropy) of a query’s weights over the number of keys that it sees, 100 if "
    "equal. Explained by positions: how much closer to a query’s weights than equal ones a table "
    "of mean weights comes, from other examples; 100 is a head that reads no tokens, below 0 one "
    "that no table describes. Rank: of the logits, without a shared position bias, over the "
    "largest possible; a head of width e has at most e (Bhojanapalli et al. 2020)."
)
NUMBERS = ("entropy", "spread", "near", "off_diagonal", "static", "rank")


def write_inspection(path: pathlib.Path, inspected: Inspected, *, title: str) -> pathlib.Path:
    """Writes the page about an inspected run, and a JSON file with its numbers.

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
    layers, example = inspected["layers"], [x for x in inspected["example"] if x]
    cut = (f"“{x[:MOST_LETTERS]}{'…' * (len(x) > MOST_LETTERS)}”" for x in example)
    parts: list[tuple[str, str, Iterator[Markup]]] = [
        ("Heads at a glance", GLANCE, _overview(layers)),
        (
            "Weights at the start and at the end",
            "How many pairs of query and key have which weight, all heads together, as in Tay et "
            "al. 2021; the bar at the left holds all smaller weights.",
            _histograms(layers),
        ),
        (
            "Mixtures",
            "The weight α of each part, and its mean over heads in the saved checkpoints.",
            _mixtures(inspected["mixtures"]),
        ),
        (
            "Where heads look",
            "Queries down, keys across: the mean over all examples by position, and one "
            f"example, {' → '.join(cut)}",
            _maps(layers),
        ),
        (
            "Distance from the query",
            "The share of the weight by key position − query position; the ends hold all beyond.",
            _distances(layers),
        ),
        (
            "How alike heads are",
            "The mean cosine of two heads’ weights of the same query, in percent.",
            _grids(
                {n: {"": layer["end"]["similarity"]} for n, layer in layers.items()}, "head", 100.0
            ),
        ),
        (
            "Talking heads",
            "P_l mixes logits, P_w weights, from the heads down to those across.",
            _grids(inspected["projections"], "to head", 1.0),
        ),
    ]
    sections = [
        Section(
            "Layer by layer",
            "How sharp, how local and how static each layer is; in brackets the range of its heads.",
            headings=("layer", "what it does"),
            rows=[(name, sentence(layer)) for name, layer in layers.items()],
            numbers=False,
        ),
        *(Section(name, text, _tiles(charts)) for name, text, charts in parts),
        *([] if inspected["static"] is None else [_static(inspected["static"])]),
        Section(
            "All numbers by head",
            "Entropy in nats, distances in positions. – is not defined: numbers of keys in a "
            "window, distances in cross-attention. The JSON file beside this page holds all that "
            "is drawn here.",
            headings=("layer, head", *(x.replace("_", " ") for x in NUMBERS)),
            rows=list(_rows(layers)),
            folded=True,
        ),
    ]
    shown = [section for section in sections if section.charts or section.rows]
    write_page(path, title=title, sentences=list(summary(inspected)), sections=shown)
    return numbers


def summary(inspected: Inspected) -> Iterator[str]:
    """Yields the sentences at the top of the page.

    They say how many heads are sharp, local and static, which layers have no attention weights, and
    which checkpoint and examples were measured.
    """
    end = {name: layer["end"] for name, layer in inspected["layers"].items()}
    if end:
        spread, static = (
            np.concatenate([m[x] for m in end.values()]) for x in ("spread", "static")
        )
        local = sum(_is_local(m, near) for m in end.values() for near in m["near"])
        names = [f"{name}.{i + 1}" for name, m in end.items() for i in range(len(m["spread"]))]
        yield (
            f"{len(names)} heads: {(spread < SHARP).sum()} sharp (less than {SHARP:.0%} of the "
            f"keys seen are used), {local} local (in self-attention, most of the weight is within "
            f"{NEAR} positions of the query, and more than equal weights have there), "
            f"{(static >= STATIC).sum()} static (positions alone explain at least {STATIC:.0%} of "
            "where the head looks)."
        )
        if np.isfinite(spread).any():
            sharpest = names[np.nanargmin(spread)]
            yield f"The sharpest is {sharpest}, which uses {np.nanmin(spread):.1%} of the keys."
        if np.isnan(spread).any():
            yield "Heads with a window are not counted as any of these."
    kinds: dict[str, list[str]] = {}
    for name, mixer in inspected["without"].items():
        kinds.setdefault(mixer, []).append(name)
    if kinds:
        which = "; ".join(f"{', '.join(names)} ({mixer})" for mixer, names in kinds.items())
        yield f"{'These layers have' if end else 'This model has'} no attention weights: {which}."
    yield (
        f"Step {inspected['step']:,}, over {inspected['examples']:,} examples of the evaluation "
        f"sets. The parameters at the start are {inspected['start']}."
    )


def sentence(layer: Inspected) -> str:
    """Returns a sentence that says how sharp, local and static a layer is."""
    m, said = layer["end"], []
    spread, near, off, static = (
        float(np.mean(m[name])) for name in ("spread", "near", "off_diagonal", "static")
    )
    if m["keys"] > 1 and math.isfinite(spread):
        sharp = "sharp" if spread < SHARP else "rather sharp" if spread < 0.6 else "diffuse"
        keys = f"{_share(m['spread'])} of the {m['keys']:.0f} keys it sees"
        said.append(f"{sharp}: a query uses {keys}")
    # If sequences are so short that most keys are near the query, no head can be called local.
    if m["near_of_equal"] <= 1 / MORE_LOCAL:
        said.append(
            f"{'local' if _is_local(m, near) else 'not local'}: {_share(m['near'])} of the weight "
            f"is within {NEAR} positions, {m['near_of_equal']:.0%} would be equal weights"
        )
    if math.isfinite(off):
        said.append(f"the largest weight is {off:.1f} off the diagonal")
    if math.isfinite(static):
        kind = (
            "static" if static >= STATIC else "partly static" if static >= 0.5 else "reads tokens"
        )
        where = _share(np.maximum(m["static"], 0))
        said.append(f"{kind}: positions explain {where} of where it looks")
    return f"{layer['mixer']}: {'; '.join(said)}."


def _is_local(m: Measures, near: float) -> bool:
    """Returns whether a head of a layer is local; `near` is its share of weight near the query."""
    return near >= 0.5 and near >= MORE_LOCAL * m["near_of_equal"]


def _share(values: np.ndarray) -> str:
    """Returns the mean of shares in percent and, if they differ, their range."""
    low, mean, high = (f"{100 * x:.0f}" for x in (values.min(), values.mean(), values.max()))
    return f"{mean}%" + (f" ({low} to {high})" if low != high else "")


def _overview(layers: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields a table of layers and heads for each stack and each measure of `OVERVIEW`."""
    for group in dict.fromkeys(map(_stack, layers)):
        measures = [layer["end"] for name, layer in layers.items() if _stack(name) == group]
        for title, field in OVERVIEW.items():
            # [layers, heads]; a layer with fewer heads than another has NaN in its last columns.
            grid = np.full((len(measures), max(len(m[field]) for m in measures)), np.nan)
            for i, m in enumerate(measures):
                grid[i, : len(m[field])] = m[field]
            if np.isfinite(grid).any():
                yield _grid(f"{group}: {title}", grid, x_label="head", y_label="layer")


def _stack(name: str) -> str:
    """Returns a layer's name without its number: ``decoder cross`` for ``decoder 1 cross``."""
    return " ".join(word for word in name.split() if not word.isdecimal())


def _histograms(layers: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields a chart for each layer, with histograms of its weights before and after training."""
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
    """Yields the weights of each mixture's parts by head, and a chart of their means by step."""
    for name, (parts, steps, alpha) in ((n, m.values()) for n, m in mixtures.items()):
        title = f"{name}: α, %"
        yield _grid(title, alpha[-1], columns=parts, x_label="part", y_label="head")
        lines = {part: (steps, [a[:, i].mean() for a in alpha]) for i, part in enumerate(parts)}
        yield _lines(f"{name}: α over time", lines, "step", "mean α")


def _grids(matrices: Mapping[str, Inspected], x_label: str, scale: float) -> Iterator[Markup]:
    """Yields a table for each matrix of each layer, whose rows are heads."""
    for name, of_layer in matrices.items():
        for title, x in of_layer.items():
            yield _grid(f"{name} {title}", x, scale=scale, x_label=x_label, y_label="head")


def _maps(layers: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields two figures for each layer: mean attention maps, and the maps of one example."""
    for name, layer in layers.items():
        yield _weight_maps(f"{name}, mean", layer["end"]["map"])
        yield _weight_maps(f"{name}, one example", layer["example"])


def _distances(layers: Mapping[str, Inspected]) -> Iterator[Markup]:
    """Yields a chart for each layer: the share of the weight by distance from the query."""
    for name, layer in layers.items():
        lines = {f"head {i + 1}": (DISTANCES, y) for i, y in enumerate(layer["end"]["profile"])}
        if np.isfinite(layer["end"]["profile"]).all():
            yield _lines(name, lines, "distance, tokens", "share of weight")


def _static(static: Inspected) -> Section:
    """Returns the section about static forms.

    It shows how far each static form is from each head, and the loss of the model when heads are
    replaced by tables.
    """
    heads, charts, said = static["divergences"], [], ""
    if numbers := static.get("replaced"):
        losses, equal = static["loss"], static["uniform_loss"]
        limit = (1.0 + TOLERANCE) * losses[0]
        # The index of the last loss before the first one above the limit. A NaN is above it, too.
        within = next((i for i, x in enumerate(losses) if not x <= limit), len(losses)) - 1
        said = (
            f"Of {len(heads)} heads, the {numbers[max(within, 0)]} most static can read a fitted "
            "table instead of tokens, without further training, for a loss of at most "
            f"{TOLERANCE:.0%} more. "
        )
        if equal <= limit:
            said += (
                "So can all with equal weights: the loss hardly depends on where these heads look; "
                "train longer. "
            )
        ends = numbers[0], numbers[-1]
        lines = {"tables": (numbers, losses), f"+{TOLERANCE:.0%}": (ends, [limit] * 2)}
        lines["equal weights"] = (ends, [equal] * 2)
        charts.append(_lines("tables", lines, "heads replaced", "loss, nats"))
    names = list(dict.fromkeys(name for kl in heads.values() for name in kl))
    return Section(
        "What static forms miss",
        f"{said}Each form, which reads no tokens, was fitted to each head on half of the examples, "
        "beside the model’s position bias: the mean Kullback–Leibler divergence of a query’s "
        f"weights on the other half, in nats. Where other forms beat the table ({TABLE}), it had "
        "too few --examples.",
        charts=_tiles(charts),
        headings=("head", *names),
        rows=[
            (f"{stack} {layer + 1}.{i + 1}", *(f"{kl.get(name, math.nan):.3f}" for name in names))
            for (stack, layer, i), kl in heads.items()
        ],
    )


def _tiles(charts: Iterable[Markup]) -> list[Markup]:
    """Returns all charts as one, in which they stand side by side, or below each other on a phone.

    Returns an empty list if there are no charts.
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
    """Shows a matrix as a table, multiplied by a scale; see `heat_maps`."""
    return heat_maps(
        {title: scale * values},
        x_label=x_label,
        y_label=y_label,
        columns=columns,
        number="{:.0f}" if scale == 100.0 else "{:.2f}",
    )


def _weight_maps(title: str, maps: np.ndarray) -> Markup:
    """Draws the attention maps of a layer, ``[heads, q, k]``.

    Queries are rows and keys are columns. The colors of each map range from 0 to its own largest
    weight.
    """
    rows, ratio = -(-len(maps) // MAPS), min(1.3, max(0.5, maps.shape[1] / maps.shape[2]))
    with drawing_style():
        height = 0.4 + rows * (0.22 + WIDTH / MAPS * ratio * 0.9)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle(short_label(title), fontsize=9.5, x=0.02, ha="left")
        for i, axes in enumerate(figure.subplots(rows, MAPS, squeeze=False).flat):
            axes.set(xticks=[], yticks=[])
            axes.axis("on" if i < len(maps) else "off")
            if i < len(maps):
                axes.imshow(maps[i], cmap="BuPu", vmin=0, aspect="auto", interpolation="nearest")
                axes.set_title(f"head {i + 1}", fontsize=7, pad=2)
        return to_svg(figure)


def _rows(layers: Mapping[str, Inspected]) -> Iterator[list[str]]:
    """Yields a row of a table for each head: its name and the measures in `NUMBERS`."""
    text = lambda x: "–" if math.isnan(x) else f"{x:.3g}"
    for name, layer in layers.items():
        m = layer["end"]
        for i in range(len(m["spread"])):
            yield [f"{name}.{i + 1}", *(text(m[x][i]) for x in NUMBERS)]
