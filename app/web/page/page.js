// The page: puts its parts together, and takes the address to what is shown.

import { Lost, Refused, call } from './api.js';
import * as chat from './chat.js';
import * as conversation from './conversation.js';
import * as documents from './documents.js';
import { byId, h, icon, iconButton } from './dom.js';
import * as keys from './keys.js';
import * as lock from './lock.js';
import * as map from './map.js';
import * as panel from './panel.js';
import { address, arrive, visiting } from './route.js';
import * as sessions from './sessions.js';
import { kept, on, set, state } from './store.js';

const AGAIN_MS = 2000;

function start() {
  theme();
  sessions.start();
  map.start();
  chat.start();
  panel.start();
  documents.start();
  keys.start();
  lock.start(load);
  bottom();
  byId('new').prepend(icon('plus'));
  byId('side-tools').append(
    iconButton('question', 'Keys (?)', keys.sheet),
    iconButton('sun', 'Light or dark', turnTheme));
  byId('skip').addEventListener('click', (/** @type {Event} */ event) => (event.preventDefault(), chat.focusAsk()));
  on(['route'], drawView);
  visiting(visit);
  addEventListener('popstate', arrive);
  addEventListener('hashchange', arrive);
  arrive();
  set(state);
  load();
}

/** @param {import('./route.js').Route} now @param {import('./route.js').Route} before */
function visit(now, before) {
  document.body.classList.remove('side-open');
  if (now.view === 'chat' && now.session !== state.session?.id) now.session ? conversation.open(now.session) : conversation.close();
  if (now.moment !== before.moment || (now.moment && now.moment !== state.moment?.turn)) conversation.look(now.moment);
}

async function load() {
  try {
    await Promise.all([conversation.list(), documents.load()]);
    const { model } = await call('ready');
    set({ server: 'ready', model });
    // What was asked for before there was a key.
    if (state.route.session && !state.turns.length && state.problem) conversation.open(state.route.session);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return;
    set({ server: error instanceof Lost ? 'unreachable' : 'loading' });
    setTimeout(load, AGAIN_MS);
  }
}

function drawView() {
  const { view, panel: open, document: opened } = state.route;
  const wanted = view === 'documents';
  byId('chat').hidden = wanted;
  byId('documents').hidden = !wanted;
  document.body.dataset.view = view;
  // On a phone the panel is a view of its own.
  document.body.classList.toggle('panel-open', Boolean(wanted ? opened : open));
  document.body.classList.toggle('no-panel', wanted ? !opened : false);
}

function bottom() {
  const items = /** @type {const} */ ([['chat', 'Chat', () => ({ view: 'chat', session: state.route.session ?? last })], ['memory', 'Memory', () => ({ view: 'chat', session: state.route.session ?? last, panel: 'memory' })], ['file', 'Documents', () => ({ view: 'documents' })]]);
  let last = /** @type {string | undefined} */ (undefined);
  const links = items.map(([picture, label]) => h('a', null, icon(picture), label));
  byId('bottom').append(...links);
  on(['route', 'session'], () => {
    last = state.route.session ?? last;
    const { view, panel } = state.route;
    const open = view === 'documents' ? 2 : panel ? 1 : 0;
    links.forEach((link, i) => {
      link.setAttribute('href', address(/** @type {any} */ (items[i][2]())));
      if (i === open) link.setAttribute('aria-current', 'page');
      else link.removeAttribute('aria-current');
    });
  });
}

/** As the system has it, until somebody chooses. */
function theme() {
  const chosen = kept.get('theme');
  if (chosen) document.documentElement.dataset.theme = chosen;
}

function turnTheme() {
  const now = document.documentElement.dataset.theme ?? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  const next = now === 'dark' ? 'light' : 'dark';
  document.documentElement.dataset.theme = next;
  kept.set('theme', next);
}

start();
