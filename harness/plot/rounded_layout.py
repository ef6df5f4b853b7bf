"""Layout of a figure whose places are equal in every process.

The solver of matplotlib's constrained layout adds up in the order of addresses, so the last digits
of its places differ between calls, and with them names in an SVG that are hashes of places.
"""

from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import Bbox

DIGITS = 9  # of a place in parts of the figure: 1e-9 of 10,000 pixels is no difference


class RoundedLayout(ConstrainedLayoutEngine):
    """Constrained layout with rounded places of panels."""

    def execute(self, fig: Figure) -> None:
        """Place the panels of a figure."""
        super().execute(fig)
        _round_parts(fig)
        for axes in fig.axes:
            place = axes.get_position(original=True)
            is_placed = axes.get_in_layout()
            axes.set_position(_rounded(place), which="original")
            axes.set_in_layout(is_placed)  # which a position ends


def _round_parts(parent: Figure | SubFigure) -> None:
    for part in parent.subfigs:
        part.bbox_relative.set(_rounded(part.bbox_relative))
        _round_parts(part)


def _rounded(place: Bbox) -> Bbox:
    return Bbox(place.get_points().round(DIGITS))
