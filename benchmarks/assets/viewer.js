// The viewer. Three parts, in this order: the list on the left, the graph of an episode, the details of a node.
// The address after # is the whole state (#a=12&node=3&b=40&q=bridge&role=planner), so every view is a link.

const $ = (id) => document.getElementById(id);
const ROW = 48;
const state = { a: null, b: null, node: '', nodeB: '', tint: 'logprob', q: '', outcome: '', role: '', trouble: '', label: '', env: '', sort: '' };
const remembered = ['a', 'b', 'node', 'nodeB', 'q', 'outcome', 'role', 'trouble', 'label', 'env', 'sort'];
const blocks = new Map();
let columns, rows = [], matches = null, picking = false;

const word = (column, i) => columns[column].words[columns[column].codes[i]];

// ---------------------------------------------------------------- episodes and the list

async function episodeAt(i) {
  const id = 'block' + columns.block[i];
  if (!blocks.has(id)) {
    if (!$(id) && document.readyState === 'loading') await new Promise((done) => document.addEventListener('DOMContentLoaded', done));
    blocks.set(id, unpack(id));
    if (blocks.size > 12) blocks.delete(blocks.keys().next().value);
  }
  const block = await blocks.get(id);
  return block[i - columns.block.indexOf(columns.block[i])];
}

function outcomeOf(i) {
  if (word('ended', i) === 'error') return 'error';
  const score = columns.score[i];
  return score === null ? 'unscored' : score >= 1 - 1e-9 ? 'success' : score > 1e-9 ? 'partial' : 'failure';
}

const SORTS = {
  '': null,
  'score, low first': (i) => (columns.score[i] === null ? -1e9 : columns.score[i]),
  'score, high first': (i) => -(columns.score[i] === null ? -1e9 : columns.score[i]),
  'credit, low first': (i) => columns.credit[i],
  'most tokens': (i) => -columns.tokens[i],
  'most acts': (i) => -columns.acts[i],
};

function filterRows() {
  const needle = state.q.trim().toLowerCase();
  const keep = (i) =>
    (!state.outcome || outcomeOf(i) === state.outcome || word('ended', i) === state.outcome)
    && (!state.role || word('roles', i).split(' ').includes(state.role))
    && (!state.label || word('label', i) === state.label)
    && (!state.env || word('env', i) === state.env)
    && (state.trouble !== 'malformed' || (state.role ? word('malformed', i).split(' ').includes(state.role) : word('malformed', i) !== ''))
    && (state.trouble !== 'tool error' || columns.errors[i] > 0)
    && (!needle || (matches ? matches.has(i) : `${columns.title[i]}\n${word('task', i)}\n${word('label', i)}\n${word('env', i)}`.toLowerCase().includes(needle)));
  rows = [];
  for (let i = 0; i < columns.block.length; i++) if (keep(i)) rows.push(i);
  const by = SORTS[state.sort];
  if (by) rows.sort((x, y) => by(x) - by(y) || x - y);
}

// Enter in the search box looks into every prompt and reply, block by block.
async function searchTexts() {
  const needle = state.q.trim().toLowerCase();
  if (!needle) return;
  const found = new Set();
  const total = columns.block[columns.block.length - 1] + 1;
  for (let block = 0, i = 0; block < total; block++) {
    const episodes = await unpack('block' + block);
    for (const episode of episodes) { if (JSON.stringify(episode).toLowerCase().includes(JSON.stringify(needle).slice(1, -1))) found.add(i); i++; }
    if (block % 8 === 0) $('counts').textContent = `searching texts… ${Math.round((100 * block) / total)}%`;
    if (state.q.trim().toLowerCase() !== needle) return;
  }
  matches = found;
  paintList(true);
}

function paintList(top) {
  filterRows();
  $('sizer').style.height = rows.length * ROW + 'px';
  if (top) $('list').scrollTop = 0;
  const scores = rows.map((i) => columns.score[i]).filter((s) => s !== null);
  const mean = scores.length ? scores.reduce((x, y) => x + y, 0) / scores.length : null;
  $('counts').textContent = `${number(rows.length)} of ${number(columns.block.length)} episodes` + (mean === null ? '' : ` · mean score ${number(mean, 3)}`);
  paintHistogram(scores);
  paintRows();
}

