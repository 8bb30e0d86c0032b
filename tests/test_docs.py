"""The documentation says what the code does: reference, README's map, README's example of a stage."""

from docs import reference
from pipelines.config import ROOT


def test_the_reference_is_what_the_config_classes_say() -> None:
    assert (ROOT / "docs" / "reference.md").read_text("utf-8") == reference.text(), (
        "make reference, then review the diff"
    )


def test_the_readme_maps_every_file_of_both_packages() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for path in [*(ROOT / "pipelines").glob("*.py"), *(ROOT / "stages").glob("*.py")]:
        if path.name != "__init__.py":
            assert path.name in readme, f"README's map misses {path.relative_to(ROOT)}"
    assert len(readme.splitlines()) <= 150
