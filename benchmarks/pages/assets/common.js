'use strict';
// Shared by our pages: reading packed data, and making elements whose text is only ever text.

async function unpack(id) {
  const element = document.getElementById(id);
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return JSON.parse(await new Response(stream).text());
}

// Control characters, direction overrides and lone surrogates are shown, not obeyed.
const INVISIBLE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
function visible(text) {
  return String(text).replace(
    INVISIBLE,
    (c) => '⟨' + c.charCodeAt(0).toString(16).toUpperCase().padStart(2, '0') + '⟩',
  );
}

function h(tag, attributes, ...children) {
  const svg = h.svg.has(tag);
  const element = svg
    ? document.createElementNS('http://www.w3.org/2000/svg', tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(name, value === true ? '' : visible(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}
h.svg = new Set([
  'svg',
  'g',
  'rect',
  'path',
  'line',
  'text',
  'circle',
  'title',
  'polyline',
  'clipPath',
  'defs',
  'tspan',
]);

function number(value, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (typeof value !== 'number') return String(value);
  if (Number.isInteger(value) && digits === undefined)
    return value.toLocaleString('en-US').replace(/^-/, '−');
  const text = value.toFixed(digits === undefined ? 3 : digits);
  return (
    digits === undefined && text.includes('.') ? text.replace(/0+$/, '').replace(/\.$/, '') : text
  ).replace(/^-/, '−');
}

function counted(n, noun, plural) {
  return `${number(n)} ${n === 1 ? noun : plural || noun + 's'}`;
}
