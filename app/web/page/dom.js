// Nodes, and how people write numbers and times. Text only ever becomes text: there is no innerHTML anywhere.

/** @typedef {Node | string | number | null | undefined | false} Child */

const SVG = 'http://www.w3.org/2000/svg';

/**
 * An element. Properties: `class`, `data` (an object), `on` (listeners by event), any DOM property, else an attribute;
 * null, undefined and false leave it out.
 * @param {string} name
 * @param {Record<string, any> | null} [properties]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function h(name, properties, ...children) {
  return fill(document.createElement(name), properties, children);
}

/** The same for SVG.
 * @param {string} name
 * @param {Record<string, any> | null} [properties]
 * @param {...(Child | Child[])} children
 * @returns {any} */
export function svg(name, properties, ...children) {
  return fill(document.createElementNS(SVG, name), properties, children);
}

/** @param {any} element @param {Record<string, any> | null | undefined} properties @param {(Child | Child[])[]} children */
function fill(element, properties, children) {
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === 'class') element.setAttribute('class', value);
    else if (key === 'data') Object.assign(element.dataset, value);
    else if (key === 'on') for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (key in element && !(element instanceof SVGElement) && key !== 'list' && key !== 'form') element[key] = value;
    else element.setAttribute(key, value === true ? '' : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Make the content of `parent` these children; null, undefined and false are none.
 * @param {any} parent @param {...(Child | Child[])} children */
export function put(parent, ...children) {
  parent.replaceChildren();
  fill(parent, null, children);
}

/** @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

/** Make the children of `parent` those of `items`, keeping the element of each key.
 * @template T
 * @param {any} parent
 * @param {T[]} items
 * @param {(item: T) => string} key
 * @param {(item: T) => any} create
 * @param {(element: any, item: T, index: number) => void} [update] */
export function each(parent, items, key, create, update) {
  const held = new Map([...parent.children].map((element) => [element.key, element]));
  let place = parent.firstElementChild;
  items.forEach((item, index) => {
    let element = held.get(key(item));
    if (element) held.delete(key(item));
    else {
      element = create(item);
      element.key = key(item);
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update?.(element, item, index);
  });
  for (const element of held.values()) element.remove();
}

/** A picture of the page's own set, hidden from screen readers: whoever holds it has the name.
 * @param {keyof typeof PATHS} name */
export function icon(name) {
  const picture = svg('svg', { class: 'icon', viewBox: '0 0 16 16', 'aria-hidden': 'true', focusable: 'false' });
  picture.append(svg('path', { d: PATHS[name] }));
  return picture;
}

const PATHS = {
  plus: 'M8 3v10M3 8h10',
  search: 'M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM10.5 10.5 14 14',
  close: 'm4 4 8 8m0-8-8 8',
  more: 'M3.5 8h.01M8 8h.01M12.5 8h.01',
  chat: 'M2.5 3.5h11v7h-6l-3 2.5v-2.5h-2z',
  memory: 'M2 5h3v6H2zM6.5 5h4v6h-4zM12 5h2v6h-2z',
  file: 'M4 2h5l3 3v9H4zM9 2v3h3',
  copy: 'M5.5 5.5h7v8h-7zM3.5 10.5v-8h7',
  retry: 'M13 8a5 5 0 1 1-1.6-3.7M13 2.5v3h-3',
  edit: 'm3 13 .6-2.9 7.2-7.2 2.3 2.3-7.2 7.2z',
  fork: 'M4.5 3v4.5c0 1 .5 1.5 1.5 1.5h4c1 0 1.5-.5 1.5-1.5V3M8 9v4',
  link: 'M7 9.5a2.5 2.5 0 0 0 3.6 0l2-2a2.5 2.5 0 0 0-3.6-3.600l-.8.8M9 6.5a2.5 2.5 0 0 0-3.6 0l-2 2a2.5 2.5 0 0 0 3.6 3.600l.8-.8',
  clock: 'M8 13.5a5.5 5.5 0 1 0 0-11 5.5 5.5 0 0 0 0 11zM8 5v3.200l2 1.3',
  trash: 'M3 4.5h10M6.5 4V2.5h3V4M4.5 4.5l.6 9h5.800l.6-9',
  settings: 'M2 5h6m4 0h2M2 11h2m4 0h6M8 5a2 2 0 1 0 4 0 2 2 0 0 0-4 0zM4 11a2 2 0 1 0 4 0 2 2 0 0 0-4 0z',
  sun: 'M8 10.800a2.8 2.8 0 1 0 0-5.6 2.8 2.8 0 0 0 0 5.600zM8 1.5v1.300M8 13.200v1.300M1.5 8h1.300M13.2 8h1.300M3.4 3.400l.9.9M11.7 11.700l.9.9M3.4 12.600l.9-.9M11.7 4.300l.9-.9',
  send: 'M8 13V3.5M4 7.5l4-4 4 4',
  stop: 'M4.5 4.5h7v7h-7z',
  down: 'm4 6 4 4 4-4',
  upload: 'M8 10.5v-8M5 5.5l3-3 3 3M3 10.5v3h10v-3',
  folder: 'M2 4h4.5l1.5 1.5h6V13H2z',
  question: 'M6 6a2 2 0 1 1 2.7 1.900c-.5.2-.7.5-.7 1.100v.5M8 12h.01',
  menu: 'M2.5 4.5h11M2.5 8h11M2.5 11.5h11',
};

/** A button that shows a picture only; `label` is its name and its hint.
 * @param {keyof typeof PATHS} picture @param {string} label @param {(event: any) => void} press @param {Record<string, any>} [properties] */
export function iconButton(picture, label, press, properties) {
  return h('button', { type: 'button', class: 'quiet-button', 'aria-label': label, title: label, on: { click: press }, ...properties }, icon(picture));
}

/** 12 345 with thin spaces. @param {number} value */
export function count(value) {
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, '\u2009');
}

/** "1 block", "2 blocks". @param {number} value @param {string} noun */
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? '' : 's'}`;

/** Seconds as people say them. @param {number | null | undefined} value */
export function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value < 0.001) return '<\u20091\u2009ms';
  if (value < 1) return `${Math.round(value * 1000)}\u2009ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)}\u2009s`;
  return `${Math.floor(value / 60)}\u2009min ${Math.round(value % 60)}\u2009s`;
}

/** @param {number} value */
export function bytes(value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let step = 0;
  for (; value >= 1000 && step < units.length - 1; step++) value /= 1000;
  return `${value >= 100 || step === 0 ? Math.round(value) : value.toFixed(1)}\u2009${units[step]}`;
}

/** A moment as people say it; exact on hover. @param {string} iso */
export function time(iso) {
  const moment = new Date(iso);
  return h('time', { dateTime: iso, title: moment.toLocaleString(undefined, { dateStyle: 'full', timeStyle: 'medium' }) }, ago(moment));
}

/** @param {Date} moment */
function ago(moment) {
  const passed = (Date.now() - moment.getTime()) / 1000;
  if (passed < 45) return 'just now';
  if (passed < 3600) return `${Math.max(1, Math.round(passed / 60))} min ago`;
  if (dayOf(moment) === 'Today') return moment.toLocaleTimeString(undefined, { hour: '2-digit', minute: '2-digit' });
  if (dayOf(moment) === 'Yesterday') return 'yesterday';
  return moment.toLocaleDateString(undefined, { day: 'numeric', month: 'short' });
}

/** The heading under which a list by day puts it. @param {Date} moment */
export function dayOf(moment) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const days = Math.ceil((midnight - moment.getTime()) / 86_400_000);
  if (days <= 0) return 'Today';
  if (days === 1) return 'Yesterday';
  return days < 7 ? 'This week' : 'Earlier';
}

/** Say something to screen readers, politely. @param {string} text */
export function announce(text) {
  byId('announcements').textContent = text;
}

/** A line that goes by itself; `action` is a button on it.
 * @param {string} text @param {{label: string, press: () => void}} [action] */
export function toast(text, action) {
  const line = h('div', { class: 'toast' }, h('span', null, text));
  const remove = () => line.remove();
  if (action) line.append(h('button', { type: 'button', class: 'text-button', on: { click: () => (remove(), action.press()) } }, action.label));
  line.append(iconButton('close', 'Dismiss', remove));
  byId('toasts').append(line);
  setTimeout(remove, 8000);
}

/** @param {string} text @param {string} what */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied`);
  } catch {
    toast('The browser does not let this page copy');
  }
}

