// The map of the model's memory: the bar whose width is the budget, the shelf under it, the card of a block.

import { byId, count, each, h, iconButton, plural, put } from './dom.js';
import { KINDS, resident, shown, tokensOf } from './memory.js';
import { also } from './route.js';
import { on, state } from './store.js';
import { arrival, nameOf, standing, textOf, why } from './why.js';

/** @typedef {import('./store.js').Block} Block */

const STATES = /** @type {Record<string, string>} */ ({ resident: 'in memory', coming: 'being read', offloaded: 'on the shelf', dropped: 'gone' });
/** Blocks on the shelf under the bar, newest first; the panel has all. */
const SHELF = 60;

const bar = h('ol', { class: 'bar', id: 'budget-bar' });
const free = h('span', { class: 'bar-free', 'aria-hidden': 'true' });
const shelf = h('ol', { class: 'shelf' });
const note = h('div', { class: 'bar-note' });

export function start() {
  byId('bar').append(note, h('div', { class: 'bar-line' }, bar, free), shelf);
  on(['blocks', 'moment', 'session', 'turns', 'route', 'running'], draw);
  for (const list of [bar, shelf]) list.addEventListener('keydown', walk);
  const scroller = byId('main');
  scroller.addEventListener('scroll', hide, true);
}

function draw() {
  const { session, moment } = state;
  byId('bar').hidden = !session;
  if (!session) return;
  const blocks = shown();
  const used = tokensOf(blocks);
  const budget = session.budget_tokens;
  const turn = moment && state.turns.find(({ id }) => id === moment.turn);
  note.replaceChildren(
    h('span', null, h('b', null, count(used)), ` of ${count(budget)} tokens in view`),
    moment
      ? h('span', { class: 'moment-note' }, `as it was after turn ${turn?.number ?? '?'}`, ' ', h('button', { type: 'button', class: 'text-button', on: { click: () => also({ moment: undefined }) } }, 'Back to now'))
      : h('span', { class: 'muted' }, plural(blocks.length, 'block')),
  );
  bar.classList.toggle('past', Boolean(moment));
  bar.setAttribute('aria-label', `What the model sees${moment ? `, after turn ${turn?.number}` : ''}: ${plural(blocks.length, 'block')}, ${count(used)} of ${count(budget)} tokens`);
  each(bar, blocks, ({ id }) => id, create, (element, block) => update(element, block, budget, used));
  roving(bar);
  const away = moment ? [] : state.blocks.filter((block) => block.state === 'offloaded' || block.state === 'dropped').sort((a, b) => (b.evicted_at ?? '').localeCompare(a.evicted_at ?? ''));
  shelf.setAttribute('aria-label', `What left: ${plural(away.length, 'block')}`);
  each(shelf, away.slice(0, SHELF), ({ id }) => id, create, (element, block) => update(element, block, budget, budget));
  roving(shelf);
}

/** @param {Block} block */
function create(block) {
  const button = h('button', { type: 'button' }, h('span', { class: 'letter', 'aria-hidden': 'true' }, KINDS[block.kind]?.letter ?? '?'));
  const item = h('li', null, button);
  button.addEventListener('click', () => also({ block: item.block.id, panel: 'memory' }));
  for (const event of ['mouseenter', 'focus']) button.addEventListener(event, () => show(button, item.block));
  for (const event of ['mouseleave', 'blur']) button.addEventListener(event, hide);
  return item;
}

/** @param {any} item @param {Block} block @param {number} budget @param {number} used */
function update(item, block, budget, used) {
  item.block = block;
  item.className = `block kind-${block.kind} is-${block.state}`;
  // A pruned answer may pass the budget by the tokens of an event that is not counted yet.
  item.style.flexBasis = `${(100 * block.tokens) / Math.max(budget, used)}%`;
  const button = item.firstChild;
  const label = `${nameOf(block)}, ${plural(block.tokens, 'token')}, ${STATES[block.state]}`;
  if (button.getAttribute('aria-label') !== label) button.setAttribute('aria-label', label);
  button.toggleAttribute('aria-current', state.route.block === block.id);
}

/** One stop for the Tab key; arrows go on. @param {HTMLElement} list */
function roving(list) {
  const buttons = [...list.querySelectorAll('button')];
  const current = buttons.find((button) => button.tabIndex === 0) ?? buttons[0];
  for (const button of buttons) button.tabIndex = button === current ? 0 : -1;
}

/** @param {KeyboardEvent} event */
function walk(event) {
  const list = /** @type {HTMLElement} */ (event.currentTarget);
  const buttons = [...list.querySelectorAll('button')];
  const at = buttons.indexOf(/** @type {any} */ (document.activeElement));
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (to === undefined || !buttons[to]) return;
  event.preventDefault();
  for (const button of buttons) button.tabIndex = -1;
  buttons[to].tabIndex = 0;
  buttons[to].focus();
}

