// The graph of who was asked what, in lanes, as wide as the window lets it be; and as a list where that is narrow.

const BOX = { h: 42, gapX: 22, gapY: 10, top: 26 };
const NARROW = 560;

// The widest boxes that fit: first with lines that pass beside boxes, then with lines that may pass behind them.
// Where none do, the graph scrolls.
function fitted(nodes, room) {
  const size = (w) => ({ w, step: Math.round(0.42 * w) });
  for (const clear of [true, false])
    for (let w = 190; w >= 88 && nodes.length < 150; w -= 6) {
      const made = layout(nodes, size(w), clear);
      if (made.width <= room) return made;
    }
  return layout(nodes, size(136), true);
}

// Lanes are roles and tools in order of first appearance; time runs left to right. A node stands a step right of its
// parents when they are in other lanes, and clear of what it follows in its own; what is side by side gets its own track.
function layout(nodes, { w, step }, clear) {
  const byId = new Map(nodes.map((n) => [n.id, n])),
    before = new Map(),
    lanes = new Map();
  for (const [at, n] of nodes.entries()) {
    const name = n.kind === 'use' ? n.tool : n.role,
      parents = (n.parents || [])
        .map((p) => byId.get(p))
        .filter((p) => p && p.x !== undefined && before.has(p.id));
    if (!lanes.has(name)) lanes.set(name, { name: name || '?', tool: n.kind === 'use', nodes: [], ends: [] });
    const lane = (n.lane = lanes.get(name)),
      earlier = new Set(parents.flatMap((p) => [p.id, ...before.get(p.id)]));
    before.set(n.id, earlier);
    if (!lane.row) lane.row = lanes.size;
    n.x = Math.max(
      14,
      ...parents.map((p) => p.x + (p.lane === lane ? w + BOX.gapX : step)),
      ...lane.nodes.filter((o) => earlier.has(o.id)).map((o) => o.x + w + BOX.gapX),
    );
    if (clear) n.x = clearOf(n, parents, nodes.slice(0, at), w);
    n.track = lane.ends.findIndex((end) => end + 8 <= n.x);
    if (n.track < 0) n.track = lane.ends.length;
    lane.ends[n.track] = n.x + w;
    lane.nodes.push(n);
  }
  let y = BOX.top;
  for (const lane of lanes.values()) {
    lane.y = y;
    y += lane.ends.length * (BOX.h + BOX.gapY) + BOX.gapY;
  }
  for (const n of nodes) n.y = n.lane.y + BOX.gapY + n.track * (BOX.h + BOX.gapY);
  return {
    w,
    byId,
    lanes: [...lanes.values()],
    width: 14 + w + Math.max(14, ...nodes.map((n) => n.x)),
    height: y,
  };
}

// A line from a lane further away comes down left of the node: no box of the lanes between may stand there.
function clearOf(n, parents, nodes, w) {
  let x = n.x;
  for (const p of parents) {
    const [low, high] = [p.lane.row, n.lane.row].sort((a, b) => a - b);
    for (const o of nodes)
      if (o.x !== undefined && o !== n && o.lane.row > low && o.lane.row < high && o.x < x && o.x + w + BOX.gapX > x)
        x = o.x + w + BOX.gapX;
  }
  return x;
}