/** Ask before something that cannot be undone. Resolves to whether it is wanted.
 * @param {string} question @param {string} consequence @param {string} verb */
export function confirmed(question, consequence, verb) {
  return new Promise((resolve) => {
    const dialog = h('dialog', { class: 'dialog', 'aria-label': question });
    const close = (/** @type {boolean} */ answer) => (dialog.close(), resolve(answer));
    dialog.append(
      h('h2', null, question),
      h('p', { class: 'muted' }, consequence),
      h('div', { class: 'dialog-actions' },
        h('button', { type: 'button', class: 'button', on: { click: () => close(false) } }, 'Keep it'),
        h('button', { type: 'button', class: 'button danger', on: { click: () => close(true) } }, verb)),
    );
    dialog.addEventListener('close', () => (dialog.remove(), resolve(false)));
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** A menu of actions under a button. @param {HTMLElement} anchor @param {{label: string, press: () => void, danger?: boolean}[]} actions */
export function menu(anchor, actions) {
  const list = h('div', { class: 'menu', role: 'menu', popover: 'auto' });
  const items = actions.map(({ label, press, danger }) =>
    h('button', { type: 'button', role: 'menuitem', class: danger ? 'danger' : '', on: { click: () => (list.hidePopover(), press()) } }, label));
  list.append(...items);
  list.addEventListener('keydown', (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
  });
  list.addEventListener('toggle', (/** @type {any} */ event) => {
    if (event.newState === 'closed') (list.remove(), anchor.focus());
  });
  document.body.append(list);
  list.showPopover();
  const box = anchor.getBoundingClientRect();
  list.style.left = `${Math.max(8, Math.min(box.left, innerWidth - list.offsetWidth - 8))}px`;
  list.style.top = `${box.bottom + list.offsetHeight + 8 < innerHeight ? box.bottom + 4 : box.top - list.offsetHeight - 4}px`;
  items[0].focus();
}
