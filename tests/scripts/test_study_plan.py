"""The study's plan: every command can be read by the program it starts, and names what other stages write."""

import shlex

import pytest

from grpo.arguments import GrpoConfig
from rollout.evaluate import EvaluateConfig
from scripts.stage_graph import digests
from scripts.study import ABLATED, ABLATIONS, EXPERTS, POLICIES, ROOT, SEEDS, STUDY, main, stages
from sft.arguments import SftConfig
from visor.config import load_config


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def settings(command: str):
    """The configuration of a training or evaluation command, read as the command reads it."""
    words = shlex.split(command)
    place = words.index("--config")
    model = {"sft": SftConfig, "grpo.train": GrpoConfig, "rollout.evaluate": EvaluateConfig}[words[place - 1]]
    return load_config(model, words[place + 1], words[place + 2 :])


def configured():
    return [
        pytest.param(stage, id=stage.name)
        for stage in stages()
        if stage.name.startswith("seed0/") and "--config" in stage.commands[0]
    ]


@pytest.mark.parametrize("stage", configured())
def test_every_command_has_the_seed_and_one_thread_and_writes_its_output(stage):
    for seed in SEEDS:
        same = [other for other in stages() if other.name == stage.name.replace("seed0", f"seed{seed}")]
        for other in same:
            config = settings(other.commands[0])
            assert (config.seed, config.torch_threads) == (seed, 1)
            output = config.output if isinstance(config, EvaluateConfig) else config.output_dir
            assert output == str(STUDY / other.outputs[0])


def test_names_are_unique_and_each_stage_comes_after_what_it_needs():
    plan = stages()
    assert len({stage.name for stage in plan}) == len(plan)
    assert set(digests(plan)) == {stage.name for stage in plan}


def test_every_file_under_the_study_that_a_stage_reads_is_written_by_one_it_needs():
    plan = {stage.name: stage for stage in stages()}
    for stage in plan.values():
        needed, waiting = set(), [stage.name]
        while waiting:
            name = waiting.pop()
            needed.add(name)
            waiting += plan[name].after
        written = [str(STUDY / output) for name in needed for output in plan[name].outputs]
        for command in stage.commands:
            text = command
            if "--config" in command:
                text = settings(command).model_dump_json().replace('"', " ")
            for word in text.replace("questions:", "").replace(",", " ").replace("]", " ").split():
                if word.startswith(str(STUDY)):
                    assert any(word == path or word.startswith(path + "/") for path in written), word


def test_the_variants_differ_in_what_they_say():
    configs = {
        stage.outputs[0].rpartition("/")[2]: settings(stage.commands[0])
        for stage in stages()
        if stage.name.startswith("seed0/policy/")
    }
    assert set(configs) == set(POLICIES)
    main = configs["grpo"]
    assert (main.credit, main.auxiliary.until_step) == ("turn", None)
    assert main.auxiliary.weight > 0
    off = configs["grpo_aux_off"]
    assert 0 < off.auxiliary.until_step < off.max_steps
    kl = configs["grpo_kl"]
    assert kl.model_copy(update={"auxiliary": main.auxiliary, "output_dir": main.output_dir}) == main
    paper = configs["grpo_paper"]
    assert (paper.auxiliary, paper.beta, paper.credit) == (None, 0.01, "trajectory")
    assert configs["grpo_noisy"].model_name_or_path.endswith("policy/sft_noisy")
    assert any("expert/noisy" in source.path for source in configs["sft_noisy"].data)
    assert "--keep_invalid_actions" in EXPERTS["noisy"].filter


def test_sft_contexts_differ_in_the_context_alone():
    one, other = (
        settings(next(s for s in stages() if s.name == f"seed0/policy/sft_{context}").commands[0])
        for context in ("episode", "append")
    )
    assert (one.context, other.context) == ("episode", "append")
    assert all(source.context is None for source in one.data)
    assert one.model_copy(update={"context": "append", "output_dir": other.output_dir}) == other


def test_ablations_change_only_the_episode():
    plan = {stage.name: stage for stage in stages()}
    full = settings(plan[f"seed0/evaluate/{ABLATED}-sampled"].commands[0])
    assert (full.episode.window, full.episode.evidence_space, full.episode.intent_injection) == (
        2,
        True,
        True,
    )
    assert full.prompt_ids
    seen = [full.episode]
    for row in ABLATIONS:
        config = settings(plan[f"seed0/evaluate/{ABLATED}-{row}-sampled"].commands[0])
        assert config.episode not in seen
        seen.append(config.episode)
        assert config.model_copy(update={"episode": full.episode, "output": full.output}) == full
    none = settings(plan[f"seed0/evaluate/{ABLATED}-none-sampled"].commands[0]).episode
    assert (none.window, none.evidence_space, none.intent_injection) == (None, False, False)


def test_list_prints_the_state_of_the_chosen_stages(capsys):
    main(["list", "--only", "seed0/policy/grpo"])
    names = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert names[-1] == "seed0/policy/grpo"
    assert "seed0/policy/sft" in names
    assert "seed1/policy/sft" not in names
    with pytest.raises(SystemExit):
        main(["list", "--only", "nothing"])
