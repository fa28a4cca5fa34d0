// How the session's memory went, turn by turn: small multiples over one axis of turns, ticks where blocks left, a
// value wherever one points, and the same as a table.

import { bytes, count, h, seconds, svg } from './dom.js';
import { also } from './route.js';
import { on, state } from './store.js';

const WIDTH = 340, HEIGHT = 64, PAD = 4;

/** @typedef {{turn: import('./store.js').Turn, left: number}} Point */
/** @typedef {{title: string, value: (point: Point) => number | null | undefined, text: (value: number) => string, most?: () => number, line?: () => number}} Chart */

/** @type {Chart[]} */
const CHARTS = [
  { title: 'Tokens in view', value: ({ turn }) => turn.cache?.resident_tokens, text: count, most: () => state.session?.budget_tokens ?? 0, line: () => state.session?.budget_tokens ?? 0 },
  { title: 'Tokens seen', value: ({ turn }) => turn.cache?.seen_tokens, text: count },
  { title: 'Compression', value: ({ turn }) => turn.cache?.compression_ratio, text: (value) => `${value.toFixed(2)}×` },
  { title: 'K/V in memory', value: ({ turn }) => turn.cache?.kv_bytes, text: bytes },
  { title: 'First token after', value: ({ turn }) => turn.timings?.first_token, text: seconds },
];

/** @param {HTMLElement} part */
export function start(part) {
  const charts = h('div', { class: 'charts' });
  const ticks = h('p', { class: 'muted hint' }, 'Ticks under the line: turns in which blocks left. Click a turn to see what was in view.');
  const table = h('details', { class: 'figure-table' }, h('summary', null, 'As a table'), h('div', { class: 'table-scroll', tabIndex: 0, role: 'region', 'aria-label': 'Figures by turn' }));
  const teach = h('div', { class: 'teach' }, h('p', null, 'After the first answer: how much the model has seen, how much of it is still in view, and what that takes.'));
  part.append(charts, ticks, table, teach);
  on(['turns', 'evictions', 'route', 'session'], () => {
    if (part.hidden) return;
    const points = state.turns.filter((turn) => turn.cache).map((turn) => ({ turn, left: state.evictions.filter((row) => row.turn_id === turn.id).length }));
    teach.hidden = points.length > 0;
    charts.hidden = ticks.hidden = table.hidden = points.length === 0;
    if (!points.length) return;
    charts.replaceChildren(...CHARTS.map((chart) => draw(chart, points, charts)));
    table.lastChild.replaceChildren(asTable(points));
    mark(charts, points.findIndex(({ turn }) => turn.id === state.route.moment), points);
  });
}

/** @param {number} i @param {number} of */
const x = (i, of) => PAD + ((WIDTH - 2 * PAD) * (of === 1 ? 0.5 : i / (of - 1)));

/** @param {Chart} chart @param {Point[]} points @param {HTMLElement} charts */
function draw(chart, points, charts) {
  const values = points.map((point) => chart.value(point) ?? 0);
  const most = Math.max(...values, chart.most?.() ?? 0) || 1;
  const y = (/** @type {number} */ value) => PAD + (HEIGHT - 14) * (1 - value / most);
  const path = values.map((value, i) => `${i ? 'L' : 'M'}${x(i, values.length).toFixed(1)} ${y(value).toFixed(1)}`).join('');
  const floor = (HEIGHT - 14 + PAD).toFixed(1);
  const drawing = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: 'chart', 'aria-hidden': 'true', preserveAspectRatio: 'none' },
    chart.line && svg('line', { class: 'chart-limit', x1: 0, x2: WIDTH, y1: y(chart.line()), y2: y(chart.line()) }),
    svg('path', { class: 'chart-area', d: `${path}L${x(values.length - 1, values.length)} ${floor}L${x(0, values.length)} ${floor}Z` }),
    svg('path', { class: 'chart-line', d: path }),
    svg('line', { class: 'chart-axis', x1: 0, x2: WIDTH, y1: floor, y2: floor }),
    points.map(({ left }, i) => left > 0 && svg('line', { class: 'chart-tick', x1: x(i, points.length), x2: x(i, points.length), y1: HEIGHT - 8, y2: HEIGHT - 8 + Math.min(7, 2 + left) })),
    svg('line', { class: 'chart-cursor', x1: -9, x2: -9, y1: 0, y2: HEIGHT }),
    svg('circle', { class: 'chart-dot', r: 3, cx: -9, cy: 0 }));
  const at = (/** @type {MouseEvent} */ event) => {
    const box = drawing.getBoundingClientRect();
    return Math.max(0, Math.min(points.length - 1, Math.round(((event.clientX - box.left) / box.width) * (points.length - 1))));
  };
  drawing.addEventListener('pointermove', (/** @type {MouseEvent} */ event) => mark(charts, at(event), points));
  drawing.addEventListener('pointerleave', () => mark(charts, points.findIndex(({ turn }) => turn.id === state.route.moment), points));
  drawing.addEventListener('click', (/** @type {MouseEvent} */ event) => also({ moment: points[at(event)].turn.id }));
  return h('figure', { class: 'figure' }, h('figcaption', null, h('span', null, chart.title), h('span', { class: 'figure-value' })), drawing);
}

/** Point every chart at one turn; -1 is the last, unmarked. @param {HTMLElement} charts @param {number} i @param {Point[]} points */
function mark(charts, i, points) {
  const point = points[i < 0 ? points.length - 1 : i];
  [...charts.children].forEach((figure, n) => {
    const chart = CHARTS[n], value = chart.value(point);
    const label = /** @type {HTMLElement} */ (figure.querySelector('.figure-value'));
    label.replaceChildren(h('span', { class: 'muted' }, `turn ${point.turn.number}${i >= 0 && point.left ? `, ${count(point.left)} evicted` : ''} `), h('b', null, value === null || value === undefined ? '–' : chart.text(value)));
    const values = points.map((each) => chart.value(each) ?? 0), most = Math.max(...values, chart.most?.() ?? 0) || 1;
    const cursor = /** @type {Element} */ (figure.querySelector('.chart-cursor')), dot = /** @type {Element} */ (figure.querySelector('.chart-dot'));
    const place = i < 0 ? -9 : x(i, points.length);
    for (const end of ['x1', 'x2']) cursor.setAttribute(end, String(place));
    const last = i < 0 ? points.length - 1 : i;
    dot.setAttribute('cx', String(x(last, points.length)));
    dot.setAttribute('cy', String(PAD + (HEIGHT - 14) * (1 - (value ?? 0) / most)));
  });
}

/** @param {Point[]} points */
function asTable(points) {
  return h('table', null,
    h('thead', null, h('tr', null, ['Turn', ...CHARTS.map(({ title }) => title), 'Blocks evicted'].map((name) => h('th', { scope: 'col', class: 'number' }, name)))),
    h('tbody', null, points.map((point) => h('tr', null, h('th', { scope: 'row', class: 'number' }, point.turn.number), CHARTS.map((chart) => {
      const value = chart.value(point);
      return h('td', { class: 'number' }, value === null || value === undefined ? '–' : chart.text(value));
    }), h('td', { class: 'number' }, count(point.left))))));
}
