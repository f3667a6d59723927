"""The page about what the layers of a model have learned, and its numbers as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from synthesizer_jax.files import write_atomic
from synthesizer_jax.inspection.measures import EDGES, NEAR, REACH, Measures
from synthesizer_jax.inspection.run import Inspection, LayerInspection
from synthesizer_jax.registry import JSON
from synthesizer_jax.reports.attention_figures import number_grid, small_lines, tiles, weight_maps
from synthesizer_jax.reports.figures import Section, write_page
from synthesizer_jax.reports.static_attention import static_sections

OVERVIEW = {
    "keys used, %": "spread",
    f"within {NEAR} positions, %": "near",
    "explained by positions, %": "static",
    "largest weight, %": "peak",
    "rank of logits, %": "rank",
    "effective rank, %": "effective_rank",
}
HEADINGS = (
    *("layer, head", "entropy", "keys used", "largest", "near", "distance", "off diagonal"),
    *("static", "rank", "eff. rank", "st. deviation", "skewness", "kurtosis"),
    *("st. deviation before", "skewness before", "kurtosis before"),
)
SHARP, STATIC = 0.25, 0.9
"""The shares below and from which heads are called so."""

MOST_LETTERS = 300
"""Of an example's text."""


def write_inspection(path: pathlib.Path, found: Inspection, *, title: str) -> pathlib.Path:
    """Writes the page, and the numbers beside it as ``.json``, whose path is returned."""
    numbers = path.with_suffix(".json")
    edges = {"histogram_edges": EDGES, "profile_distances": np.arange(-REACH, REACH + 1)}
    text = json.dumps(_plain({"title": title, **edges, **vars(found)}), allow_nan=False)
    write_atomic(numbers, text + "\n")
    sections = [section for section in _sections(found) if section.charts or section.rows]
    if not found.static:
        sections.append(Section("Static forms", found.static_problem))
    write_page(path, title=title, sentences=list(summary(found)), sections=sections)
    return numbers


def summary(found: Inspection) -> Iterator[str]:
    """Yields sentences: how many heads are sharp, local and static, and what has no attention."""
    end = {name: layer.end for name, layer in found.layers.items()}
    if end:
        spread, static = (
            np.concatenate([getattr(m, field) for m in end.values()])
            for field in ("spread", "static")
        )
        local = sum(int(_is_local(m, m.near).sum()) for m in end.values())
        names = [f"{name}.{i + 1}" for name, m in end.items() for i in range(len(m.spread))]
        yield (
            f"Of {len(names)} heads, {(spread < SHARP).sum()} are sharp (they use less than {SHARP:.0%} of "
            f"the keys that they see), {local} are local (most of their weight is within {NEAR} positions "
            f"of the query, and more than equal weights have there), and {(static >= STATIC).sum()} are "
            f"static (positions alone explain at least {STATIC:.0%} of where they look). The sharpest is "
            f"{names[spread.argmin()]}, which uses {spread.min():.1%} of the keys."
        )
    if found.without:
        kinds: dict[str, list[str]] = {}
        for name, mixer in found.without.items():
            kinds.setdefault(mixer, []).append(name)
        which = "; ".join(f"{', '.join(names)} ({mixer})" for mixer, names in kinds.items())
        yield f"{'These layers have' if end else 'This model has'} no attention weights: {which}."
    yield (
        f"Step {found.step:,}, over {found.examples:,} examples of the evaluation sets. Parameters at the "
        f"start: {found.start[0].lower()}{found.start[1:]}."
    )


