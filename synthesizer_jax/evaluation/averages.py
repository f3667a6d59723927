"""The averages of GLUE and SuperGLUE, in which every group of tasks has the same weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Results = Mapping[str, Mapping[str, float]]
"""Metrics by task name."""

GLUE_GROUPS: tuple[tuple[str, ...], ...] = (
    ("glue_cola_v002",),
    ("glue_sst2_v002",),
    ("glue_mrpc_v002",),
    ("glue_stsb_v002",),
    ("glue_qqp_v002",),
    ("glue_mnli_matched_v002", "glue_mnli_mismatched_v002"),
    ("glue_qnli_v002",),
    ("glue_rte_v002",),
)
"""The tasks of every group; the average does not include WNLI and AX."""

SUPER_GLUE_GROUPS: tuple[tuple[str, ...], ...] = (
    ("super_glue_boolq_v102",),
    ("super_glue_cb_v102",),
    ("super_glue_copa_v102",),
    ("super_glue_multirc_v102",),
    ("super_glue_record_v102",),
    ("super_glue_rte_v102",),
    ("super_glue_wic_v102",),
    ("super_glue_wsc_v102_simple_eval",),
)

BENCHMARKS = {"GLUE": GLUE_GROUPS, "SuperGLUE": SUPER_GLUE_GROUPS}


def averages(results: Results) -> dict[str, float]:
    """Returns the averages of the benchmarks of which all tasks have results."""
    found = {name: _group_means(results, name) for name in BENCHMARKS}
    return {name: _mean(means) for name, means in found.items() if means}


def best_average(by_step: Mapping[int, Results], benchmark: str) -> float | None:
    """Returns the average of all groups, each at its own best step; None if no step has all tasks."""
    found = {step: _group_means(results, benchmark) for step, results in sorted(by_step.items())}
    whole = {step: means for step, means in found.items() if means}
    groups = zip(*whole.values(), strict=True)
    best = [means[_best(dict(enumerate(means)))] for means in groups]
    return _mean(best) if best else None


def best_single_step(by_step: Mapping[int, Results], benchmark: str) -> tuple[int, float] | None:
    """Returns the step with the highest average, and that average; None if no step has all tasks."""
    found = {s: averages(results).get(benchmark) for s, results in sorted(by_step.items())}
    whole = {s: value for s, value in found.items() if value is not None}
    step = _best(whole) if whole else None
    return None if step is None else (step, whole[step])


def best_by_task(by_step: Mapping[int, Results]) -> dict[str, int]:
    """Returns the step with the highest mean of its metrics for every task, the first of equal ones."""
    means: dict[str, dict[int, float]] = {}
    for step, results in sorted(by_step.items()):
        for task, metrics in results.items():
            if metrics:
                means.setdefault(task, {})[step] = _mean(list(metrics.values()))
    return {task: _best(values) for task, values in means.items()}


def _group_means(results: Results, benchmark: str) -> list[float]:
    """Returns the mean of every group over its tasks of the mean of their metrics; empty: a task lacks."""
    groups = BENCHMARKS[benchmark]
    if not all(results.get(task) for group in groups for task in group):
        return []
    return [_mean([_mean(list(results[task].values())) for task in group]) for group in groups]


def _best(values: Mapping[int, float]) -> int:
    """Returns the step with the highest value, the first of equal ones; NaN is less than any number."""
    return max(values, key=lambda step: (not math.isnan(values[step]), values[step]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
