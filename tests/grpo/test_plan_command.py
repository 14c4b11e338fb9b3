"""`grpo.train --plan`: what it prints, what it refuses with which numbers, and what every run checks."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from training_world import EPISODE, grpo_settings, trainer_for

from data.corpus_files import DocumentRecord, write_corpus
from grpo.arguments import GrpoConfig
from grpo.plan import make_plan
from grpo.planning.options import PlanOptions, TrainCommand
from grpo.train import main
from visor.config import load_config
from visor.types import Page, make_page_id

ROOT = Path(__file__).parents[2]
SEVEN_B = Path(__file__).parent / "model_configs" / "qwen2_5_vl_7b"
PAPER = ROOT / "configs" / "grpo" / "qwen2_5_vl_7b.yaml"
GIB = 1 << 30


@pytest.fixture
def folder(world, tmp_path):
    """The world without its policy's weights, and a place for settings."""
    shutil.copytree(world, tmp_path / "world")
    (tmp_path / "world" / "policy" / "model.safetensors").unlink()
    return tmp_path


def planned(folder, capsys, *options, **settings):
    """(exit status, output, error) of the command on the folder's world."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(grpo_settings(folder / "world", folder / "out", **settings)))
    with pytest.raises(SystemExit) as stopped:
        main(["--config", str(path), "--plan", *options])
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err


def write_pages(corpus, sizes):
    pages = {}
    for number, (width, height) in enumerate(sizes, 1):
        page_id = make_page_id("deck", number)
        pages[page_id] = Page(
            page_id=page_id, doc_id="deck", page_number=number, image="x.png", width=width, height=height
        )
    write_corpus(corpus, {"deck": DocumentRecord(doc_id="deck", status="done", page_count=len(pages))}, pages)


# ---------------------------------------------------------------- what it prints


def test_a_plan_needs_no_weights_and_leaves_nothing(folder, capsys):
    status, shown, _ = planned(folder, capsys, "--plan_device_gib", "4")
    assert status == 0
    assert shown.endswith("no limit is exceeded\n")
    for part in ("system", "evidence", "image tokens", "max_model_len", "images per prompt 1", "turn",
                 "trajectory (set)", "weights", "optimizer", "activations", "KV cache"):  # fmt: skip
        assert part in shown
    assert "assumed:" not in shown
    assert not (folder / "out").exists()


def test_the_figures_of_a_step(folder, capsys):
    """2 questions × 3 trajectories, at most 3 calls each."""
    _, shown, _ = planned(folder, capsys, "--plan_turns", "2", max_completion_length=30)
    rows = [line.split() for line in shown.splitlines() if line.startswith(("  trajectory", "  turn"))]
    numbers = {(row[0], row[-6]): int(row[-5].replace(",", "")) for row in rows}
    assert numbers == {
        ("trajectory", "longest"): 6, ("trajectory", "typical"): 6, ("turn", "longest"): 18,
        ("turn", "typical"): 12,
    }  # fmt: skip


def test_without_gpu_and_device_memory_is_not_checked(folder, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, shown, _ = planned(folder, capsys)
    assert status == 0
    assert "warning: no GPU is here and plan_device_gib is not given" in shown


def test_data_that_does_not_exist_yet_is_assumed(folder, capsys):
    shutil.rmtree(folder / "world" / "corpus")
    (folder / "world" / "questions.jsonl").unlink()
    status, shown, _ = planned(folder, capsys, "--plan_device_gib", "8", max_completion_length=20)
    assert "assumed: pages of any shape" in shown
    assert "assumed: questions like" in shown
    assert status == 0, shown


def test_one_process_of_a_launch_prints(folder, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    _, shown, _ = planned(folder, capsys)
    assert "memory (2 processes, data parallel" in shown
    monkeypatch.setenv("RANK", "1")
    assert planned(folder, capsys)[1] == ""


def test_options_of_a_plan_are_no_settings_of_a_run(folder):
    settings = grpo_settings(folder / "world", folder / "out")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**settings, "plan_device_gib": 80}))
    command = load_config(TrainCommand, path, ["--plan", "--stop_on_alarm", "all"])
    assert command.plan
    assert command.plan_device_gib == 80
    assert command.settings.model_dump() == GrpoConfig(**settings, stop_on_alarm="all").model_dump()
    assert not set(PlanOptions.model_fields) & set(GrpoConfig.model_fields)


# ---------------------------------------------------------------- the paper's setting


def paper_plan(**settings):
    options = {name: settings.pop(name) for name in list(settings) if name in PlanOptions.model_fields}
    overrides = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    config = load_config(GrpoConfig, PAPER, ["--model_name_or_path", str(SEVEN_B), *overrides])
    launch = str(ROOT / "configs" / "accelerate" / "zero2.yaml")
    return make_plan(config, PlanOptions(**{"plan_launch_file": launch, "plan_device_gib": 80, **options}))


def test_the_papers_setting_on_8_gpus_of_80_gib():
    """Table 6: group 5, 8 questions, W = 2, T = 10, prompts to 8,192 and replies to 2,048 tokens."""
    plan = paper_plan()
    context, memory = plan.context, plan.demand.typical
    assert (context.max_context, context.max_images) == (8192 + 2048, 2)
    assert (context.page_tokens, context.crop_tokens) == (512, 1024)
    assert [call.visual for call in context.calls] == [0, 512, *[1536] * 8]  # flat in the turn index
    worst = context.worst["trajectory"]
    assert worst.visual == 5 * 512 + 4 * 1024
    assert worst.longest.sampled == 10 * 2048
    assert worst.longest.tokens <= plan.config.max_length == 32768  # no row is cut
    assert worst.longest.tokens == pytest.approx(30_100, rel=0.02)
    # ZeRO-2: whole weights and reference in bfloat16, 14 bytes of the trained parameters over 8 GPUs.
    assert memory.weights == memory.reference == 2 * 8_292_166_656
    assert memory.optimizer == 12 * 7_615_616_512 // 8
    assert memory.gradients == 2 * 7_615_616_512 // 8
    assert 45 * GIB < memory.peak < 55 * GIB  # a typical episode fits
    # Ten full replies fit too: of 20,480 sampled tokens the logits of a chunk stand at a time.
    assert 55 * GIB < plan.demand.longest.peak < 65 * GIB
    assert plan.refusals == []


def test_what_makes_the_papers_setting_fit_smaller_gpus():
    small = {"plan_device_gib": 55}
    (refusal,) = paper_plan(**small).refusals
    number = re.search(r"rows of up to about ([\d,]+) sampled tokens fit", refusal.text)[1]
    fitting = int(number.replace(",", ""))
    assert "20,480 sampled" in refusal.text
    # About: shorter replies leave the prompt room for more pages before it is full.
    assert paper_plan(**small, max_completion_length=fitting // 15).refusals == []
    assert paper_plan(**small, plan_must_fit="typical").refusals == []
    assert paper_plan(**small, credit="turn").refusals == []


def test_what_does_not_fit_80_gib():
    alone = paper_plan(plan_zero_stage=0, plan_world_size=1)
    assert alone.demand.typical.optimizer == 12 * 7_615_616_512  # 91 GB of optimizer alone
    assert "optimizer" in alone.refusals[-1].text
    adapter = paper_plan(plan_world_size=1, plan_zero_stage=2, use_peft=True, credit="turn")
    assert adapter.refusals == []
    assert paper_plan(gradient_checkpointing=False).demand.typical.activations > 4 * (
        paper_plan().demand.typical.activations
    )


def test_sharding_further_takes_less_and_gathers_for_rollouts():
    two, three = paper_plan(), paper_plan(plan_zero_stage=3)
    assert three.demand.longest.weights == two.demand.longest.weights // 8
    assert three.demand.longest.gathered == two.demand.longest.weights
    assert any("whole copy" in finding.text for finding in three.findings)


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"max_completion_length": 4000}, [], r"context of [\d,]+ tokens is possible.*4,096 positions"),
        ({"max_completion_length": 5000}, [], "max_completion_length is 5,000 and the model has 4,096"),
        (
            {"max_completion_length": 60, "max_length": 200}, ["--plan_reply_tokens", "10"],
            r"rows take up to \d+ tokens \(.*over max_length 200: their last turns are cut",
        ),
        ({"max_length": 30}, [], "rows of a typical episode take .* over max_length 30"),
        ({"max_length": 40, "credit": "turn"}, [], "over max_length 40: they are left out"),
        ({"max_prompt_length": 20}, [], "first call takes up to .* over max_prompt_length 20"),
        ({"max_prompt_length": 45}, [], "with one page takes .* over max_prompt_length 45"),
        ({}, ["--plan_device_gib", "0.5"], "and a GPU has 0.5 GiB; the largest part is runtime"),
        ({"episode": {**EPISODE, "crop_max_pixels": 20_000_000}}, [], "crop_max_pixels 20,000,000 is over"),
    ],
)  # fmt: skip
def test_each_limit_is_refused_with_its_numbers(folder, capsys, settings, options, message):
    status, shown, _ = planned(folder, capsys, *options, **settings)
    assert status == 2
    assert shown.endswith("\nrefused\n")
    assert re.search("refused: .*" + message, shown), shown


def test_pages_that_no_budget_can_show(folder, capsys):
    write_pages(folder / "world" / "corpus", [(56, 56), (20, 5000)])
    status, shown, _ = planned(folder, capsys)
    assert status == 2
    assert "refused: 1 pages are longer than 200:1 and cannot be shown: deck#page=2" in shown


def test_pages_over_their_budget(folder, capsys):
    write_pages(folder / "world" / "corpus", [(56, 56), (56, 1000)])
    status, shown, _ = planned(folder, capsys)
    assert status == 2
    assert "refused: 1 pages take up to 8 image tokens, over the 4 of page_max_pixels" in shown


def test_more_images_than_an_engine_takes(folder):
    class Bounded(GrpoConfig):
        max_images: int | None = None

    settings = grpo_settings(folder / "world", folder / "out", max_completion_length=40)
    settings["episode"] = {**EPISODE, "max_turns": 5, "window": 3}
    plan = make_plan(Bounded(**settings, max_images=2), PlanOptions())
    assert "up to 3 images (a window of 3, 5 turns), over max_images 2" in plan.refusals[0].text
    assert make_plan(Bounded(**settings, max_images=3), PlanOptions()).refusals == []


def test_a_policy_that_is_stopped_is_a_warning(folder, capsys):
    settings = {"max_completion_length": 60, "max_prompt_length": 120}
    assert planned(folder, capsys, **settings)[0] == 2  # typical replies of 60 tokens are stopped as well
    status, shown, _ = planned(folder, capsys, "--plan_reply_tokens", "10", **settings)
    assert status == 0
    assert "warning: a policy that fills its replies is stopped from call 2 on" in shown


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Qwen/Nobody-7B", "no model of this name in the local cache of the hub; give --model_name_or_path"),
        ("/nowhere/at/all", "there is no folder /nowhere/at/all; give --model_name_or_path"),
    ],
)
def test_a_model_that_is_not_here_is_one_sentence(folder, capsys, monkeypatch, tmp_path, model, message):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    status, _, error = planned(folder, capsys, model_name_or_path=model)
    assert status == 2
    (line,) = error.splitlines()
    assert line.startswith("grpo.train: error: there is no folder")
    assert message in line


def test_another_kind_of_model_is_refused(folder, capsys):
    path = folder / "world" / "policy" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "llama"}))
    status, _, error = planned(folder, capsys)
    assert status == 2
    assert "its model_type is 'llama'" in error


def test_a_hub_model_in_the_cache_is_planned(folder, capsys, monkeypatch):
    snapshot = folder / "cache" / "models--some--policy" / "snapshots" / "abc"
    shutil.copytree(folder / "world" / "policy", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    status, shown, _ = planned(folder, capsys, model_name_or_path="some/policy")
    assert status == 0
    assert "plan of a GRPO run from some/policy" in shown


# ---------------------------------------------------------------- what every run checks


def test_a_run_that_cannot_keep_its_limits_is_refused_before_anything(world, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.build.load_model", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="4,096 positions"):
        trainer_for(world, tmp_path / "run", max_completion_length=4000)
    with pytest.raises(ValueError, match="over max_prompt_length 20"):
        trainer_for(world, tmp_path / "run", max_prompt_length=20)


def test_a_run_says_its_limits_in_one_line(world, tmp_path, capsys):
    trainer_for(world, tmp_path / "run")
    captured = capsys.readouterr()
    (line,) = [line for line in captured.out.splitlines() if line.startswith("plan: ")]
    assert "prompts of at most" in line
    (warning,) = [line for line in captured.err.splitlines() if line.startswith("warning: ")]
    assert warning == "warning: no crop fits in max_completion_length 8 after a thought"


def test_rows_that_will_be_cut_are_a_warning_of_a_run(world, tmp_path, capsys):
    trainer_for(world, tmp_path / "run", max_length=40, credit="turn")
    assert "over max_length 40: they are left out" in capsys.readouterr().err
