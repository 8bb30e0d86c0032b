"""Groups of a stage's config that may be null are switched on by any override that reaches into them."""

from typing import Any

import pytest

from pipelines.config import compose
from pipelines.mistakes import ConfigError
from stages.clean import CleanConfig
from stages.ingest import IngestConfig
from stages.text.curation import C4, Decontamination, Gopher, NearDuplicates, Quality
from stages.text.formats import Format
from stages.text.source_config import SourceConfig


def clean(*overrides: str) -> CleanConfig:
    config = compose(["pipeline=quickstart", *overrides]).stages["clean"]
    assert isinstance(config, CleanConfig)
    return config


@pytest.mark.parametrize(
    ("overrides", "field", "expected"),
    [
        ([], "near_duplicates", None),
        (["stages.clean.near_duplicates={}"], "near_duplicates", NearDuplicates()),
        (["+stages.clean.near_duplicates={bands: 3}"], "near_duplicates", NearDuplicates(bands=3)),
        (
            ["stages.clean.near_duplicates.rows=9", "stages.clean.near_duplicates.bands=2"],
            "near_duplicates",
            NearDuplicates(rows=9, bands=2),
        ),
        (["stages.clean.quality={c4: null}"], "quality", Quality(c4=None)),
        (["stages.clean.quality.gopher.min_words=3"], "quality", Quality(gopher=Gopher(min_words=3))),
        (["clean=web", "stages.clean.quality.c4={min_sentences: 1}"], "quality", Quality(c4=C4(min_sentences=1))),
        (
            ["stages.clean.decontamination.tasks={a: x.jsonl}", "stages.clean.decontamination.ngram=8"],
            "decontamination",
            Decontamination(tasks={"a": "x.jsonl"}, ngram=8),
        ),
    ],
)
def test_an_override_inside_a_group_switches_it_on(overrides: list[str], field: str, expected: Any) -> None:
    assert getattr(clean(*overrides), field) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.clean.decontamination={}", r"decontamination\.tasks is empty: name at least one evaluation set"),
        ("stages.clean.near_duplicates.bands=0", r"near_duplicates\.bands must be at least 1, got 0"),
        ("stages.clean.near_duplicates.bands=many", r"stages\.clean\.near_duplicates\.bands.*many"),
        ("stages.clean.near_duplicates.band=3", r"near_duplicates\.band is not a field of NearDuplicates.*'bands'"),
        (
            "stages.clean.quality.gofer.min_words=3",
            r"stages\.clean\.quality\.gofer is not there; did you mean 'gopher'",
        ),
        ("stages.clear.near_duplicates.bands=3", r"stages\.clear is not there; did you mean 'clean'"),
    ],
)
def test_a_mistake_inside_a_group_earns_one_message(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        clean(override)
    assert "\n" not in str(caught.value)


MINE, WEB = SourceConfig(path="a.jsonl", weight=3.0), SourceConfig(path="web/", format=Format.text)


@pytest.mark.parametrize("pipeline", ["pipeline=quickstart", "pipeline=finetune"])
@pytest.mark.parametrize(
    "overrides",
    [
        [
            "stages.ingest.mix.mine.path=a.jsonl",
            "stages.ingest.mix.mine.weight=3",
            "stages.ingest.mix.web.format=text",
            "stages.ingest.mix.web.path=web/",
        ],
        ["stages.ingest.mix.mine={path: a.jsonl, weight: 3}", "+stages.ingest.mix.web={path: web/, format: text}"],
        ["stages.ingest.mix={mine: {path: a.jsonl, weight: 3}, web: {path: web/, format: text}}"],
        [
            "+stages.ingest.mix={mine: {path: a.jsonl}, web: {path: web/, format: text}}",
            "stages.ingest.mix.mine.weight=3",
        ],
    ],
)
def test_a_mix_is_written_on_the_command_line_in_any_form(pipeline: str, overrides: list[str]) -> None:
    config = compose([pipeline, "model=./folder", *overrides] if "finetune" in pipeline else [pipeline, *overrides])
    ingest = config.stages["ingest"]
    assert isinstance(ingest, IngestConfig)
    assert ingest.mix == {"mine": MINE, "web": WEB} and ingest.source.path is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.ingest.mix.a.paht=x"], r"stages\.ingest\.mix\.a\.paht is not a field of SourceConfig.*'path'"),
        (["stages.ingest.mix={a: {paht: x}}"], r"mix\.a\.paht is not a field of SourceConfig.*'path'"),
        (["stages.ingest.mix.a.weight=0"], r"weight must be above 0, got 0"),
        (
            ["stages.ingest.mix.a=x.jsonl"],
            r"stages\.ingest\.mix\.a is a group; write stages\.ingest\.mix\.a\.path=x\.jsonl",
        ),
        (["stages.ingest.mix=x.jsonl"], r"stages\.ingest\.mix"),
        (["stages.ingest.mix.a.path=x", "stages.ingest.source.path=y"], r"source\.path and .* must be null with a mix"),
        (["stages.ingest.mix.my data.path=x"], "mix"),
    ],
)
def test_a_mistake_in_a_mix_earns_one_message(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        compose(["pipeline=quickstart", *overrides])
    assert "\n" not in str(caught.value)
