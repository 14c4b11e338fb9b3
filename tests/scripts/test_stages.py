"""Stages and graphs of stages, with commands that write a line to a file."""

import json
import sys
import time

import psutil
import pytest

from scripts.stage_graph import digests, run_graph, select, state
from scripts.stages import Stage, StageFailed, read_mark, run_stage, stage_digest


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path


def writes(name: str, after=(), text: str = "x", config: str = "") -> Stage:
    """A stage that appends a line to its output."""
    code = f"open('{name}','a').write('{text}\\\\n')"
    return Stage(name, "g", (f'{sys.executable} -c "{code}" {config}'.rstrip(),), (name,), after=tuple(after))


def fails(name: str, after=()) -> Stage:
    command = f'{sys.executable} -c "import sys; print(42); sys.exit(3)"'
    return Stage(name, "g", (command,), (), after=tuple(after))


def lines(root, name: str) -> int:
    return len((root / name).read_text().splitlines())


def test_a_finished_stage_is_not_run_again(root, capsys):
    stage = writes("a")
    first = run_stage(stage, "d", root)
    assert run_stage(stage, "d", root) == first
    assert lines(root, "a") == 1
    assert "done before" in capsys.readouterr().out


@pytest.mark.parametrize(("digest", "code"), [("other", ""), ("d", "other")])
def test_another_digest_or_code_starts_anew_without_the_old_output(root, digest, code):
    run_stage(writes("a"), "d", root)
    run_stage(writes("a"), digest, root, code)
    assert lines(root, "a") == 1
    assert read_mark(root, "a") | {"seconds": 0} == {
        "digest": digest,
        "code": code,
        "done": True,
        "seconds": 0,
    }


def test_an_interrupted_stage_goes_on_and_its_processes_are_ended(root):
    left = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    mark = root / "stages" / "a.json"
    mark.parent.mkdir()
    processes = [(left.pid, left.create_time())]
    mark.write_text(json.dumps({"digest": "d", "done": False, "seconds": 100.0, "processes": processes}))
    (root / "a").write_text("kept\n")
    assert run_stage(writes("a"), "d", root) > 100
    assert lines(root, "a") == 2
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    left.wait()


def test_a_failing_command_and_a_missing_output_are_named(root):
    with pytest.raises(StageFailed, match="exit code 3"):
        run_stage(fails("f"), "d", root)
    with pytest.raises(StageFailed, match="without writing b"):
        run_stage(Stage("n", "g", ("true",), ("b",)), "d", root)
    assert not read_mark(root, "f")["done"]


def test_a_log_gets_the_output(root):
    with pytest.raises(StageFailed):
        run_stage(fails("f"), "d", root, log=root / "logs" / "f.log")
    command, output = (root / "logs" / "f.log").read_text().splitlines()
    assert command.startswith("$ ")
    assert output == "42"


def test_the_digest_follows_the_settings_of_a_configuration_file_not_its_comments(root):
    config = root / "configs" / "c.yaml"
    stage = writes("a", config="configs/c.yaml")
    found = []
    for text in ("a: 1\nb: 2\n", "# why\nb: 2\na: 1\n", "a: 1\nb: 3\n"):
        config.write_text(text)
        found.append(stage_digest(stage, ""))
    assert found[0] == found[1] != found[2]
    assert stage_digest(stage, "before") != found[2]


# ---------------------------------------------------------------- graphs


def test_a_changed_stage_outdates_what_needs_it_and_nothing_else(root):
    def plan(text: str) -> list[Stage]:
        return [writes("a", text=text), writes("b", ["a"]), writes("c")]

    run_graph(plan("x"), root, "code")
    (root / "c").write_text("one\ntwo\n")
    found = digests(plan("y"))
    assert [state(s, root, found[s.name], "code") for s in plan("y")] == ["outdated", "outdated", "done"]
    (root / "b").write_text("one\ntwo\n")
    run_graph(plan("y"), root, "code")
    assert [lines(root, name) for name in "abc"] == [1, 1, 2]


def test_results_of_other_code_are_kept_unless_asked(root):
    plan = [writes("a")]
    run_graph(plan, root, "old")
    (root / "a").write_text("one\ntwo\n")
    run_graph(plan, root, "new")
    assert lines(root, "a") == 2
    assert state(plan[0], root, digests(plan)["a"], "new") == "done (other code)"
    run_graph(plan, root, "new", same_code=True)
    assert lines(root, "a") == 1
    assert read_mark(root, "a")["code"] == "new"


def test_what_needs_a_failed_stage_is_left_out_and_the_rest_is_done(root):
    plan = [fails("f"), writes("b", ["f"]), writes("c", ["b"]), writes("d")]
    with pytest.raises(StageFailed, match="f, b, c"):
        run_graph(plan, root, "code")
    assert [(root / name).exists() for name in "bcd"] == [False, False, True]


def test_two_run_side_by_side_and_a_third_waits(root):
    spans = {}
    code = "import time; a=time.time(); time.sleep(0.5); open('{0}','w').write(f'{{a}} {{time.time()}}')"
    plan = [Stage(n, "g", (f'{sys.executable} -c "{code.format(n)}"',), (n,)) for n in "abc"]
    started = time.time()
    run_graph(plan, root, "code", jobs=2)
    for name in "abc":
        spans[name] = [float(value) - started for value in (root / name).read_text().split()]
    assert spans["b"][0] < spans["a"][1]
    assert spans["c"][0] >= min(spans["a"][1], spans["b"][1])


def test_select_takes_what_a_stage_needs(root):
    plan = [writes("w"), writes("s/a", ["w"]), writes("s/b", ["s/a"]), writes("t")]
    assert [stage.name for stage in select(plan, ["s/b"])] == ["w", "s/a", "s/b"]
    assert [stage.name for stage in select(plan, ["t", "w*"])] == ["w", "t"]
    with pytest.raises(ValueError, match="no stage matches"):
        select(plan, ["x*"])
