"""The data card as a part of the report's page. Apart from what it says, because drawing has rules of its own: plain boxes, no script,
no outside request, everything escaped, readable without colour (what leaves has a sign and a hatching), in light and dark, at the
width of a telephone.
"""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.data_card import SPLITS, Card, Level, by_count, shares, waterfall

SMALL, REASONS_SHOWN, BARS_SHOWN = 0.001, 12, 12
"""Reasons beyond so many, each with less than this share of the rows, are folded."""


def page(card: Card) -> str:
    """The card as a part of the report; empty when no data stage has run."""
    if not card:
        return ""
    parts = [
        _titled("From the files to tokens", _waterfall_html(waterfall(card)) if waterfall(card) else ""),
        _titled("Sources", _sources_html(card)),
        _titled("Split", _split_html(card)),
        '<div class="dc-columns">',
        _titled("Length in characters", _bars(_lengths(card.corpus.get("characters_log2")), "rows", whole=True)),
        _titled("Length in tokens", _bars(_lengths(card.tokens.get("tokens_log2")), "documents", whole=True)),
        _titled("Languages", _bars(_languages(card), "rows")),
        _titled("Equal rows found together", _bars(_clusters(card, "exact"), "groups")),
        _titled("Nearly equal rows found together", _bars(_clusters(card, "near"), "groups")),
        _titled("Masked", _bars(by_count(card.corpus.get("masked") or {}), "times")),
        _titled("Found in evaluation sets", _bars(by_count(card.corpus.get("contaminated") or {}), "rows")),
        "</div>",
        _titled("Examples of rows that left", _examples_html(card)),
    ]
    return f'<section class="dc"><h2>Data card</h2>{"".join(parts)}</section>'


def _titled(title: str, markup: str) -> str:
    return f"<div class='dc-part'><h3>{title}</h3>{markup}</div>" if markup else ""


def _waterfall_html(levels: Sequence[Level]) -> str:
    base = max((level.rows for level in levels), default=0) or 1
    reasons = [level for level in levels if level.left]
    many = len(reasons) > REASONS_SHOWN
    standing, parts = 0, []
    hidden: list[tuple[Level, str]] = []
    for level in levels:
        before = standing
        standing = standing - level.rows if level.left else level.rows
        markup = _level(level, before, standing, base)
        if many and level.left and 0 < level.rows < SMALL * base:
            hidden.append((level, markup))
        else:
            parts += [_fold(hidden), markup]
            hidden = []
    parts.append(_fold(hidden))
    gone = "" if reasons else '<p class="dc-note">Nothing left on the way.</p>'
    return f'<div class="dc-fall" role="list">{"".join(parts)}</div>{gone}'


def _fold(hidden: Sequence[tuple[Level, str]]) -> str:
    if len(hidden) < 2:
        return "".join(markup for _, markup in hidden)
    rows = sum(level.rows for level, _ in hidden)
    what = f"{len(hidden)} more reasons, {rows:,} rows together"
    return f"<details><summary>{what}</summary>{''.join(markup for _, markup in hidden)}</details>"


def _level(level: Level, before: int, after: int, base: int) -> str:
    e = html.escape
    label = e(level.label.replace("_", " "))
    words = f"<small>{e(level.words)}</small>" if level.words else ""
    characters = (
        f"{-level.characters if level.left else level.characters:,} characters".replace("-", "−")
        if level.characters
        else ""
    )
    if level.left:
        kind = "bad" if level.bad else "gone"
        bar = _box("stay", after, base) + _box(kind, before - after, base)
        number = f"−{level.rows:,}" if level.rows else "–"
        share = f"{level.rows / base:.1%}" if level.rows else ""
    else:
        kind, bar = "total", _box("all", level.rows, base)
        number, share = f"{level.rows:,}", f"{level.rows / base:.1%}"
    return (
        f'<div class="dc-level {kind}" role="listitem"><span class="dc-name">{label}{words}</span>'
        f'<span class="dc-bar" aria-hidden="true">{bar}</span>'
        f'<span class="dc-count"><b>{number}</b> <em>{share}</em><small>{characters}</small></span></div>'
    )


