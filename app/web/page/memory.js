// What the model can see, block by block: taken from the server, and moved along by the stream's own events.

import { all } from './api.js';
import { set, state } from './store.js';

/** @typedef {import('./store.js').Block} Block */

export const KINDS = /** @type {Record<string, {letter: string, name: string}>} */ ({
  system: { letter: 'S', name: 'System prompt' },
  prose: { letter: 'P', name: 'Prose' },
  list: { letter: 'L', name: 'List' },
  code: { letter: 'C', name: 'Code' },
  table: { letter: 'T', name: 'Table' },
  question: { letter: 'Q', name: 'Question' },
  answer: { letter: 'A', name: 'Answer' },
});

/** @param {Block[]} blocks */
export const resident = (blocks) => blocks.filter((block) => block.state === 'resident' || block.state === 'coming');

/** @param {Block[]} blocks */
export const tokensOf = (blocks) => blocks.reduce((sum, block) => sum + block.tokens, 0);

/** The blocks that the bar shows: now, or as they were at the moment looked at. */
export const shown = () => state.moment?.blocks ?? resident(state.blocks);

/** What the server has of the session's memory, in place of what the stream's events made of it.
 * @param {string} session @param {() => boolean} [wanted] whether it still is, once it is there */
export async function load(session, wanted = () => state.session?.id === session) {
  const [blocks, evictions, recalls, points] = await Promise.all(
    ['cache', 'evictions', 'recalls', 'compression'].map((what) => all(`v1/sessions/${session}/${what}`)),
  );
  if (wanted()) set({ blocks, evictions, recalls, points });
}

/** @param {string} turn @param {Partial<Block>} fields @returns {Block} */
function coming(turn, fields) {
  const now = new Date().toISOString();
  return {
    id: '', turn_id: turn, turn: state.turns.length + 1, kind: 'prose', state: 'coming', tokens: 0, document_id: null,
    passage_id: null, name: null, heading: null, score: 0, created_at: now, evicted_at: null, ...fields,
  };
}

/** Tokens of the passages read in this turn, in the order the model reads them. @type {{block: string, tokens: number}[]} */
let reading = [];
let read = 0;

/** An event of the running turn. @param {string} event @param {any} data */
export function apply(event, data) {
  const turn = state.running?.turn_id ?? '';
  let blocks = state.blocks;
  if (event === 'retrieval') {
    ({ blocks } = arrange(blocks, data));
  } else if (event === 'eviction') {
    blocks = blocks.map((block) => (block.id === data.block_id ? { ...block, state: data.outcome, score: data.score, evicted_at: data.created_at } : block));
    set({ evictions: [...state.evictions, data] });
  } else if (event === 'recall') {
    const back = blocks.find((block) => block.id === data.block_id);
    if (back?.state === 'coming') {
      blocks = blocks.map((block) => (block === back ? { ...block, state: 'resident', tokens: data.tokens } : block));
    } else if (back) {
      blocks = insert(blocks, { ...back, state: 'resident', evicted_at: null }, turn);
    }
    set({ recalls: [...state.recalls, data] });
  } else if (event === 'prefill') {
    read = Math.max(read, data.done - data.restored);
    blocks = grow(blocks, turn);
  } else if (event === 'token') {
    const answer = blocks.find((block) => block.id === `${turn}.answer`);
    if (answer) blocks = blocks.map((block) => (block === answer ? { ...block, tokens: block.tokens + 1 } : block));
    else blocks = [...blocks, coming(turn, { id: `${turn}.answer`, kind: 'answer', tokens: 1 })];
  }
  if (blocks !== state.blocks) set({ blocks });
}

/** Passages that are wanted stand at the end, the best of them last: so the model reads them.
 * @param {Block[]} blocks @param {{turn_id: string, sources: import('./store.js').Source[]}} retrieval */
function arrange(blocks, { turn_id: turn, sources }) {
  reading = [];
  read = 0;
  const arrivals = /** @type {Block[]} */ ([]);
  sources.forEach((source, i) => {
    if (source.state === 'skipped') return;
    const there = blocks.find((block) => block.passage_id === source.passage_id && block.state !== 'dropped');
    const { kind, document_id, passage_id, name, heading } = source;
    const block = there && source.state !== 'streamed'
      ? { ...there, state: there.state === 'resident' ? there.state : /** @type {const} */ ('coming'), tokens: there.state === 'resident' ? there.tokens : 0 }
      : coming(turn, { id: `${turn}.passage${i}`, kind, document_id, passage_id, name, heading });
    arrivals.unshift(block);
    if (source.state === 'streamed') reading.unshift({ block: block.id, tokens: source.tokens });
  });
  const ids = new Set(arrivals.map((block) => block.id));
  const question = coming(turn, { id: `${turn}.question`, kind: 'question' });
  return { blocks: [...blocks.filter((block) => !ids.has(block.id)), ...arrivals, question] };
}

/** An exchange that comes back stands before what this turn brings. @param {Block[]} blocks @param {Block} block @param {string} turn */
function insert(blocks, block, turn) {
  const others = blocks.filter(({ id }) => id !== block.id);
  const first = others.findIndex((other) => other.state === 'coming' && other.turn_id === turn);
  others.splice(first < 0 ? others.length : first, 0, block);
  return others;
}

/** @param {Block[]} blocks @param {string} turn */
function grow(blocks, turn) {
  let left = read;
  const sizes = new Map();
  for (const { block, tokens } of reading) {
    sizes.set(block, Math.min(tokens, Math.max(0, left)));
    left -= tokens;
  }
  sizes.set(`${turn}.question`, Math.max(0, left));
  return blocks.map((block) => (sizes.has(block.id) && block.state === 'coming' ? { ...block, tokens: sizes.get(block.id) } : block));
}