function paintHistogram(scores) {
  const low = scores.reduce((x, y) => Math.min(x, y), 0), high = scores.reduce((x, y) => Math.max(x, y), 1);
  const bins = new Array(24).fill(0);
  for (const s of scores) bins[Math.min(23, Math.floor(((s - low) / (high - low)) * 24))]++;
  const most = Math.max(1, ...bins);
  $('histogram').replaceChildren(h('svg', { viewBox: '0 0 240 30', preserveAspectRatio: 'none' },
    bins.map((n, x) => n && h('rect', { x: x * 10, width: 9, y: 30 - Math.max(1.5, (n / most) * 30), height: Math.max(1.5, (n / most) * 30) }))));
}

function paintRows() {
  const list = $('list'), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
  const last = Math.min(rows.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 4);
  const shown = [];
  for (let at = first; at < last; at++) {
    const i = rows[at], trouble = word('malformed', i) !== '' || columns.errors[i] > 0 || word('ended', i) === 'error';
    shown.push(h('div', { class: 'row' + (i === state.a ? ' a' : '') + (i === state.b ? ' b' : ''), role: 'option', 'aria-selected': String(i === state.a), 'data-i': i, style: { top: at * ROW + 'px' } },
      h('b', {}, columns.title[i]), h('b', { class: 'score' }, number(columns.score[i])),
      h('span', {}, [word('task', i), word('label', i), `${columns.acts[i]} acts`, columns.tokens[i] && `${number(columns.tokens[i])} tokens`].filter(Boolean).join(' · ')),
      h('span', { class: trouble ? 'state bad' : 'state' }, trouble ? [word('malformed', i) && 'malformed', columns.errors[i] && 'tool error', word('ended', i) === 'error' && 'error'].filter(Boolean)[0] : word('ended', i))));
  }
  $('sizer').replaceChildren(...shown);
}

function paintFilters() {
  const count = (values) => [...new Set(values)].filter(Boolean).sort();
  const choice = (key, name, options) => {
    if (options.length < 2 && key !== 'trouble' && key !== 'outcome') return null;
    const select = h('select', { 'aria-label': name, class: state[key] ? 'on' : '', 'data-key': key, onchange: (e) => { state[key] = e.target.value; paintFilters(); paintList(true); remember(); } },
      h('option', { value: '' }, name), options.filter(Boolean).map((o) => h('option', { value: o, selected: state[key] === o }, o)));
    return select;
  };
  $('filters').replaceChildren(...[
    choice('outcome', 'any outcome', ['success', 'partial', 'failure', 'unscored', ...columns.ended.words.filter((w) => w !== 'terminal')]),
    choice('role', 'any role', count(columns.roles.words.flatMap((w) => w.split(' ')))),
    choice('trouble', 'any trouble', ['malformed', 'tool error']),
    choice('label', 'any source', columns.label.words),
    choice('env', 'any environment', columns.env.words),
    choice('sort', 'in order', Object.keys(SORTS)),
  ].filter(Boolean));
}

// ---------------------------------------------------------------- one episode

const BOX = { w: 150, h: 42, step: 64, gapX: 22, gapY: 10, top: 26 };

// Lanes are roles and tools in order of first appearance; time runs left to right. A node stands a step right of its
// parents when they are in other lanes, and clear of what it follows in its own; what is side by side gets its own track.
function layout(nodes) {
  const byId = new Map(nodes.map((n) => [n.id, n])), before = new Map(), lanes = new Map();
  for (const n of nodes) {
    const name = n.kind === 'use' ? n.tool : n.role, parents = (n.parents || []).map((p) => byId.get(p)).filter((p) => p && p.x !== undefined && before.has(p.id));
    if (!lanes.has(name)) lanes.set(name, { name: name || '?', tool: n.kind === 'use', nodes: [], ends: [] });
    const lane = n.lane = lanes.get(name), earlier = new Set(parents.flatMap((p) => [p.id, ...before.get(p.id)]));
    before.set(n.id, earlier);
    n.x = Math.max(14, ...parents.map((p) => p.x + (p.lane === lane ? BOX.w + BOX.gapX : BOX.step)),
      ...lane.nodes.filter((o) => earlier.has(o.id)).map((o) => o.x + BOX.w + BOX.gapX));
    n.track = lane.ends.findIndex((end) => end + 8 <= n.x);
    if (n.track < 0) n.track = lane.ends.length;
    lane.ends[n.track] = n.x + BOX.w;
    lane.nodes.push(n);
  }
  let y = BOX.top;
  for (const lane of lanes.values()) { lane.y = y; y += lane.ends.length * (BOX.h + BOX.gapY) + BOX.gapY; }
  for (const n of nodes) n.y = n.lane.y + BOX.gapY + n.track * (BOX.h + BOX.gapY);
  return { byId, lanes: [...lanes.values()], width: 14 + BOX.w + Math.max(14, ...nodes.map((n) => n.x)), height: y };
}

