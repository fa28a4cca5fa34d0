// One state. Events and answers change it through `set`; what is drawn follows in the next frame.

/**
 * @typedef {object} Session
 * @property {string} id @property {string} title @property {string} system_prompt @property {number} budget_tokens
 * @property {string} model @property {string} created_at @property {string} updated_at @property {string | null} forked_from
 * @property {number} turns @property {number} resident_tokens @property {number} seen_tokens
 *
 * @typedef {object} Source
 * @property {string} passage_id @property {string} document_id @property {string} name @property {string} heading
 * @property {string} kind @property {string} text @property {number} score
 * @property {{bm25: number | null, vector: number | null} | null} ranks @property {number} tokens
 * @property {'resident' | 'recalled' | 'streamed' | 'skipped'} state
 *
 * @typedef {object} Turn
 * @property {string} id @property {number} number @property {'running' | 'done' | 'cancelled' | 'failed'} status
 * @property {string} question @property {string | null} answer @property {string | null} finish_reason
 * @property {Source[] | null} sources @property {any} usage @property {any} timings @property {any} cache
 * @property {any} problem @property {string} created_at @property {string | null} finished_at
 *
 * @typedef {object} Block
 * @property {string} id @property {string | null} turn_id @property {number} turn @property {string} kind
 * @property {'resident' | 'offloaded' | 'dropped' | 'coming'} state @property {number} tokens
 * @property {string | null} document_id @property {string | null} passage_id @property {string | null} name
 * @property {string | null} heading @property {number} score @property {string} created_at @property {string | null} evicted_at
 *
 * @typedef {object} Running
 * @property {string} session @property {string} turn_id @property {string} question @property {string} answer
 * @property {Source[]} sources @property {{done: number, total: number, restored: number} | null} prefill
 * @property {number} evicted @property {number} recalled @property {'sending' | 'reading' | 'answering' | 'resuming'} phase
 *
 * @typedef {object} State
 * @property {import('./route.js').Route} route
 * @property {'ready' | 'unreachable' | 'loading' | 'locked'} server
 * @property {string} model
 * @property {Session[]} sessions @property {string | null} sessionsCursor @property {string} sessionQuery
 * @property {Session | null} session @property {Turn[]} turns @property {boolean} loading
 * @property {Running | null} running
 * @property {{status?: number, detail: string, field?: string} | null} problem
 * @property {Block[]} blocks @property {{turn: string, blocks: Block[]} | null} moment
 * @property {any[]} points @property {any[]} evictions @property {any[]} recalls
 * @property {any[]} documents @property {any[]} uploads
 * @property {any} block
 */

/** @type {State} */
export const state = {
  route: { view: 'chat' },
  server: 'loading', model: '',
  sessions: [], sessionsCursor: null, sessionQuery: '',
  session: null, turns: [], loading: false,
  running: null, problem: null,
  blocks: [], moment: null,
  points: [], evictions: [], recalls: [],
  documents: [], uploads: [],
  block: null,
};

/** @type {{keys: string[], draw: () => void}[]} */
const views = [];
/** @type {Set<string>} */
const changed = new Set();
let scheduled = false;

/** Draw whenever one of `keys` has changed, at most once a frame. @param {(keyof State)[]} keys @param {() => void} draw */
export function on(keys, draw) {
  views.push({ keys, draw });
}

/** @param {Partial<State>} patch */
export function set(patch) {
  Object.assign(state, patch);
  for (const key of Object.keys(patch)) changed.add(key);
  if (scheduled) return;
  scheduled = true;
  // A hidden tab has no frames, and should still be right when it is looked at.
  if (document.hidden) setTimeout(flush);
  else requestAnimationFrame(flush);
}

/** Draw what has changed, now. */
export function flush() {
  scheduled = false;
  const keys = new Set(changed);
  changed.clear();
  for (const { keys: wanted, draw } of views) if (wanted.some((key) => keys.has(key))) draw();
}

/** What the browser keeps: drafts, choices, the key. A browser that keeps nothing is fine. */
export const kept = {
  /** @param {string} name @returns {any} */
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(`keepwhole:${name}`) ?? 'null');
    } catch {
      return null;
    }
  },
  /** @param {string} name @param {any} value */
  set(name, value) {
    try {
      if (value === null || value === '') localStorage.removeItem(`keepwhole:${name}`);
      else localStorage.setItem(`keepwhole:${name}`, JSON.stringify(value));
    } catch {
      // Private windows and full disks: it lasts as long as the page.
    }
  },
};
