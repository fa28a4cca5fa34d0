// What is done with sessions and turns: opening, asking, stopping, asking again elsewhere. Answers go to the store.

import { Lost, Refused, all, asProblem, call, query, request } from './api.js';
import { announce, plural, toast } from './dom.js';
import * as memory from './memory.js';
import { go } from './route.js';
import { kept, set, state } from './store.js';
import { follow } from './stream.js';

/** What a session is asked with beside the question. @typedef {{top_k: number, path: string, kind: string, document_id: string, max_tokens: number | null, temperature: number | null}} Asking */
/** @type {Asking} */
const ASKING = { top_k: 4, path: '', kind: '', document_id: '', max_tokens: null, temperature: null };

/** @param {string | undefined} session @returns {Asking} */
export const asking = (session) => ({ ...ASKING, ...kept.get(`asking:${session ?? 'new'}`) });
/** @param {string | undefined} session @param {Asking} value */
export const setAsking = (session, value) => kept.set(`asking:${session ?? 'new'}`, value);

/** @type {AbortController | null} */
let following = null;

/** @param {string} id */
export async function open(id) {
  following?.abort();
  set({ session: state.sessions.find((session) => session.id === id) ?? null, turns: [], blocks: [], points: [], evictions: [], recalls: [], running: null, problem: null, moment: null, loading: true });
  try {
    const [session, turns] = await Promise.all([call(`v1/sessions/${id}`), turnsOf(id)]);
    if (state.route.session !== id) return;
    set({ session, turns: turns.filter(finished), loading: false });
    const running = turns.at(-1);
    await memory.load(id);
    if (running?.status === 'running') await run(id, running.question, running.id);
  } catch (error) {
    if (state.route.session === id) set({ loading: false, problem: asProblem(error) });
  }
}

/** Leave the session; a turn of it goes on at the server. */
export function close() {
  following?.abort();
  set({ session: null, turns: [], blocks: [], points: [], evictions: [], recalls: [], running: null, problem: null, moment: null, loading: false });
}

/** @param {import('./store.js').Turn} turn */
const finished = (turn) => turn.status !== 'running' && (turn.status !== 'cancelled' || Boolean(turn.answer));

/** @param {string} id @returns {Promise<import('./store.js').Turn[]>} */
const turnsOf = (id) => all(`v1/sessions/${id}/turns`);

/** Ask; in a new session if none is open. @param {string} content @param {{system_prompt?: string, budget_tokens?: number}} [settings] */
export async function ask(content, settings) {
  let session = state.session;
  set({ problem: null });
  try {
    if (!session) {
      const chosen = asking(undefined);
      session = /** @type {import('./store.js').Session} */ (await call('v1/sessions', { json: { title: titleOf(content), ...settings } }));
      setAsking(session.id, chosen);
      set({ session, sessions: [session, ...state.sessions], turns: [] });
      go({ view: 'chat', session: session.id, panel: state.route.panel });
      await memory.load(session.id);
    }
    return await run(session.id, content, null);
  } catch (error) {
    set({ problem: asProblem(error) });
    return false;
  }
}

/** @param {string} content */
function titleOf(content) {
  const line = content.trim().split('\n')[0];
  return line.length > 60 ? `${line.slice(0, 59).replace(/\s+\S*$/, '')}…` : line;
}

/** @param {string} session */
function body(session) {
  const { top_k, path, kind, document_id, max_tokens, temperature } = asking(session);
  const filter = Object.fromEntries(Object.entries({ path, kind, document_id }).filter(([, value]) => value));
  return {
    top_k,
    ...(Object.keys(filter).length && { filter }),
    ...(max_tokens !== null && { max_tokens }),
    ...(temperature !== null && { temperature }),
  };
}

/** Follow a turn from its question, or one that runs already. Resolves to whether it was accepted.
 * @param {string} session @param {string} question @param {string | null} turn */
async function run(session, question, turn) {
  const control = (following = new AbortController());
  set({
    running: { session, turn_id: turn ?? '', question, answer: '', sources: [], prefill: null, evicted: 0, recalled: 0, phase: turn ? 'resuming' : 'sending' },
    moment: null,
  });
  announce('Reading');
  let ended = false;
  try {
    ended = await follow({
      first: turn ? undefined : () => post(session, question, control.signal),
      path: `v1/sessions/${session}/events`,
      last: ['done', 'error'],
      take: ({ event, data, id }) => take(event, data, id),
      lost: () => {
        if (state.running) set({ running: { ...state.running, phase: 'resuming' } });
        announce('Connection lost, resuming');
      },
      signal: control.signal,
    });
  } catch (error) {
    if (control.signal.aborted) return true;
    const accepted = !(error instanceof Refused || error instanceof Lost) || Boolean(state.running?.turn_id);
    set({ running: null, problem: asProblem(error) });
    if (!accepted) return false;
  }
  if (control.signal.aborted) return true;
  await settle(session, ended, control);
  return true;
}

/** @param {string} session @param {string} content @param {AbortSignal} signal */
const post = (session, content, signal) =>
  request(`v1/sessions/${session}/messages`, { json: { content, on_disconnect: 'finish', ...body(session) }, signal });

