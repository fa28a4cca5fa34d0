// The list of sessions, by day; finding, renaming, copying, deleting them.

import * as conversation from './conversation.js';
import { byId, confirmed, copy, dayOf, each, h, iconButton, menu, time, toast } from './dom.js';
import { Refused } from './api.js';
import { address, link } from './route.js';
import { on, set, state } from './store.js';

const WAIT_MS = 150;

export function start() {
  const search = /** @type {HTMLInputElement} */ (byId('session-search'));
  let waiting = 0;
  search.addEventListener('input', () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      set({ sessionQuery: search.value.trim() });
      attempt(conversation.list());
    }, WAIT_MS);
  });
  const place = byId('sessions');
  place.addEventListener('keydown', walk);
  on(['sessions', 'sessionsCursor', 'route', 'running'], draw);
}

function draw() {
  const { sessions, sessionQuery, route } = state;
  const place = byId('sessions');
  const items = /** @type {any[]} */ ([]);
  let day = '';
  for (const session of sessions) {
    const its = dayOf(new Date(session.updated_at));
    if (its !== day && !items.some((item) => item.day === its)) items.push({ id: its, day: its });
    day = its;
    items.push(session);
  }
  if (!sessions.length) items.push({ id: `none ${sessionQuery}`, text: sessionQuery ? `No session has “${sessionQuery}”.` : 'Your sessions will be here.' });
  if (state.sessionsCursor) items.push({ id: 'more', more: true });
  each(place, items, ({ id }) => id, create, (element, item) => {
    if (!item.created_at) return;
    const anchor = element.firstChild;
    anchor.firstChild.textContent = item.title || 'Untitled';
    anchor.toggleAttribute('aria-current', item.id === route.session);
    element.classList.toggle('is-running', state.running?.session === item.id);
    element.session = item;
  });
}

/** @param {any} item */
function create(item) {
  if (item.day) return h('h2', { class: 'day' }, item.day);
  if (item.text) return h('p', { class: 'muted none' }, item.text);
  if (item.more) return h('button', { type: 'button', class: 'text-button more', on: { click: () => attempt(conversation.list(true)) } }, 'More sessions');
  const element = h('div', { class: 'session' },
    h('a', { href: address({ view: 'chat', session: item.id }) }, h('span', { class: 'session-title' }), h('span', { class: 'muted session-time' }, time(item.updated_at))),
    iconButton('more', 'Session actions', (event) => openMenu(event.currentTarget, element.session)));
  return element;
}

/** Arrows go through the sessions. @param {KeyboardEvent} event */
function walk(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  move(step);
}

/** To the session below or above the one that has the focus or is open. @param {number} step */
export function move(step) {
  const links = /** @type {HTMLElement[]} */ ([...byId('sessions').querySelectorAll('.session > a')]);
  const at = links.findIndex((each) => each === document.activeElement);
  const from = at >= 0 ? at : links.findIndex((each) => each.hasAttribute('aria-current'));
  links[Math.max(0, Math.min(links.length - 1, from + step))]?.focus();
}

/** @param {HTMLElement} anchor @param {import('./store.js').Session} session */
export function openMenu(anchor, session) {
  menu(anchor, [
    { label: 'Rename', press: () => rename(session) },
    { label: 'Make a copy', press: () => attempt(conversation.fork(session)) },
    { label: 'Copy link', press: () => copy(link({ view: 'chat', session: session.id }), 'Link') },
    { label: 'Delete', danger: true, press: async () => {
      if (await confirmed(`Delete “${session.title || 'Untitled'}”?`, 'Its messages and its memory go. What was evicted stays in the audit log, which has no text.', 'Delete')) attempt(conversation.remove(session.id));
    } },
  ]);
}

/** @param {import('./store.js').Session} session */
function rename(session) {
  const input = h('input', { value: session.title, maxLength: 200, 'aria-label': 'Title' });
  const dialog = h('dialog', { class: 'dialog', 'aria-label': 'Rename session' });
  const form = h('form', { on: { submit: (/** @type {Event} */ event) => {
    event.preventDefault();
    dialog.close();
    attempt(conversation.rename(session.id, input.value.trim()));
  } } }, h('h2', null, 'Rename session'), input, h('div', { class: 'dialog-actions' },
    h('button', { type: 'button', class: 'button', on: { click: () => dialog.close() } }, 'Cancel'), h('button', { type: 'submit', class: 'button primary' }, 'Rename')));
  dialog.append(form);
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  input.select();
}

/** @param {Promise<any>} work */
export async function attempt(work) {
  try {
    await work;
  } catch (error) {
    toast(error instanceof Refused ? error.message : 'The server cannot be reached');
  }
}
