// The keyboard, and the sheet that shows it.

import { focusAsk } from './chat.js';
import { stop } from './conversation.js';
import { h } from './dom.js';
import { also, go } from './route.js';
import { move } from './sessions.js';
import { state } from './store.js';

/** @type {[string[], string, (event: KeyboardEvent) => void][]} */
const KEYS = [
  [['/'], 'Ask', () => (state.route.view === 'chat' ? focusAsk() : (document.getElementById('document-search')?.focus()))],
  [['n'], 'New session', () => (go({ view: 'chat' }), focusAsk())],
  [['j', 'k'], 'Next, previous session', (event) => move(event.key === 'j' ? 1 : -1)],
  [['[', ']'], 'Memory one answer earlier, later', (event) => travel(event.key === '[' ? -1 : 1)],
  [['m'], 'Memory', () => also({ panel: 'memory' })],
  [['l'], 'Log', () => also({ panel: 'log' })],
  [['f'], 'Figures', () => also({ panel: 'figures' })],
  [['d'], 'Documents', () => go({ view: 'documents' })],
  [['?'], 'These keys', () => sheet()],
];

export function start() {
  addEventListener('keydown', (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]')) return;
    if (event.key === 'Escape') return escape();
    const target = /** @type {HTMLElement} */ (event.target);
    if (/^(input|textarea|select)$/i.test(target.tagName) || document.querySelector(':popover-open')) return;
    const found = KEYS.find(([keys]) => keys.includes(event.key));
    if (!found) return;
    event.preventDefault();
    found[2](event);
  });
}

/** Stops what is being written; else closes the nearest thing that is open. */
function escape() {
  if (state.running) stop();
  else if (document.body.classList.contains('side-open')) document.body.classList.remove('side-open');
  else if (state.route.block) also({ block: undefined });
  else if (state.route.moment) also({ moment: undefined });
  else /** @type {HTMLElement | null} */ (document.activeElement)?.blur();
}

/** @param {number} step */
function travel(step) {
  const { turns, route } = state;
  if (!turns.length) return;
  const at = turns.findIndex(({ id }) => id === route.moment);
  const to = (at < 0 ? turns.length : at) + step;
  if (to >= 0) also({ moment: turns[to]?.id }, { replace: true });
}

export function sheet() {
  const dialog = h('dialog', { class: 'dialog keys', 'aria-label': 'Keys' });
  const more = /** @type {[string[], string][]} */ ([[['Enter'], 'Send'], [['Shift', 'Enter'], 'New line'], [['Esc'], 'Stop, close'], [['←', '→'], 'From block to block in the bar'], [['↑', '↓'], 'Through the sessions']]);
  dialog.append(h('h2', null, 'Keys'),
    h('dl', null, [...KEYS, ...more].map(([keys, what]) => h('div', null, h('dt', null, keys.map((key) => h('kbd', null, key))), h('dd', null, what)))),
    h('div', { class: 'dialog-actions' }, h('button', { type: 'button', class: 'button', on: { click: () => dialog.close() } }, 'Close')));
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
