"""Code beside what it draws: a small SVG, rendered by resvg, whose source is the caption.

The key is the list of elements with their colours and the cells of their places.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from random import Random
from typing import Any

from nanok3.data.images import pillow
from nanok3.data.pictures.document import Ask, Picture, PictureDocument, tell
from nanok3.data.pictures.drawing import cell

SIDE = 64
_BY_HAND = ("red", "green", "blue", "orange", "purple", "pink", "brown", "gold", "teal", "navy")


def render_svg(resvg: Any, code: str, width: int, height: int) -> Picture:
    """The picture of an SVG over white."""
    drawn = pillow().open(io.BytesIO(bytes(resvg.svg_to_bytes(svg_string=code, width=width, height=height))))
    picture = pillow().new("RGB", drawn.size, (255, 255, 255))
    picture.paste(drawn, mask=drawn.convert("RGBA").getchannel("A"))
    return Picture((picture,))


def resvg() -> Any:
    """The renderer; an error that names the extra where it is missing."""
    try:
        import resvg_py
    except ImportError:
        raise ImportError("pictures of SVG code need resvg: pip install 'nanok3[pictures]'") from None
    return resvg_py


def _element(random: Random) -> tuple[str, str, str]:
    """One element: its code, its name and its key. Coordinates are multiples of 4."""
    x, y = 4 * random.randint(2, 14), 4 * random.randint(2, 14)
    a, b = 4 * random.randint(1, 4), 4 * random.randint(1, 4)
    colour = random.choice(_BY_HAND)
    name = random.choice(("circle", "rect", "ellipse", "line", "polygon"))
    code = {
        "circle": f'<circle cx="{x}" cy="{y}" r="{a}" fill="{colour}"/>',
        "rect": f'<rect x="{x - a}" y="{y - b}" width="{2 * a}" height="{2 * b}" fill="{colour}"/>',
        "ellipse": f'<ellipse cx="{x}" cy="{y}" rx="{a + 4}" ry="{b}" fill="{colour}"/>',
        "line": f'<line x1="{x - a}" y1="{y - b}" x2="{x + a}" y2="{y + b}" stroke="{colour}" stroke-width="3"/>',
        "polygon": f'<polygon points="{x},{y - b} {x + a},{y + b} {x - a},{y + b}" fill="{colour}"/>',
    }[name]
    return code, name, f"{name} {colour} {cell((x, y), SIDE, SIDE)}"


def svg_from(renderer: Any) -> Callable[[Random], PictureDocument]:
    """Documents of one to three elements."""

    def svg(random: Random) -> PictureDocument:
        elements = [_element(random) for _ in range(random.randint(1, 3))]
        body = "".join(code for code, _, _ in elements)
        source = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}">{body}</svg>'
        picture = render_svg(renderer, source, SIDE, SIDE)
        key = "svg " + ", ".join(sorted(key for _, _, key in elements))
        short = source.replace(' xmlns="http://www.w3.org/2000/svg"', "")
        asks = [Ask("code", ("Write this as SVG.", "Give the SVG code."), short)]
        return tell(random, "svg", [picture], [key], (short, f"SVG: {short}"), asks)

    return svg
