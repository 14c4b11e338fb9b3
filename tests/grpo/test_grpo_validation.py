"""Validation in the loop: it changes nothing, it is neither doubled nor lost, and the best model is kept."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from training_world import grpo_settings, read_metrics, read_timeless, trainer_for, validating

from grpo.arguments import GrpoConfig
from visor.models.base import Request, Sampling
from visor.types import ImagePart, ImageRef, Message, RewardBreakdown, Trajectory


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def validations(output_dir: Path) -> list[dict]:
    return read_timeless(output_dir / "validation.jsonl")


def best(output_dir: Path) -> dict:
    return json.loads((output_dir / "best" / "best.json").read_text())


def with_values(trainer, values: dict[int, float]):
    """The trainer with validations that come out as told: step → reward."""
    run = trainer.validation.run
    trainer.validation.run = lambda step: {**run(step), "reward": values[step]}
    return trainer


@pytest.mark.parametrize(
    "settings",
    [{}, {"freeze": ["vision_tower", "projector"]}, {"use_peft": True, "lora_dropout": 0.3, "lora_r": 2}],
    ids=["all", "frozen tower", "lora with dropout"],
)
def test_training_is_the_same_with_and_without_validation(world, tmp_path, settings):
    trainer_for(world, tmp_path / "without", **settings).train()
    trainer_for(
        world, tmp_path / "with", **settings, **validating(world, eval_on_start=True, eval_num_samples=2)
    ).train()
    assert read_metrics(tmp_path / "with") == read_metrics(tmp_path / "without")
    name = "adapter_model.safetensors" if "use_peft" in settings else "model.safetensors"
    ours, theirs = (load_file(tmp_path / folder / name) for folder in ("with", "without"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    lines = validations(tmp_path / "with")
    assert [(line["step"], line["n"]) for line in lines] == [(0, 8), (1, 8), (2, 8), (3, 8)]


def test_what_a_validation_records(world, tmp_path, capsys):
    trainer = trainer_for(
        world, tmp_path, max_steps=1, learning_rate=0.0,
        **validating(world, eval_on_start=True, eval_limit=3, eval_num_samples=2),
    )  # fmt: skip
    trainer.train()
    start, after = validations(tmp_path)
    # The same policy under the same random numbers gives the same figures.
    assert {**start, "step": 1} == after
    records = [
        json.loads(line) for line in (tmp_path / "validation" / "step-1.jsonl").read_text().splitlines()
    ]
    trajectories = [Trajectory.model_validate(record) for record in records]
    assert [(t.question_id, t.sample_index) for t in trajectories] == [
        (f"held-out-{topic}", sample) for topic in ("apple", "brick", "cloud") for sample in (0, 1)
    ]
    rewards = [t.reward.total for t in trajectories]
    assert after["reward"] == pytest.approx(sum(rewards) / 6)
    assert len(set(rewards)) > 1
    assert {turn.completion.policy_version for t in trajectories for turn in t.turns} == {1}
    shown = capsys.readouterr().out
    assert "validation at step 0: reward" in shown
    assert "(best reward so far)" in shown


def test_several_samples_give_pass_at_k(world, tmp_path, capsys):
    """Against every way to draw k of a question's samples; the best model may be chosen by it."""
    settings = validating(world, eval_num_samples=5, metric_for_best_model="pass_at_4")
    trainer = trainer_for(world, tmp_path, max_steps=1, **settings)

    def some_right(trajectory, question, judge):
        counts = {"apple": 0, "brick": 1, "cloud": 2, "delta": 4}
        right = trajectory.sample_index < counts[question.question_id.removeprefix("held-out-")]
        return RewardBreakdown(total=float(right), judge="test", verdict=right)

    trainer.validation.engine.scorer = some_right
    trainer.train()
    (line,) = validations(tmp_path)
    records = [
        json.loads(text) for text in (tmp_path / "validation" / "step-1.jsonl").read_text().splitlines()
    ]
    by_question = defaultdict(list)
    for record in records:
        by_question[record["question_id"]].append(record["reward"]["total"] == 1.0)
    assert {len(right) for right in by_question.values()} == {5}
    assert len({sum(right) for right in by_question.values()}) > 1
    for k in (1, 2, 4, 5):
        draws = [[any(drawn) for drawn in combinations(right, k)] for right in by_question.values()]
        expected = sum(sum(hits) / len(hits) for hits in draws) / len(draws)
        assert line[f"pass_at_{k}"] == pytest.approx(expected)
    assert [name for name in line if name.startswith("pass_at_")] == [f"pass_at_{k}" for k in (1, 2, 4, 5)]
    assert line["pass_at_1"] == pytest.approx(line["accuracy"])
    assert best(tmp_path)["metric"] == "pass_at_4"
    assert "pass@5" in capsys.readouterr().out


