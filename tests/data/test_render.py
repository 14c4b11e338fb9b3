import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.images import usable_size
from data.pdf import DocumentError, clean_text, fit_scale
from data.render import RenderSettings, joined_notes, render_document


@pytest.fixture
def render(tmp_path):
    def render(path, first=1, count=99, **settings):
        folder = tmp_path / "pages"
        folder.mkdir(exist_ok=True)
        done = render_document(path, folder, RenderSettings(**settings), first, count)
        return done, [Image.open(folder / page.file_name) for page in done.pages]

    return render


def test_size_text_and_hash(make_pdf, render, tmp_path):
    import hashlib

    done, images = render(make_pdf(tmp_path / "a.pdf", ["one", "two"]), dpi=144)
    assert done.page_count == 2
    assert [(p.number, p.text, p.width, p.height) for p in done.pages] == [
        (1, "one", 200, 280),
        (2, "two", 200, 280),
    ]
    assert [image.size for image in images] == [(200, 280)] * 2
    data = (tmp_path / "pages" / done.pages[0].file_name).read_bytes()
    assert done.pages[0].sha256 == hashlib.sha256(data).hexdigest()


def test_a_range_of_pages(make_pdf, render, tmp_path):
    done, _ = render(make_pdf(tmp_path / "a.pdf", list("abcde")), first=4, count=9)
    assert [(p.number, p.text) for p in done.pages] == [(4, "d"), (5, "e")]
    assert done.page_count == 5


def test_rotation_is_applied(cases, render):
    done, images = render(cases / "rotate_mixed.pdf", dpi=72)
    assert [(p.width, p.height) for p in done.pages] == [(612, 792), (792, 612), (792, 612), (612, 792)]
    assert [page.text for page in done.pages] == ["up", "rot90", "rot270", "rot180"]
    for image in images:
        width, height = image.size
        red, blue = image.getpixel((3, 3)), image.getpixel((width - 4, height - 4))
        assert red[0] > 200
        assert max(red[1:]) < 60
        assert blue[2] > 200
        assert max(blue[:2]) < 60


def test_huge_pages_stay_within_the_cap(cases, render):
    done, _ = render(cases / "huge_page.pdf", dpi=200, max_pixels=1_000_000)
    first, second = done.pages
    assert first.width == first.height
    assert first.width * first.height <= 1_000_000
    assert abs(second.height - 48 * second.width) <= 48
    assert min(first.width, second.width) > 100
    assert [number for number, _ in done.notes] == [1, 2]
    assert all("dpi instead of 200" in note for _, note in done.notes)


@given(st.floats(1, 20000), st.floats(1, 20000), st.floats(0.1, 10), st.integers(784, 10_000_000))
def test_fit_scale_is_the_largest_within_the_cap(width, height, wanted, cap):
    def pixels(scale):
        return math.prod(usable_size(math.ceil(width * scale), math.ceil(height * scale)))

    scale = fit_scale(width, height, wanted, cap)
    assert pixels(scale) <= cap
    assert scale <= wanted
    assert scale == wanted or pixels(min(wanted, scale * 1.05) + 2 / min(width, height)) > cap


def test_cmyk_and_damaged_profile(cases, render):
    _, (first, second) = render(cases / "cmyk_icc.pdf")
    width, height = first.size
    left, right, top, bottom = width // 4, 3 * width // 4, height // 4, 3 * height // 4
    assert first.mode == "RGB"
    cyan, magenta = first.getpixel((left, top)), first.getpixel((right, top))
    yellow, dark = first.getpixel((left, bottom)), first.getpixel((right, bottom))
    assert cyan[0] < 100 < 150 < cyan[2]
    assert magenta[1] < 100 < 150 < magenta[0]
    assert yellow[2] < 100
    assert min(yellow[:2]) > 180
    assert max(dark) < 80
    assert second.getpixel((left, top))[0] > 200 > 60 > second.getpixel((left, top))[2]
    assert second.getpixel((left, bottom))[2] > 200 > 60 > second.getpixel((left, bottom))[0]


def test_owner_password_needs_none(cases, render):
    done, _ = render(cases / "enc_owner_only.pdf")
    assert done.page_count == len(done.pages) == 2


@pytest.mark.parametrize(
    "order",
    [
        ["zero_pages.pdf"],
        ["enc_user_pw.pdf", "zero_pages.pdf"],
        ["html_named.pdf", "zero_pages.pdf", "enc_user_pw.pdf"],
        ["empty_0_bytes.pdf", "zero_pages.pdf", "rotate_mixed.pdf", "zero_pages.pdf"],
    ],
)
def test_reasons_do_not_depend_on_the_file_before(cases, render, order):
    reasons = {
        "zero_pages.pdf": "zero_pages.pdf has no pages",
        "enc_user_pw.pdf": "enc_user_pw.pdf is password-protected",
        "html_named.pdf": "html_named.pdf is not a PDF",
        "empty_0_bytes.pdf": "empty_0_bytes.pdf is not a PDF",
    }
    for name in order:
        if name in reasons:
            with pytest.raises(DocumentError, match=reasons[name]):
                render(cases / name)
        else:
            render(cases / name)


def test_broken_xref_is_repaired(cases, render):
    assert [page.text for page in render(cases / "broken_xref.pdf")[0].pages] == ["Page 1", "Page 2"]


def test_a_damaged_pdf_is_named(render, tmp_path):
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4\nnothing here")
    with pytest.raises(DocumentError, match=r"bad\.pdf is a damaged PDF"):
        render(tmp_path / "bad.pdf")


def test_image_files_are_kept_byte_for_byte_when_they_can_be(render, tmp_path):
    Image.new("RGB", (60, 50), "red").save(tmp_path / "a.jpg")
    done, _ = render(tmp_path / "a.jpg")
    stored = tmp_path / "pages" / done.pages[0].file_name
    assert stored.read_bytes() == (tmp_path / "a.jpg").read_bytes()
    done, (image,) = render(tmp_path / "a.jpg", max_pixels=1500)
    assert image.width * image.height <= 1500
    assert done.notes == [(1, "scaled down from 60 x 50 to stay within the pixel cap")]


def test_codec(make_pdf, render, tmp_path):
    pdf = make_pdf(tmp_path / "a.pdf", ["one"], size=(600, 800))
    assert [image.format for image in render(pdf)[1]] == ["JPEG"]
    assert [image.format for image in render(pdf, image_format="png")[1]] == ["PNG"]
    assert [image.format for image in render(pdf, dpi=30)[1]] == ["PNG"]  # small


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a\r\nb", "a\nb"),
        ("re\x02quires", "requires"),
        ("re\x02\r\nquires", "requires"),
        ("end\x02", "end"),
        ("a\x03b\ufffe\x00c", "a b  c"),
        ("tab\there", "tab\there"),
    ],
)
def test_clean_text(raw, clean):
    assert clean_text(raw) == clean


@pytest.mark.parametrize("settings", [{"dpi": 0}, {"max_pixels": 10}, {"image_format": "gif"}, {"dpi": 1e9}])
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RenderSettings(**settings)


def test_notes_of_neighbouring_pages_are_joined():
    notes = [(4, "left out"), (2, "left out"), (3, "left out"), (6, "left out"), (7, "small"), (7, "dark")]
    assert joined_notes(notes) == ["pages 2-4: left out", "page 6: left out", "page 7: dark", "page 7: small"]
    assert joined_notes([]) == []
