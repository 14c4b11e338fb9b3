"""The planned memory against what PyTorch allocates for a tiny policy, and against published figures."""

import contextlib
import weakref
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch.profiler import ProfilerActivity, profile
from training_world import TEXTS, grpo_settings

from grpo.arguments import GrpoConfig
from grpo.batch import PolicyRow
from grpo.build import _optimizer, _policy
from grpo.loss import LossSettings
from grpo.planning.activations import Batch, Shape, kept_for_backward, peak
from grpo.planning.demand import compute_pass
from grpo.planning.launch import Launch
from grpo.planning.memory import (
    CACHE_ROOM,
    FEATURE_CACHE,
    RolloutBatch,
    cache_bytes,
    static_memory,
)
from grpo.planning.model import Parameters, count_parameters, read_model_config
from grpo.update import PolicyUpdate
from rollout.rows import messages_row
from visor.models import output_layer
from visor.models.decoding import GROWTH, _Run, inference
from visor.models.features import ImageFeatures, collate_with_features
from visor.models.loading import load_model, load_processor, unwrap
from visor.models.tensors import collate, forward_logprobs
from visor.models.tiny import build_tiny_policy
from visor.models.transformers import TransformersClient
from visor.types import ImagePart, ImageRef, Message, TextPart, text_message

SEVEN_B = Path(__file__).parent / "model_configs" / "qwen2_5_vl_7b"
FROZEN = ["vision_tower", "projector"]
CASES = {
    "full": {"freeze": FROZEN},
    "full, bfloat16": {"freeze": FROZEN, "dtype": "bfloat16"},
    "full, autocast": {"freeze": FROZEN, "bf16": True},
    "full, checkpointing": {"freeze": FROZEN, "gradient_checkpointing": True},
    "full, bfloat16, checkpointing": {
        "freeze": FROZEN, "dtype": "bfloat16", "gradient_checkpointing": True,
    },
    "full, autocast, checkpointing": {"freeze": FROZEN, "bf16": True, "gradient_checkpointing": True},
    "vision too": {},
    "vision too, bfloat16": {"dtype": "bfloat16"},
    "vision too, autocast": {"bf16": True},
    "vision too, checkpointing": {"gradient_checkpointing": True},
    "projector too": {"freeze": ["vision_tower"]},
    "eager": {"freeze": FROZEN, "attn_implementation": "eager"},
    "eager, bfloat16, checkpointing": {
        "freeze": FROZEN, "attn_implementation": "eager", "dtype": "bfloat16",
        "gradient_checkpointing": True,
    },
    "LoRA": {"use_peft": True},
    "LoRA, bfloat16": {"use_peft": True, "dtype": "bfloat16"},
    "LoRA, autocast": {"use_peft": True, "bf16": True},
    "LoRA, bfloat16, checkpointing": {
        "use_peft": True, "dtype": "bfloat16", "gradient_checkpointing": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A tiny policy with several layers, vision windows and a vocabulary that weighs something."""
    path = tmp_path_factory.mktemp("memory") / "policy"
    build_tiny_policy(
        path, TEXTS, vocab_size=340, text={"vocab_size": 3000, "num_hidden_layers": 4},
        vision={"depth": 3, "fullatt_block_indexes": [1]},
    )  # fmt: skip
    return path


def config_for(policy, tmp_path, **settings) -> GrpoConfig:
    base = grpo_settings(policy.parent, tmp_path, lora_r=8, per_device_train_batch_size=1)
    return GrpoConfig(**{**base, "model_name_or_path": str(policy), **settings})


def picture(ref):
    return Image.new("RGB", (112, 112), "white")


def make_row(renderer, words=300, sampled=80, images=3):
    """A trajectory's row: pictures, text of the environment, and one reply."""
    ref = [ImageRef(page_id=f"d#page={i}", min_pixels=12544, max_pixels=12544) for i in range(1, images + 1)]
    parts = [part for image in ref for part in (ImagePart(image=image), TextPart(text=" page" * words))]
    reply = Message(
        role="assistant", content=[TextPart(text="x")], token_ids=renderer.text_ids(" page") * sampled
    )
    messages = [text_message("system", "agent"), Message(role="user", content=parts), reply]
    return messages_row(messages, renderer, picture)


def make_batch(model, renderer, rows, how) -> tuple[dict, int]:
    """The batch of a run, and the bytes of its pictures, which are there before the pass."""
    if how.features:
        batch = collate_with_features(rows, ImageFeatures(model, renderer, picture), "cpu")
        return batch, batch["image_features"].nbytes
    batch = collate(rows, renderer, picture)
    return batch, batch["pixel_values"].nbytes


def as_batch(rows) -> Batch:
    lengths = [len(row.input_ids) for row in rows]
    return Batch(
        rows=len(rows),
        length=max(lengths),
        sampled=sum(sum(row.loss_mask) for row in rows),
        patches=sum(4 * (end - start) for row in rows for start, end in row.image_spans),
        image_patches=64,
    )


def allocated(function) -> int:
    """The most bytes that `function` has allocated at once on the CPU, temporaries of kernels included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    total = most = 0
    for _, size in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        total += size
        most = max(most, total)
    return most


def kept_bytes(model, batch, forward) -> int:
    """Bytes of the distinct storages that autograd saves, weights and inputs left out, the logits too."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *batch.values()]}
    logits = int(batch["loss_mask"].sum()), unwrap(model).config.text_config.vocab_size
    saved = weakref.WeakSet()

    class Saved:
        """Lives as long as the node of the graph that needs the tensor."""

        def __init__(self, tensor):
            self.tensor = tensor
            saved.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda kept: kept.tensor):
        result = forward()
    storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor for kept in saved}
    del result
    return sum(
        0 if tensor.shape == logits else tensor.untyped_storage().nbytes()
        for pointer, tensor in storages.items()
        if pointer not in known
    )


