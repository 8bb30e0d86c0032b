"""What a reviewer sees: the MLflow pages and the report of a real run, rendered in headless Chromium."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from pipelines.config import ROOT
from tests.e2e.conftest import Quickstart
from tests.e2e.project import Project

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def project(first_run: Quickstart) -> Project:
    """As it was after the first run, whatever its own project did since."""
    return first_run.copy


@pytest.fixture(scope="module")
def pages(project: Project) -> Iterator[list[str]]:
    """`make ui` on a free port: the addresses that it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pipelines", "ui", f"state={project.state}"]
    environment = {**os.environ, "PORT": str(port)}
    log = project.state / "ui.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None, log.read_text()
                time.sleep(0.5)
        yield re.findall(r"http://\S+", log.read_text())
    finally:
        server.terminate()
        server.wait(timeout=20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_the_address_that_make_ui_prints_shows_verdict_and_baselines(pages: list[str], browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1600})
    page.goto(pages[0])
    expect(page.get_by_text("PASSED:").first).to_be_visible(timeout=PATIENCE_MS)
    page.get_by_text("Show more").first.click()
    for wanted in (
        "unigram",
        "untrained",
        "lzma",
        "Samples",
        "Data",
        "Endpoint",
        "Reproduce",
        "does not beat a compressor",
    ):
        expect(page.get_by_text(wanted).first).to_be_attached(timeout=PATIENCE_MS)


def test_the_list_of_runs_opens_on_the_pipelines_runs(pages: list[str], browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.goto(pages[0].split("/runs/")[0] + "/runs?workflowType=machine_learning")
    expect(page.get_by_text("quickstart 20").first).to_be_visible(timeout=PATIENCE_MS)


def test_the_training_run_shows_its_loss_curve_and_its_data_set(
    project: Project, pages: list[str], browser: Browser
) -> None:
    train = next(r for r in project.runs("quickstart") if r.data.tags["mlflow.runName"] == "train")
    base = pages[0].split("/runs/")[0]
    page = browser.new_page(viewport={"width": 1400, "height": 1600})
    page.goto(f"{base}/runs/{train.info.run_id}?workflowType=machine_learning")
    expect(page.get_by_text("learning_rate").first).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_role("heading", name="Datasets")).to_be_attached(timeout=PATIENCE_MS)
    page.goto(f"{base}/runs/{train.info.run_id}/model-metrics?workflowType=machine_learning")
    expect(page.locator("svg .scatterlayer, .js-plotly-plot").first).to_be_attached(timeout=PATIENCE_MS)


def test_the_report_is_one_self_contained_page_with_the_loss_curve(project: Project, browser: Browser) -> None:
    report = next(p for p in (project.state / "mlflow" / "artifacts").rglob("report.html"))
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    assert requests == [report.as_uri()]
    assert page.locator("script").count() == 0
    expect(page.locator("h1")).to_have_text("quickstart")
    expect(page.locator(".verdict")).to_contain_text("PASSED")
    stages = page.locator(".dag svg[role=img] .node .name")
    assert stages.all_text_contents()[:3] == ["ingest", "clean", "tokenize"] and stages.count() == 9
    points = page.locator("svg polyline").first.get_attribute("points") or ""
    assert len(points.split()) == 30
    assert page.locator("dl.sample").count() == 10
    assert page.get_by_text("make run").count() >= 1


def test_a_hostile_text_is_escaped_in_the_report() -> None:
    from pipelines.report import Facts, markdown, page

    attack = "<script>alert(1)</script> ``` | x"
    facts = Facts("t", "FINISHED", "", "make run", 0, [])
    facts.summaries = {
        "EvalReport": {
            "metrics": {"bits_per_byte": 1.0},
            "baselines": {attack: {}},
            "findings": [attack],
            "samples": [{"prompt": attack}],
        }
    }
    assert "<script>" not in page(facts)
    assert "````" in markdown(facts)
