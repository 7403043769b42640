// The token view: one page of tokens at a time, so that a call of any length costs the browser the same.

const PAGE = 400;
const SURPRISE = -3;
const CONTEXT = 2;
const NO_VERSION = -1;
const BINS = 160;
const EDGES = [-0.05, -0.3, -1, -2.5, -5];
const KINDS = ["prompt", "sampled, mask 1", "sampled by an earlier call, mask 0", "sampled, quarantined"];
const VERSION_COLOURS = 6;

/** Tokens that the service returns page by page. */
class RemoteTokens {
  constructor(url) {
    this.url = url;
  }

  async page(start, overview) {
    return this.get(`tokens?start=${start}&count=${PAGE}&overview=${overview}`);
  }

  async next(what, after, value) {
    const given = value === undefined ? "" : `&value=${value}`;
    return (await this.get(`next?what=${what}&after=${after}${given}`)).position;
  }

  /** Where the image is. */
  image(digest) {
    return `${this.url}/../../media/${digest}`;
  }

  async get(path) {
    const answer = await fetch(`${this.url}/${path}`, { headers: { accept: "application/json" } });
    if (answer.status === 401) location.reload();
    if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
    return answer.json();
  }
}

/** Tokens that an exported page contains. Each call has its own; those before them are its base's. */
class StoredTokens {
  /** `name` is calls/N or rows/N. */
  constructor(stored, name) {
    const [tree, number] = name.split("/");
    const { last: lastAt, trained } = tree === "rows" ? stored.rows[number] : { last: Number(number) };
    const last = stored.calls[lastAt];
    const length = last.base_length + unpack(last.ids).byteLength / 4;
    this.ids = new Int32Array(length);
    this.kinds = new Uint8Array(length);
    this.logprobs = new Float32Array(length).fill(NaN);
    this.places = new Int32Array(length);
    // Versions are whole numbers of 53 bits: a trainer may count in milliseconds.
    this.versions = new Float64Array(length).fill(NO_VERSION);
    this.media = [];
    this.texts = stored.texts;
    this.missing = stored.missing;
    let limit = length;
    for (let at = lastAt; at !== null; at = stored.calls[at].base) limit = this.fill(stored.calls[at], limit);
    if (trained) for (const [from, to] of trained) this.kinds.fill(1, from, to);
    else this.kinds.fill(last.kind, last.base_length + last.added);
    this.media.sort((one, other) => one[1] - other[1]);
  }

  /** The conversation has each image; null for one that is missing there. */
  image(digest) {
    return document.querySelector(`img[data-media="${digest}"]`)?.src ?? null;
  }

  /** Write the call's own tokens among the first `limit` ones. Returns how many precede them. */
  fill(call, limit) {
    const from = call.base_length;
    if (limit <= from) return limit;
    const sampled = from + call.added;
    this.ids.set(new Int32Array(unpack(call.ids)).subarray(0, limit - from), from);
    this.places.set(new Int32Array(unpack(call.texts)).subarray(0, limit - from), from);
    for (const [digest, start, end] of call.media) if (from + end <= limit) this.media.push([digest, from + start, from + end]);
    if (limit > sampled) {
      this.kinds.fill(CONTEXT, sampled, limit);
      this.logprobs.set(new Float32Array(unpack(call.logprobs)).subarray(0, limit - sampled), sampled);
      for (const [version, start, end] of call.spans) this.versions.fill(version, Math.min(limit, sampled + start), Math.min(limit, sampled + end));
    }
    return from;
  }

  async page(start, overview) {
    const end = Math.min(this.ids.length, start + PAGE);
    return {
      start,
      total: this.ids.length,
      ids: Array.from(this.ids.subarray(start, end)),
      kinds: Array.from(this.kinds.subarray(start, end)).join(""),
      logprobs: Array.from(this.logprobs.subarray(start, end), (each) => (Number.isNaN(each) ? null : each)),
      versions: Array.from(this.versions.subarray(start, end), (each, at) => [each, at, at + 1]).filter(([version]) => version !== NO_VERSION),
      texts: Array.from(this.places.subarray(start, end), (at) => (at < 0 ? null : this.texts[at])),
      media: this.media.map((each, at) => [at + 1, ...each]).filter(([, , from, to]) => from < end && to > start),
      missing: this.missing,
      alternatives: {},
      overview: overview ? this.bins() : undefined,
    };
  }

