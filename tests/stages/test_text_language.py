"""Languages are told offline, and what cannot be told is not guessed."""

import pytest

from stages.contract import StageError
from stages.text.curation import Language, Unknown
from stages.text.language import SAMPLE, UNKNOWN, Identifier, known

TEXTS = {
    "en": "The train to the coast leaves twenty minutes later today, as the company told its passengers this morning.",
    "de": "Der Zug nach München fährt heute leider zwanzig Minuten später ab, wie die Bahn am Morgen mitteilte.",
    "fr": "Le gouvernement a annoncé hier de nouvelles mesures pour soutenir les petites entreprises du pays.",
    "es": "El equipo ganó el partido en el último minuto gracias a un gol de cabeza de su capitán.",
    "nl": "De regering heeft gisteren nieuwe maatregelen aangekondigd om kleine bedrijven te steunen.",
    "pl": "Rząd ogłosił wczoraj nowe środki wspierające małe przedsiębiorstwa w całym kraju.",
    "ru": "Сегодня утром в Москве прошёл сильный дождь, и многие улицы оказались затоплены.",
    "ar": "أعلنت الحكومة أمس عن إجراءات جديدة لدعم الشركات الصغيرة في البلاد.",
    "hi": "आज सुबह दिल्ली में भारी बारिश हुई और कई सड़कें पानी में डूब गईं।",
    "zh": "今天天气很好，我们一起去公园散步吧，那里有很多花。",
    "ja": "昨日は友達と一緒に映画を見に行きました。とても面白かったです。",
    "ko": "어제 친구와 함께 영화를 보러 갔습니다. 정말 재미있었습니다.",
}
NOTHING_TO_TELL = {
    "empty": "",
    "white space": " \n\t ",
    "a word": "ok",
    "digits": "12 34 56 78 90 " * 20,
    "punctuation": "!!! ??? ... --- *** " * 20,
    "emoji": "😀 🎉 " * 40,
    "addresses": "https://de.wikipedia.org/wiki/Deutschland someone@somewhere.fr " * 10,
    "code": "def f(x):\n    return [i for i in range(x) if i % 2 == 0]\n\nimport os, sys\nprint(f(10))",
}


@pytest.mark.parametrize("language", TEXTS)
def test_a_sentence_is_enough(language: str) -> None:
    told, probability = Identifier(Language()).identify(TEXTS[language])
    assert told == language and 0.65 <= probability <= 1


@pytest.mark.parametrize("case", NOTHING_TO_TELL)
def test_what_has_no_language_is_unknown(case: str) -> None:
    assert Identifier(Language()).identify(NOTHING_TO_TELL[case])[0] == UNKNOWN


def test_lines_capitals_and_links_do_not_mislead() -> None:
    identify = Identifier(Language()).identify
    assert identify(TEXTS["de"].upper())[0] == "de"
    assert identify(TEXTS["de"].replace(" ", "\n"))[0] == "de"
    assert identify("https://example.org/the/page/of/all/the/things " * 5 + TEXTS["de"])[0] == "de"


def test_below_the_probability_asked_for_and_below_the_letters_asked_for_it_is_unknown() -> None:
    told, probability = Identifier(Language(min_probability=0)).identify(NOTHING_TO_TELL["code"])
    assert told != UNKNOWN and probability < 0.65
    assert Identifier(Language(min_letters=1)).identify("Straßenbahn")[0] == "de"
    assert Identifier(Language(min_letters=12)).identify("Straßenbahn")[0] == "de"  # ß takes two bytes
    assert Identifier(Language(min_letters=13)).identify("Straßenbahn") == (UNKNOWN, 0.0)


def test_a_long_text_is_told_by_its_beginning() -> None:
    identify = Identifier(Language()).identify
    long = (TEXTS["fr"] + " ") * 30
    assert len(long) > SAMPLE and identify(long + TEXTS["ru"] * 500) == identify(long[:SAMPLE])


def test_many_texts_at_once_are_the_same_as_one_after_the_other() -> None:
    identifier = Identifier(Language())
    assert identifier.identify_all(TEXTS.values()) == [identifier.identify(text) for text in TEXTS.values()]


def test_only_languages_to_keep_stay_and_unknown_goes_as_asked() -> None:
    strict = Identifier(Language(keep=["de", "fr"]))
    assert [strict.reason(language) for language in ("de", "fr", "en", UNKNOWN)] == [
        None, None, "language_other", "language_unknown",
    ]  # fmt: skip
    assert Identifier(Language(keep=["de"], unknown=Unknown.keep)).reason(UNKNOWN) is None
    assert [Identifier(Language()).reason(language) for language in ("de", UNKNOWN)] == [None, None]


def test_a_language_that_cannot_be_told_is_refused_with_those_that_can() -> None:
    with pytest.raises(StageError, match=r"language\.keep names xx, which cannot be told; known: ace, af, .*, zu"):
        Identifier(Language(keep=["de", "xx"]))
    with pytest.raises(ValueError, match=r"language\.keep must hold codes of ISO 639"):
        Language(keep=["German"])
    assert UNKNOWN not in known() and "zxx" not in known() and len(known()) == 139