// Close by: down (or up) from the parent and into the child's side. Far away: one soft curve.
function route(from, to, w) {
  const x2 = to.x,
    y2 = to.y + BOX.h / 2,
    right = from.x + w,
    down = to.y > from.y;
  if (right + 10 > x2) {
    const x = Math.max(from.x + 10, x2 - 16),
      r = 8;
    return `M${x} ${down ? from.y + BOX.h : from.y}V${down ? y2 - r : y2 + r}Q${x} ${y2} ${x + r} ${y2}H${x2}`;
  }
  const y1 = from.y + BOX.h / 2,
    bend = Math.min(90, Math.max(14, (x2 - right) / 2));
  return `M${right} ${y1}C${right + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

// All that led to a node.
function ancestors(byId, id) {
  const seen = new Set(),
    todo = [id];
  while (todo.length) {
    const at = todo.pop();
    if (seen.has(at) || !byId.has(at)) continue;
    seen.add(at);
    todo.push(...(byId.get(at).parents || []));
  }
  return seen;
}

const short = (text, most) => {
  const line = visible(text).replace(/\s+/g, ' ').trim();
  return line.length > most ? line.slice(0, most - 1) + '…' : line;
};
const plain = (value) =>
  typeof value === 'string' ? value : value === null || value === undefined ? '' : JSON.stringify(value);

// A structured value as words: what is in it, without its punctuation. A flag is its name.
function gist(value) {
  if (value === null || value === undefined) return '';
  if (typeof value !== 'object') return String(value);
  return Object.entries(value)
    .map(([k, v]) => (v === true ? words(k) : v === false ? '' : gist(v)))
    .filter(Boolean)
    .join(' · ');
}

function said(node) {
  if (node.kind === 'use') return node.error ? plain(node.error) : gist(node.args) || gist(node.result);
  return (node.ok && gist(node.value)) || plain(node.reply) || '(empty)';
}

// What stands in a node's box besides its words.
const speaker = (n) => (n.kind === 'use' ? n.tool || n.role : n.agent || n.role) || '?';
const creditOf = (n) => (n.credit ? `${n.credit > 0 ? '+' : ''}${number(n.credit)}` : null);
const sizeWords = (n) => (n.meta && n.meta.tokens_out ? `${n.meta.tokens_out} tok` : null);
const flagOf = (n) => (n.kind === 'act' && n.ok === false ? 'malformed' : n.error ? 'failed' : '');
const classOf = (n, selected) =>
  `node ${n.kind}` +
  (n.id === selected ? ' on' : '') +
  (flagOf(n) === 'malformed' ? ' illegal' : '') +
  (n.error ? ' failed' : '');
const pickers = (n, pick) => ({
  role: 'button',
  'data-node': n.id,
  'aria-label': [speaker(n), flagOf(n), short(said(n), 60)].filter(Boolean).join(', '),
  onclick: () => pick(n.id),
  onkeydown: (e) => {
    if (e.key !== 'Enter' && e.key !== ' ') return;
    e.preventDefault();
    pick(n.id);
  },
});

function drawBox(n, w, selected, most, pick) {
  const letters = Math.floor((w - 16) / 6.1),
    flag = flagOf(n),
    small = [n.agent !== n.role && n.kind === 'act' ? n.agent : null, sizeWords(n), creditOf(n)].filter(Boolean);
  return h(
    'g',
    {
      class: classOf(n, selected),
      transform: `translate(${n.x} ${n.y})`,
      tabindex: n.id === selected ? 0 : -1,
      ...pickers(n, pick),
    },
    h('title', {}, `${speaker(n)} · node ${n.id}\n${short(said(n), 400)}`),
    h('rect', { class: 'box', width: w, height: BOX.h, rx: n.kind === 'use' ? 12 : 4 }),
    h('text', { x: 8, y: 17 }, short(said(n), letters)),
    h('text', { class: 'small', x: 8, y: 31 }, short(small.join(' · '), letters - flag.length)),
    flag ? h('text', { class: 'flag', x: w - 7, y: 31 }, flag) : null,
    n.credit
      ? h('rect', {
          class: n.credit > 0 ? 'plus' : 'minus',
          x: 8,
          y: BOX.h - 5,
          width: Math.max(2, (Math.abs(n.credit) / most) * (w - 16)),
          height: 2,
          rx: 1,
        })
      : null,
  );
}

function drawTurns(nodes) {
  const turns = [];
  let last = null;
  for (const n of [...nodes].sort((x, y) => x.x - y.x)) {
    if (n.turn === null || n.turn === undefined || n.turn === last || (last !== null && n.turn < last))
      continue;
    last = n.turn;
    turns.push(
      h('line', { class: 'turn-line', x1: n.x, x2: n.x, y1: 6, y2: n.y }),
      h('text', { class: 'turn-name', x: n.x + 5, y: 14 }, `turn ${n.turn}`),
    );
  }
  return turns;
}

function drawGraph(nodes, selected, pick, room) {
  const longest = Math.max(...nodes.map((n) => ((n.kind === 'use' ? n.tool : n.role) || '?').length)),
    names = Math.min(150, 30 + 7.2 * longest);
  const { byId, lanes, width, height, w } = fitted(nodes, room - names - 2);
  const onPath = ancestors(byId, selected),
    most = Math.max(1e-9, ...nodes.map((n) => Math.abs(n.credit || 0)));
  const edges = nodes.flatMap((n) =>
    (n.parents || [])
      .filter((p) => byId.has(p))
      .map((p) =>
        h('path', {
          class: 'edge' + (onPath.has(p) && onPath.has(n.id) ? ' on' : ''),
          d: route(byId.get(p), n, w),
        }),
      ),
  );
  const lines = (end) =>
    lanes.slice(1).map((l) => {
      const y = l.y + BOX.gapY / 2;
      return h('line', { class: 'lane-line', x1: 0, x2: end, y1: y, y2: y });
    });
  return h(
    'div',
    { class: 'graph' },
    h(
      'svg',
      { width: names, height, 'aria-hidden': 'true' },
      lines(names),
      lanes.map((l) =>
        h(
          'text',
          { class: 'lane-name' + (l.tool ? ' tool' : ''), x: 14, y: l.y + BOX.gapY + BOX.h / 2 + 4 },
          short(l.name, 18),
        ),
      ),
    ),
    h(
      'div',
      { class: 'scroll' },
      h(
        'svg',
        { width, height, role: 'group', 'aria-label': 'graph of the episode' },
        drawTurns(nodes),
        lines(Math.max(width, 4000)),
        edges,
        nodes.map((n) => drawBox(n, w, selected, most, pick)),
      ),
    ),
  );
}

// The same from top to bottom, the chosen node's detail below it. What was asked side by side is set in, by the branches of its path.
function drawSteps(nodes, selected, pick, detail) {
  let turn = null;
  return h(
    'div',
    { class: 'steps', role: 'group', 'aria-label': 'steps of the episode' },
    nodes.flatMap((n) => {
      const heading =
        n.turn !== null && n.turn !== undefined && n.turn !== turn
          ? h('div', { class: 'turn' }, `turn ${(turn = n.turn)}`)
          : null;
      return [
        heading,
        h(
          'div',
          {
            class: classOf(n, selected),
            tabindex: n.id === selected ? 0 : -1,
            style: { 'margin-left': Math.min(3, (String(n.id).split('.').length - 1) / 2) * 12 + 'px' },
            ...pickers(n, pick),
          },
          h('b', {}, speaker(n)),
          h('span', { class: 'words' }, short(said(n), 160)),
          h(
            'span',
            { class: 'small' },
            flagOf(n) ? h('em', {}, flagOf(n)) : null,
            [sizeWords(n), creditOf(n)].filter(Boolean).join(' · '),
          ),
        ),
        n.id === selected ? detail : null,
      ];
    }),
  );
}