  /** Per bin: its first position, the share of sampled tokens, their mean logprob. */
  bins() {
    const total = this.ids.length;
    const bins = Math.min(BINS, total);
    return Array.from({ length: bins }, (_, at) => {
      const start = Math.floor((at * total) / bins);
      const end = Math.floor(((at + 1) * total) / bins);
      let count = 0;
      let sum = 0;
      for (let each = start; each < end; each++) {
        if (this.kinds[each] === 0) continue;
        count++;
        sum += this.logprobs[each];
      }
      return [start, count / (end - start), count && Number.isFinite(sum) ? sum / count : null];
    });
  }

  async next(what, after, value) {
    let known = NO_VERSION;
    for (let at = Math.min(after, this.ids.length - 1); at >= 0 && known === NO_VERSION; at--) known = this.versions[at];
    const found = {
      surprise: (at) => this.logprobs[at] < (value ?? SURPRISE),
      id: (at) => this.ids[at] === value,
      kind: (at) => at > 0 && this.kinds[at] !== this.kinds[at - 1],
      version: (at) => this.versions[at] !== NO_VERSION && this.versions[at] !== known,
    }[what];
    for (let at = after + 1; at < this.ids.length; at++) if (found(at)) return at;
    return null;
  }
}

function unpack(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;
}

class TokenView {
  constructor(root, source) {
    this.root = root;
    this.source = source;
    this.stream = root.querySelector("[data-stream]");
    this.card = root.querySelector("[data-card]");
    this.where = root.querySelector("[data-where]");
    this.slider = root.querySelector("[data-slider]");
    this.overview = root.querySelector("[data-overview]");
    this.legend = root.querySelector("[data-legend]");
    this.scorer = root.querySelector("[data-scorer]");
    this.mode = "logprob";
    this.page = null;
    this.at = 0;
    this.requests = 0;
    this.listen();
  }

  listen() {
    for (const choice of this.root.querySelectorAll("[data-mode]")) {
      choice.addEventListener("change", () => this.colour(choice.value));
    }
    this.scorer.addEventListener("change", () => {
      this.take(this.page);
      this.select(this.at);
    });
    for (const button of this.root.querySelectorAll("[data-page]")) {
      button.addEventListener("click", () => this.turn(Number(button.dataset.page)));
    }
    for (const button of this.root.querySelectorAll("[data-next]")) {
      button.addEventListener("click", () => this.seek(button.dataset.next));
    }
    this.root.querySelector("[data-find]").addEventListener("submit", (event) => this.find(event));
    this.slider.addEventListener("change", () => this.show(Number(this.slider.value)));
    this.stream.addEventListener("keydown", (event) => this.move(event));
    this.stream.addEventListener("pointerover", (event) => this.point(event, false));
    this.stream.addEventListener("pointerleave", () => this.describe(this.at));
    this.stream.addEventListener("click", (event) => this.point(event, true));
    this.stream.addEventListener("focus", () => this.select(this.at));
    this.overview.addEventListener("click", (event) => this.jump(event));
  }

  /** Show the page that `position` is on, and with `select` the token itself. */
  async show(position, select = false) {
    const request = ++this.requests;
    const start = Math.max(0, Math.floor(position / PAGE) * PAGE);
    if (!this.page || this.page.start !== start) {
      this.root.setAttribute("aria-busy", "true");
      let page;
      try {
        page = await this.source.page(start, !this.bins);
      } catch (error) {
        this.card.textContent = `The tokens could not be loaded: ${error.message}.`;
        this.root.removeAttribute("aria-busy");
        return;
      }
      // A later request may have been answered before this one.
      if (request !== this.requests) return;
      this.take(page);
      this.at = start;
    }
    if (select) this.select(position);
  }

