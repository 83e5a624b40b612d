// The board: sorting, filtering, opening a row. Without this script the page reads the same, in its first order.

function sortBy(button) {
  const th = button.closest('th'),
    table = th.closest('table'),
    column = Number(button.dataset.column);
  const down = th.getAttribute('aria-sort') !== 'descending';
  for (const other of table.querySelectorAll('th[aria-sort]')) other.removeAttribute('aria-sort');
  th.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const key = (body) => {
    const raw = body.rows[0].cells[column].dataset.value,
      n = Number(raw);
    return raw === '' || Number.isNaN(n) ? raw : n;
  };
  const bodies = [...table.tBodies].filter((b) => b.parentNode === table);
  const compare = (x, y) =>
    typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y));
  bodies.sort((a, b) => (down ? -1 : 1) * compare(key(a), key(b)));
  table.append(...bodies);
}

function toggle(button) {
  const open = button.getAttribute('aria-expanded') !== 'true';
  button.setAttribute('aria-expanded', String(open));
  button.closest('tbody').rows[1].hidden = !open;
}

function filter() {
  const needle = document.getElementById('query').value.trim().toLowerCase();
  for (const section of document.querySelectorAll('section:not(#rejected)')) {
    const whole = !needle || section.querySelector('h2').textContent.toLowerCase().includes(needle);
    let any = false;
    for (const body of section.querySelectorAll('.scroll > table > tbody')) {
      body.hidden = !(whole || body.textContent.toLowerCase().includes(needle));
      any = any || !body.hidden;
    }
    section.hidden = !any;
  }
  history.replaceState(null, '', needle ? '#q=' + encodeURIComponent(needle) : location.pathname);
}

document.addEventListener('click', (e) => {
  const column = e.target.closest('[data-column]'),
    more = e.target.closest('.more');
  if (column) sortBy(column);
  else if (more) toggle(more);
});
document.addEventListener('keydown', (e) => {
  if (e.key === '/' && e.target.tagName !== 'INPUT') {
    e.preventDefault();
    document.getElementById('query').focus();
  }
});
document.getElementById('query').addEventListener('input', filter);
if (location.hash.startsWith('#q=')) {
  try {
    document.getElementById('query').value = decodeURIComponent(location.hash.slice(3));
  } catch {
    /* a broken address shows everything */
  }
  filter();
}
document.documentElement.dataset.ready = 'yes';
