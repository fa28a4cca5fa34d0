// Documents: taking them in by drop or choice, file by file; the list of them; search; deleting.

import { Refused, all, asProblem, call, request } from './api.js';
import { announce, byId, bytes, confirmed, count, each, h, icon, iconButton, menu, plural, put, time, toast } from './dom.js';
import { chip } from './map.js';
import { also, go } from './route.js';
import { attempt } from './sessions.js';
import { on, set, state } from './store.js';
import { follow } from './stream.js';

/** One request takes so much: the server has a limit, and a file that is refused should not hold others up. */
const BATCH = { bytes: 8_000_000, files: 50 };

/** @typedef {{id: string, name: string, file?: File, status: 'waiting' | 'sending' | 'queued' | 'running' | 'done' | 'failed' | 'cancelled' | 'unchanged', error: string | null, version?: number}} Upload */

export function start() {
  view();
  side();
  dropping();
}

export async function load() {
  set({ documents: await all('v1/documents') });
}

// Taking in

/** @param {{file: File, name: string}[]} files */
export async function take(files) {
  const uploads = files.map(({ file, name }) => /** @type {Upload} */ ({ id: crypto.randomUUID?.() ?? `${Math.random()}`, name, file, status: 'waiting', error: null }));
  set({ uploads: [...state.uploads, ...uploads] });
  const folder = uploads[0]?.name.includes('/') ? uploads[0].name.split('/')[0] : null;
  let batch = /** @type {Upload[]} */ ([]), size = 0;
  const jobs = [];
  for (const upload of uploads) {
    const its = upload.file?.size ?? 0;
    if (batch.length && (size + its > BATCH.bytes || batch.length === BATCH.files)) {
      jobs.push(await send(batch, folder));
      (batch = []), (size = 0);
    }
    batch.push(upload);
    size += its;
  }
  if (batch.length) jobs.push(await send(batch, folder));
  await Promise.all(jobs.map((job) => job && watch(job)));
  const failed = state.uploads.filter((upload) => upload.status === 'failed').length;
  announce(failed ? `${plural(failed, 'file')} could not be read` : 'Documents are ready');
}

/** @param {Upload[]} batch @param {Partial<Upload>} patch */
function change(batch, patch) {
  const ids = new Set(batch.map(({ id }) => id));
  set({ uploads: state.uploads.map((upload) => (ids.has(upload.id) ? { ...upload, ...patch } : upload)) });
}

/** @param {Upload[]} batch @param {string | null} folder @returns {Promise<{job: string, uploads: Map<string, Upload>} | null>} */
async function send(batch, folder) {
  change(batch, { status: 'sending' });
  const form = new FormData();
  for (const { file, name } of batch) form.append('files', /** @type {File} */ (file), name);
  if (folder) form.append('metadata', JSON.stringify({ folder }));
  try {
    const job = await call('v1/documents', { method: 'POST', body: form });
    change(batch, { status: 'queued', file: undefined });
    const uploads = new Map(batch.map((upload) => [upload.name, upload]));
    for (const document of job.documents) report(uploads, document);
    return { job: job.job_id, uploads };
  } catch (error) {
    const reasons = new Map(error instanceof Refused ? (error.body?.files ?? []).map((/** @type {any} */ each) => [each.name, each.error]) : []);
    for (const upload of batch) change([upload], { status: 'failed', error: reasons.get(upload.name) ?? asProblem(error).detail, file: undefined });
    return null;
  }
}

/** @param {Map<string, Upload>} uploads @param {any} document */
function report(uploads, document) {
  const upload = uploads.get(document.name);
  if (upload) change([upload], { status: document.status, error: document.error, version: document.version });
}

/** @param {{job: string, uploads: Map<string, Upload>}} what */
async function watch({ job, uploads }) {
  try {
    await follow({
      path: `v1/jobs/${job}/events`,
      last: ['done'],
      take: ({ event, data }) => event === 'document' && report(uploads, data),
      signal: new AbortController().signal,
    });
  } catch (error) {
    toast(asProblem(error).detail);
  }
  await attempt(load());
}

function dropping() {
  const veil = byId('drop');
  let depth = 0;
  const files = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes('Files');
  addEventListener('dragenter', (event) => files(event) && (depth++, (veil.hidden = false)));
  addEventListener('dragleave', (event) => files(event) && --depth <= 0 && (veil.hidden = true));
  addEventListener('dragover', (event) => files(event) && event.preventDefault());
  addEventListener('drop', async (event) => {
    if (!files(event)) return;
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    // Entries have to be taken before anything is waited for.
    const entries = [...(event.dataTransfer?.items ?? [])].map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
    const found = (await Promise.all(entries.map((entry) => walk(entry, '')))).flat();
    if (found.length) (go({ view: 'documents' }), take(found));
  });
}

