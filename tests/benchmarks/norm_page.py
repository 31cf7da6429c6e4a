"""Writes docs/benchmarks/norms.md's figures and tables from the JSON of norms.py.

Usage: python tests/benchmarks/norm_page.py [FILE]     (default docs/benchmarks/h200.json)

A figure shows one op: a line for each case, and on it the time of every arm over that of the copy. The page keeps
its words; what stands between its two comments is replaced.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from norm_results import FLOOR, Record, allowed, by_op, is_met, lead, median, over, rivals, shown, verdicts
from peers import COMPILE, OURS, TITLES, TORCH

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
PAGE = DOCS / "norms.md"
RESULTS = DOCS / "h200.json"
ANOTHER_RUN = DOCS / "h200-another-run.csv"
"""Rivals whose compilers are too large to come to every run: op, shape, peer, and microseconds of that run."""

FIGURES = "norms"
BEGIN, END = "<!-- written by tests/benchmarks/norm_page.py -->\n", "<!-- to here -->\n"

WIDTH, LEFT, RIGHT, TOP, LINE = 1000, 190, 820, 96, 26
LEAST, MOST = 0.8, 8.0
TICKS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="13" fill="#374151"
  font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif">"""
MARKS = {
    OURS: '<circle cx="{x}" cy="{y}" r="6" fill="#6b46a8"/>',
    TORCH: '<rect x="{x0}" y="{y0}" width="9" height="9" fill="none" stroke="#4b5563" stroke-width="1.6"/>',
    COMPILE: '<path d="M{x} {y1}l6 6l-6 6l-6-6z" fill="none" stroke="#4b5563" stroke-width="1.6"/>',
}
OTHERS = (
    '<path d="M{x} {y1}l6 11h-12z" fill="none" stroke="#0f766e" stroke-width="1.6"/>',
    '<path d="M{x0} {y0}l9 9m0 -9l-9 9" fill="none" stroke="#0f766e" stroke-width="1.8"/>',
    '<path d="M{x} {y2}l6 -11h-12z" fill="none" stroke="#b45309" stroke-width="1.6"/>',
    '<path d="M{x} {y1}v12m-6 -6h12" fill="none" stroke="#b45309" stroke-width="1.8"/>',
)


# ----------------------------------------------------------------------------------------------------------- figures


