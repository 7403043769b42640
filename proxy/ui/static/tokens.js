// The token view: one page of tokens at a time, so that a call of any length costs the browser the same.

const EDGES = [-0.05, -0.3, -1, -2.5, -5];
const KINDS = ["given", "sampled, mask 1", "sampled elsewhere, mask 0", "sampled, quarantined"];
const VERSION_COLOURS = 6;

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
    this.mode = "logprob";
    this.told = null;
    this.at = 0;
    this.asked = 0;
    this.listen();
  }

  listen() {
    for (const choice of this.root.querySelectorAll("[data-mode]")) {
      choice.addEventListener("change", () => this.colour(choice.value));
    }
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
    this.stream.addEventListener("pointerleave", () => this.tell(this.at));
    this.stream.addEventListener("click", (event) => this.point(event, true));
    this.stream.addEventListener("focus", () => this.select(this.at));
    this.overview.addEventListener("click", (event) => this.jump(event));
  }

  /** Show the page that `position` is on, and with `select` the token itself. */
  async show(position, select = false) {
    const turn = ++this.asked;
    const start = Math.max(0, Math.floor(position / PAGE) * PAGE);
    if (!this.told || this.told.start !== start) {
      this.root.setAttribute("aria-busy", "true");
      let told;
      try {
        told = await this.source.page(start, !this.bins);
      } catch (error) {
        this.card.textContent = `The tokens could not be loaded: ${error.message}.`;
        this.root.removeAttribute("aria-busy");
        return;
      }
      // A later request may have been answered first.
      if (turn !== this.asked) return;
      this.take(told);
      this.at = start;
    }
    if (select) this.select(position);
  }

  take(told) {
    this.told = told;
    if (told.overview) this.picture(told.overview);
    this.versions = new Array(told.ids.length).fill(null);
    for (const [version, from, to] of told.versions) this.versions.fill(version, from, to);
    this.stream.replaceChildren(...told.ids.map((id, at) => this.span(id, at)));
    const end = told.start + told.ids.length;
    const note = told.missing ? ` Ids are shown: ${told.missing}.` : "";
    this.where.textContent = told.total
      ? `Tokens ${counted(told.start + 1)} to ${counted(end)} of ${counted(told.total)}.${note}`
      : "There are no tokens: the engine returned no ids.";
    this.slider.max = String(Math.max(0, told.total - 1));
    this.slider.value = String(told.start);
    this.slider.setAttribute("aria-valuetext", this.where.textContent);
    this.root.querySelector('[data-page="-1"]').disabled = told.start === 0;
    this.root.querySelector('[data-page="1"]').disabled = end >= told.total;
    this.stream.scrollTop = 0;
    this.explain();
    this.card.textContent = told.total ? "Point at a token, or move with the arrow keys." : "";
    this.root.removeAttribute("aria-busy");
  }

  span(id, at) {
    const span = document.createElement("span");
    const text = this.told.texts[at];
    const logprob = this.told.logprobs[at];
    const version = this.versions[at];
    span.className = `t k${this.told.kinds[at]}`;
    if (logprob !== null) span.classList.add(`b${bucket(logprob)}`);
    if (version !== null) span.classList.add(`v${version % VERSION_COLOURS}`);
    if (text === null) span.classList.add("raw");
    span.textContent = text === null ? `⟨${id}⟩` : text === "" ? "·" : visible(text);
    span.dataset.at = String(this.told.start + at);
    return span;
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
      logprob: ["p ≥ 95 %", "≥ 74 %", "≥ 37 %", "≥ 8 %", "≥ 0.7 %", "less"].map((said, at) => [`t k1 b${at}`, said]),
      mask: KINDS.map((said, at) => [`t k${at}`, said]),
      version: this.told
        ? [...new Set(this.versions.filter((each) => each !== null))].map((each) => [`t k1 v${each % VERSION_COLOURS}`, `weights ${each}`])
        : [],
    }[this.mode];
    if (this.mode !== "mask") rows.push(["t k0", "given"]);
    this.legend.dataset.colour = this.mode;
    this.legend.replaceChildren(
      ...rows.map(([kind, said]) => {
        const item = document.createElement("li");
        const mark = document.createElement("span");
        mark.className = kind;
        mark.textContent = said;
        item.append(mark);
        return item;
      }),
    );
  }

  picture(bins) {
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
    if (!this.told) return;
    const { left, width } = this.overview.getBoundingClientRect();
    const share = Math.min(0.999, Math.max(0, (event.clientX - left) / width));
    this.show(Math.floor(share * this.told.total), true);
  }

  turn(pages) {
    if (!this.told) return;
    const start = this.told.start + pages * PAGE;
    if (start >= 0 && start < this.told.total) this.show(start);
  }

  async seek(what, value) {
    const found = await this.source.next(what, this.told ? this.at : -1, value);
    if (found === null) this.card.textContent = "There is none behind this token.";
    else await this.show(found, true);
  }

  find(event) {
    event.preventDefault();
    const wanted = Number(new FormData(event.target).get("id"));
    if (Number.isInteger(wanted)) this.seek("id", wanted);
  }

  point(event, stay) {
    const span = event.target.closest("[data-at]");
    if (!span) return;
    const position = Number(span.dataset.at);
    if (stay) this.select(position);
    else this.tell(position);
  }

  move(event) {
    const page = this.told;
    const places = {
      ArrowRight: () => this.at + 1,
      ArrowLeft: () => this.at - 1,
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

  /** How many tokens away the one below or above is. */
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
    return this.told ? this.stream.children[position - this.told.start] : undefined;
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
    this.tell(position);
  }

  tell(position) {
    const at = position - (this.told ? this.told.start : 0);
    if (!this.told || at < 0 || at >= this.told.ids.length) return;
    const logprob = this.told.logprobs[at];
    const text = this.told.texts[at];
    const said = [
      ["position", counted(position)],
      ["id", String(this.told.ids[at])],
      ["text", text === null ? "unknown" : text === "" ? "part of the character before" : quoted(text)],
      ["", KINDS[Number(this.told.kinds[at])]],
    ];
    if (logprob !== null) said.push(["logprob", `${logprob.toFixed(4)} (${percent(logprob)})`]);
    if (this.versions[at] !== null) said.push(["weights", String(this.versions[at])]);
    const others = this.told.alternatives[position];
    if (others) said.push(["could have been", others.map(([id, said, odds]) => `${said === null || said === undefined ? id : quoted(said)} ${percent(odds)}`).join(", ")]);
    this.card.replaceChildren(
      ...said.map(([name, value]) => {
        const part = document.createElement("span");
        const label = document.createElement("b");
        label.textContent = name;
        part.append(label, name ? " " : "", value);
        return part;
      }),
    );
  }
}

