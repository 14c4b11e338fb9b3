"""Our loss and gradients against TRL's own GRPOTrainer on a plain single-turn text batch."""

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
    torch.manual_seed(1)
    prompt_mask = torch.ones(4, PROMPT, dtype=torch.long)
    prompt_mask[1, :2] = 0  # TRL pads prompts on the left
    return {
        "prompt_ids": torch.randint(2, VOCABULARY, (4, PROMPT)),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(2, VOCABULARY, (4, COMPLETION)),
        "completion_mask": (torch.arange(COMPLETION)[None] < torch.tensor(LENGTHS)[:, None]).long(),
        "advantages": torch.tensor([1.2, -0.7, 0.0, -1.5]),
        "old_per_token_logps": -3.0 + 0.5 * torch.randn(4, COMPLETION),
        "ref_per_token_logps": -3.0 + 0.5 * torch.randn(4, COMPLETION),
        "num_items_in_batch": torch.tensor(float(sum(LENGTHS))),
    }


def trl_loss(model, batch, settings: LossSettings, folder) -> tuple[float, dict]:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, report_to="none", bf16=False,
        per_device_train_batch_size=4, num_generations=4, loss_type=settings.loss_type, beta=settings.beta,
        epsilon=settings.epsilon, epsilon_high=settings.epsilon_high,
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


def our_loss(model, batch, settings: LossSettings) -> tuple[float, dict]:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    model.train()
    logits = model(input_ids=ids, attention_mask=attention).logits[:, PROMPT - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None]).squeeze(-1)
    coefficients = torch.tensor(row_coefficients(LENGTHS, list("abcd"), settings))
    loss, _ = policy_loss(
        logprobs, batch["old_per_token_logps"], batch["advantages"], batch["completion_mask"].float(),
        coefficients, settings, batch["ref_per_token_logps"] if settings.beta else None,
    )  # fmt: skip
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("loss_type", "corrected"), [("dapo", False), ("dapo", True), ("grpo", False), ("dr_grpo", False)]
)
def test_loss_and_gradients_equal_trl(loss_type, corrected, batch, tmp_path):
    settings = LossSettings(
        loss_type=loss_type, epsilon=0.2, epsilon_high=0.28, beta=0.04, use_bias_correction_kl=corrected,
        max_completion_length=COMPLETION,
    )  # fmt: skip
    model = tiny_model()
    theirs, their_grads = trl_loss(model, batch, settings, tmp_path)
    ours, our_grads = our_loss(model, batch, settings)
    assert abs(ours) > 0.01
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert our_grads.keys() == their_grads.keys()
    for name, gradient in our_grads.items():
        assert torch.allclose(gradient, their_grads[name], atol=1e-5), name