def figure(op: str, records: Sequence[Record]) -> str:
    """One op as SVG."""
    height = TOP + LINE * len(records) + 40
    text = f"{_title(op)}: time on the device over the time of a copy of the bytes that the op has to move"
    lines = [
        HEAD.format(width=WIDTH, height=height),
        f"<title>{escape(text)}</title>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="12" fill="#ffffff" stroke="#d1d5db"/>',
        f'<text x="24" y="32" font-size="15" font-weight="bold">{escape(text)}</text>',
        *_legend(_arms(records)),
        *_axis(height - 40),
    ]
    for at, record in enumerate(records):
        lines += _line(record, TOP + LINE * at + LINE // 2, _arms(records))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _title(op: str) -> str:
    norm = op.removesuffix("_bwd").replace("_", " ").replace("rms", "RMS")
    return f"{norm[0].upper()}{norm[1:]}" + (", backward" if op.endswith("_bwd") else "")


def _arms(records: Sequence[Record]) -> list[str]:
    """Those with a time, without the copy; ours last, so that it is drawn over the others."""
    return [*dict.fromkeys(arm for record in records for arm in rivals(record)), OURS]


def _mark(arm: str, arms: Sequence[str], x: float, y: float) -> str:
    others = [one for one in arms if one not in MARKS]
    mark = MARKS[arm] if arm in MARKS else OTHERS[others.index(arm) % len(OTHERS)]
    sides = {"x": x, "y": y, "x0": x - 4.5, "y0": y - 4.5, "y1": y - 6, "y2": y + 6}
    return mark.format(**{name: f"{value:g}" for name, value in sides.items()})


def _legend(arms: Sequence[str]) -> Iterator[str]:
    for at, arm in enumerate(arms):
        x = 30 + 150 * at
        yield _mark(arm, arms, x, 56)
        yield f'<text x="{x + 14}" y="60">{escape(TITLES.get(arm, arm))}</text>'
    x = 30 + 150 * len(arms)
    yield f'<path d="M{x} 48v16" stroke="#dc2626" stroke-width="2.4"/><text x="{x + 10}" y="60">our bar</text>'


def _axis(bottom: int) -> Iterator[str]:
    for tick in TICKS:
        x, color = _x(tick), "#374151" if tick == 1 else "#e5e7eb"
        yield f'<path d="M{x:g} {TOP - 8}V{bottom}" stroke="{color}"/>'
        yield f'<text x="{x:g}" y="{bottom + 20}" text-anchor="middle">{"copy" if tick == 1 else f"{tick:g} ×"}</text>'


def _line(record: Record, y: int, arms: Sequence[str]) -> Iterator[str]:
    yield f'<text x="{LEFT - 20}" y="{y + 4}" text-anchor="end">{escape(record["name"])}</text>'
    most, floor = allowed(record), median(record, FLOOR)
    if most is not None and floor is not None:
        yield f'<path d="M{_x(most / floor):g} {y - 10}v20" stroke="#dc2626" stroke-width="2.4"/>'
    for arm in arms:
        ratio = over(record, arm, FLOOR)
        if ratio is not None:
            yield _mark(arm, arms, _x(ratio), y)
    yield f'<text x="{RIGHT + 24}" y="{y + 4}">{_microseconds(record, OURS)} µs, {shown(over(record, OURS, FLOOR))} ×</text>'


def _x(ratio: float) -> float:
    """Where a ratio lies, on a scale of equal factors; what is beyond lies on its end."""
    inside = min(max(ratio, LEAST), MOST)
    return round(LEFT + (RIGHT - LEFT) * math.log(inside / LEAST) / math.log(MOST / LEAST), 1)


def _microseconds(record: Record, arm: str) -> str:
    time = median(record, arm)
    return "–" if time is None else f"{time:.2f}"


# -------------------------------------------------------------------------------------------------------------- page


def section(report: Mapping[str, Any]) -> str:
    """What the page has between its comments: a summary, then for each op its figure and a table."""
    ops = by_op(report["cases"])
    on = sorted({f"{on} ({', '.join(arms)})" for on, arms in _machines(report["on"]).items()})
    lines = [
        f"Python {report['python']}, medians of up to {report['rounds']} rounds, on:",
        "",
        *(f"- {machine}" for machine in on),
        "",
    ]
    lines += ["| op | cases | bars met | missed | not measured | best rival ÷ ours |", "|---|---:|---:|---:|---:|---:|"]
    for op, records in ops.items():
        states = [is_met(record) for record in records]
        counts = " | ".join(str(states.count(state)) for state in (True, False, None))
        lines.append(f"| {_title(op)} | {len(records)} | {counts} | {shown(lead(records))} |")
    for op, records in ops.items():
        lines += [
            "",
            f"### {_title(op)}",
            "",
            f"![{_title(op)}]({FIGURES}/{op}.svg)",
            "",
            *_table(records),
        ]
    return "\n".join([*lines, *_another_run(report["cases"])]) + "\n\n"


def _another_run(records: Sequence[Record]) -> Iterator[str]:
    """Our times beside those of rivals that were measured in another run."""
    with ANOTHER_RUN.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    times = {(row["op"], row["shape"], row["peer"]): float(row["microseconds"]) for row in rows}
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    yield from ("", "### Rivals of another run", "", f"| µs | {OURS} | {' | '.join(peers)} | ÷ best of them |")
    yield f"|---|{'---:|' * (len(peers) + 2)}"
    for record in records:
        ours = median(record, OURS)
        found = [times.get((record["op"], record["name"], peer)) for peer in peers]
        known = [time for time in found if time is not None]
        if ours is not None and known:
            shown_times = " | ".join("–" if time is None else f"{time:.2f}" for time in found)
            yield f"| {_title(record['op'])} {record['name']} | {ours:.2f} | {shown_times} | {shown(ours / min(known))} |"


def _machines(on: Mapping[str, str]) -> dict[str, list[str]]:
    """The arms by what they ran on."""
    found: dict[str, list[str]] = {}
    for arm, machine in on.items():
        if machine:
            found.setdefault(machine, []).append(TITLES.get(arm, arm))
    return found


def _table(records: Sequence[Record]) -> Iterator[str]:
    others = _arms(records)[:-1]
    titles = [TITLES.get(arm, arm) for arm in (FLOOR, OURS, *others)]
    yield f"| µs | dtype | kernel | {' | '.join(titles)} | ÷ copy | ÷ best rival | bar |"
    yield f"|---|---|---|{'---:|' * (len(titles) + 2)}---|"
    for record in records:
        times = " | ".join(_microseconds(record, arm) for arm in (FLOOR, OURS, *others))
        best = min(rivals(record), key=rivals(record).__getitem__, default=None)
        ratios = f"{shown(over(record, OURS, FLOOR))} | {shown(over(record, OURS, best))}"
        yield f"| {record['name']} | {record['dtype']} | {record['kernel']} | {times} | {ratios} | {_bar(record)} |"


def _bar(record: Record) -> str:
    state = {True: "met", False: "**missed**", None: "not measured"}[is_met(record)]
    missed = [said for said, met in verdicts(record) if met is False]
    return f"{state}: {'; '.join(missed)}" if missed else state


def written(page: str, report: Mapping[str, Any]) -> str:
    """The page with the results of `report`."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section(report)}{END}{after}"


def files_of(report: Mapping[str, Any], page: str) -> dict[Path, str]:
    """What is written, by where."""
    figures = {DOCS / FIGURES / f"{op}.svg": figure(op, records) for op, records in by_op(report["cases"]).items()}
    return {PAGE: written(page, report), **figures}


def main() -> None:
    """Write the page and its figures; remove those of ops without results."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    report = json.loads(results.read_text(encoding="utf-8"))
    files = files_of(report, PAGE.read_text(encoding="utf-8"))
    (DOCS / FIGURES).mkdir(exist_ok=True)
    for stale in set((DOCS / FIGURES).glob("*.svg")) - files.keys():
        stale.unlink()
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