  take(page) {
    this.page = page;
    this.offer(Object.keys(page.scores ?? {}));
    if (page.overview) this.drawOverview(page.overview);
    this.versions = new Array(page.ids.length).fill(null);
    for (const [version, from, to] of page.versions) this.versions.fill(version, from, to);
    this.spans = page.ids.map(() => null);
    for (const each of page.media) this.spans.fill(this.imageSpan(each), Math.max(0, each[2] - page.start), each[3] - page.start);
    this.spans = page.ids.map((id, at) => this.spans[at] ?? this.span(id, at));
    this.stream.replaceChildren(...new Set(this.spans));
    const end = page.start + page.ids.length;
    const note = page.missing ? ` Ids are shown: ${page.missing}.` : "";
    this.where.textContent = page.total
      ? `Tokens ${formatCount(page.start + 1)} to ${formatCount(end)} of ${formatCount(page.total)}.${note}`
      : "There are no tokens: the engine returned no ids.";
    this.slider.max = String(Math.max(0, page.total - 1));
    this.slider.value = String(page.start);
    this.slider.setAttribute("aria-valuetext", this.where.textContent);
    this.root.querySelector('[data-page="-1"]').disabled = page.start === 0;
    this.root.querySelector('[data-page="1"]').disabled = end >= page.total;
    this.stream.scrollTop = 0;
    this.explain();
    this.card.textContent = page.total ? "Point at a token, or move with the arrow keys." : "";
    this.root.removeAttribute("aria-busy");
  }

  /** Let one of the scorers be chosen, if there are several. */
  offer(names) {
    this.root.querySelector("[data-mode][value=score]").parentElement.hidden = names.length === 0;
    this.scorer.hidden = names.length < 2;
    if (this.scorer.options.length !== names.length) this.scorer.replaceChildren(...names.map((name) => new Option(name)));
  }

  span(id, at) {
    const span = document.createElement("span");
    const text = this.page.texts[at];
    const logprob = this.page.logprobs[at];
    const version = this.versions[at];
    span.className = `t k${this.page.kinds[at]}`;
    if (logprob !== null) span.classList.add(`b${bucket(logprob)}`);
    const score = this.scoresAt(at).find(([name]) => name === this.scorer.value);
    if (score) span.classList.add(`d${distance(score[1] - logprob)}`);
    if (version !== null) span.classList.add(`v${version % VERSION_COLOURS}`);
    if (text === null) span.classList.add("raw");
    span.textContent = text === null ? `⟨${id}⟩` : text === "" ? "·" : showInvisible(text);
    span.dataset.at = String(this.page.start + at);
    return span;
  }

  /** All placeholders of an image as one; its label counts them, also those on other pages. */
  imageSpan([number, digest, from, to]) {
    const span = document.createElement("span");
    span.className = "t k0 image";
    span.dataset.at = String(Math.max(from, this.page.start));
    const source = this.source.image(digest);
    if (source) {
      const image = document.createElement("img");
      image.src = source;
      image.alt = "";
      span.append(image);
    }
    span.append(`image ${number}, ${countTokens(to - from)}`);
    return span;
  }

  /** What each scorer says of the token: name and logprob. */
  scoresAt(at) {
    if (this.page.logprobs[at] === null) return [];
    return Object.entries(this.page.scores ?? {}).map(([name, logprobs]) => [name, logprobs[at]]).filter(([, logprob]) => logprob !== null);
  }

  /** The image that the token at this position stands for. */
  imageAt(position) {
    return this.page?.media.find(([, , from, to]) => from <= position && position < to);
  }

  colour(mode) {
    this.mode = mode;
    this.stream.dataset.colour = mode;
    const choice = this.root.querySelector(`[data-mode][value="${mode}"]`);
    if (choice) choice.checked = true;
    this.explain();
  }

  explain() {
    const rows = {
      logprob: ["p ≥ 95 %", "≥ 74 %", "≥ 37 %", "≥ 8 %", "≥ 0.7 %", "less"].map((label, at) => [`t k1 b${at}`, label]),
      score: ["likelier by the scorer", "alike", "≥ 2 nats less", "≥ 5 nats less"].map((label, at) => [`t k1 d${at}`, label]),
      mask: KINDS.map((label, at) => [`t k${at}`, label]),
      version: this.page
        ? [...new Set(this.versions.filter((each) => each !== null))].map((each) => [`t k1 v${each % VERSION_COLOURS}`, `weights ${each}`])
        : [],
    }[this.mode];
    if (this.mode !== "mask") rows.push(["t k0", "prompt"]);
    this.legend.dataset.colour = this.mode;
    this.legend.replaceChildren(
      ...rows.map(([kind, label]) => {
        const item = document.createElement("li");
        const mark = document.createElement("span");
        mark.className = kind;
        mark.textContent = label;
        item.append(mark);
        return item;
      }),
    );
  }

