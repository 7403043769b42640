// What every page does: the theme, keys, the tree, live lists, and a conversation that loads as it is read.

const LIVE_MILLISECONDS = 3000;

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("verbatim-theme", root.dataset.theme);
  } catch {
    // Without storage it holds for this page.
  }
}

/** Make `current` the one tab stop among the links. */
function setTabStop(links, current) {
  for (const link of links) link.tabIndex = link === current ? 0 : -1;
}

function tree() {
  const picture = document.querySelector("[data-tree]");
  if (!picture) return;
  const links = [...picture.querySelectorAll("a")];
  if (!links.length) return;
  setTabStop(links, links[0]);
  picture.addEventListener("keydown", (event) => {
    const here = event.target.closest("a");
    if (!here || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = nearest(links, here, event.key);
    if (!to) return;
    event.preventDefault();
    setTabStop(links, to);
    to.focus();
  });
}

/** The closest link in the direction of the key, on the same line before others. */
function nearest(links, here, key) {
  const place = (link) => [Number(link.dataset.x), Number(link.dataset.y)];
  const [x, y] = place(here);
  const ahead = {
    ArrowRight: ([a, b]) => (a > x ? a - x + 5 * Math.abs(b - y) : null),
    ArrowLeft: ([a, b]) => (a < x ? x - a + 5 * Math.abs(b - y) : null),
    ArrowDown: ([a, b]) => (b > y ? b - y + Math.abs(a - x) / 5 : null),
    ArrowUp: ([a, b]) => (b < y ? y - b + Math.abs(a - x) / 5 : null),
  }[key];
  if (!ahead) return null;
  let best = null;
  let least = Infinity;
  for (const link of links) {
    const distance = ahead(place(link));
    if (distance !== null && distance < least) [best, least] = [link, distance];
  }
  return best;
}

/** j and k move through the page's list; Enter opens, as on every link. */
function walk(step) {
  const links = [...document.querySelectorAll("[data-item]")].filter((link) => link.offsetParent);
  if (!links.length) return;
  const at = links.indexOf(document.activeElement);
  const next = at < 0 ? (step > 0 ? 0 : links.length - 1) : Math.min(links.length - 1, Math.max(0, at + step));
  links[next].focus();
}

function keys() {
  const help = document.getElementById("keys");
  const follow = (name) => document.querySelector(`[data-key="${name}"]`)?.click();
  const acts = {
    "/": () => document.querySelector("[data-search]")?.focus(),
    "?": () => help.showModal(),
    j: () => walk(1),
    k: () => walk(-1),
    n: () => follow("next"),
    p: () => follow("previous"),
    u: () => follow("up"),
    t: switchTheme,
  };
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey || help?.open) return;
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  for (const button of document.querySelectorAll("[data-theme-switch]")) button.addEventListener("click", switchTheme);
  for (const button of document.querySelectorAll("[data-keys]")) button.addEventListener("click", () => help.showModal());
}

/** Replace live parts when the service's page has others. */
function live() {
  const pause = document.querySelector("[data-pause]");
  if (!pause) return;
  let going = true;
  const label = pause.querySelector("[data-label]");
  pause.addEventListener("click", () => {
    going = !going;
    pause.setAttribute("aria-pressed", String(!going));
    label.textContent = going ? "live" : "paused";
  });
  let asking = false;
  const timer = setInterval(async () => {
    if (!going || asking || document.hidden) return;
    asking = true;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (answer.status === 401) return location.reload();
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      exchange(fresh);
      grow(fresh);
      label.textContent = going ? "live" : "paused";
      if (fresh.querySelector("[data-pause]")) return;
      // Nothing changes any more: it was closed.
      clearInterval(timer);
      label.textContent = "ended";
      pause.disabled = true;
    } catch {
      label.textContent = "unreachable";
    } finally {
      asking = false;
    }
  }, LIVE_MILLISECONDS);
}

/** The last content of each live part, before this script changed it. */
const seen = new WeakMap();

function exchange(fresh) {
  for (const old of document.querySelectorAll("[data-live]")) {
    const now = fresh.querySelector(`[data-live="${old.dataset.live}"]`);
    // A part that has the focus is being used.
    if (!now || old.contains(document.activeElement) || (seen.get(old) ?? old.innerHTML) === now.innerHTML) continue;
    seen.set(old, now.innerHTML);
    const chosen = new Set([...old.querySelectorAll("input:checked")].map((box) => box.value));
    old.replaceChildren(...now.childNodes);
    for (const box of old.querySelectorAll("input[type=checkbox]")) box.checked = chosen.has(box.value);
    if (old.querySelector("[data-tree]")) tree();
  }
}

/** Choose one or two members of a group to compare. */
function pairs() {
  const form = document.querySelector("[data-compare]");
  if (!form) return;
  const check = () => {
    const chosen = form.querySelectorAll("input[type=checkbox]:checked").length;
    form.querySelector("button").disabled = chosen < 1 || chosen > 2;
  };
  form.addEventListener("change", check);
  check();
}