def _sources_html(card: Card) -> str:
    e, lines = html.escape, []
    found = shares(card)
    for source in found:
        read, kept = source["read"], source["kept"]
        format_ = f"<b>{e(str(read['format']))}</b>" if read.get("format") else ""
        why = f"<small>{e(str(read.get('why') or ''))}</small>"
        bad = f"<small>−{read['quarantined']:,} quarantined</small>" if read.get("quarantined") else ""
        rows = f"{read['rows']:,}" if "rows" in read else ""
        stayed = f"{kept['rows']:,}" if "rows" in kept else ""
        cells = [f"<b>{e(str(source['name']))}</b>", format_ + why, rows + bad, stayed]
        cells.append(f"{source['tokens']:,}" if card.tokens else "")
        cells.append(_share_bars(source) if len(found) > 1 else "")
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if not lines:
        return ""
    head = ["source", "format, and why", "read", "kept", "tokens to train on", "share" if len(found) > 1 else ""]
    heads = "".join(f"<th>{name}</th>" for name in head)
    table = f"<table class='dc-sources'><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    note = (
        '<p class="dc-note">Share: <b>▏</b> what the weights ask for, the bar what training drew (of the tokens stored, where '
        "no training ran).</p>"
        if len(found) > 1
        else ""
    )
    return f'<div class="dc-wide">{table}</div>{note}'


def _share_bars(source: Mapping[str, Any]) -> str:
    drawn = source["drawn"] if source["drawn"] is not None else source["stored"]
    passes = f", {source['epochs']:,.2f} passes" if source["epochs"] is not None else ""
    words = f"{drawn:.1%}" if drawn is not None else "none"
    wanted = f'<u style="left:{_percent(source["wanted"], 1)}"></u>'
    return (
        f'<span class="dc-drawn"><span class="dc-bar dc-share">{_box("all", drawn or 0, 1)}{wanted}</span>'
        f"<b>{words}</b><small>asked {source['wanted']:.1%}{passes}</small></span>"
    )


def _split_html(card: Card) -> str:
    units = [
        (card.corpus, "rows"),
        (card.corpus, "characters"),
        *((card.tokens, unit) for unit in ("tokens", "supervised_tokens", "pairs", "chosen_tokens", "rejected_tokens")),
    ]
    known = [(facts, unit) for facts, unit in units if isinstance(facts.get("train"), dict) and unit in facts["train"]]
    if not known:
        return ""
    head = "".join(
        f"<th>{unit.replace('supervised_tokens', 'tokens with loss').replace('_', ' ')}</th>" for _, unit in known
    )
    lines = []
    for split in SPLITS:
        cells = []
        for facts, unit in known:
            number, total = facts[split].get(unit, 0), sum(facts[s].get(unit, 0) for s in SPLITS)
            of = facts[split].get("tokens", 0) if unit == "supervised_tokens" else total
            cells.append(f"<td>{number:,} <small>{number / of if of else 0:.1%}</small></td>")
        lines.append(f"<tr><td><b>{split}</b></td>{''.join(cells)}</tr>")
    overlap = card.corpus.get("split_overlap")
    mark = (
        ""
        if overlap is None
        else f"{'✓' if overlap == 0 else '✕'} {overlap:,} contents stand on both sides of the split."
    )
    table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    verdict = f'<p class="{"dc-fine" if overlap == 0 else "dc-wrong"}">{mark}</p>' if mark else ""
    return f'<div class="dc-wide">{table}</div>{verdict}'


def _bars(items: Sequence[tuple[str, int]], unit: str, whole: bool = False) -> str:
    """One line a bar: label, bar, number."""
    if not items:
        return ""
    most, total = max(count for _, count in items) or 1, sum(count for _, count in items) or 1
    shown = list(items if whole else items[:BARS_SHOWN])
    rest = items[len(shown) :]
    if rest:
        shown.append((f"{len(rest)} more", sum(count for _, count in rest)))
    lines = "".join(
        f'<div class="dc-row" role="listitem"><span>{html.escape(label)}</span><span class="dc-bar" aria-hidden="true">'
        f"{_box('all', count, most)}</span>"
        f"<span><b>{count:,}</b> <em>{_rounded(count / total)}</em></span></div>"
        for label, count in shown
    )
    note = '<p class="dc-note">By powers of two; k is 1,024.</p>' if whole else ""
    return f'<div class="dc-rows" role="list" aria-label="{unit}">{lines}</div>{note}'


def _rounded(share: float) -> str:
    return "&lt;1%" if 0 < share < 0.01 else f"{share:.0%}"


def _lengths(buckets: Mapping[str, int] | None) -> list[tuple[str, int]]:
    """Buckets of powers of two (`n` holds lengths from 2^(n-1) to 2^n - 1), without gaps."""
    if not buckets:
        return []
    numbers = {int(bucket): int(count) for bucket, count in buckets.items()}
    return [(_range(n), numbers.get(n, 0)) for n in range(min(numbers), max(numbers) + 1)]


