// Markdown as nodes. What it reads is written by a model or by whoever wrote a document, so it makes nodes and text of
// it and never markup: tags stay text, pictures become links, and only http(s) and mailto addresses lead anywhere.

import { copy, h, iconButton } from './dom.js';

/** Make the content of `container` that of `text`, touching only the blocks that changed: text that grows costs what
 * its last block costs.
 * @param {any} container @param {string} text */
export function render(container, text) {
  const parts = blocks(text);
  const before = container.parts ?? [];
  let same = 0;
  while (same < parts.length && same < before.length && parts[same] === before[same]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const part of parts.slice(same)) container.append(block(part));
  container.parts = parts;
}

/** The text cut into top-level blocks. @param {string} text @returns {string[]} */
export function blocks(text) {
  const parts = /** @type {string[]} */ ([]);
  let lines = /** @type {string[]} */ ([]);
  const end = () => {
    if (lines.some((line) => line.trim())) parts.push(lines.join('\n'));
    lines = [];
  };
  let fence = '';
  const all = text.replace(/\r\n?/g, '\n').split('\n');
  all.forEach((line, i) => {
    const opening = FENCE.exec(line);
    if (fence) {
      lines.push(line);
      if (closes(line, fence)) {
        fence = '';
        if (!inList(lines)) end();
      }
      return;
    }
    if (opening) {
      if (!inList(lines) || !opening[1]) end();
      lines.push(line);
      fence = opening[2];
      return;
    }
    if (/^ {0,3}(#{1,6}(\s|$)|(?:\*\s*){3,}$|(?:-\s*){3,}$|(?:_\s*){3,}$)/.test(line)) {
      end();
      lines.push(line);
      end();
      return;
    }
    if (!line.trim()) {
      const next = all.slice(i + 1).find((following) => following.trim()) ?? '';
      // A loose list goes on after an empty line.
      if (inList(lines) && (/^ {2,}\S/.test(next) || marker(next) === marker(lines[0]))) lines.push(line);
      else end();
      return;
    }
    const inside = inList(lines) && /^ {2,}/.test(line);
    if (lines.length && marker(line) && !inside && marker(line) !== marker(lines[0])) end();
    lines.push(line);
  });
  end();
  return parts;
}

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
/** What makes a line the start of a list or a quotation, and of which kind. @param {string} line */
const marker = (line) => (/^ {0,3}>/.test(line) ? '>' : ITEM.exec(line)?.[2].replace(/\d+/, '1') ?? '');
/** @param {string[]} lines */
const inList = (lines) => lines.length > 0 && ITEM.test(lines[0]);
/** @param {string} line @param {string} fence */
const closes = (line, fence) => new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`).test(line);

/** @param {string} part @returns {Node} */
function block(part) {
  const lines = part.split('\n');
  const heading = /^ {0,3}(#{1,6})\s*(.*?)\s*#*$/.exec(lines[0]);
  if (FENCE.test(lines[0])) return code(lines);
  // The page itself has the first two levels.
  if (heading && /^ {0,3}#{1,6}(\s|$)/.test(lines[0])) return h(`h${Math.min(6, heading[1].length + 2)}`, null, inline(heading[2]));
  if (lines.length === 1 && /^ {0,3}([*_-])(\s*\1){2,}\s*$/.test(lines[0])) return h('hr');
  if (ITEM.test(lines[0])) return list(lines);
  if (/^ {0,3}>/.test(lines[0])) return nested('blockquote', lines.map((line) => line.replace(/^ {0,3}> ?/, '')).join('\n'));
  const at = lines.findIndex((line, i) => i > 0 && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(line) && line.includes('|') && lines[i - 1].includes('|'));
  if (at === 1) return table(lines);
  if (lines.every((line) => /^( {4}|\t)/.test(line))) return pre(lines.map((line) => line.replace(/^( {4}|\t)/, '')).join('\n'), '');
  return h('p', null, inline(part.replace(/^ +/gm, '')));
}

/** @param {string} name @param {string} text */
function nested(name, text) {
  const element = h(name);
  for (const part of blocks(text)) element.append(block(part));
  return element;
}

/** @param {string[]} lines */
function code(lines) {
  const [, indent, fence, info] = /** @type {RegExpExecArray} */ (FENCE.exec(lines[0]));
  const body = lines.slice(1);
  if (body.length && closes(body[body.length - 1], fence)) body.pop();
  return pre(body.map((line) => line.replace(new RegExp(`^ {0,${indent.length}}`), '')).join('\n'), info.trim().split(/\s+/)[0]);
}

/** @param {string} text @param {string} language */
function pre(text, language) {
  return h('div', { class: 'code' },
    h('div', { class: 'code-bar' }, h('span', null, language), iconButton('copy', 'Copy code', () => copy(text, 'Code'))),
    // Scrolled sideways by keyboard too.
    h('pre', { tabIndex: 0, role: 'region', 'aria-label': language ? `Code in ${language}` : 'Code' }, h('code', null, text)));
}

/** @param {string[]} lines */
function list(lines) {
  const ordered = /\d/.test(/** @type {RegExpExecArray} */ (ITEM.exec(lines[0]))[2]);
  const items = /** @type {string[][]} */ ([]);
  let indent = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && (!items.length || item[1].length < indent)) {
      indent = item[1].length + item[2].length + Math.min(4, item[3].length || 1);
      items.push([line.slice(indent)]);
    } else items[items.length - 1].push(line.replace(new RegExp(`^ {0,${indent}}`), ''));
  }
  const loose = lines.some((line) => !line.trim());
  return h(ordered ? 'ol' : 'ul', ordered ? { start: parseInt(lines[0].trim(), 10) } : null,
    items.map((item) => {
      const element = nested('li', item.join('\n'));
      if (!loose && element.firstChild?.nodeName === 'P') element.firstChild.replaceWith(...element.firstChild.childNodes);
      return element;
    }));
}

/** @param {string[]} lines */
function table(lines) {
  const cells = (/** @type {string} */ line) => line.trim().replace(/^\||\|$/g, '').split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, '|'));
  const [head, marks, ...rows] = lines.map(cells);
  const align = marks.map((mark) => (/^:-+:$/.test(mark) ? 'center' : /-:$/.test(mark) ? 'end' : 'start'));
  const row = (/** @type {string} */ name, /** @type {string[]} */ texts) =>
    h('tr', null, head.map((_, i) => h(name, { class: `align-${align[i] ?? 'start'}` }, inline(texts[i] ?? ''))));
  return h('div', { class: 'table-scroll', tabIndex: 0, role: 'region', 'aria-label': 'Table' },
    h('table', null, h('thead', null, row('th', head)), h('tbody', null, rows.map((texts) => row('td', texts)))));
}

const INLINE = new RegExp(
  [
    '\\\\([!-/:-@[-`{-~])', // 1 escaped
    '(`+)([^]*?[^`])\\2(?!`)', // 2, 3 code
    '!?\\[([^\\]\\n]*)\\]\\(\\s*<?([^\\s)<>]*(?:\\([^\\s)]*\\)[^\\s)<>]*)?)>?(?:\\s+["\'(][^\\n]*?["\')])?\\s*\\)', // 4, 5 link
    '<((?:https?://|mailto:)[^\\s<>]+)>', // 6 link
    '(\\bhttps?://[^\\s<>"\'`*]+[^\\s<>"\'`*.,:;!?)\\]])', // 7 link
    '(\\*\\*|__)(?=\\S)([^]*?\\S)\\8(?!\\w)', // 8, 9 bold
    '(?<![\\w*_])([*_])(?=[^\\s*_])([^]*?[^\\s*_]|[^\\s*_])\\10(?![\\w*_])', // 10, 11 italic
    '~~(?=\\S)([^]*?\\S)~~', // 12 struck
    '( {2,}|\\\\)\\n', // 13 break
  ].join('|'),
  'g',
);

/** @param {string} text @returns {(Node | string)[]} */
export function inline(text) {
  const nodes = /** @type {(Node | string)[]} */ ([]);
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > from) nodes.push(text.slice(from, found.index));
    from = found.index + found[0].length;
    if (found[1]) nodes.push(found[1]);
    else if (found[2]) nodes.push(h('code', null, found[3].replace(/\n/g, ' ').replace(/^ (.*\S.*) $/, '$1')));
    else if (found[5] !== undefined) nodes.push(link(found[5], inline(found[4] || found[5])));
    else if (found[6] ?? found[7]) nodes.push(link(found[6] ?? found[7], [found[6] ?? found[7]]));
    else if (found[8]) nodes.push(h('strong', null, inline(found[9])));
    else if (found[10]) nodes.push(h('em', null, inline(found[11])));
    else if (found[12]) nodes.push(h('s', null, inline(found[12])));
    else nodes.push(h('br'));
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

/** @param {string} target @param {(Node | string)[]} children */
function link(target, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return h('span', { title: target }, children);
  return h('a', { href: target, target: '_blank', rel: 'noopener noreferrer nofollow' }, children);
}
