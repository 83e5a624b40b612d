// One episode: its facts, and the graph of who was asked what, in lanes.

const BOX = { w: 150, h: 42, step: 64, gapX: 22, gapY: 10, top: 26 };

// Lanes are roles and tools in order of first appearance; time runs left to right. A node stands a step right of its
// parents when they are in other lanes, and clear of what it follows in its own; what is side by side gets its own track.
function layout(nodes) {
  const byId = new Map(nodes.map((n) => [n.id, n])),
    before = new Map(),
    lanes = new Map();
  for (const n of nodes) {
    const name = n.kind === 'use' ? n.tool : n.role,
      parents = (n.parents || [])
        .map((p) => byId.get(p))
        .filter((p) => p && p.x !== undefined && before.has(p.id));
    if (!lanes.has(name)) lanes.set(name, { name: name || '?', tool: n.kind === 'use', nodes: [], ends: [] });
    const lane = (n.lane = lanes.get(name)),
      earlier = new Set(parents.flatMap((p) => [p.id, ...before.get(p.id)]));
    before.set(n.id, earlier);
    n.x = Math.max(
      14,
      ...parents.map((p) => p.x + (p.lane === lane ? BOX.w + BOX.gapX : BOX.step)),
      ...lane.nodes.filter((o) => earlier.has(o.id)).map((o) => o.x + BOX.w + BOX.gapX),
    );
    n.track = lane.ends.findIndex((end) => end + 8 <= n.x);
    if (n.track < 0) n.track = lane.ends.length;
    lane.ends[n.track] = n.x + BOX.w;
    lane.nodes.push(n);
  }
  let y = BOX.top;
  for (const lane of lanes.values()) {
    lane.y = y;
    y += lane.ends.length * (BOX.h + BOX.gapY) + BOX.gapY;
  }
  for (const n of nodes) n.y = n.lane.y + BOX.gapY + n.track * (BOX.h + BOX.gapY);
  return {
    byId,
    lanes: [...lanes.values()],
    width: 14 + BOX.w + Math.max(14, ...nodes.map((n) => n.x)),
    height: y,
  };
}

// Close by: down (or up) from the parent and into the child's side. Far away: one soft curve.
function route(from, to) {
  const x2 = to.x,
    y2 = to.y + BOX.h / 2,
    right = from.x + BOX.w,
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

// A structured value as words: what is in it, without its punctuation.
function gist(value) {
  if (value === null || value === undefined) return '';
  if (typeof value !== 'object') return String(value);
  return Object.values(value).map(gist).filter(Boolean).join(' · ');
}

function said(node) {
  if (node.kind === 'use') return node.error ? plain(node.error) : gist(node.args) || gist(node.result);
  return (node.ok && gist(node.value)) || plain(node.reply) || '(empty)';
}

function drawGraph(nodes, selected, pick) {
  const { byId, lanes, width, height } = layout(nodes);
  const onPath = ancestors(byId, selected);
  const edges = [],
    boxes = [],
    turns = [];
  const most = Math.max(1e-9, ...nodes.map((n) => Math.abs(n.credit || 0)));
  for (const n of nodes) {
    for (const p of n.parents || []) {
      const from = byId.get(p);
      if (!from) continue;
      edges.push(
        h('path', { class: 'edge' + (onPath.has(p) && onPath.has(n.id) ? ' on' : ''), d: route(from, n) }),
      );
    }
    const illegal = n.kind === 'act' && n.ok === false,
      failed = Boolean(n.error);
    const who = n.agent && n.agent !== n.role ? n.agent : n.kind === 'use' ? n.tool || n.role : n.role;
    const credit = n.credit || 0,
      bar = (Math.abs(credit) / most) * (BOX.w - 16);
    boxes.push(
      h(
        'g',
        {
          class:
            `node ${n.kind}` +
            (n.id === selected ? ' on' : '') +
            (illegal ? ' illegal' : '') +
            (failed ? ' failed' : ''),
          transform: `translate(${n.x} ${n.y})`,
          tabindex: n.id === selected ? 0 : -1,
          role: 'button',
          'data-node': n.id,
          'aria-label': `${who}${illegal ? ', malformed' : ''}${failed ? ', failed' : ''}: ${short(said(n), 60)}`,
          onclick: () => pick(n.id),
          onkeydown: (e) => {
            if (e.key === 'Enter') pick(n.id);
          },
        },
        h('title', {}, `${who} · node ${n.id}\n${short(said(n), 400)}`),
        h('rect', { class: 'box', width: BOX.w, height: BOX.h, rx: n.kind === 'use' ? 12 : 4 }),
        h('text', { x: 8, y: 17 }, short(said(n), 22)),
        h(
          'text',
          { class: 'small', x: 8, y: 31 },
          [
            n.agent !== n.role && n.kind === 'act' ? n.agent : null,
            n.meta && n.meta.tokens_out ? `${n.meta.tokens_out} tok` : null,
            credit ? `${credit > 0 ? '+' : ''}${number(credit)}` : null,
          ]
            .filter(Boolean)
            .join(' · '),
        ),
        illegal || failed
          ? h('text', { class: 'flag', x: BOX.w - 7, y: 31 }, illegal ? 'malformed' : 'failed')
          : null,
        credit
          ? h('rect', {
              class: credit > 0 ? 'plus' : 'minus',
              x: 8,
              y: BOX.h - 5,
              width: Math.max(2, bar),
              height: 2,
              rx: 1,
            })
          : null,
      ),
    );
  }
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
  const lines = lanes
    .slice(1)
    .map((l) =>
      h('line', {
        class: 'lane-line',
        x1: 0,
        x2: Math.max(width, 4000),
        y1: l.y + BOX.gapY / 2,
        y2: l.y + BOX.gapY / 2,
      }),
    );
  const names = Math.min(150, 30 + 7.2 * Math.max(...lanes.map((l) => l.name.length)));
  return h(
    'div',
    { class: 'graph' },
    h(
      'svg',
      { width: names, height, 'aria-hidden': 'true' },
      lanes
        .slice(1)
        .map((l) =>
          h('line', { class: 'lane-line', x1: 0, x2: names, y1: l.y + BOX.gapY / 2, y2: l.y + BOX.gapY / 2 }),
        ),
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
        turns,
        lines,
        edges,
        boxes,
      ),
    ),
  );
}

