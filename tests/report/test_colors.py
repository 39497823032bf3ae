"""Scores are distinguishable by color in normal vision and with the two common forms of color blindness."""

from itertools import combinations

import numpy as np
import pytest

from personax.report.runs import GRAYS, PALETTE

# Machado, Oliveira and Fernandes 2009, at full severity, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
# Linear RGB to XYZ under D65, and the white point.
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
PAGES = ("#ffffff", "#14171c")  # light and dark, as in style.css
COLORS = [*PALETTE, *GRAYS.values()]


def linear(color):
    part = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(color, vision="normal"):
    """CIE L*a*b*: distances in it are roughly how different colors look; 2 is the least that is noticed."""
    xyz = XYZ @ np.clip(np.array(VISION[vision]) @ linear(color), 0, 1) / XYZ.sum(axis=1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("page", [0, 1])
def test_any_two_colors_are_far_apart(page, vision):
    pairs = combinations([pair[page] for pair in COLORS], 2)
    near = {pair: round(float(np.linalg.norm(lab(pair[0], vision) - lab(pair[1], vision))), 1) for pair in pairs}
    assert min(near.values()) > 12, min(near, key=near.get)


@pytest.mark.parametrize("page", [0, 1])
def test_lines_stand_out_from_the_page(page):
    """The contrast of 3 that the Web Content Accessibility Guidelines ask of graphics."""
    light = lambda color: float(XYZ[1] @ linear(color)) + 0.05
    for pair in COLORS:
        contrast = light(pair[page]) / light(PAGES[page])
        assert max(contrast, 1 / contrast) > 3, pair[page]