// Close by: down (or up) from the parent and into the child's side. Far away: one soft curve.
function route(from, to) {
  const x2 = to.x, y2 = to.y + BOX.h / 2, right = from.x + BOX.w, down = to.y > from.y;
  if (right + 10 > x2) { const x = Math.max(from.x + 10, x2 - 16), r = 8; return `M${x} ${down ? from.y + BOX.h : from.y}V${down ? y2 - r : y2 + r}Q${x} ${y2} ${x + r} ${y2}H${x2}`; }
  const y1 = from.y + BOX.h / 2, bend = Math.min(90, Math.max(14, (x2 - right) / 2));
  return `M${right} ${y1}C${right + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

function ancestors(byId, id) {
  const seen = new Set(), todo = [id];
  while (todo.length) { const at = todo.pop(); if (seen.has(at) || !byId.has(at)) continue; seen.add(at); todo.push(...(byId.get(at).parents || [])); }
  return seen;
}

const short = (text, most) => { const line = visible(text).replace(/\s+/g, ' ').trim(); return line.length > most ? line.slice(0, most - 1) + '…' : line; };
const plain = (value) => (typeof value === 'string' ? value : value === null || value === undefined ? '' : JSON.stringify(value));

function said(node) {
  if (node.kind === 'use') return node.error ? plain(node.error) : plain(node.args && (node.args.query ?? Object.values(node.args)[0])) || plain(node.result);
  return plain(node.ok ? node.value : node.reply) || plain(node.reply) || '(empty)';
}

function drawGraph(nodes, selected, pick) {
  const { byId, lanes, width, height } = layout(nodes);
  const onPath = ancestors(byId, selected);
  const edges = [], boxes = [], turns = [];
  const most = Math.max(1e-9, ...nodes.map((n) => Math.abs(n.credit || 0)));
  for (const n of nodes) {
    for (const p of n.parents || []) {
      const from = byId.get(p);
      if (!from) continue;
      edges.push(h('path', { class: 'edge' + (onPath.has(p) && onPath.has(n.id) ? ' on' : ''), d: route(from, n) }));
    }
    const illegal = n.kind === 'act' && n.ok === false, failed = Boolean(n.error);
    const who = n.agent && n.agent !== n.role ? n.agent : n.kind === 'use' ? n.tool || n.role : n.role;
    const credit = n.credit || 0, bar = (Math.abs(credit) / most) * (BOX.w - 16);
    boxes.push(h('g', { class: `node ${n.kind}` + (n.id === selected ? ' on' : '') + (illegal ? ' illegal' : '') + (failed ? ' failed' : ''), transform: `translate(${n.x} ${n.y})`, tabindex: n.id === selected ? 0 : -1, role: 'button', 'data-node': n.id,
      'aria-label': `${who}${illegal ? ', malformed' : ''}${failed ? ', failed' : ''}: ${short(said(n), 60)}`, onclick: () => pick(n.id), onkeydown: (e) => { if (e.key === 'Enter') pick(n.id); } },
    h('title', {}, `${who} · node ${n.id}\n${short(said(n), 400)}`),
    h('rect', { class: 'box', width: BOX.w, height: BOX.h, rx: n.kind === 'use' ? 12 : 4 }),
    h('text', { x: 8, y: 17 }, short(said(n), 22)),
    h('text', { class: 'small', x: 8, y: 31 }, [n.agent !== n.role && n.kind === 'act' ? n.agent : null, n.meta && n.meta.tokens_out ? `${n.meta.tokens_out} tok` : null, credit ? `${credit > 0 ? '+' : ''}${number(credit)}` : null].filter(Boolean).join(' · ')),
    illegal || failed ? h('text', { class: 'flag', x: BOX.w - 7, y: 31 }, illegal ? 'malformed' : 'failed') : null,
    credit ? h('rect', { class: credit > 0 ? 'plus' : 'minus', x: 8, y: BOX.h - 5, width: Math.max(2, bar), height: 2, rx: 1 }) : null));
  }
  let last = null;
  for (const n of [...nodes].sort((x, y) => x.x - y.x)) {
    if (n.turn === null || n.turn === undefined || n.turn === last || (last !== null && n.turn < last)) continue;
    last = n.turn;
    turns.push(h('line', { class: 'turn-line', x1: n.x, x2: n.x, y1: 6, y2: n.y }), h('text', { class: 'turn-name', x: n.x + 5, y: 14 }, `turn ${n.turn}`));
  }
  const lines = lanes.slice(1).map((l) => h('line', { class: 'lane-line', x1: 0, x2: Math.max(width, 4000), y1: l.y + BOX.gapY / 2, y2: l.y + BOX.gapY / 2 }));
  const names = Math.min(150, 30 + 7.2 * Math.max(...lanes.map((l) => l.name.length)));
  return h('div', { class: 'graph' },
    h('svg', { width: names, height, 'aria-hidden': 'true' }, lanes.slice(1).map((l) => h('line', { class: 'lane-line', x1: 0, x2: names, y1: l.y + BOX.gapY / 2, y2: l.y + BOX.gapY / 2 })),
      lanes.map((l) => h('text', { class: 'lane-name' + (l.tool ? ' tool' : ''), x: 14, y: l.y + BOX.gapY + BOX.h / 2 + 4 }, short(l.name, 18)))),
    h('div', { class: 'scroll' }, h('svg', { width, height, role: 'group', 'aria-label': 'graph of the episode' }, turns, lines, edges, boxes)));
}

function drawEpisode(i, episode, side) {
  const nodes = episode.nodes || [], key = side === 'a' ? 'node' : 'nodeB';
  let selected = nodes.some((n) => n.id === state[key]) ? state[key] : nodes.length ? (nodes.filter((n) => n.kind === 'act').pop() || nodes[0]).id : '';
  state[key] = selected;
  const element = h('article', { class: 'episode', 'data-side': side, 'data-i': i });
  const tokens = nodes.reduce((sum, n) => sum + ((n.meta && n.meta.tokens_out) || 0), 0);
  const figure = (name, value, main) => h('div', { class: 'figure' + (main ? ' main' : '') }, h('b', {}, number(value)), h('span', {}, name));
  const metrics = Object.entries(episode.metrics || {}).filter(([, v]) => typeof v === 'number' || typeof v === 'boolean');
  const others = [];
  for (let o = 0; o < columns.block.length && others.length < 12; o++) if (o !== i && columns.task.codes[o] === columns.task.codes[i] && columns.env.codes[o] === columns.env.codes[i]) others.push(o);
  const paint = () => {
    const node = nodes.find((n) => n.id === selected);
    element.replaceChildren(...[
      h('h2', {}, columns.title[i]),
      h('div', { class: 'facts' },
        [['environment', episode.env_id], ['task', episode.task_id], ['source', word('label', i)], ['seed', episode.seed], ['sample', episode.sample], ['data', episode.data && (episode.data.name || plain(episode.data))], ['ended', [episode.ended, episode.reason].filter(Boolean).join(', ')], ['error', short(plain(episode.error), 200)], ['outcome', short(plain(episode.outcome), 90)]]
          .filter(([, v]) => v !== null && v !== undefined && v !== '').map(([k, v]) => h('span', {}, k + ' ', h('b', {}, v)))),
      h('div', { class: 'figures' }, metrics.slice(0, 6).map(([k, v], n) => figure(k, Number(v), n === 0)), figure('credit', columns.credit[i]), figure('acts', columns.acts[i]), tokens ? figure('tokens', tokens) : null,
        h('div', { class: 'actions' }, h('button', { id: 'back', onclick: () => $('app').classList.remove('reading') }, '← list'),
          side === 'a' ? h('button', { 'aria-pressed': String(picking), onclick: () => { picking = !picking; paint(); } }, picking ? 'pick one in the list…' : 'compare')
            : h('button', { onclick: () => open(state.a, null) }, 'close'))),
      side === 'a' && others.length ? h('div', { class: 'chips' }, h('span', { class: 'faint' }, 'same task:'), others.map((o) => h('button', { class: o === state.b ? 'on' : '', onclick: () => open(state.a, o) }, `${word('label', o) || '#' + o} · ${number(columns.score[o])}`))) : null,
      nodes.length ? drawGraph(nodes, selected, (id) => { selected = id; state[key] = id; keepScroll(element, paint); remember(); element.querySelector('.node.on').focus({ preventScroll: true }); }) : h('p', { class: 'soft' }, 'No node: the episode ended before anyone acted.'),
      node ? drawNode(node) : null].filter(Boolean));
  };
  paint();
  element.step = (delta) => {
    const at = nodes.findIndex((n) => n.id === selected), next = nodes[Math.max(0, Math.min(nodes.length - 1, at + delta))];
    if (!next) return;
    selected = next.id; state[key] = next.id;
    keepScroll(element, paint);
    element.reveal();
    remember();
  };
  element.reveal = () => {
    const scroll = element.querySelector('.graph .scroll'), node = nodes.find((n) => n.id === selected);
    if (scroll && (node.x < scroll.scrollLeft || node.x + BOX.w > scroll.scrollLeft + scroll.clientWidth)) scroll.scrollLeft = node.x + BOX.w + 20 - scroll.clientWidth;
  };
  return element;
}

function keepScroll(element, paint) {
  const before = element.querySelector('.graph .scroll'), left = before ? before.scrollLeft : 0;
  paint();
  const after = element.querySelector('.graph .scroll');
  if (after) after.scrollLeft = left;
}

// ---------------------------------------------------------------- one node

function longText(text, most = 6000) {
  const pre = h('pre', { dir: 'auto', tabindex: text.length > 1200 ? 0 : null }, text.slice(0, most));
  if (text.length > most) pre.append(h('button', { onclick: () => pre.replaceChildren(visible(text)) }, `show all ${number(text.length)} characters`));
  return pre;
}

function tokenText(tokens, tint) {
  const values = tokens[tint] || [], biggest = Math.max(1e-9, ...values.map((v) => Math.abs(v || 0)));
  return h('pre', { dir: 'auto' }, tokens.text.map((text, i) => {
    const v = values[i];
    if (v === null || v === undefined) return text;
    const colour = tint === 'advantage' ? (v >= 0 ? 'good' : 'bad') : 'accent';
    const strength = tint === 'advantage' ? Math.abs(v) / biggest : Math.min(1, -v / 5);
    return h('span', { class: 'tok', title: Object.keys(tokens).filter((k) => k !== 'text').map((k) => `${k} ${number(tokens[k][i])}`).join('\n'), style: { 'background-color': `rgb(var(--${colour}-rgb) / ${(0.6 * strength).toFixed(3)})` } }, text);
  }));
}

function drawReply(node) {
  const box = h('section', { class: 'reply' + (node.ok === false ? ' illegal' : '') });
  const paint = () => {
    const tints = node.tokens ? ['logprob', 'advantage'].filter((t) => node.tokens[t]) : [];
    const tint = tints.includes(state.tint) ? state.tint : tints[0];
    box.replaceChildren(...[
      h('div', { class: 'label' }, 'Reply', tints.map((t) => h('button', { 'aria-pressed': String(t === tint), class: t === tint ? 'on' : '', onclick: () => { state.tint = t; paint(); } }, t === tint ? `coloured by ${t}` : t))),
      tints.length ? tokenText(node.tokens, tint) : longText(plain(node.reply)),
      h('div', { class: 'verdict' }, node.ok ? h('b', { class: 'good' }, 'legal') : h('b', { class: 'bad' }, 'malformed'), h('span', { class: 'mono' }, node.value === null || node.value === undefined ? 'no value' : `value: ${short(plain(node.value), 2000)}`)),
    ]);
  };
  paint();
  return box;
}

function drawRewards(node) {
  const parts = Object.entries(node.rewards || {});
  if (!parts.length) return h('section', {}, h('div', { class: 'label' }, 'Rewards'), h('p', { class: 'soft' }, 'none on this node'));
  let at = 0;
  const steps = parts.map(([name, v]) => { const from = at; at += v; return { name, v, from, to: at }; });
  const low = Math.min(0, ...steps.map((s) => s.to)), high = Math.max(0, ...steps.map((s) => s.to)), span = high - low || 1;
  const x = (v) => ((v - low) / span) * 200;
  const bar = (from, to, cls) => h('svg', { viewBox: '0 0 200 12', preserveAspectRatio: 'none' }, h('line', { x1: x(0), x2: x(0), y1: 0, y2: 12 }), h('rect', { class: cls, x: Math.min(x(from), x(to)), width: Math.max(1, Math.abs(x(to) - x(from))), y: 2, height: 8 }));
  const off = Math.abs(at - (node.credit || 0)) > 1e-9 * Math.max(1, Math.abs(at));
  return h('section', {}, h('div', { class: 'label' }, 'Rewards'), h('table', { class: 'rewards' },
    steps.map((s) => h('tr', {}, h('td', {}, s.name), h('td', { class: 'n' }, number(s.v)), h('td', { class: 'bar' }, bar(s.from, s.to, s.v >= 0 ? 'plus' : 'minus')))),
    h('tr', { class: 'sum' }, h('td', {}, 'credit'), h('td', { class: 'n' }, number(node.credit)), h('td', { class: 'bar' }, bar(0, at, 'sumbar')))),
  off ? h('p', { class: 'bad' }, `the components add up to ${number(at)}, not to the credit`) : null);
}

function drawNode(node) {
  const meta = Object.entries(node.meta || {}).filter(([, v]) => v !== null && v !== undefined && typeof v !== 'object');
  const head = h('div', { class: 'node-head' }, h('h3', {}, node.kind === 'use' ? node.tool || node.role : node.agent || node.role),
    h('span', { class: 'soft' }, [`node ${node.id}`, node.turn !== null && node.turn !== undefined && `turn ${node.turn}`, (node.parents || []).length && `after ${node.parents.join(', ')}`].filter(Boolean).join(' · ')));
  const facts = meta.length ? h('details', {}, h('summary', {}, 'measurements'), h('div', { class: 'facts' }, meta.map(([k, v]) => h('span', {}, k + ' ', h('b', {}, number(v)))))) : null;
  const error = node.error ? h('section', {}, h('div', { class: 'label' }, 'Error'), h('p', { class: 'bad mono' }, short(plain(node.error), 4000))) : null;
  if (node.kind === 'use') {
    return h('div', { class: 'detail' }, head, h('section', {}, h('div', { class: 'label' }, 'Arguments'), longText(JSON.stringify(node.args, null, 1) || '')),
      h('div', {}, error, h('section', {}, h('div', { class: 'label' }, 'Result'), longText(typeof node.result === 'string' ? node.result : JSON.stringify(node.result, null, 1) || '')),
        node.private === null || node.private === undefined ? null : h('section', {}, h('div', { class: 'label' }, 'Seen by grading only'), longText(JSON.stringify(node.private, null, 1))), facts));
  }
  return h('div', { class: 'detail' }, head,
    h('section', {}, (node.messages || []).map((m) => h('div', { class: 'message ' + (m.role === 'system' ? 'system' : '') }, h('div', { class: 'label' }, m.name ? `${m.role} · ${m.name}` : m.role), longText(plain(m.content))))),
    h('div', {}, drawReply(node), error, drawRewards(node), facts));
}

// ---------------------------------------------------------------- address, keys, start

function remember() {
  const parts = remembered.filter((k) => state[k] !== null && state[k] !== '').map((k) => `${k}=${encodeURIComponent(visible(state[k]))}`);
  history.replaceState(null, '', '#' + parts.join('&'));
}

function recall() {
  for (const k of remembered) state[k] = k === 'a' || k === 'b' ? null : '';
  for (const part of location.hash.slice(1).split('&')) {
    const [k, v] = part.split('=', 2);
    if (!remembered.includes(k) || v === undefined) continue;
    let value; try { value = decodeURIComponent(v); } catch { continue; }
    if (k === 'a' || k === 'b') { const i = Number(value); if (Number.isInteger(i) && i >= 0 && i < columns.block.length) state[k] = i; } else state[k] = value;
  }
  if (!(state.sort in SORTS)) state.sort = '';
  $('query').value = state.q;
}

let opening = 0;
async function open(a, b) {
  if (a !== state.a) state.node = '';
  if (b !== state.b) state.nodeB = '';
  state.a = a; state.b = b; picking = false;
  const turn = ++opening;
  paintRows();
  if (a === null) { $('main').className = ''; $('main').replaceChildren(h('p', { class: 'empty soft' }, 'No episode here.')); return; }
  const [first, second] = await Promise.all([episodeAt(a), b === null ? null : episodeAt(b)]);
  if (turn !== opening) return;
  $('main').className = b === null ? '' : 'two';
  $('main').replaceChildren(drawEpisode(a, first, 'a'), ...(second ? [drawEpisode(b, second, 'b')] : []));
  for (const shown of document.querySelectorAll('.episode')) shown.reveal();
  $('main').scrollTop = 0;
  remember();
}

function move(delta) {
  if (!rows.length) return;
  const at = rows.indexOf(state.a), next = Math.max(0, Math.min(rows.length - 1, at + delta)), list = $('list');
  if (next * ROW < list.scrollTop) list.scrollTop = next * ROW;
  if ((next + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (next + 1) * ROW - list.clientHeight;
  open(rows[next], state.b);
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = ['INPUT', 'SELECT', 'TEXTAREA'].includes(event.target.tagName);
  if (event.key === 'Escape') { if (typing) event.target.blur(); else if (state.b !== null) open(state.a, null); else $('app').classList.remove('reading'); return; }
  if (typing) return;
  const inList = document.activeElement === $('list');
  const episode = document.querySelector('.episode[data-side=a]');
  const actions = { '/': () => $('query').focus(), j: () => move(1), k: () => move(-1), c: () => { picking = !picking; if (episode) episode.step(0); },
    ArrowRight: () => episode && episode.step(1), ArrowLeft: () => episode && episode.step(-1), ArrowDown: () => inList && move(1), ArrowUp: () => inList && move(-1) };
  const action = actions[event.key];
  if (!action || (!inList && (event.key === 'ArrowDown' || event.key === 'ArrowUp'))) return;
  event.preventDefault();
  action();
}

async function start() {
  const index = await unpack('index');
  columns = index.columns;
  $('title').textContent = visible(index.title);
  recall();
  paintFilters();
  paintList(true);
  let timer = 0;
  $('query').addEventListener('input', (e) => { state.q = e.target.value; matches = null; clearTimeout(timer); timer = setTimeout(() => { paintList(true); remember(); }, 80); });
  $('query').addEventListener('keydown', (e) => { if (e.key === 'Enter') searchTexts(); });
  let pending = false;
  $('list').addEventListener('scroll', () => { if (!pending) { pending = true; requestAnimationFrame(() => { pending = false; paintRows(); }); } });
  $('list').addEventListener('click', (e) => {
    const row = e.target.closest('.row');
    if (!row) return;
    const i = Number(row.dataset.i);
    $('app').classList.add('reading');
    if ((e.shiftKey || picking) && state.a !== null && i !== state.a) open(state.a, i); else open(i, state.b === i ? null : state.b);
  });
  window.addEventListener('resize', paintRows);
  window.addEventListener('hashchange', () => { recall(); paintFilters(); paintList(false); open(state.a, state.b); });
  document.addEventListener('keydown', keys);
  if (location.hash.includes('a=')) $('app').classList.add('reading');
  await open(state.a !== null ? state.a : rows.length ? rows[0] : null, state.b);
  document.documentElement.dataset.ready = 'yes';
}

start();