def test_the_validation_temperature(world, tmp_path):
    texts = []
    for temperature in (0.0, None):
        trainer = trainer_for(
            world, tmp_path / str(temperature), max_steps=1,
            **validating(world, eval_limit=1, eval_num_samples=3, eval_temperature=temperature),
        )  # fmt: skip
        trainer.train()
        lines = (tmp_path / str(temperature) / "validation" / "step-1.jsonl").read_text().splitlines()
        texts.append({json.loads(line)["turns"][0]["completion"]["text"] for line in lines})
    assert len(texts[0]) == 1 < len(texts[1])


def test_validation_on_a_corpus_of_its_own(world, tmp_path):
    """The other corpus has the same page ids with other pictures, which a shared cache would hide."""
    other = tmp_path / "other"
    shutil.copytree(world / "corpus", other)
    for path in (other / "images").glob("*.png"):
        Image.new("RGB", (56, 56), "black").save(path)
    page = ImagePart(image=ImageRef(page_id="deck#page=1", min_pixels=56 * 56, max_pixels=56 * 56))
    request = Request(
        messages=[Message(role="user", content=[page])], seed=0, sampling=Sampling(max_tokens=2)
    )
    frozen = {"freeze": ["vision_tower", "projector"]}
    seen = {}
    for name, corpus in (("same", None), ("other", str(other))):
        trainer = trainer_for(world, tmp_path / name, **frozen, **validating(world, eval_corpus=corpus))
        clients = trainer.client, trainer.validation.client
        seen[name] = [client.serve([request])[0].logprobs for client in clients]
    assert seen["same"][0] == seen["same"][1] == seen["other"][0]
    assert seen["other"][0] != seen["other"][1]


# ---------------------------------------------------------------- the best model


def test_the_best_model_is_kept_and_loads(world, tmp_path):
    from visor.models.loading import load_model, load_processor

    values = {0: 0.1, 1: 0.5, 2: 0.7, 3: 0.7, 4: 0.2}
    settings = {"max_steps": 4, "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True}
    trainer = trainer_for(world, tmp_path, **settings, **validating(world, eval_on_start=True))
    write = trainer.saver.write_checkpoint

    def write_and_keep(folder, step, *rest):
        write(folder, step, *rest)
        shutil.copytree(folder, tmp_path / f"kept-{step}")

    trainer.saver.write_checkpoint = write_and_keep
    with_values(trainer, values).train()
    assert best(tmp_path) == {"step": 2, "metric": "reward", "value": 0.7}  # the earlier of two equal ones
    assert same_weights(tmp_path / "best", tmp_path / "kept-2")
    assert same_weights(tmp_path, tmp_path / "kept-2")
    assert not same_weights(tmp_path, tmp_path / "checkpoint-4")
    assert not (tmp_path / "best.json").exists()
    assert not list(tmp_path.glob(".*"))  # nothing temporary is left
    load_processor(tmp_path / "best").renderer()
    assert load_model(tmp_path / "best").lm_head.out_features > 100


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"metric_for_best_model": "mean_searches"}, 3),
        ({"metric_for_best_model": "mean_searches", "greater_is_better": True}, 1),
    ],
)
def test_which_direction_is_better(world, tmp_path, settings, step):
    trainer = trainer_for(world, tmp_path, **settings, **validating(world))
    run = trainer.validation.run
    trainer.validation.run = lambda step: {**run(step), "mean_searches": {1: 3.0, 2: 2.0, 3: 1.0}[step]}
    trainer.train()
    assert best(tmp_path)["step"] == step


