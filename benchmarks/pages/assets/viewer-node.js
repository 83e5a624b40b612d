// One node: prompt, reply with its tokens, verdict, and the rewards that make up its credit.

// Tokens with their numbers, where the run kept them: {text: [...], logprob: [...], advantage: [...]}.
const tokensOf = (node) => (node.meta && node.meta.tokens) || null;

// The strongest advantage of an episode is full colour, so that its replies can be compared.
const strongest = (nodes) =>
  nodes.reduce(
    (most, node) =>
      ((tokensOf(node) || {}).advantage || []).reduce((m, v) => Math.max(m, Math.abs(v || 0)), most),
    1e-9,
  );

function longText(text, most = 6000) {
  const pre = h('pre', { dir: 'auto', tabindex: text.length > 1200 ? 0 : null }, text.slice(0, most));
  if (text.length > most)
    pre.append(
      h(
        'button',
        { onclick: () => pre.replaceChildren(visible(text)) },
        `show all ${number(text.length)} characters`,
      ),
    );
  return pre;
}

// A value that a program made, for reading: names and what they hold; passages as passages; JSON only where it is deep.
function drawValue(value) {
  if (typeof value === 'string') return longText(value);
  const flat = (v) => v === null || typeof v !== 'object';
  if (Array.isArray(value) && value.length && value.every((v) => v && typeof v.text === 'string'))
    return h(
      'div',
      { class: 'passages' },
      value.map((v) => h('div', {}, h('b', {}, plain(v.title) || plain(v.id)), longText(v.text))),
    );
  const entries = value && typeof value === 'object' && !Array.isArray(value) ? Object.entries(value) : null;
  if (entries && entries.length && entries.every(([, v]) => flat(v)))
    return h(
      'dl',
      { class: 'value' },
      entries.map(([k, v]) => [
        h('dt', {}, words(k)),
        h('dd', {}, typeof v === 'string' && v.length > 400 ? longText(v) : spoken(v)),
      ]),
    );
  return flat(value) ? h('p', {}, spoken(value)) : longText(JSON.stringify(value, null, 1));
}

const spoken = (v) =>
  v === true ? 'yes' : v === false ? 'no' : v === null || v === undefined ? 'nothing' : typeof v === 'number' ? number(v) : v;

// The same in a line.
function told(value) {
  if (value === null || typeof value !== 'object') return spoken(value);
  if (Array.isArray(value)) return value.map(told).join(' · ');
  return Object.entries(value)
    .map(([k, v]) => (v === true ? words(k) : `${words(k)}: ${told(v)}`))
    .join(' · ');
}

const tintName = (t) => (t === 'logprob' ? 'log-prob' : t);

function tokenText(tokens, tint, biggest) {
  const values = tokens[tint] || [];
  return h(
    'pre',
    { dir: 'auto' },
    tokens.text.map((text, i) => {
      const v = values[i];
      if (v === null || v === undefined) return text;
      const colour = tint === 'advantage' ? (v >= 0 ? 'good' : 'bad') : 'accent';
      const strength = tint === 'advantage' ? Math.abs(v) / biggest : 1 - Math.exp(v); // the less likely, the more
      return h(
        'span',
        {
          class: 'tok',
          title: Object.keys(tokens)
            .filter((k) => k !== 'text')
            .map((k) => `${k} ${number(tokens[k][i])}`)
            .join('\n'),
          style: { 'background-color': `rgb(var(--${colour}-rgb) / ${(0.6 * strength).toFixed(3)})` },
        },
        text,
      );
    }),
  );
}

function drawReply(node, nodes) {
  const box = h('section', { class: 'reply' + (node.ok === false ? ' illegal' : '') });
  const paint = () => {
    const tints = tokensOf(node) ? ['logprob', 'advantage'].filter((t) => tokensOf(node)[t]) : [];
    const tint = tints.includes(state.tint) ? state.tint : tints[0];
    box.replaceChildren(
      ...[
        h(
          'div',
          { class: 'label' },
          'Reply',
          tints.map((t) =>
            h(
              'button',
              {
                'aria-pressed': String(t === tint),
                class: t === tint ? 'on' : '',
                onclick: () => {
                  state.tint = t;
                  paint();
                },
              },
              t === tint ? `coloured by ${tintName(t)}` : tintName(t),
            ),
          ),
        ),
        tints.length ? tokenText(tokensOf(node), tint, strongest(nodes)) : longText(plain(node.reply)),
        h(
          'div',
          { class: 'verdict' },
          node.ok ? h('b', { class: 'good' }, 'legal') : h('b', { class: 'bad' }, 'malformed'),
          h(
            'span',
            { class: 'mono' },
            node.value === null || node.value === undefined
              ? 'no value'
              : `read as ${short(told(node.value), 2000) || '(empty)'}`,
          ),
        ),
      ],
    );
  };
  paint();
  return box;
}

