import re

import pytest
import yaml

from visor.env.config import EpisodeConfig
from visor.env.prompts import SHIPPED, fill, load_prompts


def test_filling_is_literal_and_single_pass():
    assert fill("{a} {b} {c} {", a="{b}", b="{a}{") == "{b} {a}{ {c} {"


@pytest.mark.parametrize("name", ["visor", "tiny"])
def test_shipped_sets_load_under_their_name(name):
    assert load_prompts(name).name == name


def test_the_tiny_set_uses_lower_case_words_only():
    text = (SHIPPED / "tiny.yaml").read_text(encoding="utf-8")
    values = re.sub(r"#.*", "", text)
    assert values == values.lower()


def test_the_system_prompt_names_every_action():
    system = load_prompts("visor").system
    for tag in ("think", "search", "bbox", "answer"):
        assert f"<{tag}>" in system
        assert tag == "bbox" or f"</{tag}>" in system


def write(tmp_path, **changes):
    fields = yaml.safe_load((SHIPPED / "tiny.yaml").read_text(encoding="utf-8")) | changes
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return str(path)


def test_a_prompt_set_of_ones_own(tmp_path):
    assert load_prompts(write(tmp_path, question="q {question}")).question == "q {question}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": "{qestion}"}, "qestion"),
        ({"no_new_page": {"text": "{reason}", "intent": ""}}, "reason"),
        ({"system": "  "}, "system is empty"),
        ({"sytem": "x"}, "sytem"),
    ],
)
def test_unusable_sets_are_refused_with_the_file_and_the_reason(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(write(tmp_path, **changes))
    assert "mine.yaml" in str(caught.value)


def test_a_missing_set_names_the_shipped_ones():
    with pytest.raises(ValueError, match="tiny, visor"):
        load_prompts("nope")


def test_config_defaults_are_the_papers():
    config = EpisodeConfig()
    assert (config.max_turns, config.window, config.top_k, config.crop_margin) == (10, 2, 10, 28)
    assert (config.page_min_pixels, config.page_max_pixels) == (256 * 28**2, 512 * 28**2)
    assert (config.crop_min_pixels, config.crop_max_pixels) == (256 * 28**2, 1024 * 28**2)


@pytest.mark.parametrize("wrong", [{"windw": 1}, {"window": 0}, {"max_turns": 0}, {"page_min_pixels": 10**6}])
def test_config_refuses_wrong_values(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EpisodeConfig(**wrong)
