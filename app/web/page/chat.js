// The conversation: turns, the one being written, the composer. A turn is drawn when it comes near what is seen.

import { ask, asking, branch, setAsking, stop } from './conversation.js';
import { byId, copy, count, each, h, icon, iconButton, menu, plural, put, seconds, time } from './dom.js';
import { blockOf } from './map.js';
import { render } from './markdown.js';
import { also, link } from './route.js';
import { openMenu } from './sessions.js';
import { kept, on, set, state } from './store.js';
import { audit, nameOf, why } from './why.js';

/** @typedef {import('./store.js').Turn} Turn */
/** @typedef {import('./store.js').Source} Source */

/** How near the bottom still follows what is written. */
const NEAR = 80;

/** @type {IntersectionObserver} */
let near;
/** @type {any} */
let live = null;
/** @type {HTMLTextAreaElement} */
let box;
let follows = true;

export function start() {
  const scroll = byId('scroll');
  near = new IntersectionObserver(
    (entries) => {
      entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => (near.unobserve(target), draw(target)));
      if (follows) toBottom(false);
    },
    { root: scroll, rootMargin: '1500px 0px' },
  );
  const toEnd = byId('to-end');
  toEnd.append(icon('down'));
  toEnd.addEventListener('click', () => toBottom(true));
  scroll.addEventListener('scroll', () => {
    follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;
    toEnd.hidden = follows;
  }, { passive: true });
  compose();
  on(['session', 'route', 'turns'], drawTop);
  on(['turns', 'running', 'session', 'loading', 'documents', 'problem'], drawTurns);
  on(['route', 'turns', 'moment'], mark);
  on(['blocks', 'turns'], drawMemoryStates);
  on(['running', 'session', 'problem'], drawComposer);
}

function toBottom(/** @type {boolean} */ smooth) {
  const scroll = byId('scroll');
  const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
  scroll.scrollTo({ top: scroll.scrollHeight, behavior: smooth && !still ? 'smooth' : 'instant' });
}

function drawTop() {
  const { session } = state;
  const title = session ? session.title || 'Untitled' : 'New session';
  document.title = state.route.view === 'documents' ? 'Documents – Keepwhole' : `${title} – Keepwhole`;
  const more = iconButton('more', 'Session actions', (event) => session && openMenu(event.currentTarget, session));
  const panel = iconButton('memory', 'Show or hide what the model sees', () => document.body.classList.toggle('panel-hidden'), { class: 'quiet-button panel-toggle' });
  put(
    byId('top'),
    iconButton('menu', 'Sessions', () => document.body.classList.toggle('side-open'), { class: 'quiet-button side-toggle' }),
    h('h1', null, title),
    session?.forked_from && h('a', { class: 'forked', href: `#/sessions/${session.forked_from}`, title: 'A copy; open where it came from' }, icon('fork'), h('span', { class: 'hidden' }, 'Copied from another session')),
    h('span', { class: 'grow' }),
    session && more,
    panel);
}

// Turns

function drawTurns() {
  const place = byId('turns');
  const { turns, running, session } = state;
  const empty = !session && !running && !state.loading;
  place.classList.toggle('is-empty', empty);
  const items = /** @type {any[]} */ ([...turns]);
  if (empty) items.push({ id: `empty ${state.documents.length > 0}`, empty: true });
  if (state.problem && !running) items.push({ id: 'problem', problem: state.problem });
  if (running) items.push({ id: running.turn_id || 'running', running });
  const wasWriting = Boolean(live);
  if (running && live && live.isConnected) live.key = running.turn_id || 'running';
  if (!running && live) {
    // It becomes the turn that it was, in its place.
    const turn = turns.at(-1);
    if (turn && live.key === turn.id) finish(live, turn);
    live = null;
  }
  const starts = running && !wasWriting;
  each(place, items, ({ id }) => id, createItem, (element, item) => {
    if (item.running) drawRunning(element, item.running);
    else if (item.problem) fillProblem(element, item.problem);
  });
  if (starts) (follows = true), toBottom(false);
  else if ((running || wasWriting) && follows) toBottom(false);
  else if (place.dataset.session !== (session?.id ?? '') && turns.length) {
    follows = true;
    if (!state.route.turn) toBottom(false);
  }
  if (turns.length || !session) place.dataset.session = session?.id ?? '';
}

