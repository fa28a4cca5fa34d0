// Asks for the API key of a server that has one.

import { call, key } from './api.js';
import { h } from './dom.js';
import { on, set, state } from './store.js';

/** @type {any} */
let dialog = null;

/** @param {() => void} opened called once the server takes the key */
export function start(opened) {
  on(['server'], () => {
    if (state.server === 'locked' && !dialog) ask(opened);
  });
}

/** @param {() => void} opened */
function ask(opened) {
  const had = Boolean(key.get());
  const input = h('input', { type: 'password', id: 'key', autocomplete: 'current-password', required: true });
  const remember = h('input', { type: 'checkbox' });
  const wrong = h('p', { class: 'notice', role: 'alert', hidden: !had }, 'The server does not take this key.');
  const form = h('form', { on: { submit: async (/** @type {Event} */ event) => {
    event.preventDefault();
    key.set(input.value.trim(), remember.checked);
    try {
      await call('v1/sessions?limit=1');
    } catch {
      wrong.hidden = false;
      input.select();
      return;
    }
    dialog.close();
    set({ server: 'ready' });
    opened();
  } } },
    h('h2', null, 'This server asks for its API key'),
    h('p', { class: 'muted' }, 'Whoever started it knows: it is what they set as KEEPWHOLE_API_KEY.'),
    h('label', { class: 'field' }, h('span', null, 'API key'), input), wrong,
    h('label', { class: 'check' }, remember, 'Remember it in this browser'),
    h('div', { class: 'dialog-actions' }, h('button', { type: 'submit', class: 'button primary' }, 'Open')));
  dialog = h('dialog', { class: 'dialog', 'aria-label': 'API key', on: { cancel: (/** @type {Event} */ event) => event.preventDefault(), close: () => (dialog.remove(), (dialog = null)) } }, form);
  document.body.append(dialog);
  dialog.showModal();
}
