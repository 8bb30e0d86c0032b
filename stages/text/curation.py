"""What each step of curation may be told: one dataclass a step, each optional in clean's config. Apart from the rules
themselves, because a verb module holds these as fields and imports in milliseconds, and the rules load libraries.

Defaults are the published ones; docs/data.md names their sources.
"""

from dataclasses import dataclass, field
from enum import Enum


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}: it is a share")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(kw_only=True)
class UnicodeRepair:
    """Undo what broken encoders did, with ftfy. What is only a matter of taste (quotes, widths, ligatures) is off."""

    encoding: bool = True
    """Text decoded with the wrong code page is decoded again: `schÃ¶n` becomes `schön`. Works line by line, and only where
    the result is plausible."""
    html_entities: bool = True
    """`&eacute;` becomes `é`, up to the first line that holds a `<`: HTML and XML stay as they are."""
    terminal_escapes: bool = True
    """Colour codes of terminals (`ESC[31m`) leave."""
    straight_quotes: bool = False
    """Curly quotes become straight ones. Off: a model should know both."""
    ligatures: bool = False
    """`ﬁ` becomes `fi`."""
    character_width: bool = False
    """Fullwidth letters become plain ones, halfwidth katakana full ones. Off: wrong for Chinese and Japanese punctuation."""


@dataclass(kw_only=True)
class Gopher:
    """Quality rules of Gopher (MassiveText). Thresholds are for English and other languages that put spaces between words."""

    min_words: int = 50
    """Texts with fewer words, not counting those of punctuation alone, leave."""
    max_words: int = 100_000
    """Texts with more words leave."""
    min_mean_word_length: float = 3.0
    """Characters; shorter on average: leave."""
    max_mean_word_length: float = 10.0
    """Characters; longer on average: leave."""
    max_symbols_per_word: float = 0.1
    """`#` for each word, and ellipses for each word, each at most."""
    max_bullet_lines: float = 0.9
    """Share of lines that start with `-` or `•`."""
    max_ellipsis_lines: float = 0.3
    """Share of lines that end in an ellipsis."""
    min_alphabetic_words: float = 0.8
    """Share of words with at least one letter."""
    count_punctuation: bool = True
    """Whether a mark of punctuation is a word where symbols and letters are set against words: so in FineWeb. The paper's words
    hold none. False for technical text: in that, one word in five is a mark, and every third text leaves for it."""
    min_stop_words: int = 2
    """So many different ones of `stop_words` must occur. English by default; 0 switches the rule off."""
    stop_words: list[str] = field(default_factory=lambda: ["the", "be", "to", "of", "and", "that", "have", "with"])
    """Counted as they are written (`The` is not `the`)."""

    def __post_init__(self) -> None:
        _at_least("gopher.min_words", self.min_words, 0)
        _at_least("gopher.max_words", self.max_words, max(self.min_words, 1))
        _at_least("gopher.min_mean_word_length", self.min_mean_word_length, 0)
        _at_least("gopher.max_mean_word_length", self.max_mean_word_length, self.min_mean_word_length)
        _at_least("gopher.max_symbols_per_word", self.max_symbols_per_word, 0)
        for name in ("max_bullet_lines", "max_ellipsis_lines", "min_alphabetic_words"):
            _share(f"gopher.{name}", getattr(self, name))
        if not 0 <= self.min_stop_words <= len(set(self.stop_words)):
            raise ValueError(
                f"gopher.min_stop_words must lie between 0 and the number of stop_words ({len(set(self.stop_words))}), "
                f"got {self.min_stop_words}; 0 switches the rule off"
            )


