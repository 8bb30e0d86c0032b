"""Whether a text reads like prose: the published rules of Gopher, C4 and FineWeb, as pure functions. Apart from clean, because
each rule must give the value that the papers' own tools give.

Thresholds are for English web pages. English by nature: Gopher's stop words and word lengths, C4's phrases. A text in a
script without spaces between words gets a reason of Gopher's, never an error.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import itemgetter, sub

from stages.text.curation import C4, FineWeb, Gopher, Quality, Repetition

_WORDS = re.compile(r"https?://\S+|\w+(?:['’.]\w+|,\d+)*|\.{2,}|[^\w\s]")
"""Words and, each by itself, punctuation: what the papers' word tokenizers make of English, without a model."""
_LETTER = re.compile(r"[^\W\d_]")
_PARAGRAPHS = re.compile(r"\n{2,}")
_SENTENCE_END = re.compile(r"[.!?…。！？]+[\"'”’)\]]*(?:\s+|$)")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_POLICY = re.compile(r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
_C4_ENDS = (".", "?", "!", '"', "'")
_TERMINAL = tuple(".?!‼‽⁇⁈⁉。｡！？．﹒﹖﹗।॥؟۔።፧፨։។៕၊။᙮᠃᠉܀܁܂߹꓿")
"""Ends of sentences in living scripts (Unicode's Sentence_Terminal)."""


def reasons(cfg: Quality) -> dict[str, str]:
    """Reason -> the rule in words, in the order in which rules are asked."""
    found = {"empty": "no text"}
    if (gopher := cfg.gopher) is not None:
        found |= {
            "gopher_few_words": f"below gopher.min_words={gopher.min_words}",
            "gopher_many_words": f"above gopher.max_words={gopher.max_words}",
            "gopher_short_words": f"below gopher.min_mean_word_length={gopher.min_mean_word_length} (English)",
            "gopher_long_words": f"above gopher.max_mean_word_length={gopher.max_mean_word_length} (English)",
            "gopher_hashes": f"more # a word than gopher.max_symbols_per_word={gopher.max_symbols_per_word}",
            "gopher_ellipses": f"more ellipses a word than gopher.max_symbols_per_word={gopher.max_symbols_per_word}",
            "gopher_bullet_lines": f"above gopher.max_bullet_lines={gopher.max_bullet_lines}",
            "gopher_ellipsis_lines": f"above gopher.max_ellipsis_lines={gopher.max_ellipsis_lines}",
            "gopher_few_letters": f"below gopher.min_alphabetic_words={gopher.min_alphabetic_words}",
            "gopher_stop_words": f"below gopher.min_stop_words={gopher.min_stop_words} (English)",
        }
    if (repetition := cfg.repetition) is not None:
        for part in ("paragraphs", "paragraph_characters", "lines", "line_characters"):
            limit = getattr(repetition, f"duplicate_{part}")
            found[f"repeated_{part}"] = f"above repetition.duplicate_{part}={limit}"
        for n, share in sorted(repetition.top_ngrams.items()):
            found[f"top_{n}_gram"] = f"above repetition.top_ngrams.{n}={share}"
        for n, share in sorted(repetition.duplicate_ngrams.items()):
            found[f"repeated_{n}_grams"] = f"above repetition.duplicate_ngrams.{n}={share}"
    if (c4 := cfg.c4) is not None:
        found |= {
            "c4_lorem_ipsum": "filler text (c4.lorem_ipsum)",
            "c4_curly_bracket": "holds { (c4.curly_bracket)",
            "c4_few_sentences": f"below c4.min_sentences={c4.min_sentences} in the lines that count (English)",
        }
    if (fineweb := cfg.fineweb) is not None:
        found |= {
            "fineweb_punctuation": f"below fineweb.min_punctuated_lines={fineweb.min_punctuated_lines}",
            "fineweb_short_lines": f"above fineweb.max_short_lines={fineweb.max_short_lines}",
            "fineweb_repeated_lines": f"above fineweb.max_duplicate_line_characters={fineweb.max_duplicate_line_characters}",
            "fineweb_list": f"above fineweb.max_newlines_per_word={fineweb.max_newlines_per_word}",
        }
    return found


def words_of(text: str) -> list[str]:
    """Words and punctuation marks, in order."""
    return _WORDS.findall(text)


def sentences_in(line: str) -> int:
    """Sentences of one line: each end counts, and what stands after the last."""
    ends = list(_SENTENCE_END.finditer(line))
    return len(ends) + (not ends or ends[-1].end() < len(line)) if line else 0


class Rules:
    """All groups of one config."""

    def __init__(self, cfg: Quality) -> None:
        self.cfg = cfg

    def reason(self, text: str) -> str | None:
        """The first rule that a text breaks, cheap ones first; None for one that may stay."""
        if not text.strip():
            return "empty"
        cfg, reason = self.cfg, None
        if cfg.gopher or cfg.repetition:
            words = words_of(text)
            reason = _gopher(cfg.gopher, text, words) if cfg.gopher else None
            reason = reason or (_repetition(cfg.repetition, text, words) if cfg.repetition else None)
        if reason is None and cfg.c4:
            reason, lines = _c4(cfg.c4, text)
            text = "\n".join(lines).strip() if cfg.c4.remove_lines else text
        return reason or (_fineweb(cfg.fineweb, text) if cfg.fineweb else None)

    def lines(self, text: str) -> str:
        """What stays of a text that no rule refuses: all of it, but for `c4.remove_lines`."""
        if self.cfg.c4 is None or not self.cfg.c4.remove_lines:
            return text
        return "\n".join(_c4(self.cfg.c4, text)[1]).strip()


def _gopher(cfg: Gopher, text: str, words: list[str]) -> str | None:
    times = Counter(words)  # each word is looked at once: a third of the time
    spoken = {word: n for word, n in times.items() if word[0].isalnum() or any(map(str.isalnum, word))}
    said = sum(spoken.values())
    if said < max(cfg.min_words, 1):
        return "gopher_few_words"
    if said > cfg.max_words:
        return "gopher_many_words"
    length = sum(len(word) * n for word, n in spoken.items()) / said
    if length < cfg.min_mean_word_length:
        return "gopher_short_words"
    if length > cfg.max_mean_word_length:
        return "gopher_long_words"
    counted = len(words) if cfg.count_punctuation else said
    symbols = cfg.max_symbols_per_word * counted
    if text.count("#") > symbols:
        return "gopher_hashes"
    ellipses = text.count("...") + text.count("…")
    if ellipses > symbols:
        return "gopher_ellipses"
    lines = text.splitlines()
    # Lines are looked at only where the text has marks enough to break the rule.
    if (text.count("-") + text.count("•")) / len(lines) > cfg.max_bullet_lines:
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        if bullets / len(lines) > cfg.max_bullet_lines:
            return "gopher_bullet_lines"
    if ellipses / len(lines) > cfg.max_ellipsis_lines:
        ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        if ends / len(lines) > cfg.max_ellipsis_lines:
            return "gopher_ellipsis_lines"
    letters = sum(n for word, n in spoken.items() if word.isalpha())
    if letters / counted < cfg.min_alphabetic_words:
        letters += sum(n for word, n in spoken.items() if not word.isalpha() and _LETTER.search(word) is not None)
    if letters / counted < cfg.min_alphabetic_words:
        return "gopher_few_letters"
    if cfg.min_stop_words and len(times.keys() & set(cfg.stop_words)) < cfg.min_stop_words:
        return "gopher_stop_words"
    return None


def _again(parts: Iterable[str]) -> tuple[int, int]:
    """Of parts that stood before: how many, and their characters."""
    times = Counter(parts)
    return sum(n - 1 for n in times.values()), sum((n - 1) * len(part) for part, n in times.items() if n > 1)


def _paragraphs(text: str) -> list[str]:
    """Parts between empty lines; the expression is slow, and needed for several empty lines in a row only."""
    return _PARAGRAPHS.split(text) if "\n\n\n" in text else text.split("\n\n")


def _lines(text: str) -> list[str]:
    """Parts between runs of newlines, as `re.split` gives them: with an empty one before a first and behind a last newline."""
    return [*([""] if text[0] == "\n" else ()), *filter(None, text.split("\n")), *([""] if text[-1] == "\n" else ())]


def _repetition(cfg: Repetition, text: str, words: list[str]) -> str | None:
    for name, parts in (("paragraph", _paragraphs(text.strip())), ("line", _lines(text))):
        count, characters = _again(parts)
        if count / len(parts) > getattr(cfg, f"duplicate_{name}s"):
            return f"repeated_{name}s"
        if characters / len(text) > getattr(cfg, f"duplicate_{name}_characters"):
            return f"repeated_{name}_characters"
    ends = list(accumulate(map(len, words), initial=0))
    most = len(words)
    for n, share in sorted(cfg.top_ngrams.items()):
        # Most texts are cleared by this bound, which is six times as fast; it says nothing before `most` was counted.
        if most == len(words) or most * (max(map(sub, ends[n:], ends), default=0) + n - 1) > share * len(text):
            most, characters = _top(words, n)
            if characters / len(text) > share:
                return f"top_{n}_gram"
    positions: Sequence[int] = range(len(words))
    for n, share in sorted(cfg.duplicate_ngrams.items()):
        characters, positions = _duplicates(words, ends, n, positions)
        if characters / len(text) > share:
            return f"repeated_{n}_grams"
    return None


def _top(words: list[str], n: int) -> tuple[int, int]:
    """How often the most frequent n-gram occurs, and the characters that it takes, spaces within included. None when each
    occurs once: a short text is no repetition."""
    times = Counter(zip(*(words[start:] for start in range(n)), strict=False))
    ngram, count = max(times.items(), key=itemgetter(1), default=((), 0))
    return count, (sum(map(len, ngram)) + n - 1) * count if count > 1 else 0


def _duplicates(words: list[str], ends: list[int], n: int, positions: Sequence[int]) -> tuple[int, list[int]]:
    """Characters of n-grams that stood before, read from left to right without overlap; and where n-grams start that occur
    more than once. Only there can a longer one do so: `positions` are those of a shorter n."""
    if len(positions) == len(words):
        ngrams = list(zip(*(words[start:] for start in range(n)), strict=False))
    else:
        ngrams = [tuple(words[start : start + n]) for start in positions if start + n <= len(words)]
    times = Counter(ngrams)
    if len(times) == len(ngrams):
        return 0, []
    often = [(start, ngram) for start, ngram in zip(positions, ngrams, strict=False) if times[ngram] > 1]
    seen: set[tuple[str, ...]] = set()
    characters = free = 0
    for start, ngram in often:
        if start < free:
            continue
        if ngram in seen:
            free = start + n
            characters += ends[free] - ends[start]
        else:
            seen.add(ngram)
    return characters, [start for start, _ in often]


def _c4(cfg: C4, text: str) -> tuple[str | None, list[str]]:
    """(reason, the lines that count)."""
    kept: list[str] = []
    sentences = 0
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if len(line) > cfg.max_word_length and max(map(len, words)) > cfg.max_word_length:
            continue
        if cfg.citations and "[" in line:
            line = _CITATION.sub("", line)
        if cfg.terminal_punctuation and (not line.endswith(_C4_ENDS) or line.endswith("...")):
            continue
        if len(words) < cfg.min_words_per_line:
            continue
        lower = line.lower()
        if cfg.lorem_ipsum and "lorem ipsum" in lower:
            return "c4_lorem_ipsum", kept
        if cfg.javascript and "javascript" in lower:
            continue
        if cfg.curly_bracket and "{" in line:
            return "c4_curly_bracket", kept
        if cfg.policy and _POLICY.search(lower):
            continue
        if sentences < cfg.min_sentences:
            sentences += sentences_in(line)
        kept.append(line)
    return ("c4_few_sentences" if sentences < cfg.min_sentences else None), kept


def _fineweb(cfg: FineWeb, text: str) -> str | None:
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "empty"
    if sum(line.endswith(_TERMINAL) for line in lines) / len(lines) < cfg.min_punctuated_lines:
        return "fineweb_punctuation"
    if sum(len(line) <= cfg.short_line for line in lines) / len(lines) > cfg.max_short_lines:
        return "fineweb_short_lines"
    newlines = text.count("\n")
    if _again(lines)[1] / (len(text) - newlines) > cfg.max_duplicate_line_characters:
        return "fineweb_repeated_lines"
    if newlines > cfg.max_newlines_per_word * len(words_of(text)):
        return "fineweb_list"
    return None