  drawOverview(bins) {
    this.bins = bins;
    const width = 1000 / Math.max(1, bins.length);
    const parts = bins.map(([start, share, mean], at) => {
      const part = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      part.setAttribute("x", String(at * width));
      part.setAttribute("width", String(width));
      const height = mean === null ? 8 : 10 + Math.min(30, -mean * 8);
      part.setAttribute("y", String(40 - height));
      part.setAttribute("height", String(height));
      part.setAttribute("class", mean === null || share === 0 ? "given" : `b${bucket(mean)}`);
      part.dataset.start = String(start);
      return part;
    });
    this.overview.replaceChildren(...parts);
  }

  jump(event) {
    if (!this.page) return;
    const { left, width } = this.overview.getBoundingClientRect();
    const share = Math.min(0.999, Math.max(0, (event.clientX - left) / width));
    this.show(Math.floor(share * this.page.total), true);
  }

  turn(pages) {
    if (!this.page) return;
    const start = this.page.start + pages * PAGE;
    if (start >= 0 && start < this.page.total) this.show(start);
  }

  async seek(what, value) {
    const found = await this.source.next(what, this.page ? this.at : -1, value);
    if (found === null) this.card.textContent = "There is none after this token.";
    else await this.show(found, true);
  }

  find(event) {
    event.preventDefault();
    const wanted = Number(new FormData(event.target).get("id"));
    if (Number.isInteger(wanted)) this.seek("id", wanted);
  }

  point(event, click) {
    const span = event.target.closest("[data-at]");
    if (!span) return;
    const position = Number(span.dataset.at);
    if (click) this.select(position);
    else this.describe(position);
  }

