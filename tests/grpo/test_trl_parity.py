"""Our loss and gradients against TRL's own GRPOTrainer on a plain single-turn text batch."""

from itertools import pairwise, product

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo.loss import LossSettings, policy_loss, row_coefficients

VOCABULARY = 40
PROMPT, COMPLETION = 5, 7
LENGTHS = [7, 3, 5, 1]
"""Trained tokens of each completion; the rest is padding."""


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5,
        eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """The old policy is near the present one: the rows' mean ratios are about 1.25 (above 1 + epsilon, below
    1 + epsilon_high), 1.1, 1 and 1.8 (above delta), and the tokens' lie around them."""
    torch.manual_seed(1)
    prompt_mask = torch.ones(4, PROMPT, dtype=torch.long)
    prompt_mask[1, :2] = 0  # TRL pads prompts on the left
    batch = {
        "prompt_ids": torch.randint(2, VOCABULARY, (4, PROMPT)),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(2, VOCABULARY, (4, COMPLETION)),
        "completion_mask": (torch.arange(COMPLETION)[None] < torch.tensor(LENGTHS)[:, None]).long(),
        "advantages": torch.tensor([1.2, -0.7, 0.0, -1.5]),
        "ref_per_token_logps": -3.0 + 0.5 * torch.randn(4, COMPLETION),
        "num_items_in_batch": torch.tensor(float(sum(LENGTHS))),
    }
    noise = 0.3 * torch.randn(4, COMPLETION)
    mask = batch["completion_mask"]
    noise -= (noise * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    wanted = torch.tensor([1.25, 1.1, 1.0, 1.8]).log()[:, None] + noise
    batch["old_per_token_logps"] = completion_logprobs(tiny_model(), batch).detach() - wanted
    return batch


def completion_logprobs(model, batch) -> torch.Tensor:
    """(4, COMPLETION) of the completions' tokens, temperature 1."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    model.train()
    logits = model(input_ids=ids, attention_mask=attention).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None]).squeeze(-1)


def trl_loss(model, batch, settings: LossSettings, folder) -> tuple[float, dict]:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, report_to="none", bf16=False,
        per_device_train_batch_size=4, num_generations=4, loss_type=settings.loss_type, beta=settings.beta,
        epsilon=settings.epsilon, epsilon_high=settings.epsilon_high, delta=settings.delta,
        importance_sampling_level=settings.importance_sampling_level,
        max_completion_length=settings.max_completion_length,
        use_bias_correction_kl=settings.use_bias_correction_kl,
    )  # fmt: skip
    model.save_pretrained(
        folder
    )  # the trainer loads its reference model from the path it finds in the config
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(folder), args=config, processing_class=tiny_tokenizer(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 4),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}


def our_loss(model, batch, settings: LossSettings, excluded=None) -> tuple[float, dict]:
    logprobs = completion_logprobs(model, batch)
    coefficients = torch.tensor(row_coefficients(LENGTHS, list("abcd"), settings, excluded=excluded))
    loss, _ = policy_loss(
        logprobs, batch["old_per_token_logps"], batch["advantages"], batch["completion_mask"].float(),
        coefficients, settings, batch["ref_per_token_logps"] if settings.beta else None,
    )  # fmt: skip
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def settings_of(loss_type, level, epsilon_high, beta, **more) -> LossSettings:
    return LossSettings(
        loss_type=loss_type, importance_sampling_level=level, epsilon=0.2, epsilon_high=epsilon_high,
        beta=beta, max_completion_length=COMPLETION, **more,
    )  # fmt: skip


EVERY = [
    settings_of(*options)
    for options in product(
        ("dapo", "grpo", "bnpo", "dr_grpo"), ("token", "sequence"), (None, 0.28), (0.0, 0.04)
    )
]
MORE = [
    settings_of("dapo", "token", 0.28, 0.04, use_bias_correction_kl=True),
    settings_of("grpo", "sequence", None, 0.04, use_bias_correction_kl=True),
    settings_of("dapo", "token", 0.28, 0.04, delta=1.5),
    settings_of("grpo", "sequence", 0.28, 0.0, delta=1.5),
]


def name_of(settings: LossSettings) -> str:
    level, high = settings.importance_sampling_level, settings.epsilon_high
    more = f"-delta{settings.delta}" if settings.delta else "-corrected" * settings.use_bias_correction_kl
    return f"{settings.loss_type}-{level}-high{high}-beta{settings.beta}{more}"


@pytest.mark.parametrize("settings", EVERY + MORE, ids=name_of)
def test_loss_and_gradients_equal_trl(settings, batch, tmp_path):
    model = tiny_model()
    theirs, their_grads = trl_loss(model, batch, settings, tmp_path)
    ours, our_grads = our_loss(model, batch, settings)
    assert abs(ours) > 0.01
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert our_grads.keys() == their_grads.keys()
    assert max(gradient.abs().max() for gradient in our_grads.values()) > 1e-3
    for name, gradient in our_grads.items():
        assert torch.allclose(gradient, their_grads[name], atol=1e-5), name


CUT = 1
"""The row whose completion was cut."""


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_masked_truncated_completions_equal_trl(loss_type, batch, tmp_path):
    """TRL empties the mask of a cut completion, which then counts in no token mean (dapo, bnpo). In a mean
    over rows (grpo, dr_grpo) it would still count below the line; there ours is TRL's loss of the others."""
    settings = settings_of(loss_type, "token", 0.28, 0.04)
    excluded = [row == CUT for row in range(4)]
    ours, our_grads = our_loss(tiny_model(), batch, settings, excluded)
    kept = {**batch, "num_items_in_batch": torch.tensor(float(sum(LENGTHS) - LENGTHS[CUT]))}
    if loss_type in ("dapo", "bnpo"):
        kept["completion_mask"] = batch["completion_mask"].clone()
        kept["completion_mask"][CUT] = 0
    else:
        rows = [row for row in range(4) if row != CUT]
        kept = {name: value[rows] if value.dim() else value for name, value in kept.items()}
    theirs, their_grads = trl_loss(tiny_model(), kept, settings, tmp_path)
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert abs(ours - our_loss(tiny_model(), batch, settings)[0]) > 1e-3
    for name, gradient in our_grads.items():
        assert torch.allclose(gradient, their_grads[name], atol=1e-5), name


def test_the_options_make_a_difference_on_this_batch(batch):
    """Else equality with TRL under an option would say nothing of it."""
    losses = [
        (name_of(settings), our_loss(tiny_model(), batch, settings)[0])
        for settings in EVERY + MORE
        if settings.loss_type != "bnpo"  # equals dapo on a whole batch
    ]
    losses.sort(key=lambda item: item[1])
    for (name, loss), (other, next_loss) in pairwise(losses):
        assert next_loss - loss > 1e-5, (name, other)


def test_advantages_equal_trls_scaling_but_for_its_constant():
    """TRL adds 1e-4 to the standard deviation; ours is exact."""
    from grpo.advantage import group_advantages

    groups = [[1.0, 0.2, 0.0], [0.5, 0.5, -1.0]]
    rewards = torch.tensor(groups)
    centred = rewards - rewards.mean(1, keepdim=True)
    expected = {
        "group": centred / rewards.std(1, keepdim=True),
        "batch": centred / rewards.std(),
        "none": centred,
    }
    everyone = [reward for group in groups for reward in group]
    for scale, values in expected.items():
        ours = [group_advantages(group, scale, everyone) for group in groups]
        torch.testing.assert_close(torch.tensor(ours), values, atol=1e-6, rtol=0)
