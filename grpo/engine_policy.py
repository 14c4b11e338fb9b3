"""Keeps a sampling engine at the policy in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from grpo.policy_push import full_parameters
from grpo.train_inference_gap import Gap, GapProbe, gap_between
from rollout.group import Group
from visor.models.sampling_engine import SamplingEngine
from visor.models.vllm import VLLMClient
from visor.models.vllm_engine import LocalEngine
from visor.models.vllm_remote import RemoteEngine
from visor.stage_clock import CLOCK


class EngineLost(RuntimeError):
    """The engine is gone, so no policy can be sampled from any more."""


class EnginePolicy:
    """Pushes the weights into the engine and measures the gap that is left.

    With `owns_engine` every process has an engine of its own; else all share a server's, and the first one
    pushes while the others wait. `clients` sample from the engine and are told the version of its weights.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        clients: Sequence[VLLMClient],
        model,
        accelerator,
        *,
        owns_engine: bool,
        tolerance: float,
        make_probe: Callable[[], GapProbe],
        sleeps: bool = False,
    ) -> None:
        self.engine = engine
        self.clients = clients
        self.model = model
        self.accelerator = accelerator
        self.owns_engine = owns_engine
        self.tolerance = tolerance
        self.sleeps = sleeps
        """Whether the engine gives its memory back between `rest` and the next push."""
        self._asleep = False
        self._closed = False
        self.make_probe = make_probe
        """Called once the engine holds the policy, on every process."""
        self.probe: GapProbe | None = None

    def start(self, step: int) -> None:
        """Give the engine its first weights and see that it computes the policy; ValueError when it does
        not."""
        self.push(step)
        self.probe = self.make_probe()
        gap = self.measure()
        if not gap.mean <= self.tolerance:  # true for nan too
            raise ValueError(self._too_far(gap))
        self.accelerator.print(
            f"engine: log-probabilities within {gap.mean:.2g} (mean) and {gap.maximum:.2g} (max) of the "
            f"trainer's on a reply of {gap.tokens} tokens",
            flush=True,
        )

    def refresh(self, step: int) -> dict[str, float]:
        """Push the policy after `step` steps; returns the metrics of the gap."""
        self.push(step)
        gap = self.measure()
        return {"train_inference_gap_mean": gap.mean, "train_inference_gap_max": gap.maximum}

    def rest(self) -> None:
        """The rollouts are done: until the next push nothing is asked of the engine."""
        if self.sleeps:
            assert isinstance(self.engine, LocalEngine)
            self.engine.sleep()
            self._asleep = True

    def close(self) -> None:
        """Let go of the engine; one of this process ends. Once is enough."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    @property
    def is_pushing(self) -> bool:
        """Whether this process gives the engine its weights."""
        return self.owns_engine or self.accelerator.is_main_process

    def push(self, step: int) -> None:
        """Give the engine the policy after `step` steps. All processes call it."""
        with CLOCK.running("push", f"the policy of step {step}"):
            weights = _with_progress(full_parameters(self.model))
            if self.is_pushing:
                self._load(weights)
            else:
                for _ in weights:  # sharded weights are gathered by all
                    pass
            if isinstance(self.engine, RemoteEngine):
                self.engine.expect(broadcast_object_list([self.engine.stamp])[0])
            self.accelerator.wait_for_everyone()
        for client in self.clients:
            client.policy_version = step

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        waking = self.engine if self._asleep and isinstance(self.engine, LocalEngine) else None
        if waking:
            waking.wake_weights()
        self.engine.load_weights(weights)
        if waking:
            waking.wake_cache()
        # What was computed from the same pages or prompts by other weights must not come back.
        self.engine.reset_caches()
        self._asleep = False

    def measure(self) -> Gap:
        """The gap on the fixed reply, the same on every process: the mean of their means, and the largest.
        All processes call it."""
        assert self.probe is not None
        with CLOCK.running("push", "the fixed reply"):
            trainer = self.probe.of_trainer(self.accelerator.autocast)
            mine = [gap_between(self.probe.of_engine(), trainer)] if self.is_pushing else []
            everyone: list[Gap] = gather_object(mine)
        return Gap(
            sum(gap.mean for gap in everyone) / len(everyone),
            max(gap.maximum for gap in everyone),
            everyone[0].tokens,
        )

    def check_alive(self, groups: Sequence[Group]) -> None:
        """EngineLost when episodes failed, on any process, because the engine is gone: each is a record with
        an error, and those of all steps to come would be."""
        errors = [t.error for group in groups for t in group.trajectories if t.error is not None]
        lost = [error.message for error in errors if error.type == "EngineFailed"]
        everywhere = gather_object(lost[:1])
        if everywhere:
            raise EngineLost(f"the engine was lost during the rollouts: {everywhere[0]}")

    def _too_far(self, gap: Gap) -> str:
        types = sorted({str(p.dtype).removeprefix("torch.") for p in self.model.parameters()})
        return (
            f"the engine does not compute the policy in training: on the same reply of {gap.tokens} tokens "
            f"their log-probabilities differ by {gap.mean:.3g} on average, {gap.maximum:.3g} at most, over "
            f"max_train_inference_gap = {self.tolerance:g}. Check that the engine runs the same model (a "
            "server: the one named in model_name_or_path) in the type of the trained weights "
            f"({', '.join(types)}) and that the versions of vllm and transformers are the tested ones; raise "
            "max_train_inference_gap only for an engine that is meant to compute more coarsely"
        )


def _with_progress(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Say of each weight that it was handed over: the engine's end of a push shows no progress of its own."""
    for name, weight in weights:
        CLOCK.progress(f"weight {name}")
        yield name, weight