/** @param {string} event @param {any} data @param {string} id */
function take(event, data, id) {
  const running = state.running;
  if (!running) return;
  const turn_id = data.turn_id || running.turn_id || id.split('.')[0];
  if (event === 'retrieval') set({ running: { ...running, turn_id, sources: data.sources, answer: '', phase: 'reading' } });
  else if (event === 'prefill') set({ running: { ...running, turn_id, prefill: data, phase: 'reading' } });
  else if (event === 'eviction') set({ running: { ...running, evicted: running.evicted + 1 } });
  else if (event === 'recall') set({ running: { ...running, recalled: running.recalled + 1 } });
  else if (event === 'token') {
    if (running.phase !== 'answering') announce('Answering');
    set({ running: { ...running, answer: running.answer + data.text, phase: 'answering' } });
  } else if (event === 'error') set({ problem: data.problem });
  else if (event === 'done') {
    announce(data.finish_reason === 'cancelled' ? 'Stopped' : ['Done', running.evicted && `evicted ${plural(running.evicted, 'block')}`].filter(Boolean).join(', '));
    if (data.committed) set({ turns: [...state.turns, turnOf(running, data)] });
    set({ running: null });
  }
  memory.apply(event, data);
}

/** The turn as its events tell it. @param {import('./store.js').Running} running @param {any} done @returns {import('./store.js').Turn} */
function turnOf(running, done) {
  const now = new Date().toISOString();
  const { turn_id: id, content: answer, finish_reason, usage, timings, cache } = done;
  return {
    id, number: (state.turns.at(-1)?.number ?? 0) + 1, status: 'done', question: running.question, answer, finish_reason,
    sources: running.sources, usage, timings, cache, problem: null, created_at: now, finished_at: now,
  };
}

/** The turn is over: what the server has of it is the truth, unless the next one has begun.
 * @param {string} id @param {boolean} ended @param {AbortController} control */
async function settle(id, ended, control) {
  const latest = () => following === control && state.session?.id === id;
  if (!ended) {
    const turns = await turnsOf(id);
    if (latest()) set({ turns: turns.filter(finished), running: null });
  }
  const [session] = await Promise.all([call(`v1/sessions/${id}`), memory.load(id, latest)]);
  set({ ...(state.session?.id === id && { session }), sessions: state.sessions.map((other) => (other.id === id ? session : other)) });
}

/** Stop the answer that is being written; what is there of it stays. */
export async function stop() {
  if (!state.running) return;
  try {
    await call(`v1/sessions/${state.running.session}/cancel`, { method: 'POST' });
  } catch (error) {
    set({ problem: asProblem(error) });
  }
}

/** Ask again in a copy of the session that ends before this turn; this one stays as it is.
 * @param {import('./store.js').Turn} turn @param {string} question */
export async function branch(turn, question) {
  const session = state.session;
  if (!session) return;
  try {
    const fork = await call(`v1/sessions/${session.id}/fork`, { json: { before_turn: turn.id } });
    setAsking(fork.id, asking(session.id));
    const before = state.turns.filter((other) => other.number < turn.number);
    set({ session: fork, sessions: [fork, ...state.sessions], turns: before, blocks: [], moment: null });
    go({ view: 'chat', session: fork.id, panel: state.route.panel });
    toast('Asked in a copy that ends before this question', { label: 'Back', press: () => go({ view: 'chat', session: session.id, turn: turn.id }) });
    await memory.load(fork.id);
    await run(fork.id, question, null);
  } catch (error) {
    set({ problem: asProblem(error) });
  }
}

/** Show what the model saw when a turn ended; null is now. @param {string | undefined} turn */
export async function look(turn) {
  const session = state.route.session;
  if (!turn || !session) {
    if (state.moment) set({ moment: null });
    return;
  }
  try {
    const blocks = await all(`v1/sessions/${session}/cache`, { turn });
    if (state.route.moment === turn) set({ moment: { turn, blocks } });
  } catch (error) {
    set({ moment: null, problem: asProblem(error) });
  }
}

// Sessions

/** @param {boolean} [more] the page after those that are there */
export async function list(more) {
  const wanted = state.sessionQuery;
  const page = await call(`v1/sessions${query({ query: wanted, limit: 50, cursor: more ? state.sessionsCursor : null })}`);
  if (wanted === state.sessionQuery) set({ sessions: more ? [...state.sessions, ...page.items] : page.items, sessionsCursor: page.next_cursor });
}

/** @param {string} id @param {string} title */
export async function rename(id, title) {
  const session = await call(`v1/sessions/${id}`, { method: 'PATCH', json: { title } });
  set({ sessions: state.sessions.map((other) => (other.id === id ? session : other)), ...(state.session?.id === id && { session }) });
}

/** @param {import('./store.js').Session} session */
export async function fork(session) {
  const copy = await call(`v1/sessions/${session.id}/fork`, { json: {} });
  setAsking(copy.id, asking(session.id));
  set({ sessions: [copy, ...state.sessions] });
  go({ view: 'chat', session: copy.id });
}

/** @param {string} id */
export async function remove(id) {
  await call(`v1/sessions/${id}`, { method: 'DELETE' });
  for (const what of ['asking', 'draft']) kept.set(`${what}:${id}`, null);
  set({ sessions: state.sessions.filter((session) => session.id !== id) });
  if (state.route.session === id) go({ view: 'chat' });
}
