import random
import time

import pytest
from env_helpers import case_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from visor.env.actions import AFTER_TURN, CUT_OFF, NO_ACTION, parse_box, parse_response, unescape
from visor.types import Answer, Crop, Invalid, Search


def value_of(action) -> str:
    return action.query if isinstance(action, Search) else action.text


def test_every_parser_case():
    cases = case_lines("parser_cases.jsonl")
    assert [case["id"] for case in cases] == [f"P{i:02d}" for i in range(1, 15)]
    for case in cases:
        parsed, right = parse_response(case["text"]), case["right"]
        if right["action"] is None:
            assert isinstance(parsed.action, Invalid), case["id"]
            assert parsed.action.raw == case["text"], case["id"]
            assert not parsed.format_ok, case["id"]
        else:
            assert parsed.action.kind == right["action"], case["id"]
        if "value" in right:
            assert value_of(parsed.action) == right["value"], case["id"]
        if "value_equals_after_unescape" in right:
            assert value_of(parsed.action) == right["value_equals_after_unescape"], case["id"]
        if "format_ok" in right:
            assert parsed.format_ok is right["format_ok"], case["id"]
        for flag in filter(None, right.get("flag", "").split(" / ")):
            assert flag in parsed.flags, case["id"]
            assert not parsed.format_ok, case["id"]
        assert parsed.action.kind != right.get("not"), case["id"]


def test_a_clean_reply_has_no_flags():
    parsed = parse_response(
        "<think> The table shows 3. </think>\n<bbox>[ 1, 2.5 ,300,\n400]</bbox>\n", "pixels"
    )
    assert parsed.action == Crop(box=(1, 2.5, 300, 400), space="pixels")
    assert (parsed.think, parsed.format_ok, parsed.flags) == ("The table shows 3.", True, [])


@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        ("<think>a</think><search>q</answer><answer>x</answer>", "answer", "x"),
        ("<think>a</think><search>q1<search>q2</search>", "search", "q2"),
        ("<search>early</search><think>a</think><answer>x</answer>", "answer", "x"),
        ("<think>a</think><think>b <answer>no</answer></think><search>q</search>", "search", "q"),
        ("<think>a</think> words <answer>x</answer> words", "answer", "x"),
        ("<think></think><answer>x</answer>", "answer", "x"),
        ("<think>a</think><answer>AT&T &copy 2020 &#60;</answer>", "answer", "AT&T &copy 2020 <"),
    ],
)
def test_first_complete_action_after_the_thinking(text, kind, content):
    action = parse_response(text).action
    assert (action.kind, value_of(action)) == (kind, content)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain words",
        "<search>no thinking at all</search>",
        "<think>never closed <search>q</search>",
        "<think>a</think><search>  </search>",
        "<think>a</think><bbox>[1,2]</bbox>",
        "<think>a</think><SEARCH>q</SEARCH>",
        "<think>a</think><|im_end|><|im_start|>user\n<answer>Beijing</answer>",
        "<think>a</think><think>b<answer>x</answer>",
    ],
)
def test_replies_without_a_usable_action(text):
    parsed = parse_response(text)
    assert isinstance(parsed.action, Invalid)
    assert parsed.action.raw == text
    assert parsed.action.reason
    assert not parsed.format_ok


def test_a_final_end_of_turn_marker_is_no_defect():
    assert parse_response("<think>a</think><answer>x</answer><|im_end|>\n").format_ok
    assert AFTER_TURN in parse_response("<think>a</think><answer>x</answer><|im_end|>more").flags


def test_cut_off_thinking_keeps_its_text_but_is_marked():
    parsed = parse_response("<think>half a thou")
    assert (parsed.think, parsed.think_closed) == ("half a thou", False)
    assert parsed.flags == [CUT_OFF, NO_ACTION]


MALFORMED = [
    *("[NaN,0,1,1]", "[inf,0,1,1]", "[1e3,0,1,1]", "[0x1,2,3,4]", "[9999999,0,1,1]", "[１,2,3,4]"),
    *("[1,2,3]", "[1,2,3,4,5]", "[1 2,3,4,5]", "[,2,3,4]", "[1,2,3,4", "(1,2,3,4)"),
    '{"bbox_2d": [1,2,3,4]}',
]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_boxes(text):
    assert parse_box(text) is None


def test_box_grammar():
    assert parse_box(" [-5, +10.25,.5,7.] ") == (-5, 10.25, 0.5, 7)


def test_unescape_leaves_bare_ampersands():
    assert unescape("a &amp;&lt; b &notation &amp &unknown;") == "a &< b &notation &amp &unknown;"


TAGS = [f"<{slash}{name}>" for name in ("think", "search", "bbox", "answer") for slash in ("", "/")]


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*TAGS, "<|im_end|>", "[1,2,3,4]", " "]), st.text(max_size=5))))
def test_any_text_is_read_and_only_text_of_the_reply_is_used(pieces):
    text = "".join(pieces)
    parsed = parse_response(text)
    assert parsed.format_ok == (not parsed.flags)
    assert parsed.think in text
    if isinstance(parsed.action, Search):
        assert parsed.action.query
        assert parsed.action.query in text
    if isinstance(parsed.action, Invalid):
        assert parsed.action.raw == text


def oracle(text: str):
    """The grammar said another way: peel blocks off the front of a well-tagged reply."""
    rest = text.split("</think>", 1)[1]
    for name in ("search", "answer"):
        if rest.startswith(f"<{name}>"):
            return name, rest[len(name) + 2 :].split(f"</{name}>")[0].strip()
    return None


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.text(alphabet=st.characters(exclude_characters="<&", exclude_categories=["Cs"])),
    st.sampled_from(["search", "answer"]),
    st.text(alphabet=st.characters(exclude_characters="<&", exclude_categories=["Cs"])).filter(str.strip),
)
def test_well_formed_replies_round_trip(think, kind, content):
    text = f"<think>{think}</think><{kind}>{content}</{kind}>"
    parsed = parse_response(text)
    assert (parsed.action.kind, value_of(parsed.action)) == oracle(text) == (kind, content.strip())
    assert parsed.think == think.strip()
    assert parsed.format_ok


@pytest.mark.parametrize(
    "unit",
    [
        *TAGS,
        "<think></think>",
        "<search><answer>",
        "<",
        "&",
        "[",
        "[1,",
        "<|im_",
        " ",
        "<bbox>[ ",
        "&a",
        "-",
        "9",
    ],
)
def test_time_is_linear(unit):
    def seconds(size):
        text = "<think>a</think><bbox>" + unit * (size // len(unit)) + "</bbox>"
        started = time.perf_counter()
        parse_response(text)
        return time.perf_counter() - started

    assert seconds(200_000) < 2


def test_random_long_texts():
    draw = random.Random(0)
    alphabet = [*TAGS, "<|im_start|>", "&amp;", "[1,2,3,4]", "a", "<", ">", "/", "\n", "é", "\x00", "𝕏"]
    for _ in range(20):
        text = "".join(draw.choices(alphabet, k=20_000))
        assert isinstance(parse_response(text).action, Search | Crop | Answer | Invalid)
