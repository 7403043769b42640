// Where the tokens of a page come from: the service, or the page itself. Both give them page by page.

const PAGE = 400;
const SURPRISE = -3;
const SAMPLED_ELSEWHERE = 2;
const NO_VERSION = -1;
const BINS = 160;

/** Tokens that the service gives page by page. */
class Asked {
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

  async get(path) {
    const answer = await fetch(`${this.url}/${path}`, { headers: { accept: "application/json" } });
    if (answer.status === 401) location.reload();
    if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
    return answer.json();
  }
}

/** Tokens that lie in the page itself: an exported session. Each call brings its own; those before them are its base's. */
class Stored {
  constructor(told, source) {
    const last = told.calls[source.last];
    const length = last.base_length + unpacked(last.ids).byteLength / 4;
    this.ids = new Int32Array(length);
    this.kinds = new Uint8Array(length);
    this.logprobs = new Float32Array(length).fill(NaN);
    this.places = new Int32Array(length);
    // Versions are whole numbers of 53 bits: a trainer may count in milliseconds.
    this.versions = new Float64Array(length).fill(NO_VERSION);
    this.texts = told.texts;
    this.missing = told.missing;
    let limit = length;
    for (let at = source.last; at !== null; at = told.calls[at].base) limit = this.lay(told.calls[at], limit);
    for (const [kind, from, to] of source.marks) this.kinds.fill(kind, from, to);
  }

  /** Put in what a call brings of the first `limit` tokens. Gives how many are before it. */
  lay(call, limit) {
    const from = call.base_length;
    if (limit <= from) return limit;
    const said = from + call.given;
    this.ids.set(new Int32Array(unpacked(call.ids)).subarray(0, limit - from), from);
    this.places.set(new Int32Array(unpacked(call.texts)).subarray(0, limit - from), from);
    if (limit > said) {
      this.kinds.fill(SAMPLED_ELSEWHERE, said, limit);
      this.logprobs.set(new Float32Array(unpacked(call.logprobs)).subarray(0, limit - said), said);
      for (const [version, start, end] of call.spans) this.versions.fill(version, Math.min(limit, said + start), Math.min(limit, said + end));
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
      missing: this.missing,
      alternatives: {},
      overview: overview ? this.bins() : undefined,
    };
  }

  /** For each of at most BINS equal parts: its first position, the share of sampled tokens, the mean logprob of those. */
  bins() {
    const total = this.ids.length;
    const count = Math.min(BINS, total);
    return Array.from({ length: count }, (_, at) => {
      const start = Math.floor((at * total) / count);
      const end = Math.floor(((at + 1) * total) / count);
      let sampled = 0;
      let sum = 0;
      for (let each = start; each < end; each++) {
        if (this.kinds[each] === 0) continue;
        sampled++;
        sum += this.logprobs[each];
      }
      return [start, sampled / (end - start), sampled && Number.isFinite(sum) ? sum / sampled : null];
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

function unpacked(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;
}
