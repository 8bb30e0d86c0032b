"""Undoes what broken encoders did to a text. Apart, because the library that knows how is loaded only where it is asked for."""

from functools import lru_cache

import ftfy

from stages.text.curation import UnicodeRepair


def repair(text: str, cfg: UnicodeRepair) -> str:
    """The text as it was meant, where that can be told; the same string where nothing is broken."""
    if text.isascii() and "&" not in text and "\x1b" not in text:
        return text  # ASCII is never broken otherwise; 20 times as fast
    return ftfy.fix_text(text, _settings(tuple(vars(cfg).items())))


@lru_cache
def _settings(choices: tuple[tuple[str, bool], ...]) -> ftfy.TextFixerConfig:
    cfg = UnicodeRepair(**dict(choices))
    return ftfy.TextFixerConfig(
        fix_encoding=cfg.encoding,
        unescape_html="auto" if cfg.html_entities else False,
        remove_terminal_escapes=cfg.terminal_escapes,
        uncurl_quotes=cfg.straight_quotes,
        fix_latin_ligatures=cfg.ligatures,
        fix_character_width=cfg.character_width,
        # What follows is done for every text anyway, by normalise.
        fix_line_breaks=False,
        remove_control_chars=False,
        normalization=None,
        explain=False,
    )
