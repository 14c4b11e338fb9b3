"""What a run's settings say of the optimizer, kept over the loading of a checkpoint, which holds its own."""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR


def hyperparameters(scheduler: LambdaLR) -> list[dict]:
    """Base learning rate, betas and weight decay of each parameter group."""
    names = ("initial_lr", "betas", "weight_decay")
    return [{name: group[name] for name in names} for group in scheduler.optimizer.param_groups]


def set_hyperparameters(scheduler: LambdaLR, groups: list[dict]) -> None:
    """Put them into the optimizer, with the learning rate of the schedule at its present step."""
    scheduler.base_lrs = [group["initial_lr"] for group in groups]
    rules = scheduler.lr_lambdas
    scheduler._last_lr = [
        base * rule(scheduler.last_epoch) for base, rule in zip(scheduler.base_lrs, rules, strict=True)
    ]
    for group, values, rate in zip(scheduler.optimizer.param_groups, groups, scheduler._last_lr, strict=True):
        group.update(values, lr=rate)