def test_a_figure_that_is_missing_is_never_best(world, tmp_path, capsys):
    def unscored(trajectory, question, judge):
        return RewardBreakdown(total=None, unscored_reason="judge fault")

    trainer = trainer_for(
        world, tmp_path, scorer=unscored, max_steps=1, load_best_model_at_end=True, **validating(world)
    )
    trainer.train()
    assert validations(tmp_path)[0]["reward"] is None
    assert not (tmp_path / "best").exists()
    assert "no validation had a reward" in capsys.readouterr().out
    assert same_weights(tmp_path, tmp_path / "checkpoint-1")


# ---------------------------------------------------------------- kills and resumption

DRIVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from training_world import trainer_for, validating
world, out, place, step = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])
trainer = trainer_for(
    world, out, max_steps=4, save_steps=2, **validating(world, eval_on_start=True, greater_is_better=False)
)
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if place == "rename":
    import grpo.best
    rename = os.rename
    def renamed(source, target):
        if trainer.step_done == step and Path(target).name == "best":
            die()
        rename(source, target)
    grpo.best.os.rename = renamed
elif place == "best":
    write = trainer.saver.write_model
    def written(folder):
        write(folder)
        if trainer.step_done == step and "best" in folder.name:
            die()
    trainer.saver.write_model = written
else:
    owner = trainer.validation if place == "append" else trainer.journal
    method = getattr(owner, place)
    setattr(owner, place, lambda *given: die() if trainer.step_done == step else method(*given))