/** @param {HTMLElement} anchor @param {Block} block */
export function show(anchor, block) {
  const card = byId('card');
  const text = textOf(block);
  const place = standing(block, shown());
  const facts = block.state === 'resident' || block.state === 'coming'
    ? [arrival(block), place && `attention ${block.score.toPrecision(2)}, ${place}`]
    : [why(block).sentence];
  put(
    card,
    h('div', { class: 'card-head' }, chip(block.kind), h('b', null, nameOf(block)), h('span', { class: 'muted' }, plural(block.tokens, 'token'))),
    text && h('p', { class: 'card-text' }, text.length > 220 ? `${text.slice(0, 220)}…` : text),
    facts.map((fact) => fact && h('p', { class: 'muted' }, fact)),
  );
  card.hidden = false;
  anchor.setAttribute('aria-describedby', 'card');
  const box = anchor.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left + box.width / 2 - card.offsetWidth / 2, innerWidth - card.offsetWidth - 8));
  const below = box.bottom + card.offsetHeight + 16 < innerHeight;
  card.style.transform = `translate(${Math.round(left)}px, ${Math.round(below ? box.bottom + 8 : box.top - card.offsetHeight - 8)}px)`;
}

export function hide() {
  byId('card').hidden = true;
  document.querySelector('[aria-describedby="card"]')?.removeAttribute('aria-describedby');
}

/** A kind's colour and letter. @param {string} kind */
export const chip = (kind) => h('span', { class: `chip kind-${kind}`, title: KINDS[kind]?.name ?? kind, 'aria-hidden': 'true' }, KINDS[kind]?.letter ?? '?');

/** The list of all blocks, for the panel. @param {Element} parent */
export function drawList(parent) {
  const now = !state.moment;
  const groups = [
    { title: state.moment ? 'In view then' : 'In view, as the model reads it', blocks: shown() },
    { title: 'On the shelf', hint: 'These come back without being read again.', blocks: now ? state.blocks.filter((block) => block.state === 'offloaded') : [] },
    { title: 'Gone', hint: 'These would have to be read again.', blocks: now ? state.blocks.filter((block) => block.state === 'dropped') : [] },
  ].filter(({ blocks }, i) => i === 0 || blocks.length);
  const most = Math.max(1, ...groups.flatMap(({ blocks }) => blocks.map((block) => block.tokens)));
  each(parent, groups, ({ title }) => title, ({ title, hint }) => h('section', null, h('h3', null, title, h('span', { class: 'muted' })), hint && h('p', { class: 'muted hint' }, hint), h('ol', { class: 'block-list' })), (section, { blocks }) => {
    section.querySelector('h3 .muted').textContent = ` ${count(blocks.length)} · ${plural(tokensOf(blocks), 'token')}`;
    each(section.querySelector('ol'), blocks, ({ id }) => id, createRow, (row, block) => {
      row.className = `block-row is-${block.state}`;
      const [button] = row.children;
      button.children[1].textContent = nameOf(block);
      button.children[2].textContent = count(block.tokens);
      button.children[3].firstChild.style.width = `${(100 * block.tokens) / most}%`;
      button.toggleAttribute('aria-current', state.route.block === block.id);
    });
  });
}

/** @param {Block} block */
function createRow(block) {
  return h('li', { class: 'block-row' },
    h('button', { type: 'button', on: { click: () => also({ block: block.id }) } },
      chip(block.kind), h('span', { class: 'grow' }), h('span', { class: 'number' }), h('span', { class: 'meter', 'aria-hidden': 'true' }, h('i', { class: `kind-${block.kind}` }))));
}

/** The slider through the session, turn by turn; its last place is now. */
export function slider() {
  const input = h('input', { type: 'range', min: 0, step: 1, id: 'moment', 'aria-label': 'Go through the session turn by turn' });
  const label = h('output', { class: 'number', htmlFor: 'moment' });
  const back = iconButton('close', 'Back to now', () => also({ moment: undefined }));
  let waiting = 0;
  input.addEventListener('input', () => {
    const turn = state.turns[Number(input.value)];
    clearTimeout(waiting);
    // Dragging passes many turns; the one it rests on is fetched.
    waiting = setTimeout(() => also({ moment: turn?.id }, { replace: true }), 60);
    name(turn);
  });
  /** @param {import('./store.js').Turn | undefined} turn */
  const name = (turn) => {
    label.textContent = turn ? `after turn ${turn.number}` : 'now';
    input.setAttribute('aria-valuetext', label.textContent);
    back.hidden = !turn;
  };
  const element = h('div', { class: 'slider' }, input, label, back);
  return {
    element,
    draw() {
      element.hidden = state.turns.length === 0;
      input.max = String(state.turns.length);
      const at = state.turns.findIndex(({ id }) => id === state.route.moment);
      if (document.activeElement !== input || at < 0) input.value = String(at < 0 ? state.turns.length : at);
      name(state.turns[at]);
    },
  };
}

/** The newest block of a passage, or of a turn's question or answer.
 * @param {{passage_id?: string, turn_id?: string, kind?: string}} what */
export function blockOf({ passage_id, turn_id, kind }) {
  const found = state.blocks.filter((block) => (passage_id ? block.passage_id === passage_id : block.turn_id === turn_id && block.kind === kind));
  return resident(found)[0] ?? found.at(-1);
}
