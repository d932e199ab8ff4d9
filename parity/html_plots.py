"""Charts as inline SVG: axes with labels, lines and dots, in colours that all can tell apart."""

import dataclasses
import html
import math
from collections.abc import Sequence

# Okabe and Ito's palette.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 74, 12, 30, 44


@dataclasses.dataclass(frozen=True)
class Series:
    """Points of one colour; "line", "dashed" or "dots"."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    style: str = "line"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps numbers from ``low`` to ``high`` onto pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log10(x) for x in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers within the scale, about five."""
        if self.log:
            low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            step = max(1, math.ceil((high - low) / 5))
            ticks = [10.0**n for n in range(low, high + 1, step)]
        else:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
            step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (m * step) <= 5)
            first = math.ceil(self.low / step)
            ticks = [n * step for n in range(first, math.floor(self.high / step) + 1)]
        slack = 1e-9 * abs(self.high)
        return [tick for tick in ticks if self.low - slack <= tick <= self.high + slack]


def chart(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, log: bool = False
) -> str:
    """One chart with a legend; points that a logarithmic axis cannot show are left out."""
    shown = [
        dataclasses.replace(s, points=[p for p in s.points if math.isfinite(p[1])]) for s in series
    ]
    if log:
        shown = [dataclasses.replace(s, points=[p for p in s.points if p[1] > 0]) for s in shown]
    shown = [s for s in shown if s.points]
    points = [point for s in shown for point in s.points]
    if not points:
        return f'<p class="empty">{html.escape(title)}: nothing to show</p>'
    x = Scale(*_range([p[0] for p in points], log=False), LEFT, WIDTH - RIGHT)
    y = Scale(*_range([p[1] for p in points], log=log), HEIGHT - BOTTOM, TOP, log)
    parts = [*_axes(x, y, x_label, y_label), *(_series(s, x, y) for s in shown), *_legend(shown)]
    return _svg(HEIGHT, title, parts)


def timeline(spans: Sequence[tuple[int, int, int, str]], n_slots: int, n_events: int, marks) -> str:
    """Who occupied which slot when.

    Args:
        spans: (slot, first event, event after the last, tenant).
        n_slots: rows.
        n_events: columns.
        marks: (slot, event) of every step.
    """
    row, height = 26, TOP + 26 * n_slots + BOTTOM
    x = Scale(0, max(n_events, 1), LEFT, WIDTH - RIGHT)
    names = list(dict.fromkeys(span[3] for span in spans))
    parts = []
    for slot in range(n_slots):
        middle = TOP + row * slot + row / 2
        parts.append(_text(LEFT - 8, middle + 4, f"slot {slot}", anchor="end"))
        parts.append(_line(LEFT, middle, WIDTH - RIGHT, middle, "#ddd"))
    for slot, start, end, tenant in spans:
        top, width = TOP + row * slot + 3, max(x(end) - x(start), 2)
        color = PALETTE[names.index(tenant) % len(PALETTE)]
        parts.append(
            f'<rect x="{x(start):.1f}" y="{top}" width="{width:.1f}" height="{row - 6}" '
            f'fill="{color}" fill-opacity="0.35" stroke="{color}">'
            f"<title>{html.escape(tenant)}, events {start} to {end}</title></rect>"
        )
        if width > 7 * len(tenant) + 6:
            parts.append(_text(x(start) + 4, top + 14, tenant, anchor="start"))
    for slot, event in marks:
        top = TOP + row * slot
        parts.append(_line(x(event + 0.5), top + row - 9, x(event + 0.5), top + row - 3, "#000"))
    parts += _x_axis(x, height - BOTTOM, "event (ticks inside the bars: steps)")
    return _svg(height, "Slots", parts)


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)
        return low, high if high > low else 10 * low
    if high - low <= 1e-4 * max(abs(low), abs(high)):  # equal, to the eye
        return low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
    margin = 0.04 * (high - low)
    return low - margin, high + margin


def _axes(x: Scale, y: Scale, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in y.ticks():
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "#e5e5e5"))
        parts.append(_text(LEFT - 6, y(tick) + 4, f"{tick:.3g}", anchor="end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    parts.append(_text(14, middle, y_label, anchor="middle", extra=turned))
    parts.append(_line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, "#444"))
    return parts + _x_axis(x, HEIGHT - BOTTOM, x_label)


def _x_axis(x: Scale, bottom: float, label: str) -> list[str]:
    parts = [_line(LEFT, bottom, WIDTH - RIGHT, bottom, "#444")]
    for tick in x.ticks():
        parts.append(_line(x(tick), bottom, x(tick), bottom + 4, "#444"))
        parts.append(_text(x(tick), bottom + 17, f"{tick:g}", anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, _text(middle, bottom + 36, label, anchor="middle")]


def _series(series: Series, x: Scale, y: Scale) -> str:
    places = [(x(a), y(b)) for a, b in series.points]
    if series.style == "dots":
        return "".join(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4" fill="{series.color}" fill-opacity="0.7"/>'
            for a, b in places
        )
    dashes = ' stroke-dasharray="6 4"' if series.style == "dashed" else ""
    width = 2 if series.style == "dashed" else 3
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    return (
        f'<polyline points="{path}" fill="none" stroke="{series.color}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def _legend(series: Sequence[Series]) -> list[str]:
    parts, at = [], float(LEFT + 4)
    for s in series:
        if not s.label:
            continue
        sample = [(at, 0.0), (at + 16, 0.0)] if s.style != "dots" else [(at + 8, 0.0)]
        flat = Scale(0, 1, 0, 1)
        parts.append(
            _series(dataclasses.replace(s, points=[(a, 14.0) for a, _ in sample]), flat, flat)
        )
        parts.append(_text(at + 21, 18, s.label, anchor="start"))
        at += 30 + 6.3 * len(s.label)
    return parts


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _text(x: float, y: float, text: str, *, anchor: str, extra: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{html.escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'
