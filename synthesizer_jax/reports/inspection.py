"""The page about what the layers of a model have learned, and its numbers as JSON."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from markupsafe import Markup

from synthesizer_jax.files import write_atomic
from synthesizer_jax.inspection.measures import EDGES, NEAR, REACH, Measures
from synthesizer_jax.inspection.static_attention import TABLE, UNIFORM
from synthesizer_jax.registry import JSON
from synthesizer_jax.reports.attention_figures import number_grid, small_lines, tiles, weight_maps
from synthesizer_jax.reports.figures import Section, write_page

Found: TypeAlias = Mapping[str, Any]
"""What `inspect_run` returns, or a layer of it."""

SHARP, STATIC, TOLERANCE = 0.25, 0.9, 0.01
"""The shares below and from which heads are called so, and by which the loss may rise with tables."""

MOST_LETTERS = 300
"""Of an example's text."""

DISTANCES = np.arange(-REACH, REACH + 1)

OVERVIEW = {
    "keys used, %": "spread",
    f"within {NEAR} positions, %": "near",
    "explained by positions, %": "static",
    "rank of logits, %": "rank",
}
NUMBERS = {
    "entropy, nats": "entropy",
    "off diagonal, positions": "off_diagonal",
    **OVERVIEW,
    **{f"weights’ {name}": name for name in ("mean", "deviation", "skewness", "kurtosis")},
}

TEXTS = {
    "Layer by layer": "How sharp, how local and how static each layer is; in brackets the range of its heads.",
    "Heads at a glance": "Keys used: exp(entropy) of a query’s weights over the number of keys that it sees; "
    "100 is equal weights. Explained by positions: how much closer than equal weights a table of mean weights, "
    "from other examples, comes to a query’s weights; 100 is a head that reads no tokens, below 0 one that no "
    "table describes. Rank: of the logits’ matrix, without a shared position bias, as a share of the largest "
    "possible; a head of width e has at most e (Bhojanapalli et al. 2020).",
    "Weights at the start and at the end": "How many pairs of query and key have which weight, all heads "
    "together, as in Tay et al. 2021; the bar at the left holds all smaller weights.",
    "Mixtures": "The weight α of each part of a mixture, and its mean over heads in the saved checkpoints.",
    "Distance from the query": "The share of the weight by key position − query position, of every head; the "
    "ends hold all beyond.",
    "How alike heads are": "The mean cosine of two heads’ weights of the same query, in percent.",
    "Talking heads": "P_l mixes the heads’ logits, P_w their weights: from the heads down to those across.",
}


def write_inspection(path: pathlib.Path, found: Found, *, title: str) -> pathlib.Path:
    """Writes the page of what `inspect_run` found, and its numbers beside it as ``.json``.

    Returns:
      The path of the numbers.
    """
    axes = {"histogram_edges": EDGES, "profile_distances": DISTANCES}
    text = json.dumps(_plain({"title": title, **axes, **found}), allow_nan=False)
    numbers = write_atomic(path.with_suffix(".json"), text + "\n")
    layers = found["layers"]
    charts = {
        "Heads at a glance": _overview(layers),
        "Weights at the start and at the end": map(_histogram, layers, layers.values()),
        "Mixtures": _mixtures(found["mixtures"]),
        "Where heads look": _maps(layers),
        "Distance from the query": _distances(layers),
        "How alike heads are": (
            number_grid(name, layer["end"]["similarity"], xlabel="head", ylabel="head")
            for name, layer in layers.items()
        ),
        "Talking heads": (
            number_grid(f"{name}, {p}", x, scale=1.0, xlabel="to head", ylabel="from head")
            for name, matrices in found["projections"].items()
            for p, x in matrices.items()
        ),
    }
    example = " → ".join(
        f"“{x[:MOST_LETTERS]}{'…' * (len(x) > MOST_LETTERS)}”" for x in found["example"] if x
    )
    texts = TEXTS | {
        "Where heads look": "Queries down, keys across, darker is more. First the mean over all examples, by "
        f"position, then one example: {example}"
    }
    sections = [
        Section(
            *("Layer by layer", TEXTS["Layer by layer"]),
            headings=("layer", "what it does"),
            rows=[(name, sentence(layer)) for name, layer in layers.items()],
            numbers=False,
        ),
        *(Section(name, texts[name], charts=tiles(own)) for name, own in charts.items()),
        _quality(found),
        *([] if found["static"] is None else [_static(found["static"])]),
        Section(
            "All numbers by head",
            "Moments are those of the weights of all pairs, in brackets before training. The JSON file beside "
            "this page holds them and all that is drawn here.",
            headings=("layer, head", *NUMBERS),
            rows=list(_rows(layers)),
            folded=True,
        ),
    ]
    shown = [section for section in sections if section.charts or section.rows]
    write_page(path, title=title, sentences=list(summary(found)), sections=shown)
    return numbers