function drawRewards(node) {
  const parts = Object.entries(node.rewards || {});
  if (!parts.length)
    return h(
      'section',
      {},
      h('div', { class: 'label' }, 'Rewards'),
      h('p', { class: 'soft' }, 'none on this node'),
    );
  let at = 0;
  const steps = parts.map(([name, v]) => {
    const from = at;
    at += v;
    return { name, v, from, to: at };
  });
  const low = Math.min(0, ...steps.map((s) => s.to)),
    high = Math.max(0, ...steps.map((s) => s.to)),
    span = high - low || 1;
  const x = (v) => ((v - low) / span) * 200;
  const bar = (from, to, cls) =>
    h(
      'svg',
      { viewBox: '0 0 200 12', preserveAspectRatio: 'none' },
      h('line', { x1: x(0), x2: x(0), y1: 0, y2: 12 }),
      h('rect', {
        class: cls,
        x: Math.min(x(from), x(to)),
        width: Math.max(1, Math.abs(x(to) - x(from))),
        y: 2,
        height: 8,
      }),
    );
  const off = Math.abs(at - (node.credit || 0)) > 1e-9 * Math.max(1, Math.abs(at));
  return h(
    'section',
    {},
    h('div', { class: 'label' }, 'Rewards'),
    h(
      'table',
      { class: 'rewards' },
      steps.map((s) =>
        h(
          'tr',
          {},
          h('td', {}, s.name),
          h('td', { class: 'n' }, number(s.v)),
          h('td', { class: 'bar' }, bar(s.from, s.to, s.v >= 0 ? 'plus' : 'minus')),
        ),
      ),
      h(
        'tr',
        { class: 'sum' },
        h('td', {}, 'credit'),
        h('td', { class: 'n' }, number(node.credit)),
        h('td', { class: 'bar' }, bar(0, at, 'sumbar')),
      ),
    ),
    off ? h('p', { class: 'bad' }, `the components add up to ${number(at)}, not to the credit`) : null,
  );
}

function drawNode(node, nodes) {
  const meta = Object.entries(node.meta || {}).filter(
    ([, v]) => v !== null && v !== undefined && typeof v !== 'object',
  );
  const head = h(
    'div',
    { class: 'node-head' },
    h('h3', {}, node.kind === 'use' ? node.tool || node.role : node.agent || node.role),
    h(
      'span',
      { class: 'soft' },
      [
        `node ${node.id}`,
        node.turn !== null && node.turn !== undefined && `turn ${node.turn}`,
        (node.parents || []).length && `after ${node.parents.join(', ')}`,
      ]
        .filter(Boolean)
        .join(' · '),
    ),
  );
  const facts = meta.length
    ? h(
        'details',
        {},
        h('summary', {}, 'measurements'),
        h(
          'div',
          { class: 'facts' },
          meta.map(([k, v]) => h('span', {}, words(k) + ' ', h('b', {}, number(v)))),
        ),
      )
    : null;
  const error = node.error
    ? h(
        'section',
        {},
        h('div', { class: 'label' }, 'Error'),
        h('p', { class: 'bad mono' }, short(plain(node.error), 4000)),
      )
    : null;
  if (node.kind === 'use') {
    return h(
      'div',
      { class: 'detail' },
      head,
      h(
        'section',
        {},
        h('div', { class: 'label' }, 'Arguments'),
        drawValue(node.args),
      ),
      h(
        'div',
        {},
        error,
        h(
          'section',
          {},
          h('div', { class: 'label' }, 'Result'),
          node.result === null || node.result === undefined
            ? h('p', { class: 'soft' }, 'none')
            : drawValue(node.result),
        ),
        node.private === null || node.private === undefined
          ? null
          : h(
              'section',
              {},
              h('div', { class: 'label' }, 'Seen by grading only'),
              drawValue(node.private),
            ),
        facts,
      ),
    );
  }
  return h(
    'div',
    { class: 'detail' },
    head,
    h(
      'section',
      {},
      (node.messages || []).map((m) =>
        h(
          'div',
          { class: 'message ' + (m.role === 'system' ? 'system' : '') },
          h('div', { class: 'label' }, m.name ? `${m.role} · ${m.name}` : m.role),
          longText(plain(m.content)),
        ),
      ),
    ),
    h('div', {}, drawReply(node, nodes), error, drawRewards(node), facts),
  );
}
