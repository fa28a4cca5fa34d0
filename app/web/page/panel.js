// The panel beside the conversation: memory and a block's story, a source, the log, the figures.

import { call } from './api.js';
import { byId, h, icon, iconButton, plural, put, seconds, time } from './dom.js';
import * as figures from './figures.js';
import * as log from './log.js';
import { chip, drawList, slider } from './map.js';
import { KINDS } from './memory.js';
import * as reader from './reader.js';
import { also } from './route.js';
import { on, state } from './store.js';
import { audit, leaving, nameOf, textOf, why } from './why.js';

const TABS = /** @type {const} */ ([['memory', 'Memory'], ['source', 'Source'], ['log', 'Log'], ['figures', 'Figures']]);

/** @type {Record<string, any>} */
const parts = {};
/** @type {any[]} */
let tabs = [];

/** @returns {string} */
export const current = () => (state.route.view === 'documents' ? 'source' : state.route.panel ?? 'memory');

export function start() {
  tabs = TABS.map(([name, label]) =>
    h('button', { type: 'button', role: 'tab', id: `tab-${name}`, 'aria-controls': `panel-${name}`, on: { click: () => also({ panel: name }) } }, label));
  const list = h('div', { class: 'tabs', role: 'tablist', 'aria-label': 'About this session' }, tabs);
  list.addEventListener('keydown', (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
  for (const [name] of TABS) parts[name] = h('div', { class: `panel-part part-${name}`, role: 'tabpanel', id: `panel-${name}`, 'aria-labelledby': `tab-${name}`, tabIndex: 0 });
  const back = iconButton('close', 'Close the panel', () => also({ panel: undefined, block: undefined, document: undefined, passage: undefined }));
  back.classList.add('panel-close');
  byId('panel').append(h('div', { class: 'panel-head' }, list, back), ...Object.values(parts));

  // First: a part that is hidden draws nothing.
  on(['route'], draw);
  memoryPart(parts.memory);
  reader.start(parts.source);
  log.start(parts.log);
  figures.start(parts.figures);
}

function draw() {
  const open = current();
  TABS.forEach(([name], i) => {
    tabs[i].setAttribute('aria-selected', String(name === open));
    tabs[i].tabIndex = name === open ? 0 : -1;
    parts[name].hidden = name !== open;
  });
}

/** @param {HTMLElement} part */
function memoryPart(part) {
  const travel = slider();
  const story = h('div', { class: 'story' });
  const list = h('div');
  const teach = h('div', { class: 'teach' },
    h('p', null, 'Everything the model can see has to fit in a budget. Each block here is a passage, a question or an answer: all there, or not there at all.'),
    h('p', { class: 'muted' }, 'Ask something, and watch blocks come and leave.'),
    legend());
  part.append(travel.element, story, list, teach);
  on(['blocks', 'moment', 'turns', 'session', 'route'], () => {
    travel.draw();
    teach.hidden = state.blocks.length > 1;
    list.hidden = Boolean(state.route.block) || !state.session;
    if (!list.hidden) drawList(list);
  });
  on(['route', 'blocks'], () => drawStory(story));
}

const legend = () => h('ul', { class: 'legend', 'aria-label': 'Kinds of blocks' }, Object.entries(KINDS).map(([kind, { name }]) => h('li', null, chip(kind), name)));

/** @type {{id: string, at: number} | null} */
let told = null;

/** @param {HTMLElement} place */
async function drawStory(place) {
  const id = state.route.block;
  place.hidden = !id;
  if (!id || !state.session) {
    told = null;
    return;
  }
  const changes = state.evictions.length + state.recalls.length + state.blocks.length;
  if (told?.id === id && told.at === changes) return;
  const scroll = told?.id !== id;
  told = { id, at: changes };
  let block = state.blocks.find((each) => each.id === id), text = block ? textOf(block) : '', history = /** @type {any[]} */ ([]);
  try {
    const found = await call(`v1/sessions/${state.session.id}/cache/${encodeURIComponent(id)}`);
    block = /** @type {import('./store.js').Block} */ (block ?? found.block);
    text = found.text || text;
    history = found.history;
  } catch {
    // Not written down yet while it is being read: what the events said is enough.
  }
  if (state.route.block !== id) return;
  if (!block) {
    place.replaceChildren(h('p', { class: 'muted' }, 'There is no such block in this session.'));
    return;
  }
  const { kind } = block;
  const { sentence, row } = why(block);
  put(
    place,
    h('button', { type: 'button', class: 'text-button back', on: { click: () => also({ block: undefined }) } }, '‹ All blocks'),
    h('h3', { class: 'story-name' }, chip(block.kind), nameOf(block)),
    h('p', { class: 'muted' }, `${KINDS[block.kind]?.name ?? block.kind} · ${plural(block.tokens, 'token')} · ${{ resident: 'in memory', coming: 'being read', offloaded: 'on the shelf', dropped: 'gone' }[block.state]}`),
    h('p', { class: 'sentence' }, block.state === 'resident' || block.state === 'coming' ? 'In the model’s memory now.' : sentence),
    row && audit(row),
    h('blockquote', { class: 'story-text' }, text.trim()),
    block.document_id && h('button', { type: 'button', class: 'button', on: { click: () => also({ panel: 'source', document: block.document_id ?? undefined, passage: block.passage_id ?? undefined }) } }, icon('file'), 'Open in its document'),
    h('h4', null, 'Its story'),
    h('ol', { class: 'history' }, history.map((episode) => h('li', { class: `history-${episode.what}` }, h('span', null, tell(episode, kind)), time(episode.created_at)))),
  );
  if (scroll) place.scrollIntoView({ block: 'nearest' });
}

/** @param {{what: string, turn: number | null, recall: any, eviction: any}} episode @param {string} kind */
function tell({ what, turn, recall, eviction }, kind) {
  if (eviction) return leaving(eviction);
  const where = turn ? ` in turn ${turn}` : '';
  if (recall) return `Recalled${where} from ${recall.origin} in ${seconds(recall.seconds)}, unread.`;
  return `${what === 'read' && kind === 'answer' ? 'Written' : 'Read'}${where}.`;
}
