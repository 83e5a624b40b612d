// A page that keeps up with its run: it asks whether anything is new, and takes over what is.
// What the reader has open (details, the chosen episode, the place on the page) stays.

const EVERY = 2000;
let stamp = '';

const chip = h('p', { id: 'live', role: 'status' }, 'live');
(document.querySelector('#side header') || document.body).prepend(chip);

function keepOpen(element, change) {
  const opened = [...element.querySelectorAll('details')].map((d) => d.open);
  change();
  [...element.querySelectorAll('details')].forEach((d, n) => (d.open = Boolean(opened[n])));
}

// The report: section by section, and only those that changed.
function takeReport(fresh) {
  let before = null;
  for (const part of fresh.querySelectorAll('body > header[id], body > section[id]')) {
    const mine = document.getElementById(part.id),
      made = document.importNode(part, true);
    if (!mine) (before || chip).after(made);
    else if (mine.innerHTML !== part.innerHTML) keepOpen(mine, () => mine.replaceChildren(...made.childNodes));
    before = document.getElementById(part.id);
  }
}

// The viewer: the new index and blocks take the place of the old.
async function takeEpisodes(fresh) {
  for (const old of document.querySelectorAll('script[type="application/octet-stream"]')) old.remove();
  for (const data of fresh.querySelectorAll('script[type="application/octet-stream"]'))
    document.body.append(document.importNode(data, true));
  await refresh();
}

async function ask() {
  let pause = EVERY;
  try {
    const state = await (await fetch('/state.json')).json();
    if (state.stamp !== stamp) {
      const began = performance.now(),
        html = await (await fetch(location.pathname)).text();
      const fresh = new DOMParser().parseFromString(html, 'text/html');
      await (typeof refresh === 'function' ? takeEpisodes(fresh) : takeReport(fresh));
      stamp = state.stamp;
      pause = Math.max(EVERY, 5 * (performance.now() - began));
    }
    chip.className = state.going ? 'going' : '';
    chip.replaceChildren(
      h('b', {}, state.going ? 'live' : 'done'),
      ' ',
      visible(state.words),
      ' · ',
      typeof refresh === 'function' ? h('a', { href: '/' }, 'report') : h('a', { href: '/episodes.html' }, 'episodes'),
    );
  } catch {
    chip.className = 'gone';
    chip.replaceChildren('The server has gone; this page stays as it is. To see more: unitymas view RUN');
    pause = 5 * EVERY;
  }
  setTimeout(ask, pause);
}
ask();
if (typeof refresh !== 'function') document.documentElement.dataset.ready = 'yes';