def _sections(found: Inspection) -> Iterator[Section]:
    layers = found.layers
    yield Section(
        "Layer by layer",
        "How sharp, how local and how static each layer is; in brackets its heads, from the lowest to the "
        "highest.",
        headings=("layer", "what it does"),
        rows=[(name, sentence(layer)) for name, layer in layers.items()],
        numbers=False,
    )
    yield Section(
        "Heads at a glance",
        "Keys used: exp(entropy) of a query’s weights over the number of keys that it sees; 100 is equal "
        "weights. Explained by positions: how much closer than equal weights a table of mean weights, from "
        "other examples, comes to a query’s weights; 100 is a head that reads no tokens, below 0 is one "
        "that no table describes. Rank: of the logits’ matrix, without a shared position bias, as a share "
        "of the largest possible; a head of width e has at most e (Bhojanapalli et al. 2020).",
        charts=tiles(_overview(layers)),
    )
    yield Section(
        "Weights at the start and at the end",
        "How many pairs of query and key have which weight, all heads together, as in Tay et al. 2021; the "
        "last bars at the left hold all smaller weights. The table at the end has the moments by head.",
        charts=tiles(map(_histogram, layers, layers.values())),
    )
    yield Section(
        "Mixtures",
        "The weight α of each part of a mixture, and its mean over heads in the saved checkpoints.",
        charts=tiles(_mixtures(found)),
    )
    texts = [f"“{t[:MOST_LETTERS]}{'…' * (len(t) > MOST_LETTERS)}”" for t in found.example if t]
    yield Section(
        "Where heads look",
        "Queries down, keys across, darker is more. First the mean over all examples, by position, then "
        f"one example: {' → '.join(texts)}",
        charts=tiles(
            weight_maps(f"{name}, {which}", maps)
            for name, layer in layers.items()
            for which, maps in (("mean", layer.end.map), ("one example", layer.example))
        ),
    )
    distances = np.arange(-REACH, REACH + 1)
    yield Section(
        "Distance from the query",
        "The share of the weight by key position − query position; the ends hold everything beyond.",
        charts=tiles(
            small_lines(
                name,
                {f"head {i + 1}": (distances, y) for i, y in enumerate(layer.end.profile)},
                x_label="distance, tokens",
                y_label="share of weight",
            )
            for name, layer in layers.items()
            if np.isfinite(layer.end.profile).all()
        ),
    )
    yield Section(
        "How alike heads are",
        "The mean cosine of two heads’ weights of the same query, in percent.",
        charts=tiles(
            number_grid(name, layer.end.similarity, x_label="head", y_label="head")
            for name, layer in layers.items()
            if len(layer.end.similarity) > 1
        ),
    )
    yield Section(
        "Talking heads",
        "P_l mixes the heads’ logits, P_w their weights; from the heads down to the heads across.",
        charts=tiles(
            number_grid(f"{name}, {p}", x, x_label="to head", y_label="from head", percent=False)
            for name, matrices in found.projections.items()
            for p, x in matrices.items()
        ),
    )
    yield _quality(found)
    if found.static:
        yield from static_sections(found.static)
    yield Section(
        "All numbers by head",
        "Entropy in nats; near, keys used, static and ranks as shares; distances in tokens; the moments of "
        "the weights of all pairs, the last three before training. The JSON file beside this page holds "
        "them and all that is drawn here.",
        headings=HEADINGS,
        rows=list(_rows(layers)),
        folded=True,
    )


def sentence(layer: LayerInspection) -> str:
    """Returns how sharp, local and static a layer is."""
    m = layer.end
    spread, near, static = (float(np.mean(x)) for x in (m.spread, m.near, m.static))
    sharp = "Sharp" if spread < SHARP else "Rather sharp" if spread < 0.6 else "Diffuse"
    said = [
        f"{layer.mixer}. {sharp}: a query uses {_share(m.spread)} of the {m.keys:.0f} keys that it sees"
    ]
    if math.isfinite(near):
        local = "local" if _is_local(m, near) else "not local"
        said.append(
            f"{local}: {_share(m.near)} of the weight is within {NEAR} positions, {m.near_of_equal:.0%} "
            f"would be equal weights, and the largest is {m.off_diagonal.mean():.1f} off the diagonal"
        )
    if math.isfinite(static):
        kind = (
            "static" if static >= STATIC else "partly static" if static >= 0.5 else "reads tokens"
        )
        said.append(
            f"{kind}: positions explain {_share(np.maximum(m.static, 0))} of where it looks"
        )
    return "; ".join(said) + "."


def _is_local(m: Measures, near: np.ndarray | float) -> np.ndarray | np.bool:
    """Whether most of the weight is near its query, and clearly more than of equal weights."""
    return (np.asarray(near) >= 0.5) & (np.asarray(near) >= 1.25 * m.near_of_equal)


