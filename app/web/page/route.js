// Every view has an address that can be sent to somebody: #/sessions/ID?turn=…, #/documents/ID?passage=…

import { set, state } from './store.js';

/**
 * @typedef {object} Route
 * @property {'chat' | 'documents'} view
 * @property {string} [session] @property {string} [turn] a message, scrolled to
 * @property {string} [moment] the turn whose memory is shown @property {string} [panel] memory, source, log or figures
 * @property {string} [document] @property {string} [passage] @property {string} [block] @property {string} [query]
 */

const PARAMETERS = /** @type {const} */ (['turn', 'moment', 'panel', 'passage', 'block', 'query']);

/** @param {string} hash @returns {Route} */
export function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, '').split('?');
  const [view, id] = path.split('/').map(decodeURIComponent);
  const given = new URLSearchParams(query ?? '');
  /** @type {Route} */
  const route = { view: view === 'documents' ? 'documents' : 'chat' };
  if (id) route[route.view === 'chat' ? 'session' : 'document'] = id;
  for (const name of PARAMETERS) if (given.get(name)) route[name] = given.get(name) ?? undefined;
  if (route.view === 'chat' && given.get('document')) route.document = given.get('document') ?? undefined;
  return route;
}

/** @param {Route} route */
export function address(route) {
  const id = route.view === 'chat' ? route.session : route.document;
  const query = new URLSearchParams();
  for (const name of PARAMETERS) if (route[name]) query.set(name, /** @type {string} */ (route[name]));
  if (route.view === 'chat' && route.document) query.set('document', route.document);
  const path = route.view === 'chat' ? (id ? `sessions/${encodeURIComponent(id)}` : '') : ['documents', id].filter(Boolean).join('/');
  return `#/${path}${query.size ? `?${query}` : ''}`;
}

/** Go there. `replace` leaves no step to go back to. @param {Route} route @param {{replace?: boolean}} [how] */
export function go(route, how) {
  const hash = address(route);
  if (hash === location.hash) return;
  history[how?.replace ? 'replaceState' : 'pushState'](null, '', hash);
  arrive();
}

/** Change part of the address. @param {Partial<Route>} patch @param {{replace?: boolean}} [how] */
export const also = (patch, how) => go({ ...state.route, ...patch }, how);

/** @type {((now: Route, before: Route) => void)[]} */
const visitors = [];

/** Called at every change of address. @param {(now: Route, before: Route) => void} visit */
export const visiting = (visit) => void visitors.push(visit);

/** Take the browser's address as the state's. */
export function arrive() {
  const before = state.route;
  const route = parse(location.hash);
  set({ route });
  for (const visit of visitors) visit(route, before);
}

/** The whole link to a view. @param {Route} route */
export const link = (route) => new URL(address(route), document.baseURI).href;
