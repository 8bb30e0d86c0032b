"""A version of the registry is chosen by alias or number, and is what the registry says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.contract import Context
from stages.select import SelectConfig, holds, select, sources


class Shelf:
    """A registry with two versions of one model."""

    def __init__(self) -> None:
        self.digests = {1: "a" * 64, 2: "b" * 64}

    def resolve(self, model: str) -> tuple[str, str]:
        number = 2 if model.endswith("@champion") else int(model.rpartition("/")[2])
        return f"file:///models/{number}", self.digests[number]

    def alias(self, name: str, alias: str) -> int | None:
        return {"champion": 2}.get(alias)

    def find(self, name: str, digest: str) -> int | None:
        return next(
            (number for number, known in self.digests.items() if known == digest and name == "quickstart"), None
        )

    def model(self, model: str) -> str:
        return self.resolve(model)[1]


@pytest.mark.parametrize(("model", "number"), [("models:/quickstart@champion", 2), ("models:/quickstart/1", 1)])
def test_an_alias_or_a_number_becomes_a_version_with_its_files(
    make_context: Callable[..., Context], model: str, number: int
) -> None:
    from dataclasses import replace

    shelf: Any = Shelf()
    receipt = select(SelectConfig(model=model), replace(make_context("select"), registry=shelf))
    digest = shelf.digests[number]
    assert receipt.summary() == {
        "name": "quickstart", "version": number, "digest": digest, "uri": f"file:///models/{number}",
    }  # fmt: skip
    assert sources(SelectConfig(model=model), shelf) == {"name": "quickstart", "model": digest}
    assert holds(receipt, shelf, Path()) is None


def test_a_version_that_was_deleted_is_noticed(make_context: Callable[..., Context]) -> None:
    from dataclasses import replace

    shelf: Any = Shelf()
    receipt = select(SelectConfig(model="models:/quickstart/1"), replace(make_context("select"), registry=shelf))
    shelf.digests = {2: "b" * 64}
    assert holds(receipt, shelf, Path()) == f"the registry has no quickstart with digest {'a' * 12}"
    assert holds(receipt, None, Path()) == "there is no registry to ask"


@pytest.mark.parametrize(
    "model", ["", "quickstart", "models:/", "models:/a", "models:/a@", "models:/a/b", "models:/a b/1"]
)
def test_what_names_no_version_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="model must be models:/name@alias or models:/name/3"):
        SelectConfig(model=model)