/** @param {any} item */
function createItem(item) {
  if (item.empty) return emptyState();
  if (item.problem) return h('div', { class: 'notice problem', role: 'alert' });
  const element = h('article', { class: 'turn' });
  if (item.running) {
    live = element;
    return element;
  }
  element.turn = item;
  element.id = item.id;
  // Its text, so that it can be found and has about its height; the rest comes when it is near.
  element.append(h('div', { class: 'question' }, item.question), h('div', { class: 'answer plain' }, item.answer ?? ''));
  near.observe(element);
  return element;
}

/** @param {any} element */
function draw(element) {
  const turn = /** @type {Turn} */ (element.turn);
  const answer = h('div', { class: 'answer prose' });
  render(answer, turn.answer ?? '');
  element.replaceChildren(question(turn.question, turn), meta(turn), answer, footer(turn));
  drawMemoryState(element);
}

/** @param {any} element @param {Turn} turn */
function finish(element, turn) {
  element.turn = turn;
  element.id = turn.id;
  element.key = turn.id;
  element.classList.remove('is-running');
  const answer = element.querySelector('.answer');
  render(answer, turn.answer ?? '');
  element.replaceChildren(question(turn.question, turn), meta(turn), answer, footer(turn));
}

/** @param {string} text @param {Turn} [turn] */
function question(text, turn) {
  const asked = h('div', { class: 'question' }, h('h2', { class: 'hidden' }, 'Question'), h('p', { class: 'question-text' }, text));
  if (turn) {
    asked.append(h('div', { class: 'question-actions' },
      iconButton('edit', 'Edit and ask in a copy', () => edit(asked, turn)),
      iconButton('copy', 'Copy question', () => copy(text, 'Question')),
      h('span', { class: 'memory-state', data: { kind: 'question' } })));
  }
  return asked;
}

/** The line between question and answer: it is there from the start, so that nothing moves when it fills.
 * @param {Turn} turn */
function meta(turn) {
  const used = (turn.sources ?? []).filter((source) => source.state !== 'skipped').length;
  return h('div', { class: 'meta' },
    turn.status === 'failed' ? h('span', null, 'Failed') : h('span', null, used ? `From ${plural(used, 'source')}` : 'From no source'),
    turn.timings?.first_token !== null && turn.timings && h('span', { title: `Searching ${seconds(turn.timings.retrieval)}, waiting ${seconds(turn.timings.queued)}, reading ${seconds(turn.timings.prefill)}, writing ${seconds(turn.timings.decode)}` }, `first token ${seconds(turn.timings.first_token)}`),
    turn.usage && h('span', { title: `${count(turn.usage.prompt_tokens)} in view when it began, of which ${count(turn.usage.cached_tokens)} were there or came back unread` }, `${count(turn.usage.prefilled_tokens)} tokens read`),
    turn.finished_at && time(turn.finished_at));
}

/** @param {Turn} turn */
function footer(turn) {
  const sources = turn.sources ?? [];
  const answered = h('div', { class: 'why-answer', hidden: true, role: 'status' });
  const ended = { length: 'Ended at its length limit', cancelled: 'Stopped', repetition: 'Ended, since it only repeated itself' }[turn.finish_reason ?? ''];
  const problem = turn.status === 'failed' && turn.problem ? h('div', { class: 'notice' }, turn.problem.detail ?? 'The turn failed.') : null;
  return h('footer', { class: 'turn-footer' },
    problem,
    ended && h('p', { class: 'muted ended' }, ended),
    sources.length > 0 && h('ol', { class: 'sources', 'aria-label': 'Sources' }, sources.map((source, i) => h('li', null, sourceButton(source, i)))),
    h('div', { class: 'actions' },
      h('span', { class: 'memory-state', data: { kind: 'answer' } }),
      iconButton('copy', 'Copy answer with its sources', () => copy(asMarkdown(turn), 'Answer')),
      iconButton('retry', 'Ask again in a copy', () => branch(turn, turn.question)),
      iconButton('clock', 'What did the model see then?', () => also({ moment: turn.id, panel: 'memory', block: undefined })),
      iconButton('more', 'More', (event) => menu(event.currentTarget, [
        { label: 'Why did it forget this?', press: () => explain(answered, turn) },
        { label: 'Link to this answer', press: () => copy(link({ view: 'chat', session: state.session?.id, turn: turn.id }), 'Link') },
        { label: 'Link to this moment', press: () => copy(link({ view: 'chat', session: state.session?.id, moment: turn.id }), 'Link') },
        { label: 'What left in this turn', press: () => also({ panel: 'log', query: turn.id }) },
      ]))),
    answered);
}

