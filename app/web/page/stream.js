// Server-sent events over fetch: POST, a key, and going on after a broken line, none of which EventSource can.

import { Lost, Refused, request } from './api.js';

/** @typedef {{event: string, id: string, data: any}} Message */

const RETRY_MS = [300, 1000, 2000, 4000, 8000];

/** The events of a response. @param {Response} response @returns {AsyncGenerator<Message>} */
export async function* events(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      // A lone CR at the end may be half of CRLF.
      const whole = rest.endsWith('\r') ? rest.slice(0, -1) : rest;
      const frames = whole.split(/\r\n\r\n|\n\n|\r\r/);
      rest = /** @type {string} */ (frames.pop()) + rest.slice(whole.length);
      for (const frame of frames) {
        const message = parse(frame);
        if (message) yield message;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** @param {string} frame @returns {Message | null} */
function parse(frame) {
  let event = 'message', id = '';
  const data = [];
  // Not U+2028 and its like: they are text.
  for (const line of frame.split(/\r\n|\n|\r/)) {
    const colon = line.indexOf(':');
    if (colon === 0) continue;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (name === 'event') event = value;
    else if (name === 'id') id = value;
    else if (name === 'data') data.push(value);
  }
  return data.length ? { event, id, data: JSON.parse(data.join('\n')) } : null;
}

/**
 * Follow a stream to its end, over broken lines. Resolves to whether an event of `last` came; false says that the
 * server knows nothing more (204).
 * @param {object} how
 * @param {() => Promise<Response>} [how.first] the request that starts it; without one it is resumed from the start
 * @param {string} how.path where it can be resumed
 * @param {string[]} how.last names of events after which nothing comes
 * @param {(message: Message) => void} how.take
 * @param {(attempt: number) => void} [how.lost] the line broke, and is about to be tried again
 * @param {AbortSignal} how.signal
 */
export async function follow({ first, path, last, take, lost, signal }) {
  let seen = '', attempt = 0;
  const resume = () => request(path, { signal, headers: seen ? { 'Last-Event-ID': seen } : {} });
  let open = first ?? resume;
  for (;;) {
    try {
      const response = await open();
      if (response.status === 204) return false;
      for await (const message of events(response)) {
        attempt = 0;
        seen = message.id || seen;
        take(message);
        if (last.includes(message.event)) return true;
      }
    } catch (error) {
      if (signal.aborted) throw error;
      // A first request that never got through has started nothing, as far as anybody knows.
      if (error instanceof Refused || (error instanceof Lost && open !== resume)) throw error;
      if (!(error instanceof Lost) && !(error instanceof TypeError)) throw error;
    }
    if (signal.aborted) throw new DOMException('', 'AbortError');
    open = resume;
    lost?.(attempt + 1);
    await delay(RETRY_MS[Math.min(attempt++, RETRY_MS.length - 1)], signal);
  }
}

/** @param {number} ms @param {AbortSignal} signal */
function delay(ms, signal) {
  return new Promise((resolve) => {
    const end = () => (clearTimeout(timer), removeEventListener('online', end), signal.removeEventListener('abort', end), resolve(null));
    const timer = setTimeout(end, ms);
    addEventListener('online', end);
    signal.addEventListener('abort', end);
  });
}
