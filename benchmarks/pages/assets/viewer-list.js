// Episodes as they are needed, and the list of them by task: filters, sorting, search. Only the rows in sight exist.

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
    (!state.part || word('part', i) === state.part) &&
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
  const kept = [];
  for (let i = 0; i < columns.block.length; i++) if (keep(i)) kept.push(i);
  const by = SORTS[state.sort];
  if (by) kept.sort((x, y) => by(x) - by(y) || x - y);
  arrange(kept);
}

// Held-out episodes stand before training ones, and a task's samples beside each other, where their first one stands.
const HEIGHTS = { part: 32, task: 31, sample: 26, alone: 48 };
function arrange(kept) {
  const parts = new Map();
  for (const i of kept) {
    const part = word('part', i),
      task = taskOf(i);
    if (!parts.has(part)) parts.set(part, new Map());
    const tasks = parts.get(part);
    if (!tasks.has(task)) tasks.set(task, []);
    tasks.get(task).push(i);
  }
  items = [];
  rows = [];
  let top = 0;
  const add = (kind, item) => {
    items.push({ kind, top, ...item });
    top += HEIGHTS[kind];
  };
  for (const part of [...parts.keys()].sort((x, y) => (x === 'train') - (y === 'train'))) {
    const tasks = [...parts.get(part).values()];
    if (parts.size > 1) add('part', { part, count: tasks.reduce((sum, t) => sum + t.length, 0), tasks: tasks.length });
    for (const samples of tasks) {
      if (samples.length > 1) add('task', { i: samples[0], samples });
      for (const i of samples) {
        add(samples.length > 1 ? 'sample' : 'alone', { i });
        rows.push(i);
      }
    }
  }
  $('sizer').style.height = top + 'px';
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
  if (top) $('list').scrollTop = 0;
  const scores = rows.map((i) => columns.score[i]).filter((s) => s !== null);
  const mean = scores.length ? scores.reduce((x, y) => x + y, 0) / scores.length : null;
  $('counts').textContent =
    `${number(rows.length)} of ${counted(columns.block.length, 'episode')}` +
    (mean === null ? '' : ` · mean ${words(headline)} ${number(mean, 3)}`);
  paintHistogram(scores);
  paintRows();
}

const BINS = 10;
function paintHistogram(scores) {
  const low = scores.reduce((x, y) => Math.min(x, y), 0),
    high = scores.reduce((x, y) => Math.max(x, y), 1);
  const bins = new Array(BINS).fill(0),
    edge = (x) => number(low + ((high - low) * x) / BINS, high - low > 20 ? 0 : 1);
  for (const s of scores) bins[Math.min(BINS - 1, Math.floor(((s - low) / (high - low)) * BINS))]++;
  const most = Math.max(1, ...bins),
    shown = (n) => (n >= 10000 ? `${Math.round(n / 1000)}k` : String(n)),
    said = bins.map((n, x) => n && `${n} from ${edge(x)} to ${edge(x + 1)}`).filter(Boolean);
  $('histogram').replaceChildren(
    ...(scores.length
      ? [
          h(
            'svg',
            { viewBox: '0 0 280 66', role: 'img', 'aria-label': `episodes by ${headline}: ${said.join(', ')}` },
            bins.map((n, x) => {
              const height = Math.max(1.5, (n / most) * 36);
              return (
                n > 0 && [
                  h(
                    'rect',
                    { x: x * 28 + 1, width: 26, y: 50 - height, height },
                    h('title', {}, `${n} from ${edge(x)} to ${edge(x + 1)}`),
                  ),
                  h('text', { class: 'count', x: x * 28 + 14, y: 47 - height }, shown(n)),
                ]
              );
            }),
            h('line', { x1: 0, x2: 280, y1: 50.5, y2: 50.5 }),
            h('text', { x: 1, y: 62 }, edge(0)),
            h('text', { class: 'middle', x: 140, y: 62 }, `episodes by ${words(headline)}`),
            h('text', { class: 'end', x: 279, y: 62 }, edge(BINS)),
          ),
        ]
      : []),
  );
}

// What is wrong with an episode, in a word; else how it ended, where that is out of the ordinary.
function stateOf(i) {
  if (word('ended', i) === 'error') return ['error', true];
  if (word('malformed', i) !== '') return ['malformed', true];
  if (columns.errors[i] > 0) return ['tool error', true];
  return [word('ended', i) === 'terminal' ? '' : word('ended', i), false];
}

