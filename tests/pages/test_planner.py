"""The planner's page in a real browser: its values are the command's; errors, links, both widths, no other host."""
from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest

from website import planner

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
JOB = ["--model", "llama3-8b", "--device", "a100", "--gpus", "8", "--global-batch", "16", "--tp", "2", "--pp", "2"]
ASKED = "#model=llama3-8b&device=a100&gpus=8&global-batch=16&tp=2&pp=2"
ANSWERED = "#result:not([hidden])"
MOST_MS = 120_000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium (Debian: apt-get install chromium)")


class Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = {  # noqa: RUF012  # as in the class that it extends
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    if not planner.pyodide():
        pytest.skip("no Pyodide: npm is not there, or cannot fetch it")
    folder = tmp_path_factory.mktemp("site")
    planner.build(folder)
    planner.add_python(folder / "planner")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/planner.html"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make docs-test has it")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, address):
    """The page that was asked by its link, and the hosts that it has asked."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.hosts, page.wrong = set(), []
    page.on("request", lambda request: page.hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.goto(address + ASKED)
    page.wait_for_selector(ANSWERED, timeout=MOST_MS)
    return page


def said(capsys, *more):
    from torchckpt.__main__ import main

    assert main(["plan", *JOB, *more]) == 0
    return capsys.readouterr().out


def read(page, link):
    return page.evaluate(f"fetch(document.querySelector('#{link}').href).then((file) => file.text())")


def test_a_link_has_the_whole_input_and_the_answer_is_the_command_s(page, capsys):
    of_page, of_command = json.loads(read(page, "json")), json.loads(said(capsys, "--json"))
    assert of_page.keys() == of_command.keys()
    assert of_page.pop("summary") == page.inner_text("#summary") == of_command["summary"] in said(capsys)
    for name, value in of_command.items():  # Python 3.12 and later sum floats more exactly
        expected = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        assert name == "summary" or of_page[name] == expected, name
    assert page.locator("#tables tbody tr").count() == 2
    assert page.locator("#picture > svg").count() == 1
    step = page.locator("#picture > svg > svg")  # below the memory
    assert "stage 1" in step.text_content()
    assert step.bounding_box()["y"] > page.locator("#picture .weights").first.bounding_box()["y"]
    assert page.input_value("#model") == "llama3-8b"
    assert "model=llama3-8b" in page.get_attribute("#link", "href")
    assert page.input_value("#sequence") == ""  # a page without a link has 8192 there


def test_a_wrong_input_gets_the_command_s_error_at_its_field(page, capsys):
    page.fill("#tp", "3")
    page.click("#plan")
    page.wait_for_function("[...document.querySelectorAll('.wrong')].some((each) => each.textContent)", timeout=MOST_MS)
    wrong = " ".join(page.locator(".wrong").all_inner_texts())
    assert "the heads do not divide by tp" in wrong
    assert page.get_attribute("#tp", "aria-invalid") == "true"
    assert page.locator(ANSWERED).count() == 0
    page.fill("#tp", "2")
    page.press("#tp", "Enter")  # by the keyboard alone
    page.wait_for_selector(ANSWERED, timeout=MOST_MS)
    assert page.get_attribute("#tp", "aria-invalid") is None
    assert page.evaluate("document.activeElement.id") == "heading"


def test_the_page_asks_no_other_host_and_raises_nothing(page, address):
    assert page.hosts == {address.split("/")[2]}
    assert page.wrong == []


def test_every_field_has_a_label(page):
    fields = page.locator("#form input, #form select")
    for number in range(fields.count()):
        name = fields.nth(number).get_attribute("id")
        assert page.locator(f"label[for='{name}']").count() == 1


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_is_wider_than_the_screen(browser, page, address, width, scheme, tmp_path):
    answer = page.inner_html("#result")
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.goto(address)
    page.wait_for_selector("#tp", timeout=MOST_MS)
    shown = "(html) => Object.assign(document.querySelector('#result'), { innerHTML: html, hidden: false })"
    page.evaluate(shown, answer)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=str(tmp_path / f"{width}.png"), full_page=True)
    page.close()


def test_a_search_says_how_far_it_is_and_lists_layouts(page):
    page.click("#search")
    page.wait_for_function("document.querySelector('#progress').textContent.startsWith('search:')", timeout=MOST_MS)
    page.wait_for_selector(ANSWERED, timeout=MOST_MS)
    assert page.locator("#tables table").first.locator("tbody tr").count() > 3


def test_a_search_that_is_stopped_has_what_it_found(page):
    page.select_option("#model", "llama3-70b")
    page.fill("#gpus", "64")
    page.fill("#global-batch", "256")
    page.click("#search")
    is_under_way = "/^search: [2-9]../.test(document.querySelector('#progress').textContent)"
    page.wait_for_function(is_under_way, timeout=MOST_MS)
    page.click("#stop")
    assert page.text_content("#progress") == "Stopping."
    page.wait_for_selector(ANSWERED, timeout=MOST_MS)
    assert page.text_content("#tables caption").endswith("; stopped")
    assert page.locator("#tables table").first.locator("tbody tr").count() > 0


def test_without_npm_there_is_no_pyodide(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "CACHE", tmp_path)
    monkeypatch.setattr(planner.shutil, "which", lambda name: None)
    assert not planner.pyodide()
    assert not list(Path(tmp_path).iterdir())
