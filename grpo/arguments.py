"""Settings of a GRPO run. Names are TRL's and Transformers' own where they have one."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from grpo.advantage import ScaleRewards
from grpo.alarms import NAMES, AlarmsConfig
from grpo.engine_options import EngineOptions
from grpo.figures import FIGURES, LOWER_IS_BETTER, pass_figures
from grpo.loss import ImportanceSamplingLevel, LossSettings, LossType
from rollout.build import JudgeOptions
from rollout.model_hub import HubOptions
from visor.config import Config
from visor.env.config import EpisodeConfig
from visor.models.options import ModelOptions


class AuxiliaryConfig(Config):
    """A supervised loss added to every update, for example to keep reading pages while the policy learns when
    to search. It is not part of GRPO and is logged beside it."""

    path: str
    """JSON or JSON lines of {messages, images}; loss on the assistant messages' tokens."""
    weight: float = Field(0.1, ge=0)
    """Factor on its token-mean loss."""
    rows_per_step: int = Field(8, ge=1)
    until_step: int | None = Field(None, ge=0)
    """The last step the loss is added in; null: all of them."""


class GrpoConfig(ModelOptions, HubOptions, EngineOptions):
    output_dir: str
    corpus: str
    """Corpus folder."""
    index: str | None = None
    """Index folder of that corpus, or the address of a service, http://HOST:PORT or peer+http://HOST:PORT;
    null = CORPUS/index/RETRIEVER."""
    retriever: str | None = None
    """bm25, dense, colqwen or hybrid:FIRST+SECOND, in validation too; null = bm25, or the one behind
    `index`."""
    questions: str
    """Training questions as `reader:PATH`, for example `questions:train.jsonl`; each needs gold pages."""
    drop_questions_without_gold: bool = False
    """Leave out questions without gold pages, which have no retrieval reward, instead of refusing them."""
    episode: EpisodeConfig = EpisodeConfig()
    judge: str = "rule"
    """rule, or the spec of a model that judges answers, as in evaluation."""
    judge_options: JudgeOptions = JudgeOptions()
    reward: str = "visor"
    """Name of the reward, one of `rewards.REWARDS`."""

    questions_per_step: int = Field(8, ge=1)
    num_generations: int = Field(5, ge=2)
    """Trajectories of one question: the group."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_completion_length: int = Field(2048, ge=1)
    """Tokens of one reply."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens of a prompt; a longer one ends its trajectory with the stop reason `length`. None: no limit."""
    max_concurrency: int = Field(64, ge=1)
    """Episodes running at once in each process."""
    rollout_batch_size: int = Field(64, ge=1)
    """Replies generated in one batch."""

    credit: Literal["trajectory", "turn"] = "trajectory"
    """trajectory: one row over the whole conversation without evidence block or window, as in the paper; old
    log-probabilities are scored again under that row. turn: one row a policy call, under the very context it
    was sampled in."""
    max_length: int = Field(16384, ge=2)
    """Tokens of a training row. A trajectory row is cut at a turn boundary, a longer turn row is left out;
    both are counted."""
    max_logprob_gap: float | None = Field(0.5, gt=0)
    """turn mode: mean |log p now − log p at sampling| of a row above which the run stops, because the row is
    then not what was sampled. None: only logged."""

    loss_type: LossType = "dapo"
    """dapo, bnpo: mean over the sampled tokens of an update. grpo: mean of the trajectories' means. dr_grpo:
    sum over a constant length."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """token: a ratio a token. sequence: one ratio a training row, as in GSPO."""
    epsilon: float = Field(0.2, ge=0)
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip; null: epsilon."""
    delta: float | None = Field(None, gt=1)
    """Upper bound on the ratio of tokens with a negative advantage too; null: none. Larger than 1 +
    epsilon_high to be of use."""
    beta: float = Field(0.0, ge=0)
    """KL coefficient; above 0 the starting policy is kept beside the one in training: a frozen adapter where
    an adapter trains, else a whole copy."""
    use_bias_correction_kl: bool = False
    kl_clamp: float | None = Field(None, gt=0)
    """Upper bound on the KL estimate of one token, as verl has at 10; None: no bound, as in TRL."""
    scale_rewards: ScaleRewards = "group"
    """What a reward's distance to its group's mean is divided by: the standard deviation of the group, that
    of the step's rewards (batch), or nothing. true and false stand for group and none, as in TRL."""
    filter_zero_std_groups: bool = False
    """Leave groups without a gradient (all rewards equal, or fewer than two scored) out of the loss
    altogether, its token mean and KL term included."""
    max_resampling_rounds: int = Field(0, ge=0)
    """Rounds in which further questions may be drawn for the groups that were left out, as many as are
    missing; the step trains on fewer groups when they are spent."""
    mask_truncated_completions: bool = False
    """Leave trajectories with a reply cut at max_completion_length out of the loss; they stay in the group's
    statistics."""
    auxiliary: AuxiliaryConfig | None = None

    num_iterations: int = Field(1, ge=1)
    """Passes over the rows of a step."""
    per_device_train_batch_size: int = Field(1, ge=1)
    """Rows of one forward and backward pass, at most."""
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Tokens of one forward and backward pass, padding included, at most; a longer row has one of its own.
    null: per_device_train_batch_size alone decides. Neither changes the gradient."""
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    """Micro-batches of one update. None: a single update over all rows of the step."""
    max_steps: int = Field(100, ge=1)
    """A step samples questions_per_step questions and trains on them."""
    learning_rate: float = Field(1e-6, ge=0)
    lr_scheduler_type: str = "constant_with_warmup"
    warmup_steps: float = Field(0.0, ge=0)
    """A number of steps, or a share of max_steps when below 1."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = Field(1.0, gt=0)
    torch_threads: int | None = None
    """CPU threads of each process; None leaves PyTorch's choice."""

    eval_steps: int | None = Field(None, ge=1)
    """Validate every so many steps, and after the last one; null: never."""
    eval_on_start: bool = False
    """Validate the starting policy too, as step 0."""
    eval_questions: str | None = None
    """Validation questions as `reader:PATH`; none of them may be a training question."""
    eval_corpus: str | None = None
    """Corpus folder of the validation questions; null: that of training."""
    eval_index: str | None = None
    """Index folder of that corpus; null = EVAL_CORPUS/index/RETRIEVER, or `index` on the training corpus."""
    eval_limit: int | None = Field(None, ge=1)
    """The first so many questions; null: all."""
    eval_num_samples: int = Field(1, ge=1)
    """Trajectories a question; with several, pass@k beside the mean (pass_at_1, pass_at_2, …)."""
    eval_temperature: float | None = Field(None, ge=0)
    """0 = greedy; null: that of training."""
    metric_for_best_model: str = "reward"
    """Figure of a validation by which `best/` is chosen."""
    greater_is_better: bool | None = None
    """Of that figure; null: follows from it."""
    load_best_model_at_end: bool = False
    """The final model in output_dir is the one of `best/` instead of the last step's."""

    alarms: AlarmsConfig = AlarmsConfig()
    stop_on_alarm: list[str] = []
    """Alarms that end the run with a checkpoint and status 3 when they are raised: names, or `all`. Every
    alarm is printed and entered into the metrics."""

    save_steps: int = Field(50, ge=1)
    save_total_limit: int | None = Field(2, ge=1)
    resume_from_checkpoint: bool | str = True
    """true: go on from the newest checkpoint in output_dir, if there is one; or the path of a checkpoint."""
    report_to: list[Literal["wandb", "tensorboard"]] = []
    """Trackers the figures go to: wandb, tensorboard, or a list of them; none: metrics.jsonl alone. W&B works
    offline with WANDB_MODE=offline."""
    log_trajectories_steps: int | None = Field(None, ge=1)
    """Write the best and the worst trajectory of every so many steps as text, into `highlights/` and to the
    trackers; null: never. All trajectories are in `rollouts/` in any case."""

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _scale_as_truth_value(cls, value: object) -> object:
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value

    @field_validator("report_to", mode="before")
    @classmethod
    def _trackers(cls, value: object) -> object:
        """`none`, null or one name may stand for the list."""
        if value in ("none", None):
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("stop_on_alarm", mode="before")
    @classmethod
    def _alarm_names(cls, value: object) -> object:
        """`all`, `none` or one name may stand for the list."""
        names: list[object] = [value]
        if value in ("all", "none", None):
            names = list(NAMES) if value == "all" else []
        elif isinstance(value, list):
            names = value
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise ValueError(f"unknown alarm {unknown[0]!r}; known: {', '.join(NAMES)}, or all")
        return names

    @model_validator(mode="after")
    def _resampling_has_a_filter(self) -> Self:
        if self.max_resampling_rounds and not self.filter_zero_std_groups:
            raise ValueError("max_resampling_rounds needs filter_zero_std_groups: else no group is left out")
        return self

    @model_validator(mode="after")
    def _validation_is_consistent(self) -> Self:
        if self.eval_steps is None:
            for name in ("load_best_model_at_end", "eval_on_start"):
                if getattr(self, name):
                    raise ValueError(f"{name} needs validation: set eval_steps and eval_questions")
        elif self.eval_questions is None:
            raise ValueError("eval_steps needs eval_questions, the questions to validate on")
        known = [*FIGURES, *pass_figures(self.eval_num_samples)]
        if self.metric_for_best_model not in known:
            raise ValueError(
                f"metric_for_best_model {self.metric_for_best_model!r} is no figure of a validation with "
                f"{self.eval_num_samples} sample(s) a question; known: {', '.join(known)}"
            )
        return self

    @property
    def best_is_greater(self) -> bool:
        if self.greater_is_better is not None:
            return self.greater_is_better
        return self.metric_for_best_model not in LOWER_IS_BETTER

    @property
    def loss(self) -> LossSettings:
        return LossSettings(
            loss_type=self.loss_type,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            delta=self.delta,
            importance_sampling_level=self.importance_sampling_level,
            beta=self.beta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            kl_clamp=self.kl_clamp,
            max_completion_length=self.max_completion_length * self.episode.max_turns,
        )

    @property
    def warmup(self) -> int:
        """Warm-up steps as a number."""
        return round(self.warmup_steps * self.max_steps) if self.warmup_steps < 1 else int(self.warmup_steps)
