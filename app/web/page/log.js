// The eviction log: what left, when and why; filtered, linked to each block's story, and exported as it stands.

import { call, query, request } from './api.js';
import { count, each, h, plural, time } from './dom.js';
import { chip } from './map.js';
import { KINDS } from './memory.js';
import { also } from './route.js';
import { attempt } from './sessions.js';
import { on, state } from './store.js';
import { REASON_NAMES, nameOf, numberOf, ordinal } from './why.js';

const LIMIT = 200;

const filters = { kind: '', reason: '', everywhere: false };
/** Rows of all sessions; those of this one come with it. @type {{items: any[], cursor: string | null}} */
let elsewhere = { items: [], cursor: null };

/** @param {HTMLElement} part */
export function start(part) {
  const choose = (/** @type {'kind' | 'reason'} */ name, /** @type {string} */ label, /** @type {[string, string][]} */ options) =>
    h('select', { 'aria-label': label, on: { change: (/** @type {any} */ event) => ((filters[name] = event.target.value), refresh()) } }, h('option', { value: '' }, label), options.map(([value, text]) => h('option', { value }, text)));
  const everywhere = h('input', { type: 'checkbox', on: { change: () => ((filters.everywhere = everywhere.checked), refresh()) } });
  const turn = h('button', { type: 'button', class: 'text-button', on: { click: () => also({ query: undefined }) } });
  const summary = h('p', { class: 'muted', role: 'status' });
  const body = h('tbody');
  const more = h('button', { type: 'button', class: 'text-button more', on: { click: () => attempt(fetchAll(true)) } }, 'More rows');
  const exporting = (/** @type {string} */ format) => h('button', { type: 'button', class: 'button', on: { click: () => attempt(save(format)) } }, format.toUpperCase());
  part.append(
    h('div', { class: 'filters' },
      choose('reason', 'Every reason', Object.entries(REASON_NAMES)),
      choose('kind', 'Every kind', Object.entries(KINDS).map(([kind, { name }]) => [kind, name])),
      h('label', { class: 'check' }, everywhere, 'All sessions'), turn),
    h('div', { class: 'row-head' }, summary, h('span', { class: 'grow' }), h('span', { class: 'muted' }, 'Export'), exporting('csv'), exporting('json')),
    h('div', { class: 'table-scroll', tabIndex: 0, role: 'region', 'aria-label': 'Evictions' }, h('table', { class: 'log-table' },
      h('thead', null, h('tr', null, ['Turn', 'Block', 'Why', 'Tokens'].map((name) => h('th', { scope: 'col', class: /T/.test(name) ? 'number' : '' }, name)))), body)),
    more);

  function draw() {
    if (part.hidden) return;
    const rows = matching();
    const only = state.route.query && numberOf(state.route.query);
    turn.hidden = !only;
    turn.textContent = `Turn ${only} only ×`;
    more.hidden = !filters.everywhere || !elsewhere.cursor;
    summary.textContent = rows.length ? `${plural(rows.length, 'block')} evicted, ${plural(rows.reduce((sum, row) => sum + row.tokens, 0), 'token')}` : 'Nothing has left. When the budget is full, what leaves is written down here.';
    each(body, rows, ({ id }) => id, line);
  }
  const refresh = () => (filters.everywhere ? attempt(fetchAll(false).then(draw)) : draw());
  on(['evictions', 'route', 'turns', 'blocks'], draw);
}

const matching = () =>
  (filters.everywhere ? elsewhere.items : [...state.evictions].reverse()).filter(
    (row) => (!filters.kind || row.kind === filters.kind) && (!filters.reason || row.reason === filters.reason) && (!state.route.query || filters.everywhere || row.turn_id === state.route.query));

/** The conditions as the API has them. */
const conditions = () => ({
  session_id: filters.everywhere ? undefined : state.session?.id,
  turn_id: filters.everywhere ? undefined : state.route.query,
  kind: filters.kind, reason: filters.reason,
});

/** @param {boolean} more */
async function fetchAll(more) {
  const page = await call(`v1/audit/evictions${query({ ...conditions(), limit: LIMIT, cursor: more ? elsewhere.cursor : undefined })}`);
  elsewhere = { items: more ? [...elsewhere.items, ...page.items] : page.items, cursor: page.next_cursor };
}

/** @param {any} row */
function line(row) {
  const block = state.blocks.find(({ id }) => id === row.block_id);
  const turn = numberOf(row.turn_id);
  const name = block ? nameOf(block) : KINDS[row.kind]?.name ?? row.kind;
  const of = row.candidates ? ` of ${count(row.candidates)}` : '';
  return h('tr', null,
    h('td', { class: 'number' }, turn ?? '–'),
    h('td', null,
      h('div', { class: 'log-name' }, chip(row.kind), block ? h('button', { type: 'button', class: 'text-button', title: name, on: { click: () => also({ panel: 'memory', block: row.block_id }) } }, name) : h('span', null, name)),
      h('div', { class: 'muted log-more', title: `${ordinal(row.rank)}${of} in line to go` }, `${ordinal(row.rank)}${of} · `, time(row.created_at))),
    h('td', null, REASON_NAMES[row.reason] ?? row.reason, h('div', { class: 'muted' }, row.outcome === 'offloaded' ? '→ shelf' : '→ gone')),
    h('td', { class: 'number' }, count(row.tokens)));
}

/** A key goes with the request, which a plain link could not send. @param {string} format */
async function save(format) {
  const response = await request(`v1/audit/evictions${query({ ...conditions(), format })}`);
  const address = URL.createObjectURL(await response.blob());
  h('a', { href: address, download: `evictions.${format}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