def summary(found: Found) -> Iterator[str]:
    """Yields sentences: how many heads are sharp, local and static, and what has no attention."""
    end = {name: layer["end"] for name, layer in found["layers"].items()}
    if end:
        spread, static = (
            np.concatenate([m[x] for m in end.values()]) for x in ("spread", "static")
        )
        local = sum(int(_is_local(m, m["near"]).sum()) for m in end.values())
        names = [f"{name}.{i + 1}" for name, m in end.items() for i in range(len(m["spread"]))]
        yield (
            f"Of {len(names)} heads, {(spread < SHARP).sum()} are sharp (they use less than {SHARP:.0%} of "
            f"the keys that they see), {local} are local (most of their weight is within {NEAR} positions "
            f"of the query, and more than equal weights have there), and {(static >= STATIC).sum()} are "
            f"static (positions alone explain at least {STATIC:.0%} of where they look). The sharpest is "
            f"{names[spread.argmin()]}, which uses {spread.min():.1%} of the keys."
        )
    kinds: dict[str, list[str]] = {}
    for name, mixer in found["without"].items():
        kinds.setdefault(mixer, []).append(name)
    if kinds:
        which = "; ".join(f"{', '.join(names)} ({mixer})" for mixer, names in kinds.items())
        yield f"{'These layers have' if end else 'This model has'} no attention weights: {which}."
    yield (
        f"Step {found['step']:,}, over {found['examples']:,} examples of the evaluation sets. The parameters "
        f"at the start are {found['start']}."
    )


def sentence(layer: Found) -> str:
    """Returns how sharp, local and static a layer is."""
    m = layer["end"]
    spread, near, static = (float(np.mean(m[name])) for name in ("spread", "near", "static"))
    sharp = "Sharp" if spread < SHARP else "Rather sharp" if spread < 0.6 else "Diffuse"
    said = f"{layer['mixer']}. {sharp}: a query uses {_share(m['spread'])} of the {m['keys']:.0f} keys it sees"
    if math.isfinite(near):
        said += (
            f"; {'local' if _is_local(m, near) else 'not local'}: {_share(m['near'])} of the weight is within "
            f"{NEAR} positions, {m['near_of_equal']:.0%} would be equal weights, and the largest is "
            f"{m['off_diagonal'].mean():.1f} off the diagonal"
        )
    if math.isfinite(static):
        kind = (
            "static" if static >= STATIC else "partly static" if static >= 0.5 else "reads tokens"
        )
        said += (
            f"; {kind}: positions explain {_share(np.maximum(m['static'], 0))} of where it looks"
        )
    return f"{said}."


def _is_local(m: Measures, near: np.ndarray | float) -> np.ndarray:
    """Whether most of the weight is near its query, and clearly more than of equal weights."""
    return np.asarray(near) >= max(0.5, 1.25 * m["near_of_equal"])


def _share(values: np.ndarray) -> str:
    """Returns the mean of shares and, unless they are alike, their range."""
    low, mean, high = (f"{100 * x:.0f}" for x in (values.min(), values.mean(), values.max()))
    return f"{mean}%" + (f" ({low} to {high})" if low != high else "")


def _overview(layers: Mapping[str, Found]) -> Iterator[Markup]:
    groups: dict[str, list[Measures]] = {}
    for name, layer in layers.items():
        stack, _, *cross = name.split()
        groups.setdefault(" ".join([stack, *cross]), []).append(layer["end"])
    for group, own in groups.items():
        for title, field in OVERVIEW.items():
            grid = np.full((len(own), max(len(m[field]) for m in own)), np.nan)
            for i, m in enumerate(own):
                grid[i, : len(m[field])] = m[field]
            if np.isfinite(grid).any():
                yield number_grid(f"{group}: {title}", grid, xlabel="head", ylabel="layer")


def _histogram(name: str, layer: Found) -> Markup:
    centers = np.sqrt(EDGES[1:] * EDGES[:-1])
    both = {which: layer[which] for which in ("start", "end") if layer[which]}
    lines = {which: (centers, 100 * m["histogram"].mean(0)) for which, m in both.items()}
    return small_lines(name, lines, histogram=True, xlabel="weight", ylabel="% of pairs")


def _mixtures(mixtures: Mapping[str, Found]) -> Iterator[Markup]:
    for name, (parts, steps, alpha) in ((n, m.values()) for n, m in mixtures.items()):
        title = f"{name}: α, %"
        yield number_grid(title, alpha[-1], columns=parts, xlabel="part", ylabel="head")
        lines = {part: (steps, [a[:, i].mean() for a in alpha]) for i, part in enumerate(parts)}
        yield small_lines(f"{name}: α over time", lines, xlabel="step", ylabel="mean α")


