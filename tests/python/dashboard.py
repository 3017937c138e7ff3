"""Clicks through the page of a running server: dashboard.py URL MODEL KEY PROFILE_DIR PICTURE_DIR."""

import json
import sys
import threading
import urllib.request

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

url, model, key, profile, pictures = sys.argv[1:]
options = webdriver.ChromeOptions()
for flag in [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    f"--user-data-dir={profile}", "--window-size=1240,1600",
]:
    options.add_argument(flag)
options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
options.binary_location = "/usr/bin/chromium"
browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
wait = WebDriverWait(browser, 60)


def by(selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def text(selector):
    return by(selector).text


def generate(tokens):
    """Asks for a text, as another client would, and gives its numbers of tokens."""
    body = {"model": model, "prompt": "fn main() {\n    let", "max_tokens": tokens, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["usage"]


def all_of(selector, get):
    """What every element gives, in one call: the page replaces its rows while one is asked after the other."""
    return browser.execute_script(f"return [...document.querySelectorAll({selector!r})].map(e => {get})")


def number(selector):
    return float(text(selector).split()[0].replace(",", ""))


try:
    # locked until the key is given, and a wrong one is told from a right one
    browser.get(url)
    wait.until(lambda _: by("#login").is_displayed())
    assert text("#state") == "key needed"
    by("#key").send_keys("wrong", Keys.ENTER)
    wait.until(lambda _: "wrong" in text("#wrong"))
    by("#key").send_keys(key, Keys.ENTER)
    wait.until(lambda _: text("#state") == "idle")
    assert not by("#login").is_displayed() and model in text("#model")
    assert by("#emulated").is_displayed(), "emulated drives are called so"
    before = number("#t-total")

    # numbers move while a text is generated
    worker = threading.Thread(target=generate, args=(240,))
    worker.start()
    wait.until(lambda _: text("#state") == "generating")
    wait.until(lambda _: text("#t-tokens") not in ("–", "0.0") and number("#t-barriers") > 0)
    wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "#barriers rect.open")) > 100)
    rows = all_of("#drives tbody tr", "e.innerText")
    assert [r.split()[0] for r in rows] == ["amber", "blue"] and all("(emulated)" in r for r in rows), rows
    wait.until(lambda _: all("MB/s" in row for row in all_of("#drives tbody tr", "e.innerText")))
    Select(by("#span")).select_by_visible_text("100 ms")
    points = all_of("#chart polyline", "e.getAttribute('points')")
    assert len(points) == 2 and all(len(p.split()) > 3 for p in points), points
    Select(by("#span")).select_by_visible_text("10 ms")
    many = "document.querySelector('#chart polyline').getAttribute('points').split(' ').length > 300"
    wait.until(lambda _: browser.execute_script(f"return {many}"))
    assert text("#length") == "last 5 s" and "spread over the time" in text("#fine"), text("#fine")
    assert "missing" not in text("#fine"), text("#fine")
    peaks = all_of("#drives tbody tr", "e.cells[2].innerText")
    assert all("MB/s" in p for p in peaks), peaks
    browser.save_screenshot(f"{pictures}/dashboard-fine.png")
    Select(by("#span")).select_by_visible_text("1 s")
    wait.until(lambda _: text("#length") == "last minute")
    assert "experts" in text("#barrier")
    browser.save_screenshot(f"{pictures}/dashboard-live.png")
    worker.join()
    wait.until(lambda _: text("#state") == "idle" and number("#t-total") >= before + 240)

    # past runs: a rejected one is marked and says why, an accepted one has a rate
    by("#find").send_keys("rejected")
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#runs tr.rejected"))
    assert not browser.find_elements(By.CSS_SELECTOR, "#runs tr.row:not(.rejected)")
    mine = [r for r in browser.find_elements(By.CSS_SELECTOR, "#runs tr.rejected") if "decode" in r.text]
    assert mine, "the run that was just rejected is listed"
    mine[0].click()
    wait.until(lambda _: by("#detail").is_displayed())
    assert "does not count" in text("#d-list") and "dispatch" in text("#d-list"), text("#d-list")
    by("#detail button").click()
    wait.until(lambda _: not by("#detail").is_displayed())
    by("#find").clear()
    by("#find").send_keys("better mirror")
    wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "#runs tr.row")) >= 1)
    chosen = by("#runs tr.row:not(.rejected)")
    assert "better" in chosen.text and "EMULATED" in chosen.text, chosen.text
    chosen.send_keys(Keys.ENTER)
    wait.until(lambda _: by("#detail").is_displayed())
    assert "tok/s" in text("#d-list")
    browser.save_screenshot(f"{pictures}/dashboard-run.png")
    by("#detail button").click()
    by("#find").clear()
    by("#find").send_keys(" ")

    # dark, narrow, whole
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    browser.save_screenshot(f"{pictures}/dashboard-dark.png")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.set_window_size(520, 1400)
    wide = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"a narrow page scrolls sideways by {wide}"
    browser.save_screenshot(f"{pictures}/dashboard-narrow.png")

    # nothing was asked of anybody else, and nothing was blocked or failed; the two refused keys are in the log
    asked = {
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        for message in [json.loads(entry["message"])["message"]]
        if message["method"] == "Network.requestWillBeSent"
    }
    assert asked and all(a.startswith(url) for a in asked if not a.startswith(("data:", "chrome"))), asked
    bad = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE" and "401" not in e["message"]]
    assert not bad, bad
    version = browser.capabilities["browserVersion"]
    print(f"chromium {version}: the page shows what the server does; {pictures}/dashboard-*.png")
finally:
    browser.quit()