# ---------------------------------------------------------------- weights, gradients, optimizer


@pytest.mark.parametrize("name", [name for name in CASES if "checkpointing" not in name])
def test_weights_gradients_and_optimizer_are_exact(policy, tmp_path, name):
    config = config_for(policy, tmp_path, **CASES[name])
    counted = count_parameters(config, read_model_config(str(policy)))
    model = _policy(config, None)
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    assert counted.number == sum(parameter.numel() for parameter in parameters)
    assert counted.bytes == sum(parameter.nbytes for parameter in parameters)
    assert counted.trained == sum(parameter.numel() for parameter in trained)
    static = static_memory(counted, Launch(), bf16=config.bf16)
    assert static.weights == counted.bytes
    optimizer = _optimizer(config, model)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert static.gradients == sum(parameter.grad.nbytes for parameter in trained)
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert static.optimizer == sum(value.nbytes for value in state)


def test_the_layers_of_the_model_are_counted(policy, tmp_path):
    config = config_for(policy, tmp_path)
    counted = count_parameters(config, read_model_config(str(policy)))
    model = unwrap(load_model(policy))
    layer = sum(parameter.numel() for parameter in model.model.language_model.layers[0].parameters())
    block = sum(parameter.numel() for parameter in model.model.visual.blocks[0].parameters())
    assert counted.largest_layer == max(layer, block)
    assert counted.outside_layers == counted.number - 4 * layer - 3 * block


def test_an_adapter_folder_is_planned_as_lora(policy, tmp_path):
    _policy(config_for(policy, tmp_path, use_peft=True, lora_r=4), None).save_pretrained(tmp_path / "adapter")
    config = config_for(policy, tmp_path, model_name_or_path=str(tmp_path / "adapter"))
    model_config = read_model_config(config.model_name_or_path)
    counted = count_parameters(config, model_config)
    loaded = _policy(config, None)
    assert counted.trained == sum(p.numel() for p in loaded.parameters() if p.requires_grad)
    assert counted.base == sum(p.numel() for p in load_model(policy).parameters())
    assert compute_pass(config, model_config, Launch(), False).lora_rank == 4


# ---------------------------------------------------------------- activations