function drawEpisode(i, episode, side) {
  const nodes = episode.nodes || [],
    key = side === 'a' ? 'node' : 'nodeB';
  let selected = nodes.some((n) => n.id === state[key])
    ? state[key]
    : nodes.length
      ? (nodes.filter((n) => n.kind === 'act').pop() || nodes[0]).id
      : '';
  state[key] = selected;
  const element = h('article', { class: 'episode', 'data-side': side, 'data-i': i });
  const tokens = nodes.reduce((sum, n) => sum + ((n.meta && n.meta.tokens_out) || 0), 0);
  const figure = (name, value, main) =>
    h('div', { class: 'figure' + (main ? ' main' : '') }, h('b', {}, number(value)), h('span', {}, name));
  const metrics = Object.entries(episode.metrics || {}).filter(
    ([, v]) => typeof v === 'number' || typeof v === 'boolean',
  );
  const others = [];
  for (let o = 0; o < columns.block.length && others.length < 12; o++)
    if (
      o !== i &&
      columns.task.codes[o] === columns.task.codes[i] &&
      columns.env.codes[o] === columns.env.codes[i]
    )
      others.push(o);
  const paint = () => {
    const node = nodes.find((n) => n.id === selected);
    element.replaceChildren(
      ...[
        h('h2', {}, columns.title[i]),
        h(
          'div',
          { class: 'facts' },
          [
            ['environment', episode.env_id],
            ['task', episode.task_id],
            ['source', word('label', i)],
            ['seed', episode.seed],
            ['sample', episode.sample],
            ['data', episode.data && (episode.data.name || plain(episode.data))],
            ['ended', [episode.ended, episode.reason].filter(Boolean).join(', ')],
            ['error', short(plain(episode.error), 200)],
            ['outcome', short(plain(episode.outcome), 90)],
          ]
            .filter(([, v]) => v !== null && v !== undefined && v !== '')
            .map(([k, v]) => h('span', {}, k + ' ', h('b', {}, v))),
        ),
        h(
          'div',
          { class: 'figures' },
          metrics.slice(0, 6).map(([k, v], n) => figure(k, Number(v), n === 0)),
          figure('credit', columns.credit[i]),
          figure('acts', columns.acts[i]),
          tokens ? figure('tokens', tokens) : null,
          h(
            'div',
            { class: 'actions' },
            h('button', { id: 'back', onclick: () => $('app').classList.remove('reading') }, '← list'),
            side === 'a'
              ? h(
                  'button',
                  {
                    'aria-pressed': String(picking),
                    onclick: () => {
                      picking = !picking;
                      paint();
                    },
                  },
                  picking ? 'pick one in the list…' : 'compare',
                )
              : h('button', { onclick: () => open(state.a, null) }, 'close'),
          ),
        ),
        side === 'a' && others.length
          ? h(
              'div',
              { class: 'chips' },
              h('span', { class: 'faint' }, 'same task:'),
              others.map((o) =>
                h(
                  'button',
                  { class: o === state.b ? 'on' : '', onclick: () => open(state.a, o) },
                  `${word('label', o) || '#' + o} · ${number(columns.score[o])}`,
                ),
              ),
            )
          : null,
        nodes.length
          ? drawGraph(nodes, selected, (id) => {
              selected = id;
              state[key] = id;
              keepScroll(element, paint);
              remember();
              element.querySelector('.node.on').focus({ preventScroll: true });
            })
          : h('p', { class: 'soft' }, 'No node: the episode ended before anyone acted.'),
        node ? drawNode(node, nodes) : null,
      ].filter(Boolean),
    );
  };
  paint();
  element.step = (delta) => {
    const at = nodes.findIndex((n) => n.id === selected),
      next = nodes[Math.max(0, Math.min(nodes.length - 1, at + delta))];
    if (!next) return;
    selected = next.id;
    state[key] = next.id;
    keepScroll(element, paint);
    element.reveal();
    remember();
  };
  element.reveal = () => {
    const scroll = element.querySelector('.graph .scroll'),
      node = nodes.find((n) => n.id === selected);
    if (scroll && (node.x < scroll.scrollLeft || node.x + BOX.w > scroll.scrollLeft + scroll.clientWidth))
      scroll.scrollLeft = node.x + BOX.w + 20 - scroll.clientWidth;
  };
  return element;
}

function keepScroll(element, paint) {
  const before = element.querySelector('.graph .scroll'),
    left = before ? before.scrollLeft : 0;
  paint();
  const after = element.querySelector('.graph .scroll');
  if (after) after.scrollLeft = left;
}