def _maps(layers: Mapping[str, Found]) -> Iterator[Markup]:
    for name, layer in layers.items():
        yield weight_maps(f"{name}, mean", layer["end"]["map"])
        yield weight_maps(f"{name}, one example", layer["example"])


def _distances(layers: Mapping[str, Found]) -> Iterator[Markup]:
    for name, layer in layers.items():
        lines = {f"head {i + 1}": (DISTANCES, y) for i, y in enumerate(layer["end"]["profile"])}
        if np.isfinite(layer["end"]["profile"]).all():
            yield small_lines(name, lines, xlabel="distance, tokens", ylabel="share of weight")


def _quality(found: Found) -> Section:
    charts, parts = [], found["quality"]
    for task in dict.fromkeys(part["task"] for part in parts):
        own = [part for part in parts if part["task"] == task]
        lengths = [np.mean(part["tokens"]) for part in own]
        lines = {
            n: (lengths, [p["metrics"].get(n, math.nan) for p in own]) for n in own[0]["metrics"]
        }
        if lines and len(own) > 1:
            charts.append(small_lines(task, lines, xlabel="tokens", ylabel="metric"))
    return Section(
        "Quality by length",
        f"Of the predictions of step {found['evaluated']}, in parts by the number of input tokens; metrics in "
        "percent, the loss of texts in nats per token by their length. Small parts are uncertain.",
        charts=tiles(charts),
        headings=("task", "tokens", "examples", "metrics"),
        rows=[
            (
                *(part["task"], "{} to {}".format(*part["tokens"]), str(part["examples"])),
                ", ".join(f"{name} {value:.2f}" for name, value in part["metrics"].items()),
            )
            for part in parts
        ],
    )


def _static(static: Found) -> Section:
    """Returns what static forms miss, and the loss with tables in the place of heads."""
    heads = static["divergences"]
    names = list(dict.fromkeys(name for kl in heads.values() for name in kl))
    charts, said = [], ""
    if numbers := static.get("replaced"):
        losses, equal = static["loss"], static["uniform_loss"]
        limit = (1.0 + TOLERANCE) * losses[0]
        within = next((i for i, x in enumerate(losses) if not x <= limit), len(losses)) - 1
        said = (
            f"Of {len(heads)} heads, the {numbers[within]} most static can read a fitted table instead of the "
            f"tokens, without further training, and the loss rises by less than {TOLERANCE:.0%}. "
        )
        if equal <= limit:
            said += (
                "With equal weights in all heads it does, too: this model does not use its attention; train "
                "it longer before you conclude anything. "
            )
        ends = numbers[:1] + numbers[-1:]
        lines = {
            "tables": (numbers, losses),
            f"+{TOLERANCE:.0%}": (ends, [limit] * 2),
            "equal weights": (ends, [equal] * 2),
        }
        charts.append(
            small_lines("loss with tables", lines, xlabel="heads replaced", ylabel="nats / token")
        )
    for stack in dict.fromkeys(stack for stack, _, _ in heads):
        own = {place[1:]: kl for place, kl in heads.items() if place[0] == stack}
        for name in names:
            grid = np.full(1 + np.max(list(own), axis=0), np.nan)
            for place, kl in own.items():
                grid[place] = kl.get(name, np.nan)
            title = f"{stack}: {name}, nats"
            charts.append(number_grid(title, grid, scale=1.0, xlabel="head", ylabel="layer"))
    return Section(
        "What static forms miss",
        f"{said}Each form, which reads no tokens, was fitted to each head on one half of the examples, beside "
        "the position bias of the model, and measured on the other: the mean Kullback–Leibler divergence of a "
        f"query’s weights from the form, in nats. Where {UNIFORM} or another form beats the table ({TABLE}), "
        "the examples are too few to fit it: give more with --examples.",
        charts=tiles(charts),
        headings=("head", *names),
        rows=[
            (
                f"{stack} {layer + 1}.{head + 1}",
                *(f"{kl.get(name, math.nan):.3f}" for name in names),
            )
            for (stack, layer, head), kl in heads.items()
        ],
    )


def _rows(layers: Mapping[str, Found]) -> Iterator[list[str]]:
    for name, layer in layers.items():
        for i in range(len(layer["end"]["spread"])):
            row = [f"{name}.{i + 1}"]
            for field in NUMBERS.values():
                both = [
                    layer[x][field][i] for x in ("end", "start") if layer[x] and field in layer[x]
                ]
                texts = ["–" if math.isnan(x) else f"{x:.3g}" for x in both]
                moment = field in ("mean", "deviation", "skewness", "kurtosis") and len(texts) > 1
                row.append(f"{texts[0]} ({texts[1]})" if moment else texts[0])
            yield row


def _plain(value: Any) -> JSON:
    """Returns JSON data: arrays as lists, four digits, NaN and infinities as null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        text = lambda key: " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        return {text(key): _plain(part) for key, part in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value
