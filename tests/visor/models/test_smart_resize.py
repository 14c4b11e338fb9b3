"""Our smart resize equals Transformers' from 15 pixels a side; below, theirs may start from a side of 0."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

from visor.models.smart_resize import FACTOR, smart_resize


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(15, 4000), st.integers(15, 4000), st.integers(1, 64), st.integers(1, 64))
def test_equals_transformers(width, height, low, extra):
    # A budget of some tokens up to four times as many: narrower ones have no valid size for long pages.
    bounds = {"min_pixels": low * 784, "max_pixels": (4 * low + extra) * 784}
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="longer than 200:1"):
            smart_resize(width, height, **bounds)
        return
    ours = smart_resize(width, height, **bounds)
    assert ours == reference(height, width, factor=FACTOR, **bounds)[::-1]
    assert ours[0] % FACTOR == ours[1] % FACTOR == 0


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (257, 27), (3, 500)])
def test_tiny_images_get_whole_patches(size):
    width, height = smart_resize(*size, min_pixels=784, max_pixels=512 * 784)
    assert min(width, height) >= FACTOR
    assert width % FACTOR == height % FACTOR == 0


def test_no_area():
    with pytest.raises(ValueError, match="no area"):
        smart_resize(0, 5, min_pixels=784, max_pixels=7840)
