import json

import pytest
from PIL import Image

from rollout.curves import main, plot_curves, read_metrics, smooth


def write(path, records, tail=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def test_read_metrics_takes_the_last_line_of_a_repeated_step_and_drops_a_torn_one(tmp_path):
    path = write(
        tmp_path / "m.jsonl",
        [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 2, "reward": 0.3}],
        tail='{"step": 3, "rew',
    )
    assert [record["reward"] for record in read_metrics(path)] == [0.1, 0.3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_smooth_is_a_trailing_mean_over_what_is_there():
    assert smooth([None, 1.0, 3.0, None, 5.0], 2) == [None, 1.0, 2.0, 3.0, 5.0]


def test_plot_curves_writes_a_png(tmp_path):
    records = [{"step": i, "reward": i / 10, "accuracy": None if i == 2 else 0.5} for i in range(5)]
    out = plot_curves(write(tmp_path / "m.jsonl", records), tmp_path / "curves.png")
    with Image.open(out) as picture:
        assert picture.size == (1100, 704)
    with pytest.raises(ValueError, match="no step"):
        plot_curves(write(tmp_path / "empty.jsonl", []), tmp_path / "x.png")


def test_command_draws_a_picture_and_refuses_a_missing_file(tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "reward": 0.5, "accuracy": 0.5}\n{"step": 2, "reward": 0.7, "accuracy": 0.6}\n'
    )
    main([str(metrics), str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.jsonl"), str(tmp_path / "none.png")])
    assert "none.jsonl" in capsys.readouterr().err