@dataclass(kw_only=True)
class Repetition:
    """Repetition rules of Gopher (table A1). All shares are at most; 1 switches a rule off."""

    duplicate_lines: float = 0.3
    """Share of lines that stood before."""
    duplicate_line_characters: float = 0.2
    """Share of characters in such lines."""
    duplicate_paragraphs: float = 0.3
    """Share of paragraphs (parted by blank lines) that stood before."""
    duplicate_paragraph_characters: float = 0.2
    """Share of characters in such paragraphs."""
    top_ngrams: dict[int, float] = field(default_factory=lambda: {2: 0.2, 3: 0.18, 4: 0.16})
    """Words -> share of the characters that the most frequent n-gram of so many words takes."""
    duplicate_ngrams: dict[int, float] = field(
        default_factory=lambda: {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}
    )
    """Words -> share of the characters in n-grams of so many words that stood before."""

    def __post_init__(self) -> None:
        for name in ("lines", "line_characters", "paragraphs", "paragraph_characters"):
            _share(f"repetition.duplicate_{name}", getattr(self, f"duplicate_{name}"))
        for name in ("top_ngrams", "duplicate_ngrams"):
            for words, share in getattr(self, name).items():
                _at_least(f"repetition.{name}: words", words, 1)
                _share(f"repetition.{name}.{words}", share)


@dataclass(kw_only=True)
class C4:
    """Rules of C4, for English web pages. Lines are judged first, then the text by the lines that are left."""

    terminal_punctuation: bool = False
    """Only lines that end in `.`, `?`, `!` or a quote count. C4: true. FineWeb: false, since it cost 30 % of all text."""
    min_words_per_line: int = 3
    """Lines with fewer words do not count."""
    max_word_length: int = 1000
    """Lines with a longer word (characters) do not count."""
    javascript: bool = True
    """Lines that name JavaScript do not count."""
    policy: bool = True
    """Lines about cookies, privacy policies and terms of use do not count."""
    citations: bool = True
    """Marks like `[3]` and `[citation needed]` do not count."""
    min_sentences: int = 5
    """Texts with fewer sentences in the lines that count leave."""
    lorem_ipsum: bool = True
    """Texts with filler text leave."""
    curly_bracket: bool = True
    """Texts with `{` leave: source code, mostly."""
    remove_lines: bool = False
    """Lines that do not count, and the marks of `citations`, leave the text. Off: a text stays whole or leaves whole."""

    def __post_init__(self) -> None:
        _at_least("c4.min_words_per_line", self.min_words_per_line, 0)
        _at_least("c4.max_word_length", self.max_word_length, 1)
        _at_least("c4.min_sentences", self.min_sentences, 0)


@dataclass(kw_only=True)
class FineWeb:
    """The rules that FineWeb adds: pages that are lists, menus or copies of themselves."""

    min_punctuated_lines: float = 0.12
    """Share of lines that end in terminal punctuation of any script."""
    max_short_lines: float = 0.67
    """Share of lines of at most `short_line` characters."""
    short_line: int = 30
    """Characters."""
    max_duplicate_line_characters: float = 0.01
    """Share of characters in lines that stood before."""
    max_newlines_per_word: float = 0.3
    """Above: a list."""

    def __post_init__(self) -> None:
        for name in ("min_punctuated_lines", "max_short_lines", "max_duplicate_line_characters"):
            _share(f"fineweb.{name}", getattr(self, name))
        _at_least("fineweb.short_line", self.short_line, 0)
        _at_least("fineweb.max_newlines_per_word", self.max_newlines_per_word, 0)


@dataclass(kw_only=True)
class Quality:
    """Rules for prose, in this order; the first that a text breaks is the reason kept. A group that is null is off.
    Defaults are FineWeb's: made for English web pages; chats, code and lists break them for no fault."""

    repetition: Repetition | None = field(default_factory=Repetition)
    """Lines, paragraphs and phrases that come again."""
    gopher: Gopher | None = field(default_factory=Gopher)
    """Length, words, symbols, stop words."""
    c4: C4 | None = field(default_factory=C4)
    """Lines of web pages."""
    fineweb: FineWeb | None = field(default_factory=FineWeb)
    """Lists, menus, copies."""

    def __post_init__(self) -> None:
        if not (self.repetition or self.gopher or self.c4 or self.fineweb):
            raise ValueError("quality has no rules: all four groups are null; set quality=null to go without")


class Unknown(Enum):
    """What happens to a text whose language cannot be told."""

    drop = "drop"
    keep = "keep"


