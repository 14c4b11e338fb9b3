"""A step's line of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accelerate.utils import gather_object

from grpo.advantage import NO_GRADIENT
from grpo.batch import StepRows
from grpo.figures import SHARES
from grpo.sampling import StepGroups
from grpo.update import UpdateReport
from rewards.judge import Judge
from rollout.metrics import headline
from rollout.results import ResultRow

STAGES = ("encode", "retrieve", "crop", "decode", "judge", "update", "push")
"""encode: contexts to ids, pictures to features; retrieve: searches; crop: reading pages and cutting them;
decode: sampling replies; judge: at least one trajectory waits for its score; update: the optimization; push:
the new weights on their way to the engine, and the gap to it."""


def reward_metrics(results: Sequence[ResultRow]) -> dict:
    """Mean reward over the scored trajectories, and the shares; None where there is nothing to divide by."""
    figures = headline(results)
    return {"reward": figures["mean_reward"], **{name: figures[name] for name in SHARES}}


def update_metrics(report: UpdateReport, has_reference: bool) -> dict:
    """Loss and gradient norm: means over the step's updates. kl (None without a reference), entropy (nats)
    and clip_ratio: means over the trained tokens of all updates. logprob_gap: |log p under the training row −
    log p at sampling| while the policy is still the one that sampled: over the tokens of the first iteration,
    or, where they are not scored before the updates (turn mode), of the step's first update. padding_share:
    pads among all tokens of the forward and backward passes."""
    stats = report.stats
    metrics = {
        "loss": _mean(report.loss),
        "grad_norm": _mean(report.grad_norm),
        "kl": stats.mean(stats.kl) if has_reference else None,
        "entropy": stats.mean(stats.entropy),
        "clip_ratio": stats.mean(stats.clipped),
        "logprob_gap_mean": report.gap_sum / report.gap_tokens if report.gap_tokens else None,
        "logprob_gap_max": report.gap_max if report.gap_tokens else None,
        "trained_tokens": int(stats.tokens),
        "padding_share": report.padding.share,
    }
    if report.auxiliary_loss:
        metrics["auxiliary_loss"] = _mean(report.auxiliary_loss)
    return metrics


def row_metrics(rows: StepRows) -> dict:
    """Counts over all processes; see `StepRows`. groups_dropped: groups without a gradient, and under
    groups_all_equal, groups_unscored and groups_too_few_scored those of each reason. turns_cut: replies left
    out of rows over `max_length`."""
    local = {
        "groups": rows.groups,
        "groups_dropped": rows.groups_dropped,
        **{f"groups_{reason}": rows.dropped[reason] for reason in NO_GRADIENT},
        "unscored": rows.unscored,
        "rowless": rows.rowless,
        "rows_over_length": rows.rows_over_length,
        "rows": len(rows.rows),
        "turns_cut": sum(item.row.turns_cut for item in rows.rows),
    }
    everyone = gather_object([local])
    return {name: sum(part[name] for part in everyone) for name in local}


def sampling_metrics(sampled: StepGroups) -> dict:
    """resampling_rounds, and groups_missing: groups short of questions_per_step when they were spent."""
    return {"resampling_rounds": sampled.rounds, "groups_missing": sampled.missing}


def judge_metrics(judge: Judge) -> dict:
    """What the judge was asked since the last step, over all processes; nothing for one that keeps no counts,
    as the rule judge."""
    counts = getattr(judge, "counts", None)
    if counts is None:
        return {}
    taken = gather_object([counts.take()])
    return {f"judge_{name}": sum(part[name] for part in taken) for name in taken[0]}


def step_seconds(laps: Mapping[str, float], stages: Mapping[str, float]) -> dict:
    """The time of a step: its laps one after the other (rollout, rows, record, update, push) and their total;
    under `stages` the seconds of each of `STAGES`, and under `shares` what part of the total each is. Of the
    main process. Stages of different threads may run side by side, so that the
    shares can add up to more than 1; what is in none of them is bookkeeping and waiting."""
    total = sum(laps.values())
    seconds = {stage: round(stages.get(stage, 0.0), 4) for stage in STAGES}
    return {
        **laps,
        "total": round(total, 4),
        "stages": seconds,
        "shares": {stage: round(value / total, 4) if total else 0.0 for stage, value in seconds.items()},
    }


def summary(metrics: dict, max_steps: int, mean_seconds: float = 0.0) -> str:
    """One line for the terminal. `mean_seconds` of a step gives the time that remains."""

    def shown(name: str, digits: int = 2) -> str:
        value = metrics[name]
        return "–" if value is None else f"{value:.{digits}f}"

    seconds = metrics["seconds"]
    shares = sorted(seconds["shares"].items(), key=lambda item: -item[1])[:2]
    busy = ", ".join(f"{stage} {share:.0%}" for stage, share in shares if share >= 0.005)
    kept = metrics["groups"] - metrics["groups_dropped"]
    remaining = _duration(mean_seconds * (max_steps - metrics["step"]))
    return (
        f"step {metrics['step']}/{max_steps}  reward {shown('reward')}  accuracy {shown('accuracy')}  "
        f"complete {shown('completeness')}  Δ=1 {shown('verification_share')}  "
        f"finish {shown('finish_rate')}  groups {kept}/{metrics['groups']}  kl {shown('kl', 4)}  "
        f"entropy {shown('entropy')}  {seconds['total']:.1f} s"
        + (f" ({busy})" if busy else "")
        + (f"  {remaining} left" if metrics["step"] < max_steps and mean_seconds else "")
    )


def _duration(seconds: float) -> str:
    """For people: 45 s, 12 min, 3 h 05 min, 2 d 4 h."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{hours // 24} d {hours % 24} h"


def validation_summary(line: dict, metric: str, is_best: bool) -> str:
    """One line for the terminal."""

    def shown(name: str) -> str:
        return "–" if line[name] is None else f"{line[name]:.2f}"

    figures = {"reward": "reward", "accuracy": "accuracy", "complete": "completeness",
               "Δ=1": "verification_share", "finish": "finish_rate"}  # fmt: skip
    widest = [name for name in line if name.startswith("pass_at_")][-1:]
    figures |= {name.replace("pass_at_", "pass@"): name for name in widest}
    if metric not in figures.values():
        figures[metric] = metric
    return (
        f"validation at step {line['step']}: "
        + "  ".join(f"{label} {shown(name)}" for label, name in figures.items())
        + f"  n {line['n']}  {line['seconds']:.1f} s"
        + (f"  (best {metric} so far)" if is_best else "")
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
