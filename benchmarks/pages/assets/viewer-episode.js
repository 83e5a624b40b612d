// One episode: what it is, how it went, its graph, and the node that is chosen in it.

const figure = (name, value, main) =>
  h('div', { class: 'figure' + (main ? ' main' : '') }, h('b', {}, number(value)), h('span', {}, words(name)));

const facts = (pairs) =>
  h(
    'div',
    { class: 'facts' },
    pairs
      .filter(([, v]) => v !== null && v !== undefined && v !== '')
      .map(([k, v]) => h('span', {}, k + ' ', h('b', {}, v))),
  );

// The outcome as a reader would say it: the answer first, the rest by name.
function drawOutcome(episode) {
  const outcome = episode.outcome;
  if (outcome === null || outcome === undefined) return null;
  if (typeof outcome !== 'object' || Array.isArray(outcome))
    return h('p', { class: 'outcome' }, h('span', {}, 'outcome'), h('b', {}, short(told(outcome), 300)));
  const { answer, ...rest } = outcome;
  const others = Object.entries(rest)
    .filter(([, v]) => told(v) !== '')
    .map(([k, v]) => `${words(k)} ${short(told(v), 120)}`);
  return h(
    'p',
    { class: 'outcome' },
    answer === undefined
      ? h('span', {}, 'outcome')
      : [h('span', {}, 'answer'), h('b', {}, short(told(answer), 300) || '(empty)')],
    h('span', { class: answer === undefined ? '' : 'soft' }, short(others.join(' · '), 300)),
  );
}

function drawHead(i, episode) {
  const metrics = Object.entries(episode.metrics || {}).filter(
    ([, v]) => typeof v === 'number' || typeof v === 'boolean',
  );
  metrics.sort(([x], [y]) => (y === headline) - (x === headline));
  return [
    h('h2', {}, columns.title[i]),
    facts([
      ['', [word('label', i).includes(word('part', i)) ? '' : word('part', i), word('label', i), sampleOf(i)].filter(Boolean).join(' · ')],
      ['task', episode.task_id],
      ['ended', [episode.ended, episode.reason].filter(Boolean).join(', ')],
      ['error', short(plain(episode.error), 200)],
    ]),
    drawOutcome(episode),
    h(
      'div',
      { class: 'figures' },
      metrics.slice(0, 6).map(([k, v], n) => figure(k, Number(v), n === 0)),
      figure('credit', columns.credit[i]),
      figure('acts', columns.acts[i]),
      columns.tokens[i] ? figure('tokens', columns.tokens[i]) : null,
    ),
    h(
      'details',
      { class: 'more' },
      h('summary', {}, metrics.length > 6 ? 'all metrics, settings' : 'settings'),
      facts(metrics.slice(6).map(([k, v]) => [words(k), number(Number(v))])),
      facts([
        ['environment', episode.env_id],
        ['data', episode.data && (episode.data.name || plain(episode.data))],
        ['fingerprint', episode.data && episode.data.fingerprint],
        ['seed', episode.seed],
        ['code', episode.code_hash],
        ...Object.entries(episode.config || {}).map(([k, v]) => [words(k), short(told(v), 200)]),
      ]),
    ),
  ];
}

// Other episodes of the task, to put beside this one; the first and last source among them, where there are many.
function sameTask(i) {
  const others = [];
  for (let o = 0; o < columns.block.length; o++)
    if (o !== i && columns.task.codes[o] === columns.task.codes[i] && columns.env.codes[o] === columns.env.codes[i])
      others.push(o);
  return others.length <= 12 ? others : [...others.slice(0, 6), ...others.slice(-6)];
}

function drawCompare(i, side, paint) {
  const others = sameTask(i),
    tour = tours.find((t) => t.a === i);
  if (side === 'b')
    return h('div', { class: 'chips' }, h('button', { onclick: () => open(state.a, null) }, 'close this side'));
  return [
    tour && state.b === null
      ? h(
          'p',
          { class: 'why' },
          tour.why,
          ' ',
          tour.b === undefined
            ? null
            : h('button', { onclick: () => open(i, tour.b) }, 'side by side'),
        )
      : null,
    h(
      'div',
      { class: 'chips' },
      h('button', { id: 'back', onclick: () => $('app').classList.remove('reading') }, '← list'),
      h(
        'button',
        {
          'aria-pressed': String(picking),
          onclick: () => {
            picking = !picking;
            paint();
          },
        },
        picking ? 'now choose one in the list' : 'compare with…',
      ),
      others.map((o) =>
        h(
          'button',
          { class: o === state.b ? 'on' : '', title: 'the same task', onclick: () => open(state.a, o) },
          mark(o),
          `${[word('label', o), sampleOf(o)].filter(Boolean).join(' · ') || '#' + o}: ${number(columns.score[o], 2)}`,
        ),
      ),
    ),
  ];
}

// The room for a graph: the pane without its padding.
function roomFor() {
  const main = $('main'),
    two = state.b !== null && main.clientWidth > 760;
  return two ? main.clientWidth / 2 - 40 : main.clientWidth - (main.clientWidth > 700 ? 58 : 30);
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
  const choose = (id) => {
    selected = id;
    state[key] = id;
    keepScroll(element, paint);
    remember();
  };
  // the box that was pressed stays where it is on the screen
  const pick = (id) => {
    const top = () => element.querySelector(`[data-node="${CSS.escape(id)}"]`).getBoundingClientRect().top,
      before = top();
    choose(id);
    $('main').scrollTop += top() - before;
    element.querySelector('.node.on').focus({ preventScroll: true });
  };
  const paint = () => {
    const node = nodes.find((n) => n.id === selected);
    element.replaceChildren(
      ...[
        drawHead(i, episode),
        drawCompare(i, side, paint),
        ...(!nodes.length
          ? [h('p', { class: 'soft' }, 'No node: the episode ended before anyone acted.')]
          : roomFor() < NARROW
            ? [drawSteps(nodes, selected, pick, drawNode(node, nodes))]
            : [drawGraph(nodes, selected, pick, roomFor()), drawNode(node, nodes)]),
      ]
        .flat()
        .filter(Boolean),
    );
  };
  paint();
  element.paint = () => keepScroll(element, paint);
  element.step = (delta) => {
    const at = nodes.findIndex((n) => n.id === selected),
      next = nodes[Math.max(0, Math.min(nodes.length - 1, at + delta))];
    if (!next) return;
    choose(next.id);
    element.reveal();
  };
  element.reveal = () => {
    const scroll = element.querySelector('.graph .scroll'),
      box = element.querySelector('.graph .node.on');
    if (!scroll || !box) return;
    const at = box.getBoundingClientRect(),
      pane = scroll.getBoundingClientRect();
    if (at.left < pane.left || at.right > pane.right) scroll.scrollLeft += at.right + 20 - pane.right;
  };
  return element;
}

// What the reader had opened and scrolled to stays when an episode is drawn anew.
function keepScroll(element, paint) {
  const left = (element.querySelector('.graph .scroll') || {}).scrollLeft || 0,
    opened = [...element.querySelectorAll('details')].map((d) => d.open);
  paint();
  const after = element.querySelector('.graph .scroll');
  if (after) after.scrollLeft = left;
  [...element.querySelectorAll('details')].forEach((d, n) => (d.open = Boolean(opened[n])));
}