/** @param {HTMLElement} place @param {Turn} turn */
function explain(place, turn) {
  const { sentence, row } = why(blockOf({ turn_id: turn.id, kind: 'answer' }));
  put(place, h('p', { class: 'sentence' }, sentence), row && audit(row));
  place.hidden = false;
}

const SOURCE_STATES = { resident: 'was in view', recalled: 'recalled', streamed: 'read', skipped: 'no room' };

/** @param {Source} source @param {number} i */
function sourceButton(source, i) {
  const name = nameOf({ ...source, turn: 0 });
  return h('button', {
    type: 'button', class: `source is-${source.state}`, title: `${source.text.trim().slice(0, 300)}`,
    'aria-label': `Source ${i + 1}: ${name}, ${SOURCE_STATES[source.state]}`,
    on: { click: () => also({ panel: 'source', document: source.document_id, passage: source.passage_id }) },
  }, h('span', { class: 'source-number' }, i + 1), h('span', { class: 'source-name' }, name), h('span', { class: 'muted source-state' }, SOURCE_STATES[source.state]));
}

/** @param {Turn} turn */
function asMarkdown(turn) {
  const sources = (turn.sources ?? []).filter((source) => source.state !== 'skipped');
  const list = sources.map((source, i) => `${i + 1}. ${nameOf({ ...source, turn: 0 })}`).join('\n');
  return list ? `${turn.answer}\n\nSources:\n\n${list}\n` : `${turn.answer}\n`;
}

/** @param {any} element @param {import('./store.js').Running} running */
function drawRunning(element, running) {
  live = element;
  if (!element.classList.contains('is-running')) {
    element.classList.add('is-running');
    element.replaceChildren(question(running.question), h('div', { class: 'meta' }), h('div', { class: 'answer prose' }));
  }
  element.querySelector('.meta').textContent = progress(running);
  const answer = element.querySelector('.answer');
  render(answer, running.answer);
  answer.classList.toggle('is-writing', running.phase === 'answering');
}

/** @param {import('./store.js').Running} running */
function progress({ phase, prefill, sources, recalled, evicted }) {
  if (phase === 'resuming') return 'Connection lost. The answer goes on at the server; resuming…';
  if (phase === 'sending') return 'Searching…';
  const parts = [];
  const used = sources.filter((source) => source.state !== 'skipped').length;
  if (used) parts.push(`From ${plural(used, 'source')}`);
  if (phase === 'reading') parts.push(prefill ? `reading ${count(prefill.done)} of ${count(prefill.total)} tokens` : 'reading');
  if (recalled) parts.push(`${count(recalled)} recalled`);
  if (evicted) parts.push(`${count(evicted)} evicted`);
  return parts.join(' · ');
}

/** @param {HTMLElement} element @param {any} problem */
function fillProblem(element, problem) {
  element.replaceChildren(h('strong', null, problem.field ? `${problem.field} ` : ''), h('span', null, problem.field && problem.detail.startsWith(`${problem.field}: `) ? problem.detail.slice(problem.field.length + 2) : problem.detail),
    iconButton('close', 'Dismiss', () => set({ problem: null })));
}

/** Edit a question where it stands. @param {HTMLElement} place @param {Turn} turn */
function edit(place, turn) {
  const input = h('textarea', { class: 'edit-box', value: turn.question, rows: 3, 'aria-label': 'Edit the question' });
  const close = () => form.replaceWith(place);
  const form = h('form', { class: 'question editing', on: {
    submit: (/** @type {Event} */ event) => (event.preventDefault(), close(), branch(turn, input.value)),
    keydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key === 'Escape') (event.stopPropagation(), close());
      else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) (event.preventDefault(), form.requestSubmit());
    },
  } }, input, h('div', { class: 'edit-actions' },
    h('span', { class: 'muted' }, 'Asked in a copy; this session stays.'),
    h('button', { type: 'button', class: 'button', on: { click: close } }, 'Cancel'),
    h('button', { type: 'submit', class: 'button primary' }, 'Ask')));
  place.replaceWith(form);
  input.focus();
}

// What the model still has of each message

function drawMemoryStates() {
  for (const element of byId('turns').children) drawMemoryState(element);
}

