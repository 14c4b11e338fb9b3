import subprocess
import sys

import pytest

from visor.cli import COMMANDS, main


@pytest.fixture
def docs(tmp_path):
    from reportlab.pdfgen.canvas import Canvas

    (tmp_path / "docs").mkdir()
    canvas = Canvas(str(tmp_path / "docs" / "a.pdf"), pagesize=(200, 200))
    for text in ("red fox", "blue hen", "red hen"):
        canvas.drawString(20, 100, text)
        canvas.showPage()
    canvas.save()
    return tmp_path / "docs"


def test_ingest_index_search(docs, tmp_path, capsys):
    (docs / "bad.pdf").write_text("no")
    corpus = str(tmp_path / "corpus")
    assert main(["ingest", str(docs), "-o", corpus, "--dpi", "72"]) == 3
    out = capsys.readouterr().out
    assert "1 ingested, 0 unchanged, 0 removed, 1 failed; 3 pages" in out
    assert "failed: bad.pdf: bad.pdf is not a PDF" in out
    assert main(["index", corpus]) == 0
    assert "3 pages indexed with bm25" in capsys.readouterr().out
    assert main(["search", corpus, "Hen!", "-k", "1"]) == 0
    line = capsys.readouterr().out.split()
    assert (line[0], line[2], " ".join(line[3:])) == ("1", "a.pdf#page=2", "blue hen")
    assert main(["search", corpus, ""]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no page matches\n")


def test_exit_code_of_an_ingest_without_failures_and_its_help(docs, tmp_path, capsys):
    arguments = ["ingest", str(docs), "-o", str(tmp_path / "corpus"), "--dpi", "30"]
    (docs / "bad.pdf").write_text("no")
    assert [main(arguments), main(arguments)] == [3, 3]
    (docs / "bad.pdf").unlink()
    assert main(arguments) == 0
    with pytest.raises(SystemExit):
        main(["ingest", "--help"])
    assert "exit status: 0 every document is in the corpus; 1 none is" in " ".join(
        capsys.readouterr().out.split()
    )


def test_exit_code_when_nothing_was_ingested(docs, tmp_path, capsys):
    (docs / "a.pdf").write_bytes(b"")
    assert main(["ingest", str(docs), "-o", str(tmp_path / "corpus")]) == 1
    assert "a.pdf is not a PDF" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ingest", "missing", "-o", "corpus"], "visor ingest: error: missing: no such file or folder"),
        (["index", "missing"], "visor index: error: missing is not a corpus"),
        (["search", "missing", "x"], "visor search: error: missing is not a corpus"),
    ],
)
def test_user_errors_have_no_traceback(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(message)


def test_search_before_index_says_what_to_do(docs, tmp_path, capsys):
    main(["ingest", str(docs), "-o", str(tmp_path / "corpus"), "--dpi", "30"])
    assert main(["search", str(tmp_path / "corpus"), "x"]) == 2
    assert "make one with `visor index" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert COMMANDS[command].help in " ".join(capsys.readouterr().out.split())


def test_help_is_quick_to_load():
    code = """
import sys
from visor.cli import build_parser
build_parser().format_help()
heavy = {"torch", "transformers", "bm25s", "pyarrow", "pypdfium2", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
