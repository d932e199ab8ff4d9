"""How all figures look: labelled axes, colours for every eye, the spread shown."""

import io
import pathlib
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# M. Okabe and K. Ito's colours, told apart with any colour vision; each with a marker of its own.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

STYLE = {  # looked up when axes are made, and again when they are drawn
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "perslot",  # otherwise every SVG differs from the last
    "svg.fonttype": "none",
}


def panels(columns: int = 1, width: float = 4.2, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A figure of axes side by side, in inches each."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(columns * width, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def legend_above(
    figure: Figure, axes: Axes, title: str | None = None, columns: int | None = None
) -> None:
    """One legend for all panels, over them: what ``axes`` shows."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title=title,
        loc="outside upper center",
        ncols=columns or len(labels),
        fontsize=8,
        title_fontsize=8,
        frameon=False,
    )


def style(i: int) -> dict[str, str]:
    """Colour and marker of the i-th thing that is compared."""
    return dict(color=COLORS[i % len(COLORS)], marker=MARKERS[i % len(MARKERS)], markersize=4)


def curve(axes: Axes, x: Sequence[float], ys, i: int, label: str, **more) -> None:
    """Draws the mean of ``ys`` (n_seeds, n) over x (n,), and the range over the seeds."""
    ys = np.asarray(ys, float)
    look = style(i) | more
    axes.plot(x, ys.mean(axis=0), label=label, **look)
    axes.fill_between(x, ys.min(axis=0), ys.max(axis=0), color=look["color"], alpha=0.18, lw=0)


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes PNG and SVG beside each other; ``path`` has no suffix."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def png(figure: Figure) -> bytes:
    """The figure as a PNG, small enough for a notebook."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(out := io.BytesIO(), dpi=80, format="png")
    return out.getvalue()