def _share(values: np.ndarray) -> str:
    """Returns the mean of shares and, unless they are alike, their range."""
    low, mean, high = (f"{100 * x:.0f}" for x in (values.min(), values.mean(), values.max()))
    return f"{mean}%" + (f" ({low} to {high})" if low != high else "")


def _groups(layers: Mapping[str, LayerInspection]) -> dict[str, list[LayerInspection]]:
    """Returns layers by stack and kind, of the same number of heads each."""
    groups: dict[str, list[LayerInspection]] = {}
    for name, layer in layers.items():
        stack, _, cross = (*name.split(), "")[:3]
        groups.setdefault(f"{stack} {cross}".strip(), []).append(layer)
    return groups


def _overview(layers: Mapping[str, LayerInspection]) -> Iterator[Markup]:
    for group, own in _groups(layers).items():
        for title, field in OVERVIEW.items():
            values = [getattr(layer if "rank" in field else layer.end, field) for layer in own]
            grid = np.full((len(own), max(map(len, values))), np.nan)
            for i, row in enumerate(values):
                grid[i, : len(row)] = row
            if np.isfinite(grid).any():
                yield number_grid(f"{group}: {title}", grid, x_label="head", y_label="layer")


def _histogram(name: str, layer: LayerInspection) -> Markup:
    centers = np.sqrt(EDGES[1:] * EDGES[:-1])
    both = {"start": layer.start, "end": layer.end}
    lines = {which: (centers, 100 * m.histogram.mean(0)) for which, m in both.items() if m}
    return small_lines(
        *(name, lines),
        x_label="weight",
        y_label="% of pairs",
        logarithmic=True,
        steps=True,
    )


def _mixtures(found: Inspection) -> Iterator[Markup]:
    for name, (parts, steps, alpha) in found.mixtures.items():
        names = {"columns": [part.replace("Random", "Rand.") for part in parts]}
        yield number_grid(f"{name}: α, %", alpha[-1], x_label="part", y_label="head", **names)
        if len(steps) > 1:
            lines = {part: (steps, alpha[:, :, i].mean(1)) for i, part in enumerate(parts)}
            yield small_lines(f"{name}: α over time", lines, x_label="step", y_label="mean α")


def _quality(found: Inspection) -> Section:
    charts, rows = [], []
    for task in dict.fromkeys(part.task for part in found.quality):
        own = [part for part in found.quality if part.task == task]
        middles = [(part.shortest + part.longest) / 2 for part in own]
        lines = {
            name: (middles, [part.metrics.get(name, math.nan) for part in own])
            for name in own[0].metrics
        }
        if lines and len(own) > 1:
            charts.append(small_lines(task, lines, x_label="tokens", y_label="metric"))
        rows += [
            (
                part.task,
                f"{part.shortest} to {part.longest}",
                str(part.examples),
                ", ".join(f"{name} {value:.2f}" for name, value in part.metrics.items()),
            )
            for part in own
        ]
    return Section(
        "Quality by length",
        f"Of the predictions of step {found.evaluated}, in parts of equal size by the number of input "
        "tokens; metrics in percent, the loss of texts in nats per token by their length. Small parts are "
        "uncertain.",
        charts=tiles(charts),
        headings=("task", "tokens", "examples", "metrics"),
        rows=rows,
    )


def _rows(layers: Mapping[str, LayerInspection]) -> Iterator[Sequence[str]]:
    moments = ("deviation", "skewness", "kurtosis")
    for name, layer in layers.items():
        m, start = layer.end, layer.start
        columns = [m.entropy, m.spread, m.peak, m.near, m.distance, m.off_diagonal, m.static]
        columns += [layer.rank, layer.effective_rank, *(getattr(m, x) for x in moments)]
        columns += [getattr(start, x) if start else m.mean * math.nan for x in moments]
        for i, row in enumerate(np.stack(columns, axis=1)):
            yield f"{name}.{i + 1}", *("–" if math.isnan(x) else f"{x:.3g}" for x in row)


def _plain(value: object) -> JSON:
    """Returns JSON data: arrays as lists, four digits, NaN and infinities as null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value  # type: ignore[return-value]