trainer.train()
"""


@pytest.mark.parametrize(
    ("place", "step"),
    [("append", 0), ("append", 3), ("append", 4), ("log", 4), ("best", 3), ("rename", 2), ("rename", 3)],
)
def test_kill_9_around_a_validation(place, step, world, tmp_path):
    """Killed before the line is written, in the next step, while the best model is written or renamed."""
    # The lowest reward is the best here, because that of this run falls from step 2 on.
    validation = validating(world, eval_on_start=True, greater_is_better=False)
    values = {"max_steps": 4, "save_steps": 2, **validation}
    trainer_for(world, tmp_path / "whole", **values).train()
    assert best(tmp_path / "whole")["step"] == 4
    died = subprocess.run(
        [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(world), str(tmp_path / "broken"),
         place, str(step)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    trainer_for(world, tmp_path / "broken", **values).train()
    assert validations(tmp_path / "broken") == validations(tmp_path / "whole")
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")
    assert best(tmp_path / "broken") == best(tmp_path / "whole")
    assert same_weights(tmp_path / "broken" / "best", tmp_path / "whole" / "best")
    names = [sorted(p.name for p in (tmp_path / run / "validation").iterdir()) for run in ("broken", "whole")]
    assert names[0] == names[1] == [f"step-{n}.jsonl" for n in range(5)]
    assert not list((tmp_path / "broken").glob(".*best*"))


class Killed(BaseException):
    pass


def killed_after(trainer, step: int):
    append = trainer.validation.append

    def dying(line):
        append(line)
        if line["step"] == step:
            raise Killed

    trainer.validation.append = dying
    return trainer


def test_a_best_model_of_forgotten_steps_gives_way_to_the_one_it_replaced(world, tmp_path):
    settings = {"max_steps": 5, "save_steps": 3, **validating(world)}
    # Best at 2, covered by checkpoint 3; then 4 and 5 are better, and lost.
    first = with_values(trainer_for(world, tmp_path, **settings), {1: 0.1, 2: 0.5, 3: 0.2, 4: 0.8, 5: 0.9})
    with pytest.raises(Killed):
        killed_after(first, 4).train()
    assert best(tmp_path)["step"] == 4
    resumed = with_values(trainer_for(world, tmp_path, **settings), {4: 0.3, 5: 0.4})
    resumed.train()
    assert best(tmp_path) == {"step": 2, "metric": "reward", "value": 0.5}
    assert [line["reward"] for line in validations(tmp_path)] == [0.1, 0.5, 0.2, 0.3, 0.4]


def test_validation_may_begin_on_resume_and_then_not_change(world, tmp_path):
    trainer_for(world, tmp_path, max_steps=2).train()
    trainer_for(world, tmp_path, max_steps=3, **validating(world)).train()
    assert [line["step"] for line in validations(tmp_path)] == [2, 3]
    with pytest.raises(ValueError, match=r"other settings \(eval_temperature\)"):
        trainer_for(world, tmp_path, max_steps=4, **validating(world, eval_temperature=0.0))
    trainer_for(world, tmp_path, max_steps=4).train()
    assert [line["step"] for line in validations(tmp_path)] == [2, 3]
    with pytest.raises(ValueError, match=r"other settings \(eval_temperature\)"):
        trainer_for(world, tmp_path, max_steps=5, **validating(world, eval_temperature=0.0))
    trainer_for(world, tmp_path, max_steps=5, **validating(world)).train()
    assert [line["step"] for line in validations(tmp_path)] == [2, 3, 4, 5]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_best_model_at_end": True}, "load_best_model_at_end needs validation: set eval_steps"),
        ({"eval_on_start": True}, "eval_on_start needs validation"),
        ({"eval_steps": 5}, "eval_steps needs eval_questions"),
        ({"metric_for_best_model": "acuracy"}, r"'acuracy' is no figure.*known: reward, accuracy, complet"),
        ({"metric_for_best_model": "pass_at_2"}, r"'pass_at_2' is no figure.*with 1 sample"),
        (
            {"metric_for_best_model": "pass_at_8", "eval_num_samples": 4},
            r"known: .*pass_at_1, pass_at_2, pass_at_4",
        ),
    ],
)
def test_settings_that_make_no_validation(world, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        GrpoConfig(**grpo_settings(world, tmp_path, **settings))


def test_training_questions_are_no_validation_questions(world, tmp_path):
    lines = [json.loads(line) for line in (world / "held_out.jsonl").read_text().splitlines()]
    path = tmp_path / "eval.jsonl"

    def refused(records: list[dict], match: str, **settings):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        with pytest.raises(ValueError, match=match):
            trainer_for(world, tmp_path / "run", eval_steps=1, eval_questions=f"questions:{path}", **settings)

    refused([lines[0], {**lines[1], "question_id": "q1"}], "1 of 2 validation questions.*training.*q1")
    refused([{**lines[0], "text": " Apple  number"}], "1 of 1 validation questions .*held-out-apple")
    refused([{**lines[0], "gold_page_ids": []}], "no question of .* has gold pages.*accuracy")
    refused([], "no questions to validate on")
    # The same words about another page are another question.
    path.write_text(json.dumps({**lines[0], "text": "brick number"}) + "\n")
    trainer_for(world, tmp_path / "run", eval_steps=1, eval_questions=f"questions:{path}")


def test_an_auxiliary_loss_ends_at_its_step(world, tmp_path):
    chat = {"messages": [{"role": "user", "content": "page"}, {"role": "assistant", "content": " apple 3"}]}
    path = tmp_path / "reading.jsonl"
    path.write_text(json.dumps(chat) + "\n")

    def run(name: str, steps: int = 4, **auxiliary) -> list[dict]:
        settings = {"path": str(path), "weight": 1.0, "rows_per_step": 1, **auxiliary}
        trainer_for(world, tmp_path / name, auxiliary=settings, max_steps=steps).train()
        return read_metrics(tmp_path / name)

    always, early = run("always"), run("early", until_step=2)
    assert ["auxiliary_loss" in line for line in early] == [True, True, False, False]
    assert always[:2] == early[:2]
    assert always[3]["loss"] != early[3]["loss"]
    # It may be switched off on resume.
    run("late", steps=3)
    assert ["auxiliary_loss" in line for line in run("late", until_step=3)] == [True, True, True, False]
