// Episodes as they are needed, and the list of them: filters, sorting, search. Only the rows in sight exist.

async function episodeAt(i) {
  const id = 'block' + columns.block[i];
  if (!blocks.has(id)) {
    if (!$(id) && document.readyState === 'loading')
      await new Promise((done) => document.addEventListener('DOMContentLoaded', done));
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
    (!state.outcome || outcomeOf(i) === state.outcome || word('ended', i) === state.outcome) &&
    (!state.role || word('roles', i).split(' ').includes(state.role)) &&
    (!state.label || word('label', i) === state.label) &&
    (!state.env || word('env', i) === state.env) &&
    (state.trouble !== 'malformed' ||
      (state.role ? word('malformed', i).split(' ').includes(state.role) : word('malformed', i) !== '')) &&
    (state.trouble !== 'tool error' || columns.errors[i] > 0) &&
    (!needle ||
      (matches
        ? matches.has(i)
        : `${columns.title[i]}\n${word('task', i)}\n${word('label', i)}\n${word('env', i)}`
            .toLowerCase()
            .includes(needle)));
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
    for (const episode of episodes) {
      if (JSON.stringify(episode).toLowerCase().includes(JSON.stringify(needle).slice(1, -1))) found.add(i);
      i++;
    }
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
  $('counts').textContent =
    `${number(rows.length)} of ${number(columns.block.length)} episodes` +
    (mean === null ? '' : ` · mean score ${number(mean, 3)}`);
  paintHistogram(scores);
  paintRows();
}

function paintHistogram(scores) {
  const low = scores.reduce((x, y) => Math.min(x, y), 0),
    high = scores.reduce((x, y) => Math.max(x, y), 1);
  const bins = new Array(24).fill(0);
  for (const s of scores) bins[Math.min(23, Math.floor(((s - low) / (high - low)) * 24))]++;
  const most = Math.max(1, ...bins);
  $('histogram').replaceChildren(
    h(
      'svg',
      { viewBox: '0 0 240 30', preserveAspectRatio: 'none' },
      bins.map(
        (n, x) =>
          n &&
          h('rect', {
            x: x * 10,
            width: 9,
            y: 30 - Math.max(1.5, (n / most) * 30),
            height: Math.max(1.5, (n / most) * 30),
          }),
      ),
    ),
  );
}

function paintRows() {
  const list = $('list'),
    first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
  const last = Math.min(rows.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 4);
  const shown = [];
  for (let at = first; at < last; at++) {
    const i = rows[at],
      trouble = word('malformed', i) !== '' || columns.errors[i] > 0 || word('ended', i) === 'error';
    shown.push(
      h(
        'div',
        {
          class: 'row' + (i === state.a ? ' a' : '') + (i === state.b ? ' b' : ''),
          role: 'option',
          'aria-selected': String(i === state.a),
          'data-i': i,
          style: { top: at * ROW + 'px' },
        },
        h('b', {}, columns.title[i]),
        h('b', { class: 'score' }, number(columns.score[i])),
        h(
          'span',
          {},
          [
            word('task', i),
            word('label', i),
            `${columns.acts[i]} acts`,
            columns.tokens[i] && `${number(columns.tokens[i])} tokens`,
          ]
            .filter(Boolean)
            .join(' · '),
        ),
        h(
          'span',
          { class: trouble ? 'state bad' : 'state' },
          trouble
            ? [
                word('malformed', i) && 'malformed',
                columns.errors[i] && 'tool error',
                word('ended', i) === 'error' && 'error',
              ].filter(Boolean)[0]
            : word('ended', i),
        ),
      ),
    );
  }
  $('sizer').replaceChildren(...shown);
}

function paintFilters() {
  const count = (values) => [...new Set(values)].filter(Boolean).sort();
  const choice = (key, name, options) => {
    if (options.length < 2 && key !== 'trouble' && key !== 'outcome') return null;
    const select = h(
      'select',
      {
        'aria-label': name,
        class: state[key] ? 'on' : '',
        'data-key': key,
        onchange: (e) => {
          state[key] = e.target.value;
          paintFilters();
          paintList(true);
          remember();
        },
      },
      h('option', { value: '' }, name),
      options.filter(Boolean).map((o) => h('option', { value: o, selected: state[key] === o }, o)),
    );
    return select;
  };
  $('filters').replaceChildren(
    ...[
      choice('outcome', 'any outcome', [
        'success',
        'partial',
        'failure',
        'unscored',
        ...columns.ended.words.filter((w) => w !== 'terminal'),
      ]),
      choice('role', 'any role', count(columns.roles.words.flatMap((w) => w.split(' ')))),
      choice('trouble', 'any trouble', ['malformed', 'tool error']),
      choice('label', 'any source', columns.label.words),
      choice('env', 'any environment', columns.env.words),
      choice('sort', 'in order', Object.keys(SORTS)),
    ].filter(Boolean),
  );
}
