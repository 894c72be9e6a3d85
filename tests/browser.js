// What tests ask of a page. Every function answers with texts, so that a failure tells.

const all = (selector) => [...document.querySelectorAll(selector)];
const say = (element) => element.textContent.trim().slice(0, 80);

// Where its text stands, line by line; of a drawing, where it is.
function boxes(element) {
  if (element.namespaceURI.endsWith("svg")) return [element.getBoundingClientRect()];
  const range = document.createRange();
  range.selectNodeContents(element);
  return [...range.getClientRects()].filter((box) => box.width && box.height);
}

// Without a size, out of the window's sides, transparent, or covered by something else.
function hidden(element) {
  element.scrollIntoView({ block: "center", behavior: "instant" });
  const found = boxes(element);
  const shown = { opacityProperty: true, visibilityProperty: true };
  if (!found.length || !element.checkVisibility(shown)) return true;
  if (found.some((box) => box.left < 0 || box.right > innerWidth)) return true;
  const { left, top, width, height } = found[0];
  if (!width || !height) return true;
  return !element.contains(document.elementFromPoint(left + width / 2, top + height / 2));
}

function hiddenTexts(selector) {
  return all(selector).filter((element) => say(element) && hidden(element)).map(say);
}

function touch(a, b) {
  const within = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  return within > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
}

// Pairs that lie on each other: of these among themselves, or of these and others.
function overlaps(selector, others) {
  const found = [];
  const theirs = others && all(others);
  all(selector).forEach((a, index, these) => {
    for (const b of theirs ?? these.slice(index + 1))
      if (touch(a.getBoundingClientRect(), b.getBoundingClientRect()))
        found.push(`${say(a)} | ${say(b)}`);
  });
  return found;
}

// What reaches out of the window, where that lets the page be scrolled sideways.
function sideways() {
  const { scrollWidth, clientWidth } = document.documentElement;
  if (scrollWidth <= clientWidth) return [];
  const out = all("body *").filter((e) => e.getBoundingClientRect().right > clientWidth);
  return [`${scrollWidth} > ${clientWidth}`, ...out.map(say)];
}

function channels(color) {
  const [r, g, b, alpha = 1] = color.match(/[\d.]+/g).map(Number);
  return { rgb: [r, g, b], alpha };
}

const over = (upper, lower) =>
  upper.rgb.map((x, i) => x * upper.alpha + lower[i] * (1 - upper.alpha));

// The colour of the page itself, where nothing paints it.
function canvas() {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.background = "Canvas";
  const color = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return channels(color).rgb;
}

function behind(element) {
  if (!element) return canvas();
  const color = channels(getComputedStyle(element).backgroundColor);
  return color.alpha === 1 ? color.rgb : over(color, behind(element.parentElement));
}

// As WCAG 2 defines them.
function luminance(rgb) {
  const [r, g, b] = rgb.map((x) =>
    x <= 10 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a, b) {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

// Texts whose contrast with what they stand on is less.
function pale(least, within) {
  const found = [];
  const walker = document.createTreeWalker(all(within)[0], NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const ink = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const reached = contrast(over(channels(ink), ground), ground);
    if (!(reached >= least)) found.push(`${say(element)}: ${reached.toFixed(1)}`);
  }
  return found;
}
