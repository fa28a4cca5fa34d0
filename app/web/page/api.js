// The server's routes, by addresses relative to the page's own: a proxy may have put both under a prefix.

import { kept, set } from './store.js';

/** What the server refused, and why, in its own words. */
export class Refused extends Error {
  /** @param {number} status @param {any} body */
  constructor(status, body) {
    super(body?.detail ?? `the server answered ${status}`);
    this.status = status;
    this.field = body?.field;
    this.body = body;
  }
}

/** The server cannot be reached, or its answer broke off. */
export class Lost extends Error {}

/** @param {unknown} error @returns {{status?: number, detail: string, field?: string}} */
export function asProblem(error) {
  if (error instanceof Refused) return { status: error.status, detail: error.message, field: error.field };
  if (error instanceof Lost) return { detail: 'The server cannot be reached. Is it running?' };
  return { detail: String(/** @type {any} */ (error)?.message ?? error) };
}

/** For this tab, or also for later: as its owner chose. */
export const key = {
  get: () => sessionStorage.getItem('keepwhole:key') ?? kept.get('key'),
  /** @param {string} value @param {boolean} remember */
  set(value, remember) {
    sessionStorage.setItem('keepwhole:key', value);
    kept.set('key', remember ? value : null);
  },
  forget() {
    sessionStorage.removeItem('keepwhole:key');
    kept.set('key', null);
  },
};

/** @param {string} path @param {RequestInit & {json?: any}} [options] @returns {Promise<Response>} */
export async function request(path, { json, ...options } = {}) {
  const headers = new Headers(options.headers);
  const given = key.get();
  if (given) headers.set('Authorization', `Bearer ${given}`);
  if (json !== undefined) {
    headers.set('Content-Type', 'application/json');
    options.body = JSON.stringify(json);
    options.method ??= 'POST';
  }
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Lost();
  }
  if (response.ok) return response;
  // What a proxy says of a server that is not there is no answer of ours.
  if ([502, 504].includes(response.status)) throw new Lost();
  const refused = new Refused(response.status, await response.json().catch(() => null));
  if (refused.status === 401) set({ server: 'locked' });
  throw refused;
}

/** @param {string} path @param {RequestInit & {json?: any}} [options] @returns {Promise<any>} */
export async function call(path, options) {
  const response = await request(path, options);
  return response.status === 204 ? null : response.json();
}

/** The query string of what is given. @param {Record<string, any>} values */
export function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== '');
  return given.length ? `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}` : '';
}

/** Most items of a page of any list. */
const PAGE = 200;

/** Every item of a list, page by page. @param {string} path @param {Record<string, any>} [values] @returns {Promise<any[]>} */
export async function all(path, values) {
  const items = [];
  let cursor;
  do {
    const page = await call(path + query({ limit: PAGE, ...values, cursor }));
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor);
  return items;
}