@pytest.mark.parametrize("name", CASES)
def test_activations_of_a_pass(policy, tmp_path, name):
    """What autograd keeps within 3 %, the peak of forward and backward within 8 %."""
    config = config_for(policy, tmp_path, **CASES[name])
    model_config = read_model_config(str(policy))
    model = _policy(config, None).train()
    renderer = load_processor(policy).renderer()
    rows = [make_row(renderer)]
    shape, how = Shape.of(model_config), compute_pass(config, model_config, Launch(), config.bf16)
    batch, pictures = make_batch(model, renderer, rows, how)
    autocast = torch.autocast("cpu", torch.bfloat16) if config.bf16 else contextlib.nullcontext()

    def forward():
        with autocast:
            return forward_logprobs(model, batch, entropy=True)

    def both():
        forward()[0].sum().backward()

    kept = kept_bytes(model, batch, forward)
    assert kept_for_backward(shape, how, as_batch(rows)) == pytest.approx(kept, rel=0.03)
    both()  # gradients exist from here on
    measured, estimate = allocated(both), peak(shape, how, as_batch(rows)) - pictures
    assert estimate == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize("sampled", [4, 600])
def test_few_and_many_sampled_tokens(policy, tmp_path, sampled):
    """The logits of many sampled tokens outweigh the layers."""
    config = config_for(policy, tmp_path, freeze=FROZEN, gradient_checkpointing=True)
    model_config = read_model_config(str(policy))
    model = _policy(config, None).train()
    renderer = load_processor(policy).renderer()
    rows = [make_row(renderer, words=60, sampled=sampled, images=1)]
    shape, how = Shape.of(model_config), compute_pass(config, model_config, Launch(), False)
    batch, pictures = make_batch(model, renderer, rows, how)

    def both():
        forward_logprobs(model, batch, entropy=True)[0].sum().backward()

    both()
    estimate = peak(shape, how, as_batch(rows)) - pictures
    assert estimate == pytest.approx(allocated(both), rel=0.25)


@pytest.mark.parametrize("name", [name for name in CASES if "checkpointing" in name])
def test_sampled_tokens_in_chunks(policy, tmp_path, monkeypatch, name):
    """600 sampled tokens in twelve chunks: their logits no longer outweigh the layers."""
    monkeypatch.setattr(output_layer, "LOGIT_BYTES", 4 * 3000 * 50)
    config = config_for(policy, tmp_path, **CASES[name])
    model_config = read_model_config(str(policy))
    model = _policy(config, None).train()
    renderer = load_processor(policy).renderer()
    rows = [make_row(renderer, words=60, sampled=600, images=1)]
    shape, how = Shape.of(model_config), compute_pass(config, model_config, Launch(), config.bf16)
    batch, pictures = make_batch(model, renderer, rows, how)
    autocast = torch.autocast("cpu", torch.bfloat16) if config.bf16 else contextlib.nullcontext()

    def both():
        with autocast:
            logprobs = forward_logprobs(model, batch, entropy=True)[0]
        logprobs.sum().backward()

    both()
    estimate = peak(shape, how, as_batch(rows)) - pictures
    assert estimate == pytest.approx(allocated(both), rel=0.15)
    monkeypatch.undo()
    if how.attention == "sdpa":  # eager keeps more for one layer than all logits take
        assert peak(shape, how, as_batch(rows)) - pictures > estimate + 8 * 550 * 3000


@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_of_different_lengths(policy, tmp_path, checkpointing):
    config = config_for(policy, tmp_path, freeze=FROZEN, gradient_checkpointing=checkpointing)
    model_config = read_model_config(str(policy))
    model = _policy(config, None).train()
    renderer = load_processor(policy).renderer()
    rows = [make_row(renderer), make_row(renderer, words=250, sampled=60)]
    shape, how = Shape.of(model_config), compute_pass(config, model_config, Launch(), False)
    batch, pictures = make_batch(model, renderer, rows, how)

    def both():
        forward_logprobs(model, batch, entropy=True)[0].sum().backward()

    both()
    estimate = peak(shape, how, as_batch(rows)) - pictures
    assert estimate == pytest.approx(allocated(both), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "full, checkpointing", "LoRA"])
