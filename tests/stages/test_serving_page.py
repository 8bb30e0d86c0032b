"""The chat page in a real browser, against a real server."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from stages.serving.options import ServingOptions, key_digest
from tests.stages.serving_server import NAME, Running, serve, wait_until
from tests.stages.tiny_model import CHAT_TEMPLATE, save_tiny_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(tmp_path_factory.mktemp("m") / "chat", context=60_000, chat_template=CHAT_TEMPLATE)
    yield from serve(directory, ServingOptions())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serve(save_tiny_model(tmp_path_factory.mktemp("m") / "plain"), ServingOptions())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(tmp_path_factory.mktemp("m") / "guarded", chat_template=CHAT_TEMPLATE)
    yield from serve(directory, ServingOptions(key_digests=(key_digest("open-sesame"),)))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Answers that take minutes."""
    directory = tmp_path_factory.mktemp("m") / "endless"
    made = save_tiny_model(directory, context=16_000, chat_template=CHAT_TEMPLATE, ends=False)
    yield from serve(made, ServingOptions())


def streamed(*choices: dict[str, Any], error: str | None = None, done: bool = True) -> Callable[[Route], None]:
    """A server that answers with these pieces."""
    events = [json.dumps({"id": "x", "choices": [{"index": 0, **choice}]}) for choice in choices]
    events += [json.dumps({"error": {"message": error}})] if error else ["[DONE]"] if done else []
    body = "".join(f"data: {event}\n\n" for event in events)
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


def say(page: Page, text: str) -> None:
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def opened(browser: Browser, running: Running, **screen: int) -> Page:
    """The page, with every request that it makes and every mistake that it reports noted."""
    context = browser.new_context(viewport={"width": 1280, "height": 800, **screen})  # type: ignore[typeddict-item]
    page = context.new_page()
    page.asked, page.mistakes = [], []  # type: ignore[attr-defined]
    page.on("request", lambda request: page.asked.append(request.url))  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.mistakes.append(str(error)))  # type: ignore[attr-defined]
    page.on("console", lambda said: page.mistakes.append(said.text) if "Security Policy" in said.text else None)  # type: ignore[attr-defined]
    page.goto(f"http://127.0.0.1:{running.port}/")
    expect(page.locator("#model")).to_have_text(f"{NAME}@7")
    return page


def settings(page: Page, **values: str) -> None:
    page.locator("summary").click()
    for name, value in values.items():
        page.locator(f"#{name}").fill(value)


def test_a_chat_is_held_with_a_system_prompt_and_remembers(browser: Browser, chat: Running) -> None:
    page = opened(browser, chat)
    settings(page, system="be brief", temperature="0", tokens="12")
    page.locator("#text").fill("one")
    page.locator("#text").press("Enter")
    expect(page.locator(".assistant.waiting")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()
    first = chat.post(
        "/v1/chat/completions",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}],
        temperature=0,
        max_tokens=12,
    )[2]["choices"][0]["message"]["content"]
    assert page.locator(".assistant").nth(0).evaluate("e => e.textContent") == first
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator("#text").fill("two\nlines")
        page.locator("#send").click()
    assert json.loads(sent.value.post_data or "")["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two\nlines"},
    ]
    expect(page.locator("#send")).to_be_visible()
    page.locator("#reset").click()
    expect(page.locator(".turn")).to_have_count(0)
    assert not page.mistakes  # type: ignore[attr-defined]
    outside = [url for url in page.asked if not url.startswith((f"http://127.0.0.1:{chat.port}/", "data:"))]  # type: ignore[attr-defined]
    assert not outside


def test_stop_ends_the_answer_on_the_server_too(browser: Browser, chat: Running) -> None:
    page = opened(browser, chat)
    settings(page, tokens="50000", temperature="1")
    page.route(
        "**/v1/chat/completions", lambda route: route.continue_(post_data=_endless(route.request.post_data or ""))
    )
    page.locator("#text").fill("go on")
    page.locator("#send").click()
    wait_until(lambda: chat.app.engine.stats().running == 1, 10)
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".assistant")).not_to_have_text("")
    page.locator("#stop").click()
    wait_until(lambda: not chat.app.engine.busy, 2)
    expect(page.get_by_text("Stopped.")).to_be_visible()
    expect(page.locator("#send")).to_be_visible()


def _endless(body: str) -> str:
    return json.dumps({**json.loads(body), "ignore_eos": True})


def test_without_a_chat_template_the_text_is_continued_and_the_page_says_so(browser: Browser, plain: Running) -> None:
    page = opened(browser, plain)
    settings(page, temperature="0", tokens="10")
    page.locator("#text").fill("os.path.join(")
    page.locator("#send").click()
    expect(page.get_by_text("no chat template")).to_be_visible()
    expect(page.locator("#send")).to_be_visible()
    wanted = plain.complete(prompt="os.path.join(", temperature=0, max_tokens=10)[2]["choices"][0]["text"]
    assert page.locator(".assistant").nth(0).evaluate("e => e.textContent") == wanted


def test_a_refusal_is_shown_in_words_and_the_question_comes_back(browser: Browser, chat: Running) -> None:
    page = opened(browser, chat)
    settings(page, tokens="999999")
    page.locator("#text").fill("<b>too much</b>")
    page.locator("#send").click()
    expect(page.get_by_role("alert")).to_contain_text("maximum context length")
    expect(page.locator("#text")).to_have_value("<b>too much</b>")
    assert page.locator(".turn b").count() == 0


