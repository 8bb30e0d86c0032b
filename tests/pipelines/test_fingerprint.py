"""Identity: what changes a fingerprint, and what never does."""

import ast
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stages
from pipelines import fingerprint as fp
from stages.contract import STAGES
from tests.pipelines.stubs import MakeConfig, StubResources

STAGE = STAGES[MakeConfig]


def of(
    cfg: MakeConfig, seed: int = 0, inputs: dict[str, str] | None = None, sources: dict[str, str] | None = None
) -> str:
    return fp.digest(fp.payload(STAGE, cfg, seed, inputs or {}, sources or {}))


@given(workers=st.integers(1, 10_000), upstream=st.text(min_size=1, max_size=20))
def test_resources_and_names_of_upstream_stages_never_change_a_fingerprint(workers: int, upstream: str) -> None:
    changed = MakeConfig(resources=StubResources(workers=workers), inputs={"rows": upstream})
    assert of(changed) == of(MakeConfig())


@given(value=st.integers(), seed=st.integers(0, 2**31), digest=st.text("0123456789abcdef", min_size=64, max_size=64))
def test_every_other_facet_changes_a_fingerprint(value: int, seed: int, digest: str) -> None:
    base = of(MakeConfig())
    assert (of(MakeConfig(value=value)) == base) == (value == 1)
    assert (of(MakeConfig(), seed=seed) == base) == (seed == 0)
    assert of(MakeConfig(), inputs={"rows": digest}) != base
    assert of(MakeConfig(), sources={"file": digest}) != base


@given(
    st.dictionaries(
        st.text(max_size=5), st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)), max_size=6
    )
)
def test_the_order_of_keys_does_not_matter(value: dict[str, object]) -> None:
    assert fp.canonical(value) == fp.canonical(dict(reversed(list(value.items()))))


@pytest.mark.parametrize("unstable", [{1, 2}, float("nan"), object(), print, {"a": [b"bytes"]}, {1: "number as key"}])
def test_what_has_no_stable_form_is_refused(unstable: object) -> None:
    with pytest.raises(TypeError, match="no stable form"):
        fp.canonical({"field": unstable})


def test_whole_numbers_as_keys_of_a_config_are_written_in_digits() -> None:
    assert fp.canonical(fp.identity({5: 0.15, 10: {2: 1}})) == '{"10":{"2":1},"5":0.15}'


def code(source: str) -> str:
    return fp.normalised(ast.parse(source))


def test_comments_formatting_and_docstrings_do_not_change_a_code_digest() -> None:
    plain = "def f(x):\n    return x + 1\n"
    dressed = '"""Module."""\n# why\ndef f(x):\n    """Adds."""\n\n    return (x +\n        1)\n'
    assert code(plain) == code(dressed)


def test_a_changed_constant_changes_a_code_digest() -> None:
    assert code("LIMIT = 3\n") != code("LIMIT = 4\n")


def test_the_code_of_imported_stage_modules_is_part_of_a_stage() -> None:
    files = fp.code_digests("stages.ingest")
    assert "stages/ingest.py" in files and "stages/text/docstrings.py" in files
    assert not any(name.startswith("pipelines/") for name in files)


def test_library_versions_are_those_that_the_stage_declares() -> None:
    import pyarrow

    env = fp.payload(STAGE, MakeConfig(), 0, {}, {})["env"]
    assert env["pyarrow"] == pyarrow.__version__ and set(env) == {"python", "pyarrow"}


WRITES_BYTES = {"ftfy", "gguf", "jinja2", "peft", "phonenumbers", "py3langid", "tokenizers", "torch", "transformers"}
"""Libraries whose next version may make other text, tokens or numbers of the same input."""


def test_a_data_stage_names_each_library_that_its_code_imports_and_whose_version_changes_bytes() -> None:
    stages.import_verbs()
    root = Path(__file__).parents[2]
    wanted: dict[str, set[str]] = {}
    for stage in STAGES.values():
        if stage.name in ("ingest", "clean", "tokenize", "pair", "generate", "evaluate", "fetch", "train", "dpo"):
            trees = [ast.parse((root / file).read_text("utf-8")) for file in fp.code_digests(stage.function.__module__)]
            nodes = [node for tree in trees for node in ast.walk(tree)]
            found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
            wanted[stage.name] = {name.partition(".")[0] for name in found} & WRITES_BYTES
            assert wanted[stage.name] <= set(stage.libraries), stage.name
    assert wanted["clean"] == {"ftfy", "phonenumbers", "py3langid"}
    assert wanted["tokenize"] == {"jinja2", "tokenizers", "transformers"}  # rules of curation make no tokens anew


def test_training_is_not_made_anew_because_code_that_serves_or_renders_has_changed() -> None:
    stages.import_verbs()
    for name in ("train", "dpo"):
        reached = fp.code_digests(f"stages.{name}")
        assert "stages/training/loop.py" in reached  # the control
        rendering = ("stages/serving/", "stages/text/template", "stages/text/rendering", "stages/text/pairing")
        assert [file for file in reached if file.startswith(rendering)] == []


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match="names the library no-such-thing, which is not installed here"):
        fp.versions(("no-such-thing",))


def test_the_difference_names_the_field_with_both_values() -> None:
    old = fp.payload(STAGE, MakeConfig(value=1), 0, {"rows": "a" * 64}, {})
    new = fp.payload(STAGE, dataclasses.replace(MakeConfig(), value=2), 1, {"rows": "b" * 64}, {})
    new["code"] = {"stages/x.py": "1"}
    assert fp.difference(old, new) == [
        "config.value 1 -> 2",
        "seed 0 -> 1",
        "inputs.rows aaaaaaaaaaaa -> bbbbbbbbbbbb",
        "code stages/x.py added",
        "code tests/pipelines/stubs.py removed",
    ]