  move(event) {
    const page = this.page;
    const places = {
      ArrowRight: () => this.imageAt(this.at)?.[3] ?? this.at + 1,
      ArrowLeft: () => (this.imageAt(this.at)?.[2] ?? this.at) - 1,
      ArrowDown: () => this.at + this.line(1),
      ArrowUp: () => this.at + this.line(-1),
      Home: () => page.start,
      End: () => page.start + page.ids.length - 1,
    };
    if (!page || !(event.key in places) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const to = places[event.key]();
    if (to >= 0 && to < page.total) this.show(to, true);
  }

  /** The distance to the token below or above. */
  line(direction) {
    const current = this.token(this.at);
    if (!current) return direction;
    const { left } = current.getBoundingClientRect();
    const top = current.offsetTop;
    let best = null;
    for (let other = current; (other = direction > 0 ? other.nextElementSibling : other.previousElementSibling); ) {
      if (other.offsetTop === top) continue;
      if (best && other.offsetTop !== best.offsetTop) break;
      const distance = Math.abs(other.getBoundingClientRect().left - left);
      if (!best || distance < Math.abs(best.getBoundingClientRect().left - left)) best = other;
    }
    return best ? Number(best.dataset.at) - this.at : direction;
  }

  token(position) {
    return this.page ? this.spans[position - this.page.start] : undefined;
  }

  select(position) {
    const span = this.token(position);
    if (!span) return;
    this.stream.querySelector(".here")?.classList.remove("here");
    span.classList.add("here");
    this.at = position;
    const box = this.stream;
    if (span.offsetTop < box.scrollTop || span.offsetTop + span.offsetHeight > box.scrollTop + box.clientHeight) {
      box.scrollTop = span.offsetTop - box.clientHeight / 2;
    }
    this.describe(position);
  }

  describe(position) {
    const at = position - (this.page ? this.page.start : 0);
    if (!this.page || at < 0 || at >= this.page.ids.length) return;
    const logprob = this.page.logprobs[at];
    const text = this.page.texts[at];
    const facts = [
      ["position", formatCount(position)],
      ["id", String(this.page.ids[at])],
      ["text", text === null ? "unknown" : text === "" ? "part of the character before" : quote(text)],
      ["", KINDS[Number(this.page.kinds[at])]],
    ];
    if (logprob !== null) facts.push(["logprob", `${logprob.toFixed(4)} (${formatPercent(logprob)})`]);
    for (const [name, score] of this.scoresAt(at)) facts.push([name, `${score.toFixed(4)} (${formatPercent(score)})`]);
    if (this.versions[at] !== null) facts.push(["weights", String(this.versions[at])]);
    const image = this.imageAt(position);
    if (image) facts.push(...this.imageFacts(image));
    const others = this.page.alternatives[position];
    if (others) facts.push(["alternatives", others.map(([id, text, odds]) => `${text === null || text === undefined ? id : quote(text)} ${formatPercent(odds)}`).join(", ")]);
    this.card.replaceChildren(
      ...facts.map(([name, value]) => {
        const part = document.createElement("span");
        const label = document.createElement("b");
        label.textContent = name;
        part.append(label, name ? " " : "", value);
        return part;
      }),
    );
  }

  imageFacts([number, digest, from, to]) {
    const source = this.source.image(digest);
    let name = digest;
    // No browser opens a data URL as a page.
    if (source && !source.startsWith("data:")) {
      name = document.createElement("a");
      name.href = source;
      name.textContent = digest;
    }
    return [
      [`image ${number}`, `${countTokens(to - from)}, positions ${formatCount(from)} to ${formatCount(to - 1)}`],
      ["sha256", name],
    ];
  }
}

function bucket(logprob) {
  const found = EDGES.findIndex((edge) => logprob >= edge);
  return found < 0 ? EDGES.length : found;
}

/** How much likelier a scorer finds a token than the policy that sampled it, in nats, as a class of colour. */
function distance(difference) {
  return difference > 0.5 ? 0 : difference > -2 ? 1 : difference > -5 ? 2 : 3;
}

/** With thin spaces between thousands. */
function formatCount(number) {
  return number.toLocaleString("en").replaceAll(",", "\u202f");
}

function countTokens(number) {
  return number === 1 ? "1 token" : `${formatCount(number)} tokens`;
}

function formatPercent(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(0) : share >= 0.01 ? share.toPrecision(2) : "under 0.01"} %`;
}

/** Makes line ends and control characters visible. */
function showInvisible(text) {
  return text
    .replace(/\n/g, "↵\n")
    .replace(/\t/g, "⇥\t")
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** As a string literal on one line. */
function quote(text) {
  return showInvisible(JSON.stringify(text));
}

const views = new WeakMap();
let active = null;

/** Show the tokens that `holder` names in its `data-tokens`, once. */
function showTokens(holder) {
  if (views.has(holder)) {
    active = views.get(holder);
    return;
  }
  const root = document.getElementById("token-view").content.firstElementChild.cloneNode(true);
  holder.querySelector("[data-about]").append(root);
  const saved = document.getElementById("stored-tokens");
  stored ??= saved && JSON.parse(saved.textContent);
  const source = stored ? new StoredTokens(stored, holder.dataset.tokens) : new RemoteTokens(holder.dataset.tokens);
  const view = new TokenView(root, source);
  views.set(holder, view);
  active = view;
  root.addEventListener("focusin", () => {
    active = view;
  });
  view.colour("logprob");
  view.show(Number(holder.dataset.position), holder.dataset.position !== "0");
}

let stored = null;

document.addEventListener("keydown", (event) => {
  if (!active?.root.isConnected || event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const modes = [...active.root.querySelectorAll("[data-mode]")].filter((choice) => !choice.parentElement.hidden).map((choice) => choice.value);
  const acts = {
    "[": () => active.turn(-1),
    "]": () => active.turn(1),
    s: () => active.seek("surprise"),
    v: () => active.seek("version"),
    m: () => active.seek("kind"),
    c: () => active.colour(modes[(modes.indexOf(active.mode) + 1) % modes.length]),
  };
  acts[event.key]?.();
});
