from pathlib import Path

import pytest

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases" / "files"


@pytest.fixture
def cases():
    if not CASES.is_dir():
        pytest.skip("the shared folder with the case files is absent")
    return CASES


@pytest.fixture
def make_pdf():
    """Write a small PDF, one page a text, 100 x 140 points."""
    from reportlab.pdfgen.canvas import Canvas

    def make(path, texts, size=(100, 140)):
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas = Canvas(str(path), pagesize=size, invariant=True)
        for text in texts:
            canvas.drawString(10, 50, text)
            canvas.showPage()
        canvas.save()
        return path

    return make
