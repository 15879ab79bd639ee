"""A verdict as a badge: a one-line SVG for a README. It loads nothing, and has its text for screen readers."""

from __future__ import annotations

from xml.sax.saxutils import escape

from spillover.errors import SpilloverError, did_you_mean
from spillover.lab.report import wording
from spillover.lab.report.data import Report, Verdict
from spillover.lab.report.forest import TONES
from spillover.lab.report.metric import metric
from spillover.lab.report.tables import times

COLORS = {"good": "#0b7a52", "bad": "#b3261e", "same": "#2a569f", "none": "#5f5f5a", "warn": "#8a5208"}
LABEL = "#3d3d39"
HEIGHT, PADDING, SIZE = 20, 7, 11
NARROW, WIDE = "fijl.,:;|!'() ", "mwMW%@"


def badge(report: Report, arm: str | None = None, workload: str | None = None, label: str | None = None) -> str:
    """Return the badge of one verdict of the primary metric, or of their counts if there are several."""
    chosen = chosen_verdicts(report, arm, workload)
    left = label or report.name
    if len(chosen) == 1:
        return drawn(left, sentence(report, chosen[0]), TONES[chosen[0].verdict])
    counted = [(word, sum(verdict.verdict == word for verdict in chosen)) for word in wording.VERDICTS]
    counts = [f"{count} {wording.verdict_word(report, word)}" for word, count in counted if count]
    kinds = {verdict.verdict for verdict in chosen}
    tone = TONES[next(iter(kinds))] if len(kinds) == 1 else "none"
    return drawn(left, ", ".join(counts) or "nothing compared", tone)


def chosen_verdicts(report: Report, arm: str | None, workload: str | None) -> list[Verdict]:
    """Return the verdicts of the primary metric for an arm and a workload; refuse a name that has none."""
    found = wording.judged(report)
    for kind, given, names in (("arm", arm, [verdict.arm for verdict in found]),
                               ("workload", workload, [verdict.workload for verdict in found])):
        known = list(dict.fromkeys(names))
        if given is not None and given not in known:
            raise SpilloverError(f"{report.name} has no verdict of the {kind} '{given}'"
                                 f"{did_you_mean(given, known, listed=True)}")
    return [verdict for verdict in found if arm in (None, verdict.arm) and workload in (None, verdict.workload)]


def sentence(report: Report, verdict: Verdict) -> str:
    """Return a verdict in a few words: 'host 1.62x faster (1.55x to 1.70x)'."""
    gains = verdict.gains
    if gains is None or verdict.verdict == "no verdict":
        return f"{verdict.arm}: {verdict.word}"
    gain, low, high = gains if verdict.verdict != "slower" else (1 / gains[0], 1 / gains[2], 1 / gains[1])
    if verdict.verdict in ("faster", "slower"):
        return f"{verdict.arm} {times(gain)}x {verdict.word} ({times(low)}x to {times(high)}x)"
    return f"{verdict.arm}: {verdict.word} ({times(low)}x to {times(high)}x)"


def title(report: Report) -> str:
    return f"{metric(report.primary).title}, against {report.baseline}"


def drawn(left: str, right: str, tone: str) -> str:
    widths = [_width(text) + 2 * PADDING for text in (left, right)]
    whole = sum(widths)
    label = escape(f"{left}: {right}", {'"': "&quot;"})
    texts = "".join(
        f'<text x="{x}" y="14" textLength="{width - 2 * PADDING}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
        for text, width, x in ((left, widths[0], PADDING), (right, widths[1], widths[0] + PADDING)))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{HEIGHT}" viewBox="0 0 {whole} {HEIGHT}" '
            f'role="img" aria-label="{label}"><title>{label}</title>'
            f'<clipPath id="r"><rect width="{whole}" height="{HEIGHT}" rx="3"/></clipPath><g clip-path="url(#r)">'
            f'<rect width="{widths[0]}" height="{HEIGHT}" fill="{LABEL}"/>'
            f'<rect x="{widths[0]}" width="{widths[1]}" height="{HEIGHT}" fill="{COLORS[tone]}"/></g>'
            f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="{SIZE}">{texts}</g></svg>\n')


def _width(text: str) -> int:
    """Return the approximate width of a text in pixels; its `textLength` fits it exactly."""
    return round(sum(3.9 if letter in NARROW else 10.5 if letter in WIDE else 6.9 for letter in text))