def test_a_key_is_asked_for_and_kept_in_the_page_alone(browser: Browser, guarded: Running) -> None:
    page = opened(browser, guarded)
    assert page.locator("#ask-key").is_hidden()
    page.locator("#text").fill("hi")
    page.locator("#send").click()
    expect(page.locator("#ask-key")).to_be_visible()
    page.locator("#key").fill("open-sesame")
    page.locator("#send").click()
    expect(page.locator(".assistant")).to_have_count(1)
    expect(page.locator("#send")).to_be_visible()
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_copy_as_curl_gives_a_command_that_a_shell_takes(browser: Browser, chat: Running) -> None:
    import shlex
    import subprocess

    page = opened(browser, chat)
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    settings(page, temperature="0", tokens="8")
    page.locator("#text").fill('it\'s "quoted" $HOME `ls` \\ 🙂')
    page.locator("#send").click()
    expect(page.locator("#stop")).to_be_hidden()
    page.locator("#curl").click()
    expect(page.locator("#copied")).to_have_text("copied")
    command = page.evaluate("window.copied")
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    assert body["messages"][-1] == {"role": "user", "content": 'it\'s "quoted" $HOME `ls` \\ 🙂'}
    if shutil.which("curl"):
        made = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
        assert made.stdout.rstrip().endswith("data: [DONE]")


def test_a_new_conversation_knows_nothing_of_the_one_that_was_being_answered(
    browser: Browser, endless: Running
) -> None:
    page = opened(browser, endless)
    say(page, "first")
    expect(page.locator(".assistant")).not_to_have_text("")
    page.locator("summary").click()
    page.locator("#reset").click()
    expect(page.locator("#send")).to_be_visible()
    wait_until(lambda: not endless.app.engine.busy, 1)
    expect(page.locator(".turn")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "second")
    assert json.loads(sent.value.post_data or "")["messages"] == [{"role": "user", "content": "second"}]
    page.keyboard.press("Escape")
    expect(page.get_by_text("Stopped.")).to_be_visible()
    assert not page.mistakes  # type: ignore[attr-defined]


def test_what_a_model_writes_is_text(browser: Browser, chat: Running) -> None:
    page = opened(browser, chat)
    attack = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    page.route(
        "**/v1/chat/completions", streamed({"delta": {"content": attack}}, {"delta": {}, "finish_reason": "stop"})
    )
    say(page, attack)
    expect(page.locator("#send")).to_be_visible()
    assert [e.text_content() for e in page.locator(".user, .assistant").all()] == [attack, attack]
    assert page.locator("#talk img, #talk b").count() == 0 and page.title() == f"{NAME}@7"


def test_a_stream_that_fails_breaks_off_or_never_comes_is_told(browser: Browser, chat: Running) -> None:
    page = opened(browser, chat)
    half = {"delta": {"content": "half"}}
    for words, route in (
        ("the model failed", streamed(half, error="the model failed")),
        ("the answer was cut off", streamed(half, done=False)),
        ("The endpoint cannot be reached.", lambda route: route.abort()),
    ):
        page.route("**/v1/chat/completions", route)
        say(page, "hi")
        expect(page.get_by_role("alert").last).to_have_text(words)
        expect(page.locator("#send")).to_be_visible()
    assert page.locator(".assistant").all_text_contents() == ["half", "half"]
    expect(page.locator("#text")).to_have_value("hi")


def test_an_answer_names_the_command_that_traces_it(browser: Browser, chat: Running) -> None:
    page = opened(browser, chat)
    settings(page, temperature="0", tokens="8")
    say(page, "hi")
    page.get_by_role("button", name="where it comes from").click()
    command = page.locator(".note code").text_content() or ""
    assert command.startswith("make trace ID=chatcmpl-") and page.evaluate("String(getSelection())") == command
    said = json.loads(chat.raw("GET", f"/answers/{command.removeprefix('make trace ID=')}")[2])["texts"]
    assert said == page.locator(".assistant").all_text_contents()
    expect(page.locator(".note", has=page.locator("code"))).to_contain_text(re.compile(r"^\d tokens? · make trace"))


@pytest.mark.parametrize(("width", "height"), [(360, 640), (1280, 800)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_a_desk(
    browser: Browser, chat: Running, width: int, height: int, scheme: str, tmp_path: Path
) -> None:
    page = opened(browser, chat, width=width, height=height)
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    settings(page, temperature="0", tokens="60")
    page.locator("#text").fill(
        "What does a long question look like on a small screen, with averyveryveryverylongwordinit?"
    )
    page.locator("#send").click()
    expect(page.locator("#send")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for name in ("#text", "#send", "#system", "#reset", "#curl"):
        box = page.locator(name).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width, name
    for name in ("#send", "#reset", "#curl"):
        box = page.locator(name).bounding_box()
        assert box is not None and box["height"] >= 44
    page.screenshot(path=tmp_path / f"chat-{width}-{scheme}.png")
    for name in (
        "h1",
        "#identity",
        ".user",
        ".assistant",
        ".note",
        ".note button",
        "#send",
        "#reset",
        "label",
        "summary",
    ):
        assert page.evaluate(CONTRAST, name) >= 4.5, name


def test_the_page_is_one_file_without_foreign_addresses(chat: Running) -> None:
    status, headers, text = chat.raw("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert (
        "default-src 'none'" in headers["content-security-policy"]
        and "unsafe" not in headers["content-security-policy"]
    )
    assert not re.search(rb"https?://|//[a-z]+\.[a-z]", text)


CONTRAST = """(selector) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
  const luminance = () => {
    const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  const behind = [];
  for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
  paint("Canvas");
  if (matchMedia("(prefers-color-scheme: dark)").matches) paint("#121212");
  behind.forEach(paint);
  const ground = luminance();
  paint(getComputedStyle(element).color);
  const [high, low] = [ground, luminance()].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}"""