def test_a_whole_update_with_its_reference(policy, tmp_path, name):
    """Gradients and activations of a step of the trainer: micro-batches, reference and optimizer."""
    config = config_for(policy, tmp_path, **CASES[name])
    model_config = read_model_config(str(policy))
    model, reference = _policy(config, None), load_model(policy).requires_grad_(False)
    renderer = load_processor(policy).renderer()
    training_rows = [make_row(renderer) for _ in range(3)]
    for row in training_rows:
        row.advantage = 1.0
    features = ImageFeatures(model, renderer, picture)
    update = PolicyUpdate(
        Accelerator(cpu=True), model, _optimizer(config, model),
        lambda rows: collate_with_features(rows, features, "cpu"), LossSettings(beta=0.1),
        reference=reference,
    )  # fmt: skip
    rows = [PolicyRow(row) for row in training_rows]
    update.run(rows, [], seed=0)  # the optimizer's state exists from here on
    measured = allocated(lambda: update.run(rows, [], seed=0))
    shape, how = Shape.of(model_config), compute_pass(config, model_config, Launch(), False)
    static = static_memory(count_parameters(config, model_config), Launch(), bf16=False)
    estimate = static.gradients + peak(shape, how, as_batch(training_rows[:1]))
    assert estimate == pytest.approx(measured, rel=0.15)


# ---------------------------------------------------------------- rollouts


def test_the_cache_of_a_rollout(policy):
    model, renderer = load_model(policy), load_processor(policy).renderer()
    prompt = renderer.encode([text_message("system", "agent"), text_message("user", " page" * 200)], picture)
    sequences, reply = 4, 100
    batch = collate([prompt], renderer, picture, padding="left")

    class Longest:
        """Never ends a reply."""

        def __call__(self, logits, step):
            return torch.full((len(logits),), renderer.text_ids(" page")[0])

        def keep(self, rows):
            pass

    with inference(model):
        run = _Run(
            model, batch, [], [0] * sequences, [reply] * sequences,
            Longest(), renderer.stop_ids,
        )  # fmt: skip
        step = 0
        while run.advance(step):
            step += 1
    held = sum(tensor.nbytes for layer in run.layers for tensor in layer._buffers)
    shape = Shape.of(model.config)
    length = len(prompt.input_ids)
    planned = cache_bytes(shape, RolloutBatch(sequences, length, reply, 0), 4)
    one_layer = planned // (shape.layers + 1)
    assert held <= planned - one_layer
    assert held >= 0.75 * (planned - one_layer)
    assert planned - one_layer == 2 * 64 * 4 * (length + reply + GROWTH) * sequences * 4


def test_constants_are_those_of_the_engine():
    import inspect

    assert CACHE_ROOM == GROWTH
    default = inspect.signature(TransformersClient).parameters["feature_cache_bytes"].default
    assert default == FEATURE_CACHE


# ---------------------------------------------------------------- sharding and published figures


MIXED = Parameters(
    trained=1000, trained_bytes=2000, frozen=200, frozen_bytes=400, trained_tensors=3, base=1200,
    largest_layer=100, outside_layers=300,
)  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 2400, 4000, 12000), (1, 2400, 2000, 3000), (2, 2400, 500, 3000), (3, 600, 500, 3000)],
)
def test_zero_divides_what_its_stage_says(stage, weights, gradients, optimizer):
    """ZeRO, section 3: 2 + 2 + 12 bytes a trained parameter, over four processes."""
    static = static_memory(MIXED, Launch(4, f"zero{stage}", bf16=True), bf16=True)
    assert (static.weights, static.gradients, static.optimizer) == (weights, gradients, optimizer)
    offloaded = static_memory(MIXED, Launch(4, f"zero{stage}", optimizer_on_cpu=True), bf16=True)
    assert offloaded.optimizer == 0
    assert static.gathered == (2400 if stage == 3 else 0)  # the copy that samples


