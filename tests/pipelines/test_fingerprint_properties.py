"""Identity as properties: what is not the result never changes a fingerprint, and everything else always does."""

import ast
import copy
import dataclasses
import datetime
import decimal
import enum
import io
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import stages
from pipelines import fingerprint as fp
from pipelines.config import ROOT
from stages.contract import STAGES, Stage

stages.import_verbs()
REAL = [stage for stage in STAGES.values() if stage.function.__module__.startswith("stages.")]
NAMES = [stage.name for stage in REAL]
real_stages = pytest.mark.parametrize("stage", REAL, ids=NAMES)
quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def example(cls: type) -> Any:
    """A config with its defaults, and something for what has none; impossible combinations are allowed here."""
    made, hints = object.__new__(cls), typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            value = f.default
        elif f.default_factory is not dataclasses.MISSING:
            value = f.default_factory()
        else:
            value = example(hints[f.name]) if dataclasses.is_dataclass(hints[f.name]) else "something"
        object.__setattr__(made, f.name, value)
    return made


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything of a field's type."""
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers()
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is str:
        return st.text(max_size=8)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return st.fixed_dictionaries({n: values(h) for n, h in typing.get_type_hints(hint).items()}).map(
            lambda drawn: filled(hint, drawn)
        )
    if typing.get_origin(hint) is list:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(st.text(max_size=4), values(typing.get_args(hint)[1]), max_size=3)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if part is type(None) else values(part) for part in typing.get_args(hint)))
    raise AssertionError(f"no strategy for {hint}: add one, so that this kind of field is proved too")


EACH = "each"
"""The key under which a mapping of groups has its one example."""


def filled(cls: type, drawn: dict[str, Any]) -> Any:
    made = example(cls)
    for name, value in drawn.items():
        object.__setattr__(made, name, value)
    return made


