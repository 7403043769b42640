// What every page does: the theme, keys, the tree, and lists that keep themselves up to date.

const LIVE_MILLISECONDS = 3000;

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("verbatim-theme", root.dataset.theme);
  } catch {
    // It holds for this page then.
  }
}

/** Move among links that the marker `attribute` names, one tab stop for all of them. */
function roving(links, current) {
  for (const link of links) link.tabIndex = link === current ? 0 : -1;
}

function tree() {
  const picture = document.querySelector("[data-tree]");
  if (!picture) return;
  const links = [...picture.querySelectorAll("a")];
  if (!links.length) return;
  roving(links, links[0]);
  picture.addEventListener("keydown", (event) => {
    const here = event.target.closest("a");
    if (!here || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = nearest(links, here, event.key);
    if (!to) return;
    event.preventDefault();
    roving(links, to);
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

/** j and k walk through the list of the page; Enter opens, as on every link. */
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

/** Parts marked as live are exchanged when the service shows them otherwise. */
function live() {
  const pause = document.querySelector("[data-pause]");
  if (!pause) return;
  let going = true;
  const told = pause.querySelector("[data-told]");
  pause.addEventListener("click", () => {
    going = !going;
    pause.setAttribute("aria-pressed", String(!going));
    told.textContent = going ? "live" : "paused";
  });
  setInterval(async () => {
    if (!going || document.hidden) return;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (answer.status === 401) return location.reload();
      if (!answer.ok) return;
      exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
      told.textContent = going ? "live" : "paused";
    } catch {
      told.textContent = "not reachable";
    }
  }, LIVE_MILLISECONDS);
}

/** What live parts were last exchanged for, before anything here touched it. */
const seen = new WeakMap();

function exchange(fresh) {
  for (const old of document.querySelectorAll("[data-live]")) {
    const now = fresh.querySelector(`[data-live="${old.dataset.live}"]`);
    // Who works in a part is not disturbed.
    if (!now || old.contains(document.activeElement) || (seen.get(old) ?? old.innerHTML) === now.innerHTML) continue;
    seen.set(old, now.innerHTML);
    const chosen = new Set([...old.querySelectorAll("input:checked")].map((box) => box.value));
    old.replaceChildren(...now.childNodes);
    for (const box of old.querySelectorAll("input[type=checkbox]")) box.checked = chosen.has(box.value);
    if (old.querySelector("[data-tree]")) tree();
  }
}

/** Two members of a group are chosen to be compared. */
function pairs() {
  const form = document.querySelector("[data-compare]");
  if (!form) return;
  const chosen = () => [...form.querySelectorAll("input[type=checkbox]:checked")];
  const button = form.querySelector("button");
  const check = () => {
    button.disabled = chosen().length !== 2;
  };
  form.addEventListener("change", check);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const [left, right] = chosen().map((box) => encodeURIComponent(box.value));
    location.href = `${form.action}?left=${left}&right=${right}`;
  });
  check();
}

/** Which parts are folded away on the page of a comparison. */
function folding() {
  const choice = document.querySelector("[data-only-different]");
  if (!choice) return;
  const apply = () => document.querySelector("[data-pairs]").classList.toggle("different", choice.checked);
  choice.addEventListener("change", apply);
  apply();
}

/** A part that the address names is opened. */
function unfold() {
  const named = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  if (named instanceof HTMLDetailsElement) named.open = true;
}

addEventListener("hashchange", unfold);
unfold();
tree();
keys();
live();
pairs();
folding();
