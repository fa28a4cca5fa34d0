// A document, opened at a passage: the passage marked, its neighbours around it, and why it was found.

import { asProblem, call, query } from './api.js';
import { copy, count, h, icon, iconButton, plural, put } from './dom.js';
import { render } from './markdown.js';
import { also, link } from './route.js';
import { on, state } from './store.js';
import { blockOf } from './map.js';
import { audit, why } from './why.js';

const LIMIT = 200;

/** @type {HTMLElement} */
let part;
let shown = '';

/** @param {HTMLElement} element */
export function start(element) {
  part = element;
  on(['route', 'turns', 'running'], draw);
}

function sourceOf(/** @type {string | undefined} */ passage) {
  const sources = [...state.turns.flatMap((turn) => turn.sources ?? []), ...(state.running?.sources ?? [])];
  return sources.findLast((source) => source.passage_id === passage);
}

async function draw() {
  const { document: id, passage, view } = state.route;
  const wanted = `${view} ${id} ${passage}`;
  if (wanted === shown) return;
  if (!id) {
    shown = wanted;
    part.replaceChildren(h('div', { class: 'teach' }, h('p', null, 'Open a source under an answer, and its document appears here at that passage.')));
    return;
  }
  shown = wanted;
  part.replaceChildren(h('p', { class: 'muted', role: 'status' }, 'Opening…'));
  try {
    const [document, passages] = await Promise.all([call(`v1/documents/${id}`), until(id, passage)]);
    if (shown !== wanted) return;
    fill(document, passages, passage);
  } catch (error) {
    if (shown !== wanted) return;
    const gone = asProblem(error).status === 404;
    const source = sourceOf(passage);
    put(
      part,
      h('div', { class: 'notice' }, gone ? 'This document has been deleted, or replaced by a newer version. What the answer was drawn from is kept:' : asProblem(error).detail),
      source && [h('h3', null, source.name), marked(source.text, true)],
    );
  }
}

/** A document's passages up to some way past the one wanted. @param {string} id @param {string | undefined} passage */
async function until(id, passage) {
  const items = [];
  let cursor;
  do {
    const page = await call(`v1/documents/${id}/passages${query({ limit: LIMIT, cursor })}`);
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor && passage && items.findIndex((item) => item.id === passage) > items.length - 5);
  return { items, cursor };
}

/** @param {any} document @param {{items: any[], cursor: string | null}} passages @param {string | undefined} passage */
function fill(document, passages, passage) {
  const at = passages.items.findIndex((item) => item.id === passage);
  const source = sourceOf(passage);
  const body = h('div', { class: 'reading' });
  const add = (/** @type {any[]} */ items) => body.append(...items.map((item) => marked(item.text, item.id === passage, item)));
  // Far neighbours are there for the asking: a book of a thousand passages opens at once.
  const from = at < 0 ? 0 : Math.max(0, at - 3);
  const to = at < 0 ? 40 : at + 4;
  if (from > 0) body.append(moreButton(`${plural(from, 'passage')} before`, (button) => button.replaceWith(...passages.items.slice(0, from).map((item) => marked(item.text, false, item)))));
  add(passages.items.slice(from, to));
  const rest = (/** @type {any[]} */ items, /** @type {string | null} */ cursor) => {
    if (!items.length && !cursor) return;
    body.append(moreButton(cursor ? 'More passages' : `${plural(items.length, 'passage')} after`, async (button) => {
      button.remove();
      add(items.slice(0, LIMIT));
      if (items.length > LIMIT || !cursor) return rest(items.slice(LIMIT), cursor);
      const page = await call(`v1/documents/${document.id}/passages${query({ limit: LIMIT, cursor })}`);
      rest(page.items, page.next_cursor);
    }));
  };
  rest(passages.items.slice(to), passages.cursor);
  put(
    part,
    h('header', { class: 'reader-head' },
      h('h3', null, document.name),
      iconButton('link', 'Copy a link to this passage', () => copy(link({ ...state.route, panel: 'source' }), 'Link')),
      h('p', { class: 'muted' }, `${plural(document.passages, 'passage')} · ${plural(document.tokens, 'token')} · version ${document.version}`)),
    at < 0 && passage && h('div', { class: 'notice' }, 'The passage is not in this version of the document.'),
    source && found(source),
    body,
  );
  const mark = /** @type {HTMLElement | null} */ (body.querySelector('.passage.marked'));
  if (mark) requestAnimationFrame(() => mark.scrollIntoView({ block: 'center' }));
}

/** @param {string} label @param {(button: HTMLElement) => void} press */
const moreButton = (label, press) => h('button', { type: 'button', class: 'text-button more', on: { click: (/** @type {any} */ event) => press(event.currentTarget) } }, label);

/** @param {string} text @param {boolean} mark @param {any} [item] */
function marked(text, mark, item) {
  const body = h('div', { class: 'prose' });
  if (item?.kind === 'code' && !text.trim().startsWith('```')) body.append(h('pre', { tabIndex: 0 }, h('code', null, text.replace(/^\n+|\s+$/g, ''))));
  else render(body, text);
  return h('div', { class: `passage${mark ? ' marked' : ''}` }, mark && h('span', { class: 'hidden' }, 'The cited passage: '), body);
}

/** Why it was found, and whether the model still has it. @param {import('./store.js').Source} source */
function found(source) {
  const { bm25, vector } = source.ranks ?? {};
  const rank = (/** @type {number | null | undefined} */ value) => (value ? `no. ${count(value)}` : 'not found');
  const block = blockOf({ passage_id: source.passage_id });
  const answer = h('div', { class: 'why-answer', hidden: true, role: 'status' });
  return h('div', { class: 'found' },
    h('dl', { class: 'facts' },
      h('div', null, h('dt', null, 'By its words'), h('dd', null, rank(bm25))),
      h('div', null, h('dt', null, 'By its meaning'), h('dd', null, rank(vector))),
      h('div', null, h('dt', null, 'Score'), h('dd', null, source.score.toFixed(2)))),
    h('button', { type: 'button', class: 'text-button', on: { click: () => {
      const { sentence, row } = why(block);
      put(answer, h('p', { class: 'sentence' }, sentence), row && audit(row));
      answer.hidden = false;
    } } }, icon('question'), 'Why did it forget this?'),
    block && h('button', { type: 'button', class: 'text-button', on: { click: () => also({ panel: 'memory', block: block.id }) } }, icon('memory'), 'Its story'),
    answer);
}