const mark = (i) => h('i', { class: `dot ${outcomeOf(i)}`, title: outcomeOf(i) });
const sizeOf = (i) =>
  [counted(columns.acts[i], 'act'), columns.tokens[i] && counted(columns.tokens[i], 'token')].filter(Boolean).join(' · ');

// Which of several samples of a task in its source; nothing, where each task was played once.
const sampled = new Set();
const sampleOf = (i) => (sampled.has(columns.label.codes[i]) ? `sample ${columns.sample[i] + 1}` : '');
function noteSamples() {
  for (let i = 0; i < columns.block.length; i++) if (columns.sample[i] > 0) sampled.add(columns.label.codes[i]);
}

function drawItem(item) {
  const { kind, i, top } = item,
    style = { top: top + 'px', height: HEIGHTS[kind] + 'px' };
  if (kind === 'part')
    return h(
      'div',
      { class: 'head part', role: 'presentation', style },
      h('b', {}, item.part || 'other'),
      h('span', {}, `${counted(item.count, 'episode')}, ${counted(item.tasks, 'task')}`),
    );
  if (kind === 'task') {
    const scores = item.samples.map((s) => columns.score[s]).filter((s) => s !== null);
    return h(
      'div',
      { class: 'head task', role: 'presentation', title: word('task', i), style },
      h('b', {}, columns.title[i]),
      h('span', {}, scores.length ? `mean ${number(scores.reduce((x, y) => x + y, 0) / scores.length, 2)}` : ''),
    );
  }
  const [trouble, bad] = stateOf(i),
    alone = kind === 'alone';
  return h(
    'div',
    {
      class: `row ${kind}` + (i === state.a ? ' a' : '') + (i === state.b ? ' b' : ''),
      id: `row${i}`,
      role: 'option',
      'aria-selected': String(i === state.a),
      'data-i': i,
      style,
    },
    alone ? h('b', {}, columns.title[i]) : null,
    alone ? h('b', { class: 'score' }, mark(i), number(columns.score[i], 2)) : null,
    h(
      'span',
      {},
      (alone
        ? [word('label', i), word('task', i), sizeOf(i)]
        : [word('label', i), sampleOf(i), counted(columns.acts[i], 'act')]
      ).filter(Boolean).join(' · '),
    ),
    h('span', { class: bad ? 'state bad' : 'state' }, trouble),
    alone ? null : h('b', { class: 'score' }, mark(i), number(columns.score[i], 2)),
  );
}

function paintRows() {
  const list = $('list'),
    from = list.scrollTop - 200,
    to = list.scrollTop + list.clientHeight + 200;
  let low = 0,
    high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle].top < from) low = middle + 1;
    else high = middle;
  }
  const shown = [];
  for (let at = low; at < items.length && items[at].top <= to; at++) shown.push(drawItem(items[at]));
  $('sizer').replaceChildren(...shown);
  if ($(`row${state.a}`)) list.setAttribute('aria-activedescendant', `row${state.a}`);
  else list.removeAttribute('aria-activedescendant');
}

// The list moves as little as it must for an episode to be in sight.
function showRow(i) {
  const list = $('list'),
    item = items.find((it) => it.i === i && it.kind !== 'task');
  if (!item) return;
  if (item.top < list.scrollTop) list.scrollTop = item.top;
  const end = item.top + HEIGHTS[item.kind];
  if (end > list.scrollTop + list.clientHeight) list.scrollTop = end - list.clientHeight;
}

// Train or held out, and the episodes worth a first look.
function paintParts() {
  const parts = columns.part.words.filter(Boolean);
  const tab = (value, name) =>
    h(
      'button',
      {
        'aria-pressed': String(state.part === value),
        class: state.part === value ? 'on' : '',
        onclick: () => {
          state.part = value;
          paintParts();
          paintList(true);
          remember();
        },
      },
      name,
    );
  $('parts').replaceChildren(...(parts.length > 1 ? [tab('', 'all'), ...parts.map((p) => tab(p, p))] : []));
  $('tours').replaceChildren(
    ...(tours.length
      ? [
          h('span', { class: 'faint' }, 'look at'),
          ...tours.map((t) =>
            h(
              'button',
              {
                title: t.why,
                onclick: () => {
                  $('app').classList.add('reading');
                  open(t.a, null);
                  showRow(t.a);
                },
              },
              t.name,
            ),
          ),
        ]
      : []),
  );
}

function paintFilters() {
  paintParts();
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
