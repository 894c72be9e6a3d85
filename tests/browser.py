"""Chromium without a window: what a reader of a page has before his eyes.

Debian's packages are `chromium` and `chromium-driver`. Nothing is downloaded.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile

import pytest
from matplotlib import image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
WANTED = "To look at pages, too: apt-get install chromium chromium-driver"
WIDE, NARROW = 1280, 390  # A desk's window and a telephone's, in CSS pixels.
HEIGHT = 900
FUNCTIONS = pathlib.Path(__file__).with_suffix(".js").read_text()

QUIET = (
    "--headless",
    "--no-sandbox",  # Which it cannot have as root.
    "--disable-gpu",
    "--disable-dev-shm-usage",  # 64 MB in a container.
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def found():
    """The paths of the browser and of its driver; None without one of them."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which(DRIVER)
    return (browser, driver) if browser and driver else None


def required():
    """The same; without them the test is skipped, and in CI it fails."""
    if not found():
        pytest.fail(WANTED) if os.environ.get("CI") else pytest.skip(WANTED)
    return found()


@contextlib.contextmanager
def opened():
    """A browser with no past, closed in the end."""
    from selenium import webdriver

    browser, driver = required()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for argument in (*QUIET, f"--user-data-dir={folder}"):
            options.add_argument(argument)
        # With its path, selenium looks for none and downloads none.
        remote = webdriver.Chrome(options, webdriver.ChromeService(driver))
        try:
            yield Browser(remote)
        finally:
            remote.quit()


class Browser:
    """Opens files, and answers what is to be seen of them.

    What it lists is the text of the elements concerned: nothing is the good answer.
    """

    def __init__(self, driver):
        self.driver = driver

    def open(self, path, width=WIDE, dark=False):
        """Shows a file in a window of this width, under this theme."""
        self.driver.get_log("browser")  # What was said of the page before.
        self._resize(width, HEIGHT, mobile=width == NARROW)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("setEmulatedMedia", features=[scheme])
        from selenium.webdriver.support.wait import WebDriverWait

        address = path.absolute().as_uri()
        self.driver.get(address)
        # It may return before the page is there.
        there = "return document.readyState == 'complete' && location == arguments[0]"
        WebDriverWait(self.driver, 30, 0.01).until(lambda _: self.ask(there, address))

    def _resize(self, width, height, mobile):
        size = {"width": width, "height": height, "mobile": mobile}
        self._command("setDeviceMetricsOverride", **size, deviceScaleFactor=1)

    def _command(self, name, **values):
        self.driver.execute_cdp_cmd(f"Emulation.{name}", values)

    def ask(self, script, *args):
        """What a piece of JavaScript returns; it may call what stands in browser.js."""
        return self.driver.execute_script(f"{FUNCTIONS}\n{script}", *args)

    def elements(self, selector):
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector):
        """The text of each element, as it is displayed."""
        return [element.text for element in self.elements(selector)]

    def click(self, selector):
        for element in self.elements(selector):
            element.click()

    def hidden(self, selector):
        """Texts that have no size, reach out of the window, or are covered."""
        assert self.elements(selector), selector
        return self.ask("return hiddenTexts(arguments[0])", selector)

    def overlaps(self, selector, others=None):
        """Pairs of elements that lie on each other."""
        return self.ask("return overlaps(...arguments)", selector, others)

    def sideways(self):
        """What makes the page wider than the window."""
        return self.ask("return sideways()")

    def pale(self, contrast=4.5, within="body"):
        """Texts with less contrast to what they stand on; WCAG 2 asks for 4.5."""
        return self.ask("return pale(...arguments)", contrast, within)

    def loaded(self):
        """What the page has loaded, but itself."""
        return self.ask("return performance.getEntriesByType('resource').map(String)")

    def complaints(self):
        """What the console says."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def photograph(self, path):
        """The whole page as a PNG file, and as an array of height x width x 3."""
        width, height = self.ask(
            "return [innerWidth, document.documentElement.scrollHeight]"
        )
        self._resize(width, height, mobile=False)
        self.ask("scrollTo(0, 0)")
        assert self.driver.save_screenshot(os.fspath(path))
        self._resize(width, HEIGHT, mobile=width == NARROW)
        return (255 * image.imread(path)[..., :3]).round().astype(int)