def test_the_paper_of_zero():
    """ZeRO, figure 1: 7.5 billion parameters over 64 GPUs take 31.4, 16.6 and 1.9 GB."""
    psi = 7_500_000_000
    parameters = Parameters(psi, 2 * psi, 0, 0, 1, psi, 0, 0)
    for stage, gigabytes in ((1, 31.4), (2, 16.6), (3, 1.9)):
        static = static_memory(parameters, Launch(64, f"zero{stage}"), bf16=True)
        total = static.weights + static.gradients + static.optimizer
        assert total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_data_parallel_and_fsdp():
    alone, many = (static_memory(MIXED, Launch(size), bf16=False) for size in (1, 4))
    assert alone.communication == 0
    assert many.communication == 2000  # the buckets of DistributedDataParallel
    assert alone.weights == many.weights == 2400
    sharded = static_memory(MIXED, Launch(4, "fsdp"), bf16=True)
    assert sharded.weights == (4 * 1000 + 400) // 4
    assert sharded.gradients == 1000
    assert sharded.optimizer == 2000
    assert sharded.gathered == 2400  # the copy that samples, in the type the policy was loaded in
    kept = static_memory(MIXED, Launch(4, "fsdp_grad_op"), bf16=True)
    assert (kept.weights, kept.gathered) == (sharded.weights, sharded.gathered)
    assert kept.communication - sharded.communication == 2 * (1200 - (2 * 100 + 300))


def test_the_published_7b_model():
    """8.29 billion parameters: 0.54 of embeddings, 0.54 of the output layer, 0.68 of the vision tower."""
    model_config = read_model_config(str(SEVEN_B))
    config = GrpoConfig(
        model_name_or_path=str(SEVEN_B), output_dir="o", corpus="c", questions="q", freeze=FROZEN
    )
    counted = count_parameters(config, model_config)
    assert counted.number == 8_292_166_656
    assert counted.trained == 7_615_616_512  # Qwen2.5-7B
    assert counted.bytes == 2 * counted.number
    assert cache_bytes(Shape.of(model_config), RolloutBatch(1, 1, 0, 0), 2) == 65 * 29 * 2 * 512 * 2
    lora = count_parameters(config.model_copy(update={"use_peft": True}), model_config)
    # 16 × (in + out) of q, k, v, o, gate, up and down in 28 layers, held in float32.
    per_layer = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    assert lora.trained == 28 * 16 * per_layer
    assert lora.trained_bytes == 4 * lora.trained


def test_a_4_bit_base_takes_a_quarter():
    """QLoRA: embeddings, output layer, vision tower and projector stay whole."""
    settings = {"model_name_or_path": str(SEVEN_B), "output_dir": "o", "corpus": "c", "questions": "q"}
    model_config = read_model_config(str(SEVEN_B))

    def bytes_with(**quantised) -> int:
        return count_parameters(GrpoConfig(**settings, use_peft=True, **quantised), model_config).frozen_bytes

    number = bytes_with() // 2
    per_layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    linear = 28 * per_layer
    whole = 2 * (number - linear)
    assert bytes_with(load_in_4bit=True) == pytest.approx(whole + 0.5625 * linear, abs=1)
    nested = bytes_with(load_in_4bit=True, use_bnb_nested_quant=True)
    assert nested == pytest.approx(
        whole + (0.5 + 0.127 / 8) * linear, rel=1e-5
    )  # QLoRA, section 3: 0.127 bits
    assert bytes_with(load_in_8bit=True) == whole + linear


def test_a_colocated_engine_takes_its_share_and_the_trainers_own_sampling_none():
    from grpo.planning.demand import with_engine
    from grpo.planning.memory import GIB, Memory

    needed = Memory(*(value * GIB for value in (10, 5, 0, 3, 1, 8, 20, 6, 1, 0)))
    settings = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c", "questions": "q"}

    def planned(device=80 * GIB, **options):
        return with_engine(needed, GrpoConfig(**settings, **options), device)

    assert planned() == needed
    beside = planned(use_vllm=True, vllm_gpu_memory_utilization=0.25)
    assert beside.update == needed.update + 20 * GIB
    assert beside.rollout == needed.stays + 20 * GIB
    asleep = planned(use_vllm=True, vllm_gpu_memory_utilization=0.25, vllm_enable_sleep_mode=True)
    assert (asleep.update, asleep.rollout) == (needed.update, beside.rollout)
    server = planned(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://h:1")
    assert (server.update, server.rollout) == (needed.update, needed.stays)
    assert dict(beside.lines())["engine"] == 20 * GIB
    assert "engine" not in dict(needed.lines())