function bucket(logprob) {
  const found = EDGES.findIndex((edge) => logprob >= edge);
  return found < 0 ? EDGES.length : found;
}

/** With blanks between thousands, as on the pages. */
function counted(number) {
  return number.toLocaleString("en").replaceAll(",", "\u202f");
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(0) : share >= 0.01 ? share.toPrecision(2) : "under 0.01"} %`;
}

/** Line ends and control characters can be seen; a line still ends where the text says so. */
function visible(text) {
  return text
    .replace(/\n/g, "↵\n")
    .replace(/\t/g, "⇥\t")
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** As a string of a program, all on one line. */
function quoted(text) {
  return visible(JSON.stringify(text));
}

function opened() {
  const root = document.querySelector("[data-tokens]");
  if (!root) return;
  const stored = document.getElementById("stored-tokens");
  if (!stored) return begin(root, new Asked(root.dataset.tokens));
  const told = JSON.parse(stored.textContent);
  const choice = root.querySelector("[data-source]");
  // One at a time: together they may be many times what was said.
  const view = begin(root, new Stored(told, told.sources[0]));
  const choose = (number, position) => {
    choice.value = String(number);
    Object.assign(view, { source: new Stored(told, told.sources[number]), told: null, bins: null });
    view.show(position, true);
  };
  choice.addEventListener("change", () => choose(Number(choice.value), 0));
  for (const link of document.querySelectorAll("[data-open-source]")) {
    link.addEventListener("click", () => {
      choose(Number(link.dataset.openSource), Number(link.dataset.position));
      root.scrollIntoView();
      view.stream.focus();
    });
  }
}

function begin(root, source) {
  const view = new TokenView(root, source);
  const named = /^#token=(\d+)$/.exec(location.hash);
  const position = named ? Number(named[1]) : Number(root.dataset.position || 0);
  view.colour("logprob");
  view.show(position, Boolean(named) || position > 0);
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const modes = ["logprob", "mask", "version"];
    const acts = {
      "[": () => view.turn(-1),
      "]": () => view.turn(1),
      s: () => view.seek("surprise"),
      v: () => view.seek("version"),
      m: () => view.seek("kind"),
      c: () => view.colour(modes[(modes.indexOf(view.mode) + 1) % modes.length]),
    };
    acts[event.key]?.();
  });
  return view;
}

opened();