def fields(
    cls: type, where: tuple[str, ...] = (), *, identity: bool = True
) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """(path, type, whether it belongs to the identity) of every field, those inside nested groups too."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        outside = f.metadata.get("identity", True) is False or (not where and f.name in ("inputs", "resources"))
        belongs = identity and not outside
        yield (*where, f.name), hints[f.name], belongs
        inner = [h for h in (hints[f.name], *typing.get_args(hints[f.name])) if dataclasses.is_dataclass(h)]
        each = (EACH,) if typing.get_origin(hints[f.name]) is dict else ()
        for nested in inner:
            assert isinstance(nested, type)
            yield from fields(nested, (*where, f.name, *each), identity=belongs)


def set_at(cfg: Any, path: tuple[str, ...], value: Any) -> tuple[Any, Any]:
    """(a copy with the field set, what stood there before); a group that is None is made first."""
    changed = copy.deepcopy(cfg)
    place = changed
    for name in path[:-1]:
        place = place[EACH] if name == EACH else getattr(place, name)
        assert place is not None
    before = getattr(place, path[-1])
    object.__setattr__(place, path[-1], value)
    return changed, before


def whole(cls: type) -> Any:
    """An example whose optional groups are all there."""
    made = example(cls)
    for name, hint in typing.get_type_hints(cls).items():
        groups = [h for h in typing.get_args(hint) if dataclasses.is_dataclass(h)]
        if groups and typing.get_origin(hint) is dict:
            object.__setattr__(made, name, {EACH: whole(groups[0])})  # type: ignore[arg-type]
        elif groups and getattr(made, name) is None:
            object.__setattr__(made, name, whole(groups[0]))  # type: ignore[arg-type]
    return made


def fingerprint(stage: Stage, cfg: Any, **more: Any) -> str:
    given_facets = {"seed": 0, "inputs": {}, "sources": {}} | more
    return fp.digest(fp.payload(stage, cfg, **given_facets))


@real_stages
@quick
@given(data=st.data())
def test_any_field_of_the_identity_changes_the_fingerprint_of_a_real_stage(stage: Stage, data: st.DataObject) -> None:
    choices = [(path, hint) for path, hint, belongs in fields(stage.config) if belongs]
    if not choices:
        return
    path, hint = data.draw(st.sampled_from(choices))
    cfg = whole(stage.config)
    changed, before = set_at(cfg, path, value := data.draw(values(hint)))
    # A group may differ from the former one in what it only locates; such a difference is the next test's.
    assume(not dataclasses.is_dataclass(value) and not dataclasses.is_dataclass(before))
    assert (fingerprint(stage, changed) != fingerprint(stage, cfg)) == (repr(value) != repr(before)), path


@real_stages
@quick
@given(data=st.data())
def test_no_field_of_resources_and_no_location_changes_it(stage: Stage, data: st.DataObject) -> None:
    choices = [(path, hint) for path, hint, belongs in fields(stage.config) if not belongs]
    path, hint = data.draw(st.sampled_from(choices))
    cfg = whole(stage.config)
    changed, _ = set_at(cfg, path, data.draw(values(hint)))
    assert fingerprint(stage, changed) == fingerprint(stage, cfg), path


@real_stages
def test_every_field_of_a_real_stage_is_on_one_side_or_the_other(stage: Stage) -> None:
    sides = {belongs for _, _, belongs in fields(stage.config)}
    assert False in sides
    assert fp.identity(whole(stage.config)).keys() >= {p[0] for p, _, belongs in fields(stage.config) if belongs}


@quick
@given(
    inputs=st.dictionaries(
        st.text(max_size=5), st.text("0123456789abcdef", min_size=64, max_size=64), min_size=2, max_size=5
    ),
    order=st.randoms(use_true_random=False),
)
def test_the_order_of_inputs_and_sources_never_changes_it(inputs: dict[str, str], order: random.Random) -> None:
    shuffled = list(inputs.items())
    order.shuffle(shuffled)
    stage = REAL[0]
    cfg = whole(stage.config)
    assert fingerprint(stage, cfg, inputs=inputs) == fingerprint(stage, cfg, inputs=dict(shuffled))
    assert fingerprint(stage, cfg, sources=inputs) == fingerprint(stage, cfg, sources=dict(shuffled))
    one = next(iter(inputs))
    assert fingerprint(stage, cfg, inputs=inputs) != fingerprint(stage, cfg, inputs={**inputs, one: "f" * 63 + "x"})


FINGERPRINTS = """
import sys
from pipelines import plan, session
from pipelines.config import compose
steps, _ = session.planned(compose(sys.argv[1:]))
print({s.name: s.fingerprint for s in steps if s.fingerprint})
"""


def test_place_home_host_hash_seed_state_store_cluster_and_run_options_never_change_it(tmp_path: Path) -> None:
    elsewhere = tmp_path / "another clone" / "of it"
    for package in ("stages", "pipelines", "conf"):
        shutil.copytree(ROOT / package, elsewhere / package, ignore=shutil.ignore_patterns("__pycache__"))

    def plan(place: Path, hash_seed: str, *overrides: str) -> str:
        env = {
            **os.environ,
            "PYTHONPATH": str(place),
            "PYTHONHASHSEED": hash_seed,
            "HOME": str(place),
            "HOSTNAME": hash_seed,
        }
        command = [sys.executable, "-c", FINGERPRINTS, *overrides]
        run = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout

    here = plan(ROOT, "1", f"state={tmp_path / 'state'}")
    there = plan(
        elsewhere,
        "2",
        "state=other",
        f"store.root={tmp_path / 'store'}",
        "cluster.num_cpus=3",
        "tracking.experiment=other",
        "run.until=gate",
        "run.lease_timeout_s=7",
        "run.accept=[train.code]",
    )
    assert "ingest" in here and here == there


# Canonical form

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(2**60, 2**200), st.floats(allow_nan=False, allow_infinity=False), st.text()
)  # fmt: skip
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)
unstable = st.one_of(
    st.sets(st.integers()), st.binary(), st.just(Path("x")), st.complex_numbers(), st.sampled_from([float("nan"), float("inf")]),
    st.just(print), st.builds(object), st.just(decimal.Decimal(1)), st.just(datetime.date(2026, 1, 1)), st.just("\ud83d"),
)  # fmt: skip


def typed(value: Any) -> Any:
    """The value with its types, so that 1, 1.0 and True are three things."""
    if isinstance(value, dict):
        return ("dict", sorted((key, typed(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", [typed(item) for item in value])
    return (type(value).__name__, repr(value))


@settings(deadline=None)
@given(trees)
def test_the_canonical_form_can_be_read_back_so_distinct_values_have_distinct_forms(value: Any) -> None:
    assert typed(json.loads(fp.canonical(value))) == typed(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0, False), (0.0, -0.0), (None, "null"), ({}, []), ({"a": {}}, {}), (2**53, float(2**53)), ("é", "e\u0301")],
)  # fmt: skip
def test_what_python_calls_equal_or_alike_is_told_apart(one: Any, other: Any) -> None:
    assert fp.canonical({"f": one}) != fp.canonical({"f": other})
    assert fp.difference({"config": {"f": one}}, {"config": {"f": other}})


def test_two_halves_of_a_character_are_not_the_character() -> None:
    assert json.dumps("\ud83d\ude00") == json.dumps("😀")  # so the form alone could not tell
    with pytest.raises(TypeError, match="no stable form"):
        fp.canonical({"f": "\ud83d\ude00"})
    with pytest.raises(TypeError, match="no stable form"):
        fp.canonical({"\ud83d": 1})


@settings(deadline=None)
@given(trees, unstable, st.integers(0, 3))
def test_a_value_without_a_stable_form_is_refused_at_any_depth(around: Any, value: Any, depth: int) -> None:
    for level in range(depth):
        value = [around, value] if level % 2 else {"key": value}
    with pytest.raises(TypeError, match="no stable form"):
        fp.canonical({"field": value})


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), trees, max_size=4), st.dictionaries(st.text(max_size=4), trees, max_size=4))
def test_the_difference_is_empty_exactly_when_the_digests_agree(old: dict[str, Any], new: dict[str, Any]) -> None:
    before, after = {"config": old, "seed": 0}, {"config": new, "seed": 0}
    assert (fp.difference(before, after) == []) == (fp.digest(before) == fp.digest(after))


# Code

SOURCES = sorted(path for path in (ROOT / "stages").rglob("*.py") if path.stat().st_size > 200)


def code(source: str) -> str:
    return fp.normalised(ast.parse(source))


def dressed(source: str, chance: random.Random) -> str:
    """Comments, blank lines and trailing blanks where no statement is open; docstrings become others."""
    lines = source.splitlines(keepends=True)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    ends = [token.end[0] for token in tokens if token.type == tokenize.NEWLINE]
    for line in sorted(chance.sample(ends, min(5, len(ends))), reverse=True):
        lines.insert(line, chance.choice(["\n", "# another thought\n", "        # deeper\n", "  \n"]))
    return "".join(lines)


@quick
@given(path=st.sampled_from(SOURCES), chance=st.randoms(use_true_random=False))
def test_comments_and_blank_lines_anywhere_never_change_the_code_of_a_real_module(
    path: Path, chance: random.Random
) -> None:
    source = path.read_text("utf-8")
    assert code(dressed(source, chance)) == code(source)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_another_formatting_and_other_docstrings_never_change_it(path: Path) -> None:
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    assert code(ast.unparse(tree)) == code(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            node.body[0] = ast.Expr(ast.Constant("Told otherwise."))
    assert code(ast.unparse(tree)) == code(source)


@quick
@given(path=st.sampled_from(SOURCES), data=st.data())
def test_any_changed_constant_of_a_real_module_changes_its_code(path: Path, data: st.DataObject) -> None:
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docstrings]
    assume(constants)
    node = data.draw(st.sampled_from(constants))
    other = data.draw(st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.floats(allow_nan=False)))
    assume(typed(other) != typed(node.value))
    node.value = other
    assert fp.normalised(tree) != code(source)


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A company's own stages, outside the package `stages`: acme/verb.py imports acme.near, which imports ..deep.far."""
    name = f"acme{random.randrange(10**9)}"
    package = tmp_path / name
    files = {
        "__init__.py": "",
        "verb.py": f"def work():\n    from {name}.near import near\n    return near()\n",
        "near/__init__.py": "from ..deep.far import LIMIT\n\ndef near():\n    return LIMIT\n",
        "deep/far.py": "import json\nimport stages.text.record\nLIMIT = 3\n",
        "unrelated.py": "X = 1\n",
    }
    for file, text in files.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield package


def test_a_private_stages_code_is_followed_two_imports_deep(private: Path) -> None:
    def digests() -> dict[str, str]:
        return fp.code_now(f"{private.name}.verb")

    before = digests()
    own = {f"{private.name}/{file}" for file in ("__init__.py", "verb.py", "near/__init__.py", "deep/far.py")}
    assert before.keys() == own | {"stages/text/__init__.py", "stages/text/record.py"}
    far = private / "deep" / "far.py"
    far.write_text('"""Said."""\n' + far.read_text().replace("LIMIT = 3", "# why\nLIMIT = (\n    3\n)"))
    assert digests() == before
    far.write_text(far.read_text().replace("3\n", "4\n"))
    after = digests()
    assert {name for name in before if after[name] != before[name]} == {f"{private.name}/deep/far.py"}
    (private / "unrelated.py").write_text("X = 2\n")
    assert digests() == after


def test_a_module_without_a_source_file_is_refused() -> None:
    with pytest.raises(ValueError, match="__main__: has no source file"):
        fp.code_digests("__main__")