/** @param {any} element */
function drawMemoryState(element) {
  if (!element.turn) return;
  for (const place of element.querySelectorAll('.memory-state')) {
    const block = blockOf({ turn_id: element.turn.id, kind: place.dataset.kind });
    // What is in view is as expected; only what is not is said.
    const away = block && block.state !== 'resident' ? block : null;
    if (place.dataset.state === (away?.state ?? '')) continue;
    place.dataset.state = away?.state ?? '';
    put(place, away && h('button', { type: 'button', class: 'text-button', on: { click: () => also({ panel: 'memory', block: away.id }) } }, away.state === 'offloaded' ? 'on the shelf' : 'forgotten'));
  }
}

/** The message that the address names, and the answer whose moment is looked at. */
function mark() {
  const { turn, moment } = state.route;
  for (const element of byId('turns').children) element.classList.toggle('is-moment', Boolean(moment) && element.id === moment);
  if (!turn || mark.at === `${state.route.session} ${turn}`) return;
  const target = byId(turn);
  if (!target) return;
  mark.at = `${state.route.session} ${turn}`;
  target.classList.add('is-target');
  target.scrollIntoView({ block: 'start' });
}
mark.at = '';

function emptyState() {
  const none = state.documents.length === 0;
  const examples = none ? [] : ['What are these documents about?'];
  return h('div', { class: 'welcome' },
    h('h2', null, none ? 'Start with a document' : 'What would you like to know?'),
    none
      ? h('p', { class: 'muted' }, 'Answers are drawn from what you add: Markdown, text, HTML, PDF, Word, tables, code. Drop files or a folder anywhere on this page.')
      : h('p', { class: 'muted' }, `Answers are drawn from your ${plural(state.documents.length, 'document')}. The bar above the conversation will show what the model can see, and what it had to let go.`),
    h('p', null,
      none ? h('a', { class: 'button primary', href: '#/documents' }, 'Add documents') : examples.map((text) => h('button', { type: 'button', class: 'button', on: { click: () => (box.value = text, box.focus(), box.dispatchEvent(new Event('input'))) } }, text))));
}

// The composer

const NEW = { budget_tokens: null, system_prompt: '' };

function compose() {
  box = h('textarea', { id: 'ask', rows: 1, placeholder: 'Ask about your documents', 'aria-label': 'Ask', 'aria-keyshortcuts': '/', enterKeyHint: 'send' });
  const send = h('button', { type: 'submit', class: 'send', 'aria-label': 'Ask', title: 'Ask (Enter)' }, icon('send'));
  const halt = h('button', { type: 'button', class: 'send halt', 'aria-label': 'Stop', title: 'Stop (Esc)', hidden: true, on: { click: stop } }, icon('stop'));
  const open = h('button', { type: 'button', class: 'quiet-button', 'aria-label': 'Settings of this session', title: 'Settings of this session', 'aria-expanded': 'false', 'aria-controls': 'settings' }, icon('settings'));
  const settings = h('div', { class: 'settings', id: 'settings', hidden: true });
  const summary = h('span', { class: 'muted composer-note', id: 'composer-note' });
  const form = h('form', { on: { submit: send_ } }, settings, h('div', { class: 'ask-box' }, box, h('div', { class: 'ask-bar' }, open, summary, h('span', { class: 'grow' }), halt, send)));
  byId('composer').append(form);
  open.addEventListener('click', () => {
    settings.hidden = !settings.hidden;
    open.setAttribute('aria-expanded', String(!settings.hidden));
    if (!settings.hidden) drawSettings(settings);
  });
  box.addEventListener('input', () => {
    grow();
    kept.set(`draft:${draftOf()}`, box.value);
  });
  box.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  on(['route'], () => {
    if (box.dataset.draft === draftOf()) return;
    box.dataset.draft = draftOf();
    box.value = kept.get(`draft:${draftOf()}`) ?? '';
    grow();
    if (!settings.hidden) drawSettings(settings);
    summarise();
  });
}

const draftOf = () => state.route.session ?? 'new';

function grow() {
  box.style.height = 'auto';
  box.style.height = `${Math.min(box.scrollHeight, innerHeight * 0.4)}px`;
}

async function send_(/** @type {Event} */ event) {
  event.preventDefault();
  const content = box.value;
  if (!content.trim() || state.running) return;
  const draft = draftOf();
  box.value = '';
  grow();
  const given = Object.fromEntries(Object.entries(kept.get('new') ?? NEW).filter(([, value]) => value));
  const asked = ask(content, state.session ? undefined : given);
  kept.set(`draft:${draft}`, null);
  // What was refused is still there to be changed.
  if (!(await asked) && !box.value) {
    box.value = content;
    kept.set(`draft:${draftOf()}`, content);
    grow();
  }
}

