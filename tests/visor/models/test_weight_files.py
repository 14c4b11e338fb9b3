"""What is checked of weights before an engine takes them, and what goes through files unchanged."""

import os
import subprocess

import pytest
import torch

from visor.models.loading import load_config, load_model
from visor.models.vllm_rope import rope_overrides
from visor.models.weight_files import (
    STAGING,
    TIED,
    buckets,
    check_names,
    checked_weights,
    expected_weights,
    remove_orphans,
    written_weights,
)


@pytest.fixture(scope="module")
def expected(tiny_path):
    return expected_weights(load_config(tiny_path))


@pytest.fixture(scope="module")
def state(tiny_path):
    return dict(load_model(tiny_path, dtype="float32").state_dict())


def test_the_names_and_shapes_are_those_of_the_loaded_model(expected, state):
    assert expected.shapes == {name: tuple(weight.shape) for name, weight in state.items()}
    assert expected.tied


@pytest.mark.parametrize("left_out", [set(), {"lm_head.weight"}, TIED - {"lm_head.weight"}])
def test_tied_weights_come_under_both_names_once(left_out, expected, state):
    given = [(name, weight) for name, weight in state.items() if name not in left_out]
    checked = list(checked_weights(iter(given), expected))
    assert sorted(name for name, _ in checked) == sorted(state)
    assert all(torch.equal(weight, state[name]) for name, weight in checked)


def test_names_too_few_too_many_or_twice_are_named(expected, state):
    names = list(state)
    check_names(names, expected)
    norm = "model.language_model.norm.weight"
    with pytest.raises(ValueError, match=f"missing: {norm}"):
        check_names([name for name in names if name != norm], expected)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight, model\.language_model\.embed"):
        check_names([name for name in names if name not in TIED], expected)
    with pytest.raises(ValueError, match=r"unknown: base_model\.x"):
        check_names([*names, "base_model.x"], expected)
    with pytest.raises(ValueError, match=f"twice: {norm}"):
        check_names([*names, norm], expected)
    with pytest.raises(ValueError, match="and 5 more"):
        check_names(sorted(names)[8:], expected)


def test_a_wrong_shape_and_an_unknown_name_end_the_stream(expected, state):
    norm = "model.language_model.norm.weight"
    with pytest.raises(ValueError, match=rf"{norm} has the shape \(3,\)"):
        list(checked_weights([(norm, torch.ones(3))], expected))
    with pytest.raises(ValueError, match=r"unknown: x\.y"):
        list(checked_weights([("x.y", torch.ones(3))], expected))
    with pytest.raises(ValueError, match="missing"):
        list(checked_weights([(norm, state[norm])], expected))


def test_buckets_are_bounded_and_lose_nothing(state):
    largest = max(weight.nbytes for weight in state.values())
    parts = list(buckets(state.items(), largest // 2))
    assert len(parts) > 2
    for part in parts:
        assert len(part) == 1 or sum(weight.nbytes for weight in part.values()) <= largest // 2
    assert [name for part in parts for name in part] == list(state)


def test_weights_come_back_from_files_to_the_bit_and_the_files_go(state):
    half = {name: weight.bfloat16() for name, weight in state.items()}
    with written_weights(half.items()) as files:
        back = dict(files)
        folder = files.paths[0].parent
        assert folder.is_dir()
    assert not folder.exists()
    assert back.keys() == half.keys()
    assert all(back[name].dtype == torch.bfloat16 and torch.equal(back[name], half[name]) for name in half)


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, ours, other = (
        tmp_path / name for name in (f"{STAGING}{ended.pid}-x", f"{STAGING}{os.getpid()}-x", f"{STAGING}x")
    )
    for folder in (left, ours, other):
        folder.mkdir()
        (folder / "0.safetensors").write_bytes(b"x")
    remove_orphans(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([ours, other])


def test_sections_of_width_one_are_interleaved_for_vllm(slide_policy):
    """The overrides put each frequency on the axis on which Transformers puts it."""
    config = load_config(slide_policy)
    sections = config.text_config.rope_parameters["mrope_section"]
    parameters = rope_overrides(config)["text_config"]["rope_parameters"]
    t, h, w = parameters["mrope_section"]
    ours = [1 if j % 3 == 1 and j < 3 * h else 2 if j % 3 == 2 and j < 3 * w else 0 for j in range(t + h + w)]
    assert ours == [axis % 3 for axis, width in enumerate(sections) for _ in range(width)]
    assert parameters["rope_theta"] == config.text_config.rope_parameters["rope_theta"]


def test_three_sections_need_no_override_and_others_are_refused(tiny_path):
    config = load_config(tiny_path)
    assert rope_overrides(config) == {}
    config.text_config.rope_parameters["mrope_section"] = [2, 2, 2, 2]
    with pytest.raises(ValueError, match="M-RoPE sections"):
        rope_overrides(config)