/** Put a text on the clipboard: that of the button, or of what it names in the page or at an address. */
async function copy(button) {
  const { copy: text, copyFrom, copyAddress } = button.dataset;
  const label = button.textContent;
  try {
    if (copyAddress) await write((await (await fetch(copyAddress)).text()));
    else await write(copyFrom ? document.getElementById(copyFrom).textContent : text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not copied";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

async function write(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers give the clipboard to pages over https and of this machine alone.
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser refuses");
}

// The conversation of a session.

/** The elements of a fragment that the service renders. */
async function fetchFragment(url) {
  const answer = await fetch(url, { headers: { accept: "text/html" } });
  if (answer.status === 401) location.reload();
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  return answer.ok ? [...page.body.children] : [...page.querySelectorAll("main > *")];
}

/** Load what an opened part of the conversation shows: a fork's turns, or a call's details and tokens. */
async function unfold(part) {
  if (!part.open) return;
  const { load, details } = part.dataset;
  delete part.dataset.load;
  delete part.dataset.details;
  if (load) part.querySelector("[data-loaded]").append(...(await fetchFragment(load)));
  if (details) part.querySelector("[data-about]").append(...(await fetchFragment(details)));
  if ("tokens" in part.dataset) showTokens(part);
  watch();
}

/** Load the turns that follow, in place of the link to them. */
async function loadMore(link) {
  const url = link.dataset.more;
  if (!url) return;
  delete link.dataset.more;
  const arrived = await fetchFragment(url);
  link.closest(".more").replaceWith(...arrived.filter((element) => !element.id || !document.getElementById(element.id)));
  watch();
}

const nearing = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) loadMore(target);
  },
  { rootMargin: "300px" },
);

/** Load more turns as their link comes into view. */
function watch() {
  for (const link of document.querySelectorAll("[data-more]")) nearing.observe(link);
}

/** Add the turns that arrived meanwhile. */
function grow(fresh) {
  const turns = document.querySelector("[data-growing]");
  const arrived = fresh.querySelector("[data-growing]");
  if (!turns || !arrived) return;
  const count = (list) => list.querySelectorAll(":scope > .turn").length;
  skipTurns(arrived, Math.max(0, count(turns) - count(arrived)));
  let previous = null;
  for (const element of [...arrived.children]) {
    let here = element.id ? document.getElementById(element.id) : turns.querySelector(".more");
    if (!here) {
      if (!element.id) turns.append(element);
      else if (previous) previous.after(element);
      else turns.prepend(element);
      here = element;
    }
    previous = here;
  }
  if (turns.children.length) document.querySelector("[data-empty]")?.remove();
  watch();
}

/** Let the link to further turns begin behind `loaded` more: otherwise all of them would be asked for again each time. */
function skipTurns(arrived, loaded) {
  const link = loaded && arrived.querySelector(":scope > .more [data-more]");
  if (!link) return;
  const url = new URL(link.dataset.more, location.href);
  url.searchParams.set("start", Number(url.searchParams.get("start")) + loaded);
  link.dataset.more = url.href;
  link.nextElementSibling.remove();
}

/** Show only the turns that have the text. For an exported page, which no service searches. */
function findText() {
  const form = document.querySelector("[data-find-text]");
  if (!form) return;
  const find = () => {
    const wanted = form.querySelector("input").value.trim().toLowerCase();
    let count = 0;
    for (const turn of document.querySelectorAll(".turn")) {
      const texts = [...turn.querySelectorAll(".message pre, .tag")];
      turn.hidden = Boolean(wanted) && !texts.some((text) => text.textContent.toLowerCase().includes(wanted));
      if (!turn.hidden) count++;
    }
    for (const fork of document.querySelectorAll(".fork")) {
      fork.open = Boolean(wanted) && fork.querySelector(".turn:not([hidden])") !== null;
      fork.hidden = Boolean(wanted) && !fork.open;
    }
    form.querySelector("[data-found]").textContent = wanted ? `${count} calls found` : "";
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    find();
  });
  form.addEventListener("input", find);
}

function openAround(element) {
  for (let part = element.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
}

/** Open what the address names. */
function openTarget() {
  const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (!target) return;
  openAround(target);
  target.scrollIntoView();
}

document.addEventListener("toggle", (event) => unfold(event.target), true);
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy], [data-copy-from], [data-copy-address]");
  if (button) return copy(button);
  const link = event.target.closest("[data-more]");
  if (!link || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  loadMore(link);
});
addEventListener("hashchange", openTarget);
openTarget();
for (const part of document.querySelectorAll("details.about[open], details.fork[open]")) unfold(part);
watch();
findText();
tree();
keys();
live();
pairs();
