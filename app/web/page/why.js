// "Why did it forget this?", in one sentence, from the audit's row.

import { bytes, count, h, plural, seconds } from './dom.js';
import { KINDS } from './memory.js';
import { state } from './store.js';

/** @typedef {import('./store.js').Block} Block */

const REASONS = /** @type {Record<string, string>} */ ({
  not_relevant: 'the question found other passages, and this one could come back unread',
  room_for_turn: 'the next question and its passages needed room',
  room_for_answer: 'the answer being written needed room',
  document_deleted: 'its document was deleted',
});

export const REASON_NAMES = /** @type {Record<string, string>} */ ({
  not_relevant: 'Not relevant',
  room_for_turn: 'Room for turn',
  room_for_answer: 'Room for answer',
  document_deleted: 'Deleted',
});

/** What a block is called. @param {Pick<Block, 'kind' | 'turn' | 'name' | 'heading'>} block */
export function nameOf(block) {
  if (block.name) return block.heading ? `${block.name} › ${block.heading.split(' > ').at(-1)}` : block.name;
  return block.kind === 'system' ? KINDS.system.name : `${KINDS[block.kind]?.name ?? block.kind} ${block.turn}`;
}

/** What a block says, as far as the page has it. @param {Block} block @returns {string} */
export function textOf(block) {
  if (block.kind === 'system') return state.session?.system_prompt ?? '';
  const turn = state.turns.find(({ id }) => id === block.turn_id);
  if (!block.passage_id) {
    if (!turn && state.running?.turn_id === block.turn_id) return block.kind === 'question' ? state.running?.question ?? '' : state.running?.answer ?? '';
    return (block.kind === 'question' ? turn?.question : turn?.answer) ?? '';
  }
  const sources = [...(state.running?.sources ?? []), ...state.turns.flatMap((each) => each.sources ?? [])];
  return sources.find((source) => source.passage_id === block.passage_id)?.text.trim() ?? '';
}

/** The number of a turn. @param {string} id */
export const numberOf = (id) => state.turns.find((turn) => turn.id === id)?.number ?? (state.running?.turn_id === id ? (state.turns.at(-1)?.number ?? 0) + 1 : null);

/** When and how a block last came, in a few words. @param {Block} block */
export function arrival(block) {
  const recall = state.recalls.findLast((row) => row.block_id === block.id);
  if (!recall) return block.kind === 'answer' ? `written in turn ${block.turn}` : block.turn ? `read in turn ${block.turn}` : 'read before the first turn';
  const turn = numberOf(recall.turn_id);
  return `recalled${turn ? ` in turn ${turn}` : ''} from ${recall.origin} in ${seconds(recall.seconds)}`;
}

/** Where a resident block stands among those that may leave, least attention first. @param {Block} block @param {Block[]} among */
export function standing(block, among) {
  const others = among.filter((other) => other.kind !== 'system' && other.state === 'resident').sort((a, b) => a.score - b.score);
  const place = others.indexOf(block);
  return place < 0 ? null : `${place ? `${ordinal(place + 1)} lowest` : 'lowest'} of ${others.length}`;
}

/** One sentence on a block's whereabouts, and the audit's row behind it if it left.
 * @param {Block | undefined} block @returns {{sentence: string, row: any | null}} */
export function why(block) {
  if (!block) return { sentence: 'The model never had this: there was no room for it beside the better sources.', row: null };
  if (block.state === 'resident' || block.state === 'coming') {
    return { sentence: `It did not: this is in the model’s memory now, ${arrival(block)}.`, row: null };
  }
  const row = state.evictions.findLast((eviction) => eviction.block_id === block.id);
  const after = block.state === 'offloaded' ? 'It waits on the shelf, and comes back without being read again.' : 'It cannot come back by itself; it would have to be read again.';
  if (!row) return { sentence: `It left before this session was copied. ${after}`, row: null };
  return { sentence: `${leaving(row)} ${after}`, row };
}

/** An eviction as a sentence. @param {any} row */
export function leaving(row) {
  const turn = numberOf(row.turn_id);
  const when = turn ? `In turn ${turn}` : 'Once';
  const step = row.step ? `, after ${plural(row.step, 'token')} of the answer` : '';
  return `${when}${step} it left because ${REASONS[row.reason] ?? row.reason}; it was ${row.rank === 1 ? 'the first' : ordinal(row.rank)}${row.candidates ? ` of ${count(row.candidates)}` : ''} in line to go, and freed ${plural(row.tokens, 'token')}.`;
}

/** @param {number} value */
export function ordinal(value) {
  const suffix = value % 100 >= 11 && value % 100 <= 13 ? 'th' : { 1: 'st', 2: 'nd', 3: 'rd' }[value % 10] ?? 'th';
  return `${count(value)}${suffix}`;
}

/** The row of the audit, as it stands there. @param {any} row */
export function audit(row) {
  const facts = /** @type {[string, string][]} */ ([
    ['Rank', `${count(row.rank)}${row.candidates ? ` of ${count(row.candidates)}` : ''}`],
    ['Attention', Number(row.score).toPrecision(3)],
    ['In view', `${count(row.resident_before)} → ${count(row.resident_after)} tokens`],
    ['Freed', bytes(row.bytes_freed)],
    ['Then', row.outcome === 'offloaded' ? 'on the shelf' : 'gone'],
    ['Row', row.id],
  ]);
  return h('dl', { class: 'facts' }, facts.map(([name, value]) => h('div', null, h('dt', null, name), h('dd', null, value))));
}
