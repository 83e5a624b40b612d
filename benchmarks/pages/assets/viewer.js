// The viewer's address, keys and start. The other parts: -state, -list, -graph, -node, -episode.

function remember() {
  const parts = remembered
    .filter((k) => state[k] !== null && state[k] !== '')
    .map((k) => `${k}=${encodeURIComponent(visible(state[k]))}`);
  history.replaceState(null, '', '#' + parts.join('&'));
}

function recall() {
  for (const k of remembered) state[k] = k === 'a' || k === 'b' ? null : '';
  for (const part of location.hash.slice(1).split('&')) {
    const [k, v] = part.split('=', 2);
    if (!remembered.includes(k) || v === undefined) continue;
    let value;
    try {
      value = decodeURIComponent(v);
    } catch {
      continue;
    }
    if (k === 'a' || k === 'b') {
      const i = Number(value);
      if (Number.isInteger(i) && i >= 0 && i < columns.block.length) state[k] = i;
    } else state[k] = value;
  }
  if (!(state.sort in SORTS)) state.sort = '';
  $('query').value = state.q;
}

let opening = 0;
async function open(a, b) {
  if (a !== state.a) state.node = '';
  if (b !== state.b) state.nodeB = '';
  state.a = a;
  state.b = b;
  picking = false;
  const turn = ++opening;
  paintRows();
  if (a === null) {
    $('main').className = '';
    $('main').replaceChildren(h('p', { class: 'empty soft' }, 'No episode here.'));
    return;
  }
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
  const at = rows.indexOf(state.a),
    next = Math.max(0, Math.min(rows.length - 1, at + delta));
  showRow(rows[next]);
  open(rows[next], state.b);
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = ['INPUT', 'SELECT', 'TEXTAREA'].includes(event.target.tagName);
  if (event.key === 'Escape') {
    if (typing) event.target.blur();
    else if (state.b !== null) open(state.a, null);
    else $('app').classList.remove('reading');
    return;
  }
  if (typing) return;
  const inList = document.activeElement === $('list');
  const episode = document.querySelector('.episode[data-side=a]');
  const actions = {
    '/': () => $('query').focus(),
    j: () => move(1),
    k: () => move(-1),
    c: () => {
      picking = !picking;
      if (episode) episode.step(0);
    },
    ArrowRight: () => episode && episode.step(1),
    ArrowLeft: () => episode && episode.step(-1),
    ArrowDown: () => inList && move(1),
    ArrowUp: () => inList && move(-1),
  };
  const action = actions[event.key];
  if (!action || (!inList && (event.key === 'ArrowDown' || event.key === 'ArrowUp'))) return;
  event.preventDefault();
  action();
}

async function readIndex() {
  const index = await unpack('index');
  columns = index.columns;
  headline = index.headline || 'score';
  tours = index.tours;
  noteSamples();
  $('title').textContent = visible(index.title);
}

// The episodes are new: what is open stays open, wherever it now stands in the index. (Live pages call this.)
async function refresh() {
  const name = (i) => [word('env', i), word('task', i), word('label', i), columns.sample[i]].join('\n');
  const open_ = [state.a, state.b].map((i) => i !== null && name(i));
  blocks.clear();
  matches = null;
  await readIndex();
  const where = new Map();
  for (let i = columns.block.length - 1; i >= 0; i--) where.set(name(i), i);
  const [a, b] = open_.map((n) => (n !== false && where.has(n) ? where.get(n) : null));
  if (!$('filters').contains(document.activeElement)) paintFilters();
  if (a === null) {
    paintList(false);
    await open(firstSight(), null);
    return;
  }
  [state.a, state.b] = [a, b];
  paintList(false);
  const main = $('main'),
    top = main.scrollTop,
    focused = main.contains(document.activeElement),
    opened = [...main.querySelectorAll('details')].map((d) => d.open);
  await open(a, b);
  [...main.querySelectorAll('details')].forEach((d, n) => (d.open = Boolean(opened[n])));
  main.scrollTop = top;
  if (focused && main.querySelector('.node.on')) main.querySelector('.node.on').focus({ preventScroll: true });
}

const firstSight = () => (tours.length ? tours[0].a : rows.length ? rows[0] : null);

async function start() {
  await readIndex();
  recall();
  paintFilters();
  paintList(true);
  let timer = 0;
  $('query').addEventListener('input', (e) => {
    state.q = e.target.value;
    matches = null;
    clearTimeout(timer);
    timer = setTimeout(() => {
      paintList(true);
      remember();
    }, 80);
  });
  $('query').addEventListener('keydown', (e) => {
    if (e.key === 'Enter') searchTexts();
  });
  let pending = false;
  $('list').addEventListener('scroll', () => {
    if (!pending) {
      pending = true;
      requestAnimationFrame(() => {
        pending = false;
        paintRows();
      });
    }
  });
  $('list').addEventListener('click', (e) => {
    const row = e.target.closest('.row');
    if (!row) return;
    const i = Number(row.dataset.i);
    $('app').classList.add('reading');
    if ((e.shiftKey || picking) && state.a !== null && i !== state.a) open(state.a, i);
    else open(i, state.b === i ? null : state.b);
  });
  let resized = 0;
  window.addEventListener('resize', () => {
    paintRows();
    clearTimeout(resized);
    resized = setTimeout(() => {
      for (const shown of document.querySelectorAll('.episode')) shown.paint();
    }, 120);
  });
  window.addEventListener('hashchange', () => {
    recall();
    paintFilters();
    paintList(false);
    open(state.a, state.b);
  });
  document.addEventListener('keydown', keys);
  if (location.hash.includes('a=')) $('app').classList.add('reading');
  await open(state.a !== null ? state.a : firstSight(), state.b);
  if (state.a !== null) showRow(state.a);
  paintRows();
  document.documentElement.dataset.ready = 'yes';
}

start();