function drawComposer() {
  const writing = Boolean(state.running);
  const [halt, send] = byId('composer').querySelectorAll('.send');
  const focused = document.activeElement === halt || document.activeElement === send;
  halt.hidden = !writing;
  send.hidden = writing;
  if (focused) box.focus();
  box.setAttribute('aria-invalid', String(state.problem?.field === 'content'));
  summarise();
}

function summarise() {
  const chosen = asking(state.route.session);
  const parts = [];
  if (chosen.top_k === 0) parts.push('without documents');
  else if (chosen.top_k !== 4) parts.push(plural(chosen.top_k, 'source'));
  if (chosen.path) parts.push(chosen.path);
  if (chosen.kind) parts.push(`${chosen.kind} only`);
  if (chosen.document_id) parts.push(state.documents.find(({ id }) => id === chosen.document_id)?.name ?? 'one document');
  byId('composer-note').textContent = parts.join(' · ');
}

/** @param {HTMLElement} place */
function drawSettings(place) {
  const id = state.route.session;
  const chosen = asking(id);
  const save = (/** @type {Record<string, any>} */ patch) => (setAsking(id, { ...asking(id), ...patch }), summarise());
  const number = (/** @type {string} */ name, /** @type {string} */ label, /** @type {any} */ value, /** @type {(value: number | null) => void} */ change, /** @type {Record<string, any>} */ limits) =>
    field(label, h('input', { type: 'number', name, value: value ?? '', ...limits, on: { change: (/** @type {any} */ event) => change(event.target.value === '' ? null : Number(event.target.value)) } }));
  const fields = [
    number('top_k', 'Sources per answer', chosen.top_k, (value) => save({ top_k: value ?? 4 }), { min: 0, max: 20 }),
    number('max_tokens', 'Longest answer, tokens', chosen.max_tokens, (value) => save({ max_tokens: value }), { min: 1, placeholder: 'what fits' }),
    number('temperature', 'Temperature', chosen.temperature, (value) => save({ temperature: value }), { min: 0, max: 2, step: 0.1, placeholder: 'default' }),
    field('Only documents under', h('input', { name: 'path', value: chosen.path, placeholder: 'docs/*.md', on: { change: (/** @type {any} */ event) => save({ path: event.target.value.trim() }) } })),
    field('Only the document', h('select', { name: 'document_id', on: { change: (/** @type {any} */ event) => save({ document_id: event.target.value }) } },
      h('option', { value: '' }, 'any'), state.documents.map((document) => h('option', { value: document.id, selected: document.id === chosen.document_id }, document.name)))),
    field('Only passages of', h('select', { name: 'kind', on: { change: (/** @type {any} */ event) => save({ kind: event.target.value }) } },
      ['', 'prose', 'code', 'table', 'list'].map((kind) => h('option', { value: kind, selected: kind === chosen.kind }, kind || 'any kind')))),
  ];
  const wanted = { ...NEW, ...kept.get('new') };
  const fresh = (/** @type {Record<string, any>} */ patch) => kept.set('new', Object.assign(wanted, patch));
  const session = state.session;
  const own = session
    ? h('dl', { class: 'facts own' }, h('div', null, h('dt', null, 'Budget'), h('dd', null, `${count(session.budget_tokens)} tokens`)), h('div', null, h('dt', null, 'Model'), h('dd', null, session.model)), h('div', { class: 'wide' }, h('dt', null, 'Prompt'), h('dd', null, session.system_prompt || 'none')))
    : h('div', { class: 'fields' },
        number('budget_tokens', 'Budget, tokens', wanted.budget_tokens, (value) => fresh({ budget_tokens: value }), { min: 1, placeholder: 'default' }),
        field('System prompt', h('textarea', { name: 'system_prompt', rows: 2, value: wanted.system_prompt, placeholder: 'default', on: { change: (/** @type {any} */ event) => fresh({ system_prompt: event.target.value }) } }), 'wide'));
  place.replaceChildren(h('div', { class: 'fields' }, fields), own);
}

/** @param {string} label @param {any} input @param {string} [extra] */
const field = (label, input, extra) => h('label', { class: `field ${extra ?? ''}` }, h('span', null, label), input);

export const focusAsk = () => box.focus();
