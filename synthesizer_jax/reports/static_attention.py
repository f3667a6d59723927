"""The page about how static a model's attention is: the data of ``static_attention.html.jinja``."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from synthesizer_jax.distillation.static_attention import (
    FORMS,
    TABLE,
    Head,
    Picture,
    Point,
    StaticAttention,
)
from synthesizer_jax.files import write_atomic
from synthesizer_jax.reports.charts import grids, heat_maps, line_chart
from synthesizer_jax.reports.page import ENVIRONMENT

OVERFITTED = 0.05
"""Share of the divergence from equal weights by which a fitted table may be worse than another form."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """A head in the table of all heads."""

    name: str
    divergences: Sequence[str]
    verdict: str


def write_static_attention(
    path: pathlib.Path,
    found: StaticAttention,
    *,
    title: str,
    lengths: Mapping[str, int],
    facts: Mapping[str, str],
) -> None:
    """Writes the page atomically.

    Args:
      path: the file.
      found: what was measured.
      title: the heading.
      lengths: number of ``inputs`` and ``targets`` tokens.
      facts: labels and values of the footer, such as versions.
    """
    template = ENVIRONMENT.get_template("static_attention.html.jinja")
    replaced = found.replaceable.replaced
    has_bias = any(head.bias is not None for head in found.heads)
    page = template.render(
        title=title,
        lead="How much of the self-attention of a trained model depends on positions alone.",
        summary=summarize_static_attention(found),
        warnings=warnings_about(found),
        found=found,
        has_bias=has_bias,
        charts=dict(_charts(found.heads)),
        loss_chart=_loss_chart(found),
        points=[_format_point(point) for point in found.points],
        inputs_length=lengths["inputs"],
        targets_length=lengths["targets"],
        pictures=list(_draw(found.pictures)),
        columns=["equal weights", *(["position bias"] if has_bias else []), *FORMS],
        heads=list(_format_heads(found.heads, replaced, has_bias=has_bias)),
        facts=facts,
    )
    write_atomic(path, page)


def summarize_static_attention(found: StaticAttention) -> str:
    """Returns sentences that say how many heads can be replaced, and what that saves."""
    first, best = found.points[0], found.replaceable
    tolerance = f"{100 * found.tolerance:g}%"
    if not best.replaced:
        return (
            f"None of {len(found.heads)} heads can read a fitted table instead of the tokens unless the "
            f"loss may rise by more than {tolerance}."
        )
    rise = best.loss / first.loss - 1.0
    changes = {
        "parameters": best.costs.parameters / first.costs.parameters,
        "FLOPs per token": best.costs.flops_per_token / first.costs.flops_per_token,
        "decoding cache": best.costs.cache_bytes_per_token / first.costs.cache_bytes_per_token,
    }
    return (
        f"Of {len(found.heads)} heads, the {best.replaced} most static can read a fitted table instead of "
        f"the tokens, and the loss changes by {rise:+.1%} without further training "
        f"({first.loss:.4f} to {best.loss:.4f} nats per token, tolerance {tolerance}). "
        f"That saves {', '.join(f'{1.0 - ratio:.1%} of the {name}' for name, ratio in changes.items())}."
    )


def warnings_about(found: StaticAttention) -> list[str]:
    """Returns what speaks against conclusions, in sentences."""
    warnings = []
    if found.uniform_loss <= found.highest_loss:
        warnings.append(
            f"With equal weights in all heads the loss is {found.uniform_loss:.4f} nats per token, within "
            "the tolerance too: this model does not use its attention; train it longer before you conclude "
            "anything."
        )
    # A table can be any other form, so one that is much worse on held-out examples is overfitted.
    best = [min(h.uniform, *h.divergences.values()) + OVERFITTED * h.uniform for h in found.heads]
    worse = sum(b < h.divergences[TABLE] for b, h in zip(best, found.heads, strict=True))
    if worse:
        warnings.append(
            f"Equal weights or another form describe {worse} of {len(found.heads)} heads "
            f"better than the table: {found.fitted:,} examples are too few to fit it; give more with "
            "--examples."
        )
    return warnings


def _charts(heads: Sequence[Head]) -> Iterator[tuple[str, Markup]]:
    """Yields what forms miss, in nats, a figure for each stack, with layers down and heads across."""
    for stack in dict.fromkeys(
        head.stack for head in sorted(heads, key=lambda h: h.stack != "encoder")
    ):
        own = [head for head in heads if head.stack == stack]
        shape = max(h.layer for h in own) + 1, max(h.head for h in own) + 1
        panels = {name: np.full(shape, np.nan) for name in FORMS}
        for name, values in panels.items():
            for head in own:
                values[head.layer, head.head] = head.divergences[name]
        yield stack, grids(panels, x_label="head", y_label="layer")


def _loss_chart(found: StaticAttention) -> Markup:
    points = found.points
    counts = [point.replaced for point in points]
    ends = (counts[0], counts[-1])
    return line_chart(
        {
            "most static first": (counts, [point.loss for point in points]),
            "least static first": (counts, [point.reversed_loss for point in points]),
            f"tolerance {found.tolerance:.1%}": (ends, [found.highest_loss] * 2),
            "equal weights in all heads": (ends, [found.uniform_loss] * 2),
        },
        x_label="heads replaced",
        y_label="loss, nats per token (not from 0)",
        logarithmic=False,
    )


def _format_point(point: Point) -> list[str]:
    return [
        f"{point.replaced}",
        f"{point.loss:.4f}",
        f"{point.reversed_loss:.4f}",
        f"{point.costs.parameters:,}",
        f"{point.costs.flops_per_token / 1e3:,.0f}",
        f"{point.costs.cache_bytes_per_token:,}",
    ]


def _draw(pictures: Sequence[Picture]) -> Iterator[Markup]:
    """Yields a figure for each stack."""
    for stack in ("encoder", "decoder"):
        own = [picture for picture in pictures if picture.head.stack == stack]
        if own:
            maps = [
                ("mean", np.stack([picture.attention for picture in own])),
                ("table", np.stack([picture.table for picture in own])),
            ]
            yield heat_maps(maps, columns=[picture.head.name for picture in own])


def _format_heads(heads: Sequence[Head], replaced: int, *, has_bias: bool) -> Iterator[_Row]:
    for i, head in enumerate(heads):
        bias = [] if not has_bias else ["–" if head.bias is None else f"{head.bias:.3f}"]
        values = [f"{head.divergences[name]:.3f}" for name in FORMS]
        verdict = "can read a table" if i < replaced else "must read tokens"
        yield _Row(head.name, [f"{head.uniform:.3f}", *bias, *values], verdict)
