"""The chat page as the server sends it: one file, allowed to run itself and to talk to its own server, nothing else."""

import base64
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.serving.options import ServingOptions
from stages.serving.page import FILE as PAGE
from tests.stages.serving_server import Running, serve
from tests.stages.tiny_model import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serve(save_tiny_model(tmp_path_factory.mktemp("models") / "plain"), ServingOptions())


def test_the_page_may_run_itself_and_talk_to_its_own_server_and_nothing_else(plain: Running) -> None:
    status, headers, body = plain.raw("GET", "/")
    text = body.decode()
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8" and text == PAGE.read_text("utf-8")
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy.pop("connect-src") == "'self'" and policy.pop("img-src") == "data:"
    assert set(policy) == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(policy.values()) == {"'none'"}
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_the_page_names_no_other_place_and_never_makes_html_of_text() -> None:
    text = PAGE.read_text("utf-8")
    assert not re.search(r"https?://|//[a-z]+\.|@import|\burl\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=\"|style=\"", text)


def test_an_installed_wheel_has_the_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "pyproject.toml", "README.md", "LICENSE", "pipelines", "stages"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in [*listed.split(), "stages/serving/chat_page.html"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"import setuptools.build_meta as build; print(build.build_wheel({str(tmp_path)!r}))"
    made = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True).stdout
    assert f"adding 'stages/serving/{PAGE.name}'" in made