@dataclass(kw_only=True)
class Language:
    """Language identification with py3langid (139 languages), offline."""

    keep: list[str] = field(default_factory=list)
    """Codes of ISO 639 (`en`, `de`, `zh`): texts in other languages leave. Empty: languages are told, none leaves for it."""
    min_probability: float = 0.65
    """Below, the language counts as unknown. The value that FineWeb asks of its own model."""
    min_letters: int = 20
    """Texts with fewer letters count as unknown: too little to tell (bytes of UTF-8: a sign of Chinese counts three)."""
    unknown: Unknown = Unknown.drop
    """`drop` or `keep` texts of unknown language; asked only when `keep` names languages."""

    def __post_init__(self) -> None:
        _share("language.min_probability", self.min_probability)
        _at_least("language.min_letters", self.min_letters, 1)
        for code in self.keep:
            if not (code.isascii() and code.isalpha() and code.islower() and 2 <= len(code) <= 3):
                raise ValueError(f"language.keep must hold codes of ISO 639 like en or de, got {code!r}")


@dataclass(kw_only=True)
class Pii:
    """Personal data and secrets, each found by a pattern and proved by a check, replaced by what it was (`<EMAIL>`)."""

    emails: bool = True
    """`<EMAIL>`. Addresses below reserved names (example.com, .test, .invalid) stay: they are nobody's."""
    ip_addresses: bool = True
    """`<IP>`: public IPv4 and IPv6 addresses; private, loopback and documentation ranges stay."""
    phone_numbers: bool = True
    """`<PHONE>`: numbers that exist in the numbering plan of their country."""
    phone_region: str | None = None
    """Country (`US`, `DE`) of numbers written without `+`. Null: only numbers with `+` and country code are found."""
    payment_cards: bool = True
    """`<CARD>`: 14 to 19 digits with an issuer's prefix and a right check digit (Luhn)."""
    ibans: bool = True
    """`<IBAN>`: bank accounts of the right length for their country and with right check digits (mod 97)."""
    secrets: bool = True
    """`<SECRET>`: private keys, and tokens of well-known shapes (AWS, GitHub, OpenAI, Anthropic, Slack, Google, Hugging
    Face, Stripe, JWT, ...)."""

    def __post_init__(self) -> None:
        kinds = ("emails", "ip_addresses", "phone_numbers", "payment_cards", "ibans", "secrets")
        if not any(getattr(self, kind) for kind in kinds):
            raise ValueError("pii masks nothing: all kinds are false; set pii=null to go without")
        region = self.phone_region
        if region is not None and not (len(region) == 2 and region.isascii() and region.isupper()):
            raise ValueError(f"pii.phone_region must be two capital letters like US or DE, got {region!r}")


@dataclass(kw_only=True)
class Decontamination:
    """Rows that hold parts of evaluation sets leave."""

    tasks: dict[str, str] = field(default_factory=dict, metadata={"identity": False})
    """Name of an evaluation set -> its file, directory or glob, in any format that ingest reads: what training must not have
    seen. Of rows in other formats all texts count. The content of the files is part of the result's identity, not their place."""
    ngram: int = 13
    """Words that must be equal in a row, after lower-casing and without punctuation. GPT-3's value. An evaluation text with
    fewer words is found where a row is that text and nothing else."""
    max_overlap: float = 0.0
    """Share of a row's words that may stand in such n-grams; above, the row leaves. 0: any shared n-gram is one too many."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("decontamination.tasks is empty: name at least one evaluation set, or set it to null")
        _at_least("decontamination.ngram", self.ngram, 2)
        _share("decontamination.max_overlap", self.max_overlap)


@dataclass(kw_only=True)
class NearDuplicates:
    """Texts that are nearly the same, by MinHash: two with Jaccard similarity s of their word n-grams are found with
    probability 1 - (1 - s^rows)^bands. Defaults are FineWeb's: 0.05 at s = 0.5, 0.56 at 0.7, 0.77 at 0.75, 0.92 at 0.8, 1.00 at
    0.9. Near-duplicates never stand on both sides of the split, whether they leave or not."""

    bands: int = 14
    """More: found at smaller similarity, at more cost."""
    rows: int = 8
    """Hash values a band; more: only more similar texts are found."""
    ngram: int = 5
    """Words that are compared as one. Texts with fewer words are compared by exact duplicates alone."""
    remove: bool = True
    """All but the one with the smallest id leave. False: all stay, on one side of the split."""

    def __post_init__(self) -> None:
        for name in ("bands", "rows", "ngram"):
            _at_least(f"near_duplicates.{name}", getattr(self, name), 1)
