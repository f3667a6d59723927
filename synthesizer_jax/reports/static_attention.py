"""The page about how static a model's attention is: the data of ``static_attention.html.jinja``."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from synthesizer_jax.distillation.static_attention import (
    FORMS,
    TABLE,
    Head,
    Picture,
    StaticAttention,
)
from synthesizer_jax.files import write_atomic
from synthesizer_jax.reports.figures import ENVIRONMENT, heat_maps, line_chart
from synthesizer_jax.reports.page import provenance

OVERFITTED = 0.05
"""Share of the divergence from equal weights by which a fitted table may be worse than another form."""


def write_static_attention(
    path: pathlib.Path, found: StaticAttention, *, title: str, lengths: Mapping[str, int]
) -> None:
    """Writes the page atomically.

    Args:
      path: the file.
      found: what was measured.
      title: the heading.
      lengths: number of ``inputs`` and ``targets`` tokens.
    """
    page = ENVIRONMENT.get_template("static_attention.html.jinja").render(
        title=title,
        sentences=sentences_about(found),
        found=found,
        lengths=lengths,
        forms=list(FORMS),
        has_bias=any(head.bias is not None for head in found.heads),
        charts=dict(_form_charts(found.heads)),
        loss_chart=_loss_chart(found),
        pictures=list(_draw(found.pictures)),
        facts=provenance(),
    )
    write_atomic(path, page)


def sentences_about(found: StaticAttention) -> list[str]:
    """Returns how many heads can be replaced and what that saves, and what speaks against conclusions."""
    first, best, total = found.points[0], found.replaceable, len(found.heads)
    tolerance = f"{100 * found.tolerance:g}%"
    names = {
        "parameters": "parameters",
        "flops_per_token": "FLOPs per token",
        "cache_bytes_per_token": "decoding cache",
    }
    saved = ", ".join(
        f"{1.0 - getattr(best.costs, field) / getattr(first.costs, field):.1%} of the {name}"
        for field, name in names.items()
    )
    said = [
        f"Of {total} heads, the {best.replaced} most static can read a fitted table instead of the tokens, "
        f"and the loss changes by {best.loss / first.loss - 1.0:+.1%} without further training "
        f"({first.loss:.4f} to {best.loss:.4f} nats per token, tolerance {tolerance}). "
        f"That saves {saved}."
    ]
    if not best.replaced:
        said = [
            f"None of {total} heads can read a fitted table instead of the tokens unless the loss may rise "
            f"by more than {tolerance}."
        ]
    if found.uniform_loss <= found.highest_loss:
        said.append(
            f"With equal weights in all heads the loss is {found.uniform_loss:.4f} nats per token, within "
            "the tolerance too: this model does not use its attention; train it longer before you conclude "
            "anything."
        )
    # A table can be any other form, so one that is much worse on held-out examples is overfitted.
    others = [min(h.uniform, *h.divergences.values()) + OVERFITTED * h.uniform for h in found.heads]
    worse = sum(o < h.divergences[TABLE] for o, h in zip(others, found.heads, strict=True))
    if worse:
        said.append(
            f"Equal weights or another form describe {worse} of {total} heads better than the table: "
            f"{found.fitted:,} examples are too few to fit it; give more with --examples."
        )
    return said


def _form_charts(heads: Sequence[Head]) -> Iterator[tuple[str, Markup]]:
    """Yields what forms miss, in nats, a figure for each stack, with layers down and heads across."""
    for stack in ("encoder", "decoder"):
        own = [head for head in heads if head.stack == stack]
        if not own:
            continue
        panels = []
        for form in FORMS:
            values = np.full((1 + max(h.layer for h in own), 1 + max(h.head for h in own)), np.nan)
            for head in own:
                values[head.layer, head.head] = head.divergences[form]
            panels.append(values)
        yield (
            stack,
            heat_maps({"": panels}, list(FORMS), x_label="head", y_label="layer", numbers=True),
        )


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


def _draw(pictures: Sequence[Picture]) -> Iterator[Markup]:
    """Yields a figure for each stack."""
    for stack in ("encoder", "decoder"):
        own = [picture for picture in pictures if picture.head.stack == stack]
        if own:
            rows = {"mean": [p.attention for p in own], "table": [p.table for p in own]}
            names = [p.head.name for p in own]
            yield heat_maps(rows, names, x_label="key", y_label="query")