/** The files under an entry; hidden ones are left out, as `keepwhole ingest` does.
 * @param {any} entry @param {string} path @returns {Promise<{file: File, name: string}[]>} */
async function walk(entry, path) {
  if (entry.name.startsWith('.') && path) return [];
  if (entry.isFile) return [{ file: await new Promise((resolve, reject) => entry.file(resolve, reject)), name: path + entry.name }];
  const reader = entry.createReader(), found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    found.push(...some);
  }
  return (await Promise.all(found.map((each) => walk(each, `${path}${entry.name}/`)))).flat();
}

/** @param {boolean} folder */
function choose(folder) {
  const input = h('input', { type: 'file', multiple: true, webkitdirectory: folder });
  input.addEventListener('change', () => {
    const chosen = [...input.files].map((file) => ({ file, name: file.webkitRelativePath || file.name }));
    take(chosen.filter(({ name }) => !name.split('/').slice(1).some((/** @type {string} */ part) => part.startsWith('.'))));
  });
  input.click();
}

// Drawing

function side() {
  const place = byId('side-documents');
  const status = h('span', { class: 'muted' });
  place.append(h('a', { href: '#/documents', class: 'side-link' }, icon('file'), 'Documents', h('span', { class: 'grow' }), status));
  on(['documents', 'uploads', 'route'], () => {
    const busy = state.uploads.filter(({ status }) => ['waiting', 'sending', 'queued', 'running'].includes(status)).length;
    status.textContent = busy ? `${count(busy)} to read` : count(state.documents.length);
    place.firstElementChild.toggleAttribute('aria-current', state.route.view === 'documents');
  });
}

function view() {
  const place = byId('documents');
  const search = h('input', { type: 'search', id: 'document-search', placeholder: 'Search in the documents', 'aria-label': 'Search in the documents', autocomplete: 'off' });
  const zone = h('div', { class: 'zone' },
    icon('upload'),
    h('p', null, 'Drop files or a folder here'),
    h('p', { class: 'muted' }, 'Markdown, text, HTML, PDF, Word, CSV, JSON and source code. The same name again is a new version.'),
    h('div', { class: 'zone-actions' },
      h('button', { type: 'button', class: 'button primary', on: { click: () => choose(false) } }, 'Choose files'),
      h('button', { type: 'button', class: 'button', on: { click: () => choose(true) } }, 'Choose a folder')));
  const uploads = h('section', { class: 'uploads', hidden: true }), found = h('section', { class: 'hits', hidden: true }), table = h('section');
  place.append(h('header', { class: 'top' }, iconButton('menu', 'Sessions', () => document.body.classList.toggle('side-open'), { class: 'quiet-button side-toggle' }), h('h1', null, 'Documents'), h('span', { class: 'grow' })),
    h('div', { class: 'documents-scroll' }, h('div', { class: 'search' }, search), zone, uploads, found, table));
  let waiting = 0;
  search.addEventListener('input', () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => also({ query: search.value.trim() || undefined }, { replace: true }), 200);
  });
  on(['uploads'], () => drawUploads(uploads));
  on(['documents', 'route'], () => drawTable(table));
  let asked = '';
  on(['route', 'documents'], async () => {
    if (state.route.view !== 'documents') return;
    const words = state.route.query ?? '';
    if (document.activeElement !== search) search.value = words;
    zone.hidden = Boolean(words);
    found.hidden = !words;
    table.hidden = Boolean(words);
    if (words && asked !== `${words} ${state.documents.length}`) {
      asked = `${words} ${state.documents.length}`;
      await attempt(drawFound(found, words));
    } else if (!words) asked = '';
  });
}

const STATUS = /** @type {Record<string, string>} */ ({ waiting: 'waiting', sending: 'sending', queued: 'in line', running: 'reading', done: 'ready', failed: 'not read', cancelled: 'cancelled', unchanged: 'unchanged' });

