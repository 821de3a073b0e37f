"""README's plot of its ten rows: two bars a row, ours and the best peer's, as text SVG.

Each row has its own scale: the longer bar fills the width. The picture has its own background, so
it is readable on any page, and dark colours for dark pages.
"""

from __future__ import annotations

from html import escape

from result_tables import Highlight, duration, highlights

_WIDTH, _ROW, _TOP = 760, 44, 62
_LEFT, _BARS = 262, 246  # where bars begin, and the longest one's length
_BAR = 13

_STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1f2328 }
  .small { font-size: 11.5px; fill: #59636e }
  .kind { font-weight: 600 }
  .ours { fill: #0969da }
  .peer { fill: #b1bac4 }
  .floor { stroke: #cf222e; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .small { fill: #9198a1 }
    .ours { fill: #4493f8 }
    .peer { fill: #656c76 }
    .floor { stroke: #f85149 }
  }"""


def plot() -> str:
    rows = highlights()
    height = _TOP + _ROW * len(rows) + 6
    title = "Time of ten batches: jax_attn, the best peer, and the floor"
    key = [
        f'<rect class="ours" x="16" y="33" width="22" height="{_BAR}"/>',
        '<text x="44" y="44">jax_attn</text>',
        f'<rect class="peer" x="118" y="33" width="22" height="{_BAR}"/>',
        '<text x="146" y="44">best peer</text>',
        '<path class="floor" d="M330 31v17"/>',
        '<text x="338" y="44">floor: measured peak of the machine</text>',
        '<text class="small" x="744" y="44" text-anchor="end">each row has its own scale</text>',
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
            f' width="{_WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">',
            f"<style>{_STYLE}\n</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}"'
            ' rx="6"/>',
            f'<text class="kind" x="16" y="22">{escape(title)}</text>',
            *key,
            *(line for i, row in enumerate(rows) for line in _row(row, _TOP + _ROW * i)),
            "</svg>",
            "",
        ]
    )


def _row(row: Highlight, y: int) -> list[str]:
    scale = _BARS / max(row.ours, row.peer_us)
    floor = _LEFT + row.floor * scale
    lines = [
        f'<text class="kind" x="16" y="{y + 13}">{escape(row.kind)}</text>',
        f'<text class="small" x="16" y="{y + 29}">{escape(row.batch)}</text>',
    ]
    bars = (("ours", row.ours, ""), ("peer", row.peer_us, f"  {row.peer}"))
    for i, (name, us, beside) in enumerate(bars):
        top, width = y + 2 + i * (_BAR + 2), us * scale
        small = ' class="small"' if beside else ""
        lines += [
            f'<rect class="{name}" x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR}"/>',
            f'<text{small} x="{_LEFT + width + 7:.1f}" y="{top + 11}">'
            f"{escape(duration(us) + beside)}</text>",
        ]
    lines.append(f'<path class="floor" d="M{floor:.1f} {y}v{2 * _BAR + 6}"/>')
    return lines