def _range(bucket: int) -> str:
    if bucket < 2:
        return str(bucket)
    return f"{_short(2 ** (bucket - 1))} – {_short(2**bucket)}"


def _short(number: int) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)


def _languages(card: Card) -> list[tuple[str, int]]:
    found: Counter[str] = Counter()
    for source in card.corpus.get("sources") or []:
        found.update(source.get("languages") or {})
    return by_count(found)


def _clusters(card: Card, kind: str) -> list[tuple[str, int]]:
    """How many groups of each size, sizes over 4 by powers of two."""
    found: Counter[int] = Counter()
    for size, count in ((card.corpus.get("clusters") or {}).get(kind) or {}).items():
        number = int(size)
        found[number if number < 5 else 1 << (number - 1).bit_length()] += int(count)
    return [(f"{n} rows" if n < 5 else f"{n // 2 + 1} to {n} rows", found[n]) for n in sorted(found)]


def _examples_html(card: Card) -> str:
    e, words = html.escape, card.corpus.get("reasons") or {}
    parts = []
    for reason, rows in card.examples.items():
        inner = "".join(
            f"<dt>{e(row['id'])} <small>{e(row['source'])}</small></dt><dd><pre>{e(row['text'])}</pre></dd>"
            for row in rows
        )
        title = f"{e(reason.replace('_', ' '))} <small>{e(str(words.get(reason, '')))}</small>"
        parts.append(f"<details><summary>{title}</summary><dl>{inner}</dl></details>")
    return "".join(parts)


def _box(kind: str, part: float, whole: float) -> str:
    return f'<i class="{kind}" style="width:{_percent(part, whole)}"></i>' if part else ""


def _percent(part: float, whole: float) -> str:
    return f"{min(100.0, 100 * part / whole):.2f}%"


STYLE = """
.dc h3{font-size:.95rem;margin:1.3rem 0 .4rem}.dc small,.dc em{font-size:.8rem;font-style:normal;opacity:.75}
.dc-name small,.dc-count small,.dc td small{display:block}.dc-note{font-size:.85rem;opacity:.8;margin:.4rem 0}
.dc-level{display:grid;gap:.15rem .8rem;align-items:center;padding:.22rem 0}
.dc-level{grid-template-columns:minmax(8rem,15rem) 1fr 11.5rem}
.dc-rows{display:grid;grid-template-columns:minmax(4rem,max-content) 1fr max-content;gap:.3rem .8rem;align-items:center}
.dc-row{display:contents}
.dc-level.total{border-top:1px solid var(--line);font-weight:600}.dc-level.total:first-child{border:0}
.dc-name{overflow-wrap:anywhere}.dc-count,.dc-row>:last-child{text-align:right;font-variant-numeric:tabular-nums}
.dc-count small,.dc-name small{font-weight:400}
.dc-bar{display:flex;height:.95rem;background:#8881;border-radius:3px;overflow:hidden;position:relative}
.dc-bar i{display:block;height:100%;min-width:0}.dc-bar .all{background:var(--a);min-width:2px}
.dc-bar .stay{background:color-mix(in srgb,var(--a) 25%,transparent)}
.dc-bar .gone,.dc-bar .bad{min-width:3px;--c:var(--b);--d:color-mix(in srgb,var(--c) 55%,transparent);
background:repeating-linear-gradient(135deg,var(--c) 0 3px,var(--d) 3px 6px)}
.dc-bar .bad{--c:var(--bad)}.dc-level.gone b{color:var(--b)}.dc-level.bad b{color:var(--bad)}
.dc-drawn{display:flex;gap:.6rem;align-items:center;white-space:nowrap}.dc-share{width:7rem;flex:none;height:.8rem}
.dc-share u{position:absolute;top:0;bottom:0;width:2px;background:currentColor}
.dc-wide{overflow-x:auto}.dc-wide td:first-child,.dc-wide th{white-space:nowrap}.dc-drawn small{display:inline!important}
.dc-columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(19rem,100%),1fr));gap:0 2.5rem}
.dc details{margin:.2rem 0}.dc summary{cursor:pointer;font-size:.9rem}
.dc-fine{color:var(--ok);font-size:.9rem}.dc-wrong{color:var(--bad);font-weight:600}
@media(max-width:36rem){.dc-sources{min-width:42rem}.dc-level{grid-template-columns:1fr max-content}
.dc-level .dc-bar{grid-row:2;grid-column:1/3}}
"""