/** @param {any} place */
function drawUploads(place) {
  const uploads = /** @type {Upload[]} */ (state.uploads);
  place.hidden = uploads.length === 0;
  if (!place.firstChild) {
    place.append(h('div', { class: 'row-head' }, h('h2', null), h('span', { class: 'grow' }), h('button', { type: 'button', class: 'text-button', on: { click: () => set({ uploads: state.uploads.filter(({ status }) => ['waiting', 'sending', 'queued', 'running'].includes(status)) }) } }, 'Clear')),
      h('div', { class: 'progress', role: 'progressbar', 'aria-label': 'Files read', 'aria-valuemin': 0 }, h('i')), h('ol', { class: 'upload-list' }));
  }
  const over = uploads.filter(({ status }) => !['waiting', 'sending', 'queued', 'running'].includes(status));
  const failed = over.filter(({ status }) => status === 'failed').length;
  place.querySelector('h2').textContent = `${count(over.length - failed)} of ${plural(uploads.length, 'file')} read${failed ? `, ${count(failed)} could not be` : ''}`;
  const progress = place.querySelector('.progress');
  progress.setAttribute('aria-valuenow', String(over.length));
  progress.setAttribute('aria-valuemax', String(uploads.length));
  progress.firstChild.style.width = `${(100 * over.length) / Math.max(1, uploads.length)}%`;
  // What failed comes first: it is what one may have to do something about.
  const order = [...uploads].sort((a, b) => Number(b.status === 'failed') - Number(a.status === 'failed'));
  each(place.querySelector('ol'), order, ({ id }) => id, () => h('li', null, h('span', { class: 'grow upload-name' }), h('span', { class: 'upload-status' }), h('p', { class: 'upload-error' })), (line, upload) => {
    line.className = `upload is-${upload.status}`;
    line.children[0].textContent = upload.name;
    line.children[1].textContent = `${STATUS[upload.status]}${upload.status === 'done' && (upload.version ?? 1) > 1 ? `, version ${upload.version}` : ''}`;
    line.children[2].textContent = upload.error ?? '';
    line.children[2].hidden = !upload.error;
  });
}

/** @param {HTMLElement} place */
function drawTable(place) {
  const { documents, route } = state;
  if (!documents.length) {
    place.replaceChildren(h('p', { class: 'muted none' }, 'No documents yet. Try it with a README: drop one above, and ask what it says.'));
    return;
  }
  if (!place.querySelector('table')) {
    place.replaceChildren(h('table', { class: 'document-table' }, h('thead', null, h('tr', null, ['Name', 'Passages', 'Size', 'Version', 'Added'].map((name, i) => h('th', { scope: 'col', class: i ? 'number' : '' }, name)), h('th', null, h('span', { class: 'hidden' }, 'Actions')))), h('tbody')));
  }
  each(place.querySelector('tbody'), documents, (document) => `${document.id} ${document.status}`, row, (element, document) => element.classList.toggle('is-open', document.id === route.document));
}

/** @param {any} document */
function row(document) {
  const state = document.status === 'failed' ? h('p', { class: 'upload-error' }, document.error) : document.status === 'done' ? null : h('span', { class: 'muted' }, ` ${STATUS[document.status] ?? document.status}`);
  return h('tr', null,
    h('td', null, h('a', { href: `#/documents/${document.id}`, class: 'document-name' }, document.name), state),
    h('td', { class: 'number' }, count(document.passages)), h('td', { class: 'number' }, bytes(document.size)), h('td', { class: 'number' }, document.version), h('td', { class: 'number' }, time(document.created_at)),
    h('td', null, iconButton('more', `Actions for ${document.name}`, (event) => menu(event.currentTarget, [
      { label: 'Open', press: () => go({ view: 'documents', document: document.id }) },
      { label: 'Delete', danger: true, press: () => remove(document) },
    ]))));
}

/** @param {any} document */
async function remove(document) {
  if (!(await confirmed(`Delete “${document.name}”?`, 'It is gone from every answer at once, and from every session’s memory. What sessions were told stays in their messages.', 'Delete'))) return;
  await attempt(request(`v1/documents/${document.id}`, { method: 'DELETE' }).then(load));
  if (state.route.document === document.id) also({ document: undefined, passage: undefined });
}

/** @param {HTMLElement} place @param {string} words */
async function drawFound(place, words) {
  const { items, vectors } = await call('v1/search', { json: { query: words, top_k: 20 } });
  if (state.route.query !== words) return;
  announce(plural(items.length, 'passage'));
  put(
    place,
    h('h2', { class: 'row-head' }, items.length ? `${plural(items.length, 'passage')}, best first` : 'Nothing found'),
    vectors && !vectors.ready && h('p', { class: 'muted' }, 'Search by meaning is not ready yet; these were found by their words.'),
    h('ol', { class: 'hit-list' }, items.map((/** @type {any} */ item) => h('li', null,
      h('button', { type: 'button', class: 'hit', on: { click: () => also({ document: item.document_id, passage: item.id }) } },
        h('span', { class: 'hit-head' }, chip(item.kind), h('b', null, item.name), item.heading && h('span', { class: 'muted' }, item.heading)),
        h('span', { class: 'hit-text' }, item.text.trim().slice(0, 260)),
        h('span', { class: 'muted hit-why' }, [item.ranks?.bm25 && `no. ${item.ranks.bm25} by words`, item.ranks?.vector && `no. ${item.ranks.vector} by meaning`].filter(Boolean).join(' · ')))))));
}
