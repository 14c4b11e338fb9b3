"""What a GRPO run takes from its settings, refuses of them and says of them."""

import json
import shutil

import pytest
from training_world import grpo_settings, read_metrics, trainer_for

from grpo.arguments import GrpoConfig
from grpo.build import build_trainer
from visor.types import Question, RewardBreakdown


def test_the_named_reward_is_the_one_of_the_rollouts(world, tmp_path, monkeypatch):
    from rewards import REWARDS

    async def by_sample(trajectory, question, judge):
        return RewardBreakdown(total=float(trajectory.sample_index), judge=judge.name)

    monkeypatch.setitem(REWARDS, "by_sample", by_sample)
    settings = grpo_settings(world, tmp_path / "run", max_steps=1, reward="by_sample")
    build_trainer(GrpoConfig(**settings)).train()
    assert read_metrics(tmp_path / "run")[0]["reward"] == 1.0  # samples 0, 1 and 2 of each question
    with pytest.raises(ValueError, match=r"unknown reward 'no'; known: by_sample, visor, vrag"):
        build_trainer(GrpoConfig(**{**settings, "reward": "no"}))


def test_how_the_judge_is_asked(world, tmp_path):
    """Cache, limits and time-outs may change in a resumed run, what is asked of whom may not."""
    options = {"cache": str(tmp_path / "judge.jsonl"), "max_concurrency": 3, "timeout": 5.0, "max_retries": 1}
    fields = {"judge": "openai:big@http://127.0.0.1:9/v1", "max_steps": 1}
    trainer = trainer_for(world, tmp_path / "run", **fields, judge_options=options)
    assert trainer.engine.judge.name == "model:big"
    trainer.train()
    fields["max_steps"] = 2
    assert trainer_for(world, tmp_path / "run", **fields).step_done == 1
    with pytest.raises(ValueError, match=r"other settings \(judge_options.honesty\)"):
        trainer_for(world, tmp_path / "run", **fields, judge_options={"honesty": "model"})


def test_a_run_from_before_a_setting_existed_goes_on(world, tmp_path):
    trainer_for(world, tmp_path, max_steps=1).train()
    path = tmp_path / "run_config.json"
    stored = json.loads(path.read_text())
    del stored["reward"]
    path.write_text(json.dumps(stored))
    assert trainer_for(world, tmp_path, max_steps=2).step_done == 1


def test_a_corpus_without_its_images_is_refused(world, tmp_path):
    corpus = tmp_path / "corpus"
    shutil.copytree(world / "corpus", corpus)
    shutil.rmtree(corpus / "images")
    with pytest.raises(ValueError, match=r"lacks 4 of its 4 page images"):
        trainer_for(world, tmp_path / "run", corpus=str(corpus))


def test_the_retriever_of_the_configuration_is_opened(world, tmp_path):
    with pytest.raises(ValueError, match=r"index/dense holds no index"):
        trainer_for(world, tmp_path / "run", retriever="dense")
    bm25 = str(world / "corpus" / "index" / "bm25")
    with pytest.raises(ValueError, match="made by 'bm25', not 'dense'"):
        trainer_for(world, tmp_path / "run", retriever="dense", index=bm25)


def test_questions_without_gold_pages_are_refused(world, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(Question(question_id="bare", text="x", gold_answers=["1"]).model_dump_json() + "\n")
    with pytest.raises(ValueError, match=r"no gold pages.*bare"):
        trainer_for(world, tmp_path / "run", questions=f"questions:{path}")
    with pytest.raises(ValueError, match="no questions to train on"):
        trainer_for(world, tmp_path / "run", questions=f"questions:{path}", drop_questions_without_gold=True)
    path.write_text(path.read_text() + (world / "questions.jsonl").read_text())
    kept = trainer_for(
        world, tmp_path / "run", questions=f"questions:{path}", drop_questions_without_gold=True
    )
    assert [question.question_id for question in kept.questions] == ["q1", "q2", "q3", "q4"]


def test_what_the_reader_reports_is_shown(world, tmp_path, capsys):
    good = Question(question_id="g", text="apple number", gold_answers=["1"], gold_page_ids=["deck#page=1"])
    stray = good.model_copy(update={"question_id": "stray", "gold_page_ids": ["nowhere#page=1"]})
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(q.model_dump_json() + "\n" for q in (good, stray)))
    trainer_for(
        world, tmp_path / "run", questions=f"questions:{path}", drop_questions_without_gold=True
    )  # fmt: skip
    assert "questions: " in (shown := capsys.readouterr().err)
    assert "stray" in shown


def test_questions_of_another_corpus_are_refused_and_defects_are_one_line(world, tmp_path, capsys):
    lines = [json.loads(line) for line in (world / "questions.jsonl").read_text().splitlines()]
    stray = [
        {**lines[0], "question_id": f"stray{n}", "gold_page_ids": ["nowhere#page=1"]} for n in range(5)
    ]  # fmt: skip
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in stray))
    with pytest.raises(ValueError, match=r"no gold document of the 5 questions.*in the corpus.*nowhere"):
        trainer_for(world, tmp_path / "run", questions=f"questions:{path}")
    path.write_text("".join(json.dumps(line) + "\n" for line in [*stray, *lines]))
    capsys.readouterr()
    trainer_for(world, tmp_path / "run", questions=f"questions:{path}")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("questions:")]
    assert line.startswith("questions: 5 defects in ")
    assert line.endswith("; and 3 more")


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_named(name, world, tmp_path, monkeypatch):
    monkeypatch.setattr(f"grpo.trackers.is_{name}_available", lambda: False)
    with pytest.raises(ValueError, match=rf"pip install 'visor-rag\[{name}\]'"):
        trainer_for(world, tmp_path, report_to=name)


def test_another_configuration_in_the_same_folder_is_refused(world, tmp_path):
    trainer_for(world, tmp_path, max_steps=1).train()
    with pytest.raises(ValueError, match=r"other settings.*learning_rate"):
        trainer_for(world, tmp_path, max_steps=2, learning_rate=5e-4)
    with pytest.raises(ValueError, match="holds checkpoints"):
        trainer_for(world, tmp_path, max_steps=2, resume_from_checkpoint=False)
    assert trainer_for(world, tmp_path, max_steps=2).step_done == 1


def test_the_command_says_what_is_wrong_and_trains(world, tmp_path, capsys):
    import yaml

    from grpo.train import main

    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(grpo_settings(world, tmp_path / "run", max_steps=1)))
    with pytest.raises(SystemExit) as stopped:
        main(["--config", str(path), "--index", str(tmp_path / "nowhere")])
    assert stopped.value.code == 2
    assert "nowhere" in capsys.readouterr().err
    main(["--config", str(path), "--credit", "turn"])
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == [1]
    assert "step 1/1" in capsys.readouterr().out


@pytest.mark.parametrize("resume", ["true", "false"])
def test_an_output_dir_that_is_a_file_is_one_line(world, tmp_path, capsys, resume):
    from grpo.train import main

    output = tmp_path / "file"
    output.write_text("kept")
    settings = grpo_settings(world, output, resume_from_checkpoint=resume, torch_threads=1)
    del settings["episode"]
    with pytest.raises(SystemExit) as stop:
        main([word for key, value in settings.items() for word in (f"--{key}", str(value))])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "file is a file; name a folder" in line


def test_the_help_does_not_require_what_may_be_left_out(capsys):
    from grpo.train import main

    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--auxiliary.path str  (required with auxiliary)" in shown
    assert "--questions str  (required)" in shown
